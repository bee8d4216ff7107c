# SPDX-License-Identifier: Apache-2.0
"""What is there, and what the environment says: Accelerate's answers."""

import inspect
import os
import subprocess
from unittest import TestCase

import accelerate.utils as theirs
import accelerate.utils.environment as their_environment
import accelerate.utils.imports as their_imports
import accelerate.utils.launch as their_launch
import pytest
from packaging.version import Version

import farflung.utils as ours
import farflung.utils.environment as our_environment
import farflung.utils.imports as our_imports
import farflung.utils.launch as our_launch
from farflung.compat import probes
from tests.python import run_python

OWN = {name for name, value in vars(their_imports).items() if inspect.getmodule(value) is their_imports}
PROBES = sorted(name for name in OWN if name.startswith("is_"))


def test_each_probe_answers_as_accelerates():
    assert len(PROBES) > 55
    assert ours.get_current_device_type() == theirs.get_current_device_type()
    calls = dict.fromkeys(("bf16", "npu", "mlu", "musa", "sdaa", "neuron", "xpu", "hpu"), (True,))
    calls |= dict.fromkeys(("bnb", "mps", "numpy"), ("99.0",)) | {"torch_xla": (True, False)}
    calls = {f"is_{name}_available": arguments for name, arguments in calls.items()}
    for name, arguments in [*dict.fromkeys(PROBES, ()).items(), *calls.items()]:
        mine, other = (getattr(module, name)(*arguments) for module in (our_imports, their_imports))
        assert bool(mine) == bool(other), name


def test_rich_is_used_where_it_is_asked_for(monkeypatch):
    for word in ("1", "0"):
        monkeypatch.setenv("ACCELERATE_ENABLE_RICH", word)
        assert ours.is_rich_available() == theirs.is_rich_available()


def test_a_library_counts_when_a_package_has_it(monkeypatch, tmp_path):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not probes.is_installed("swanlab")  # a folder of that name
    assert not probes.is_installed("no.such.module")
    assert probes.is_installed("yaml", "PyYAML")


@pytest.mark.long
def test_no_probe_imports_what_it_asks_for():
    script = (
        "import sys, farflung.utils as u\n"
        "[getattr(u, name)() for name in dir(u) if name.startswith('is_') and name.endswith('_available')]\n"
        "print([m for m in ('transformers', 'tensorboard', 'accelerate', 'peft', 'wandb', 'mlflow', 'pandas', 'rich')"
        " if m in sys.modules])"
    )
    done = run_python("-c", script)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("operation", [">", ">=", "==", "!=", "<=", "<"])
@pytest.mark.parametrize("version", ["1.0", "99.0", "99.0.1"])
def test_versions_are_compared_as_accelerate_compares_them(operation, version):
    assert ours.is_torch_version(operation, version) == theirs.is_torch_version(operation, version)
    for one in ("numpy", Version("99.0")):
        assert ours.compare_versions(one, operation, version) == theirs.compare_versions(one, operation, version)


def test_a_local_build_of_a_version_is_that_version():
    assert ours.compare_versions(Version("2.13.0+cpu"), "==", "2.13.0")
    assert not theirs.compare_versions(Version("2.13.0+cpu"), "==", "2.13.0")


def both(name, *arguments):
    """What both libraries answer: the value, or the class of the error."""

    def answer(module):
        try:
            return getattr(module, name)(*arguments)
        except Exception as error:
            return ValueError if isinstance(error, ValueError) else type(error)

    return answer(our_environment), answer(their_environment)


@pytest.mark.parametrize("to_bool", [False, True])
def test_words_that_mean_yes_and_no(to_bool):
    for word in ("y", "Yes", "t", "true", "ON", "1", "n", "no", "F", "false", "off", "0", "", "maybe", "2"):
        answer, expected = both("str_to_bool", word, to_bool)
        assert (answer, type(answer)) == (expected, type(expected)), word


