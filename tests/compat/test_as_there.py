# SPDX-License-Identifier: Apache-2.0
"""Small things of states, loaders, commands and files in which both libraries answer alike."""

import logging
import os
import platform
import sys
import unittest
from collections import OrderedDict
from pathlib import Path
from unittest.mock import patch

import accelerate
import pytest
import torch
from accelerate.commands import launch as their_launch
from accelerate.commands.config import config_args as their_config
from accelerate.test_utils import testing as theirs
from accelerate.test_utils.training import RegressionDataset as TheirDataset, RegressionModel as TheirModel
from torch.utils.data import DataLoader

import farflung
from farflung.commands import launch as our_launch, to_fsdp2 as door
from farflung.commands.config import config_args as our_config
from farflung.launch import to_fsdp2 as definition
from farflung.state import PartialState, is_initialized
from farflung.test_utils import RegressionDataset, RegressionModel, testing as ours
from farflung.testing.patience import patience


@pytest.fixture(params=[farflung, accelerate], ids=["ours", "theirs"])
def library(request):
    return request.param


def test_a_state_that_was_reset_has_no_attributes(library):
    state = library.PartialState(cpu=True)
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute"):
        state.nothing  # noqa: B018
    state._reset_state()
    assert not hasattr(state, "num_processes")
    text = r"`PartialState` object has no attribute.*This happens if `PartialState._reset_state\(\)`"
    with pytest.raises(AttributeError, match=text):
        state.num_processes  # noqa: B018
    state.something = 1
    assert state.something == 1
    del state.something


def test_an_accelerator_whose_state_was_reset_says_so(library):
    accelerator = library.Accelerator(cpu=True)
    accelerator.state._reset_state()
    text = r"`AcceleratorState` object has no attribute.*This happens if `AcceleratorState._reset_state\(\)`"
    for use in (
        lambda: accelerator.num_processes,
        lambda: accelerator.distributed_type,
        lambda: accelerator.state.device,
        lambda: accelerator.prepare(torch.nn.Linear(1, 1)),
    ):
        with pytest.raises(AttributeError, match=text):
            use()
    accelerator.state.something = 1
    assert accelerator.state.something == 1
    del accelerator.state.something


def test_states_answer_after_the_training_has_ended(library):
    accelerator = library.Accelerator(cpu=True)
    accelerator.end_training()
    state = accelerator.state
    assert (accelerator.is_main_process, state.num_processes, state.mixed_precision) == (True, 1, "no")
    assert library.Accelerator(cpu=True).state.num_processes == 1


def test_a_name_is_patched_where_it_is_defined(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("fsdp_config: {fsdp_version: 1}", encoding="utf-8")
    args = door.to_fsdp2_command_parser().parse_args(["--config_file", str(file), "--overwrite"])
    monkeypatch.setattr(door, "load_config", lambda path: {"debug": True})
    door.to_fsdp2_command(args)
    assert "fsdp_version: 2" in file.read_text(encoding="utf-8")
    monkeypatch.setattr(definition, "load_config", lambda path: {"debug": True})
    door.to_fsdp2_command(args)
    assert file.read_text(encoding="utf-8") == "debug: true\n"
    assert not hasattr(farflung.accelerator, "is_xpu_available")


def test_one_process_dispatches_where_it_is_asked_to(library):
    config = library.utils.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = library.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))
    assert isinstance(loader, library.data_loader.DataLoaderDispatcher)
    assert len(loader) == 3
    assert [accelerator.gather_for_metrics(batch).tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)] == [[2, 3], [4]]


def test_help_shows_one_spelling_of_each_flag():
    for module in (our_launch, their_launch):
        parser = module.launch_command_parser()
        text = parser.format_help()
        names = [name for name in vars(parser.parse_args(["train.py"])) if "_" in name]
        dashed = {name: text.count(f"--{name.replace('_', '-')}") for name in names}
        assert {name for name, times in dashed.items() if times} == {"num_processes"}
        assert parser.parse_args(["--num-machines", "2", "train.py"]).num_machines == 2


def test_base_configs_are_made_of_words(tmp_path):
    for module in (our_config, their_config):
        config = module.BaseConfig("LOCAL_MACHINE", "NO", "fp16", False, True)
        assert config.compute_environment == "LOCAL_MACHINE"
        assert type(config.distributed_type).__name__ == "DistributedType"
        words = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "fp16"}
        assert config.to_dict() == {**words, "use_cpu": False, "debug": True}
        assert isinstance(module.ClusterConfig("LOCAL_MACHINE", "NO", "no", False, False, 1), module.BaseConfig)


def test_helpers_of_tests_say_which_devices_there_are():
    for name in ("is_hpu_available", "is_xpu_available"):
        assert getattr(ours, name)() == getattr(theirs, name)()


