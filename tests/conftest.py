# SPDX-License-Identifier: Apache-2.0
"""What all tests share: marks, time limits, and an environment without the variables of a launcher outside."""

import gc
import inspect
import multiprocessing
import signal
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest
import torch
from hypothesis import settings

import farflung.state
from farflung.config import environ
from farflung.config.launch import FIELDS
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from tests.s3_server import s3_server
from tests.warm import serving

LAUNCHER_WORDS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "OMPI_",
    "PMI_",
    "SLURM_",
    "JSM_",
    "LSB_",
    "PBS_",
    "SKYPILOT_",
    "DSTACK_",
    "ACCELERATE_",
    "FARFLUNG_",
    "FSDP_",
    "PARALLELISM_",
    "OMP_NUM_THREADS",
)
settings.register_profile("any machine", deadline=None)  # the time limit of a test grows with how busy it is
settings.load_profile("any machine")
torch.set_num_threads(1)  # models are tiny, and threads of several pytest workers would wait for each other's cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # which a shell passes on to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
STARTERS = (subprocess, multiprocessing, subprocess.run, subprocess.Popen, run_ranks)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without collecting garbage, and spare each later pass what is loaded by then."""
    gc.disable()
    found = yield
    gc.freeze()  # torch, Accelerate and all test files: half a second for each `gc.collect()`
    gc.enable()
    return found


def pytest_collection_modifyitems(items):
    """Mark what starts processes as `ranks`, and skip GPU tests without a GPU."""
    known = {}
    for item in items:
        fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
        if any(starts_processes(function, known) for function in (item.function, *fixtures)):
            item.add_marker("ranks")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def starts_processes(function, known):
    """Say whether a function of the tests uses one of `STARTERS`, itself or through others of the tests.

    Args:
        known: the answers so far, by code.
    """
    function = inspect.unwrap(getattr(getattr(function, "hypothesis", None), "inner_test", function))
    code = getattr(function, "__code__", None)
    if code is None or not function.__module__.startswith("tests"):
        return False
    if code not in known:
        known[code] = False  # while it is being found out: functions may call each other
        used = [inspect.unwrap(function.__globals__.get(name)) for name in names_in(code)]
        known[code] = any(
            value in STARTERS
            if isinstance(value, ModuleType)
            else value in STARTERS or any(starts_processes(each, known) for each in functions_of(value))
            for value in used
            if isinstance(value, (ModuleType, FunctionType, type))
        )
    return known[code]


def names_in(code):
    """The names that a piece of code and the functions inside it look up."""
    inner = [each for each in code.co_consts if hasattr(each, "co_names")]
    return {*code.co_names, *(name for each in inner for name in names_in(each))}


def functions_of(value):
    """A function itself, or the methods of a class."""
    return [value] if isinstance(value, FunctionType) else [each for each in vars(value).values() if callable(each)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Give each test more time on a slow or busy machine, unless `--timeout` says how much."""
    if item.config.getoption("timeout") is None:
        marked = item.get_closest_marker("timeout")
        limit_s = marked.args[0] if marked else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(limit_s)), append=False)
    return (yield)


@pytest.fixture(scope="session")
def warm_python():
    """The path of a Python that has torch loaded (`tests/warm.py` says for which tests)."""
    with serving() as python:
        yield python


@pytest.fixture
def warm(warm_python, monkeypatch):
    """Let `sys.executable` be a Python that has torch loaded."""
    monkeypatch.setattr(sys, "executable", warm_python)


@pytest.fixture(autouse=True)
def no_session():
    """Let each test leave nothing behind of what Accelerators share, ours or Accelerate's."""
    yield
    for state in (farflung.state, sys.modules.get("accelerate.state")):
        if state is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def clean_environment():
    """Run each test without the variables of a launcher, and put back afterwards what it changed."""
    before = environ.snapshot()
    environ.remove(*[name for name in before if name.removeprefix("LOCAL_").startswith(LAUNCHER_WORDS)])
    environ.export({"FARFLUNG_RUN_DIR": "none"})
    yield
    environ.remove(*(environ.snapshot().keys() - before.keys()))
    environ.export(before)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home that is the working directory too, and an environment that sets nothing."""
    for name in [entry.variable for entry in FIELDS] + ["HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARFLUNG_RUN_DIR", "none")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def s3():
    """An S3 server."""
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3, monkeypatch):
    """The address of a run in a bucket, which this process and those that it starts can use."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    yield s3.address()
    s3.set()