@pytest.mark.parametrize("value", [None, "1", "no", "7", "-3", "text", ""])
def test_variables_are_read_as_accelerate_reads_them(monkeypatch, value):
    monkeypatch.delenv("SOME_NAME", raising=False)
    monkeypatch.setenv("OTHER_NAME", "5")
    if value is not None:
        monkeypatch.setenv("SOME_NAME", value)
    for name, *arguments in (
        ("parse_flag_from_env", "SOME_NAME", True),
        ("parse_flag_from_env", "SOME_NAME"),
        ("parse_choice_from_env", "SOME_NAME", "fp16"),
        ("parse_choice_from_env", "SOME_NAME"),
        ("get_int_from_env", ["SOME_NAME", "OTHER_NAME"], 3),
        ("get_int_from_env", ["SOME_NAME"], 3),
    ):
        answer, expected = both(name, *arguments)
        assert answer == expected, (name, arguments)


def test_variables_are_set_and_put_back(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    for module in (ours, theirs):
        with module.patch_environment(kept=1, NEW="x"):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("1", "x")
        assert (os.environ["KEPT"], "NEW" in os.environ) == ("before", False)
        before = dict(os.environ)
        with module.clear_environment():
            assert dict(os.environ) == {}
            os.environ["NEW"] = "x"
        assert dict(os.environ) == before


def test_a_purged_function_or_class_leaves_accelerates_variables_alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_KEPT", "before")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)

    def change():
        os.environ.update(ACCELERATE_KEPT="after", ACCELERATE_NEW="x", ANOTHER="y")
        return "result"

    for module in (ours, theirs):
        monkeypatch.delenv("ANOTHER", raising=False)

        @module.purge_accelerate_environment
        class Tests(TestCase):
            def test_change(self):
                return change()

        class More(Tests):
            def test_more(self):
                return change()

        for purged in (module.purge_accelerate_environment(change), Tests().test_change, More("test_more").test_more):
            assert purged() == "result"
            assert (os.environ["ACCELERATE_KEPT"], os.environ.get("ACCELERATE_NEW")) == ("before", None)
            assert os.environ["ANOTHER"] == "y"


def test_lines_of_variables_and_lists_of_paths(monkeypatch):
    variables = {"GOOD": "1", "BAD": "a b", "": "x", "EMPTY": "", "REDIRECT": "<x"}
    assert ours.convert_dict_to_env_variables(variables) == theirs.convert_dict_to_env_variables(variables)
    for paths in ("", "/a::/b"):
        monkeypatch.setenv("SOME_PATH", paths)
        assert our_launch.env_var_path_add("SOME_PATH", "/c") == their_launch.env_var_path_add("SOME_PATH", "/c")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MV2_COMM_WORLD_RANK": "3"},
        {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
)
def test_the_place_among_processes_is_read_from_each_launchers_variables(variables):
    with ours.clear_environment(), ours.patch_environment(**variables):
        assert vars(ours.get_cpu_distributed_information()) == vars(theirs.get_cpu_distributed_information())


def test_what_this_machine_has_is_said_as_accelerate_says_it(monkeypatch):
    asked = ("sys", "no_such_module")
    assert ours.are_libraries_initialized(*asked) == theirs.are_libraries_initialized(*asked)
    answers = {"count,name": "2, RTX 4090\n2, RTX 4090\n", "driver_version": "535.1\n535.1\n"}
    monkeypatch.setattr(subprocess, "check_output", lambda command, **_: answers[command[1].split("=")[1]])
    assert ours.get_gpu_info() == theirs.get_gpu_info()
    assert our_environment.get_driver_version() == their_environment.get_driver_version()
    assert ours.check_cuda_p2p_ib_support() is theirs.check_cuda_p2p_ib_support() is False
    answers["driver_version"] = "560.0\n"
    assert ours.check_cuda_p2p_ib_support() is theirs.check_cuda_p2p_ib_support() is True


def test_without_gpus_nothing_is_found(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for module in (ours, theirs):
        with pytest.raises(FileNotFoundError):
            module.get_gpu_info()
        assert module.check_cuda_p2p_ib_support()