def test_openmp_is_left_to_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("KMP_AFFINITY", "none")
    monkeypatch.setenv("HOME", str(tmp_path))
    told = []
    for launch, prepare in (
        (our_launch, farflung.utils.launch.prepare_simple_launcher_cmd_env),
        (their_launch, accelerate.utils.launch.prepare_simple_launcher_cmd_env),
    ):
        args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(["--cpu", "train.py"]))
        told.append(prepare(args)[1]["KMP_AFFINITY"])
    assert told == ["none", "granularity=fine,compact,1,0"]


def _load_a_weight_without_a_place(library, folder):
    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1), "other": torch.ones(1)}, folder / "weights.bin")
    library.utils.load_checkpoint_in_model(torch.nn.Linear(1, 1), str(folder / "weights.bin"))


def _share_weights_between_devices(library, folder):
    library.utils.modeling.check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": "cpu", "b": "disk"})


def _save_a_shared_weight(library, folder):
    weight = torch.ones(2)
    library.utils.save(OrderedDict(a=weight, b=weight), folder / "x.safetensors", safe_serialization=True)


def _set_a_variable_that_can_not_be(library, folder):
    library.utils.environment.convert_dict_to_env_variables({"X": "<bad"})


def _run_on_an_old_kernel(library, folder):
    for release in ("5.15.0", "4.15.0"):
        with patch("platform.uname", return_value=platform.uname()._replace(system="Linux", release=release)):
            library.utils.other.check_os_kernel()


@pytest.mark.parametrize(
    ("do", "module", "words"),
    [
        (_load_a_weight_without_a_place, "utils.modeling", ""),
        (_share_weights_between_devices, "utils.modeling", ""),
        (_save_a_shared_weight, "utils.other", "Removed shared tensor"),
        (_set_a_variable_that_can_not_be, "utils.environment", ""),
        (_run_on_an_old_kernel, "utils.other", ""),
    ],
)
def test_loggers_are_named_as_in_accelerate(library, caplog, tmp_path, do, module, words):
    library.PartialState(cpu=True)
    with caplog.at_level(logging.WARNING):
        do(library, tmp_path)
    assert [record.name for record in caplog.records] == [f"{library.__name__}.{module}"]
    assert words in caplog.text


def test_sentences_are_our_own(library):
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        library.utils.set_module_tensor_to_device(torch.nn.Linear(3, 4), "weight", "cpu", value=torch.zeros(2, 2))
    with pytest.raises(TypeError, match="int"):
        library.utils.recursively_apply(torch.clone, (torch.tensor(1), 1), error_on_other_type=True)


# ---- helpers for tests: Accelerate's outcomes with the same arguments
REQUIREMENTS = [name for name in dir(theirs) if name.startswith("require_") and name != "require_torch_min_version"]


def is_skipped(decorator):
    def test():
        """A test."""

    return getattr(decorator(test), "__unittest_skip__", False)


@pytest.mark.package
def test_each_requirement_skips_what_it_skips_there():
    skipped = {name: [is_skipped(getattr(module, name)) for module in (ours, theirs)] for name in REQUIREMENTS}
    for version in ("1.0", "99.0"):
        skipped[version] = [is_skipped(each.require_torch_min_version(version=version)) for each in (ours, theirs)]
    assert {name: both for name, both in skipped.items() if both[0] != both[1]} == {}
    assert len(skipped) > 50
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
        nothing_raised = pytest.raises(AssertionError, match=r"ran without issue|nothing was raised")
        with nothing_raised, module.assert_exception(KeyError):
            pass


@pytest.mark.parametrize(("module", "library"), [(ours, farflung), (theirs, accelerate)])
def test_cases_clean_up_behind_each_test(module, library):
    seen = []

    class Tests(module.TempDirTestCase, module.AccelerateTestCase, module.MockingTestCase):
        def setUp(self):
            super().setUp()
            seen.append(sorted(path.name for path in self.tmpdir.iterdir()))
            self.add_mocks(patch.dict(os.environ, {"SOME_MOCK": "1"}))

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
    PartialState(cpu=True)
    assert ours.are_the_same_tensors(torch.ones(2))
    accelerate.Accelerator(cpu=True)
    assert theirs.are_the_same_tensors(torch.ones(2))


def test_the_regression_is_the_same(capsys):
    mine, other = RegressionDataset(length=5, seed=3), TheirDataset(length=5, seed=3)
    assert len(mine) == len(other) == 5
    assert [mine[i] for i in range(5)] == [other[i] for i in range(5)]
    x = torch.ones(2)
    models = RegressionModel(a=2, b=1), TheirModel(a=2, b=1)
    assert torch.equal(models[0](x), models[1](x))
    models[0](x)
    mine, other = capsys.readouterr().out.splitlines()
    assert mine == other
