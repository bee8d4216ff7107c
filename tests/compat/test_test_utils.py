# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests: Accelerate's outcomes with the same arguments."""

import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import accelerate
import accelerate.test_utils.testing as theirs
import pytest
import torch
from accelerate.test_utils.training import RegressionDataset as TheirDataset, RegressionModel as TheirModel

import farflung
import farflung.test_utils.testing as ours
from farflung.state import AcceleratorState, PartialState, is_initialized
from farflung.test_utils import RegressionDataset, RegressionModel
from farflung.testing.patience import patience

REQUIREMENTS = [name for name in dir(theirs) if name.startswith("require_") and name != "require_torch_min_version"]


def is_skipped(decorator):
    def test():
        """A test."""

    return getattr(decorator(test), "__unittest_skip__", False)


@pytest.mark.package
def test_each_requirement_skips_what_it_skips_there():
    skipped = {name: (is_skipped(getattr(ours, name)), is_skipped(getattr(theirs, name))) for name in REQUIREMENTS}
    assert {name: both for name, both in skipped.items() if both[0] != both[1]} == {}
    assert len(skipped) > 50
    for version in ("1.0", "99.0"):
        assert is_skipped(ours.require_torch_min_version(version=version)) == is_skipped(
            theirs.require_torch_min_version(version=version)
        )
    assert is_skipped(ours.skip) is is_skipped(theirs.skip) is True
    assert is_skipped(ours.slow) is is_skipped(theirs.slow) is True


def test_commands_have_flags():
    for arguments in ({}, {"num_processes": 2, "multi_gpu": True, "gpu_ids": None, "mixed_precision": "bf16"}):
        command = ours.get_launch_command(**arguments)
        assert command[:4] == [sys.executable, "-m", "farflung", "launch"]
        assert command[4:] == theirs.get_launch_command(**arguments)[2:]
    assert ours.DEFAULT_LAUNCH_COMMAND[4:] == theirs.DEFAULT_LAUNCH_COMMAND[2:]
    assert ours.get_backend()[:2] == theirs.get_backend()[:2] == (ours.torch_device, ours.device_count)
    assert ours.get_backend()[2]() == ours.memory_allocated_func() == 0
    assert ours.path_in_accelerate_package("utils", "random.py").is_file()


def test_commands_are_run_and_their_failures_told(capfd):
    good, bad = [sys.executable, "-c", "print('out')"], [Path(sys.executable), "-c", "import sys; sys.exit('why')"]
    limit = {"timeout": patience(60)}
    for module in (ours, theirs):
        done = module.execute_subprocess_async(list(good), env=dict(os.environ), **limit)
        assert (done.returncode, done.stdout, done.stderr) == (0, ["out"], [])
        assert "out" in capfd.readouterr().out
        module.execute_subprocess_async(list(good), quiet=True, echo=False, **limit)
        assert capfd.readouterr().out == ""
        with pytest.raises(RuntimeError, match="why"):
            module.execute_subprocess_async(list(bad), **limit)
        assert module.run_command(list(good), return_stdout=True) == "out\n"
        assert module.run_command(list(good)) is None
        with pytest.raises(module.SubprocessCallException, match="why"):
            module.run_command(list(bad))


def test_ports_differ_between_workers(monkeypatch):
    for worker in ("gw0", "gw7"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        assert ours.pytest_xdist_worker_id() == theirs.pytest_xdist_worker_id()
        assert ours.get_torch_dist_unique_port() == theirs.get_torch_dist_unique_port()


def test_output_and_exceptions_are_caught():
    for module in (ours, theirs):
        assert module.capture_call_output(print, "word", end="!") == "word!"
        with module.assert_exception(ValueError, "w"):
            int("word")
        for expected, words in ((KeyError, None), (ValueError, "other")):
            with pytest.raises(AssertionError), module.assert_exception(expected, words):
                int("word")
        with (
            pytest.raises(AssertionError, match=r"ran without issue|nothing was raised"),
            module.assert_exception(KeyError),
        ):
            pass


@pytest.mark.parametrize(("module", "library"), [(ours, farflung), (theirs, accelerate)])
def test_cases_clean_up_behind_each_test(module, library):
    seen = []

    class Tests(module.TempDirTestCase, module.AccelerateTestCase, module.MockingTestCase):
        def setUp(self):
            super().setUp()
            seen.append(sorted(path.name for path in self.tmpdir.iterdir()))
            self.add_mocks(mock.patch.dict(os.environ, {"SOME_MOCK": "1"}))

        def test_once(self):
            assert os.environ["SOME_MOCK"] == "1"
            library.Accelerator(cpu=True)
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "file").touch()

        test_again = test_once

    result = unittest.TestResult()
    Tests.setUpClass()
    for name in ("test_once", "test_again"):
        Tests(name).run(result)
    Tests.tearDownClass()
    assert (result.errors, result.failures, seen) == ([], [], [[], []])
    assert not Tests.tmpdir.exists()
    assert "SOME_MOCK" not in os.environ
    assert not is_initialized()
    assert not accelerate.state.is_initialized()


def test_tensors_of_all_processes_are_compared():
    try:
        PartialState(cpu=True)
        assert ours.are_the_same_tensors(torch.ones(2))
        accelerate.Accelerator(cpu=True)
        assert theirs.are_the_same_tensors(torch.ones(2))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_regression_is_the_same(capsys):
    mine, other = RegressionDataset(length=5, seed=3), TheirDataset(length=5, seed=3)
    assert len(mine) == len(other) == 5
    assert [mine[i] for i in range(5)] == [other[i] for i in range(5)]
    x = torch.ones(2)
    models = RegressionModel(a=2, b=1), TheirModel(a=2, b=1)
    assert torch.equal(models[0](x), models[1](x))
    models[0](x)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
