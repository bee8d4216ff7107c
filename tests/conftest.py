# SPDX-License-Identifier: Apache-2.0
"""What all tests share: marks, time limits, and an environment without the variables of a launcher outside."""

import gc
import logging
import os
import signal
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import farflung.state
from farflung.base.signals import END, WARNINGS
from farflung.config import environ
from farflung.config.launch import FIELDS
from farflung.outer.notices import OpenEnd
from farflung.testing.patience import patience
from tests.launch.machines import why_impossible
from tests.s3_server import s3_server
from tests.warm import serving

LAUNCHER_WORDS = """
RANK WORLD_SIZE MASTER_ OMPI_ PMI_ SLURM_ JSM_ LSB_ PBS_ SKYPILOT_ DSTACK_ ACCELERATE_ FARFLUNG_ FSDP_ PARALLELISM_
OMP_NUM_THREADS
"""
WARM_PYTHON = pytest.StashKey[str]()
# No deadlines: the time limit of a test grows with how busy the machine is.
settings.register_profile("small", deadline=None, max_examples=25)
settings.register_profile("large", deadline=None, max_examples=300)
settings.load_profile("small")
torch.set_num_threads(1)  # models are tiny, and threads of several pytest workers would wait for each other's cores
if torch.__version__.startswith("2.11."):  # whose flight recorder crashes where ranks are threads: docs/versions.md
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
for ignored, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL):
    if signal.getsignal(ignored) is signal.SIG_IGN:  # which a shell passes on to what it runs in the background
        signal.signal(ignored, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without collecting garbage, and spare each later pass what is loaded by then."""
    gc.disable()
    found = yield
    gc.freeze()  # torch, Accelerate and all test files: half a second for each `gc.collect()`
    gc.enable()
    return found


def pytest_collection_modifyitems(items):
    """Skip tests without the GPU, the namespaces or the package that they are marked with."""
    why_not = {"gpu": None if torch.cuda.is_available() else "no CUDA device"}
    if any(item.get_closest_marker("namespace") for item in items):
        why_not["namespace"] = why_impossible()
    for item in items:
        for name in (name for mark in item.iter_markers("package") for name in mark.args):
            if find_spec(name) is None:  # not imported here: some import Accelerate
                item.add_marker(pytest.mark.skip(reason=f"{name} is not installed"))
        for mark, reason in why_not.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Give each test more time on a slow or busy machine, unless `--timeout` says how much."""
    if item.config.getoption("timeout") is None:
        marked = item.get_closest_marker("timeout")
        limit_s = marked.args[0] if marked else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(limit_s)), append=False)
    return (yield)


def serve_until_the_end_of(config):
    """Start a Python that has torch loaded, unless this session has one; return its path."""
    if WARM_PYTHON not in config.stash:
        server = ExitStack()
        config.add_cleanup(server.close)
        config.stash[WARM_PYTHON] = server.enter_context(serving())
    return config.stash[WARM_PYTHON]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let all workers of pytest-xdist share one server: each would spend three seconds on its own."""
    node.workerinput["warm_python"] = serve_until_the_end_of(node.config)


@pytest.fixture(scope="session")
def warm_python(request):
    """The path of a Python that has torch loaded (`tests/warm.py` says for which tests)."""
    shared = getattr(request.config, "workerinput", {}).get("warm_python")
    return shared or serve_until_the_end_of(request.config)


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
def own_lines(monkeypatch):
    """Let no loop that a test left open say so in a later test, when it is collected as garbage."""
    report, later = OpenEnd.report, []
    monkeypatch.setattr(OpenEnd, "report", lambda end: None if later else report(end))
    yield
    later.append(True)


@pytest.fixture(autouse=True)
def clean_environment():
    """Run each test without the variables of a launcher, and put back afterwards what it changed."""
    before = environ.snapshot()
    environ.remove(*[name for name in before if name.removeprefix("LOCAL_").startswith(tuple(LAUNCHER_WORDS.split()))])
    environ.export({"FARFLUNG_RUN_DIR": "none"})
    yield
    environ.remove(*(environ.snapshot().keys() - before.keys()))
    environ.export(before)


@pytest.fixture(autouse=True)
def process_as_before():
    """Put back the folder, the handlers of signals and those of our log lines that a test has left changed."""
    log = logging.getLogger("farflung")
    folder, lines = os.getcwd(), (log.handlers[:], log.level, log.propagate)
    handlers = [(number, signal.getsignal(number)) for number in (*END, *WARNINGS)]
    yield
    os.chdir(folder)
    log.handlers[:], _, log.propagate = lines
    log.setLevel(lines[1])
    for number, handler in handlers:
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(params=["no key", pytest.param("a key", marks=pytest.mark.long)])
def either_key(request, monkeypatch):
    """Let a run have no key, and then one."""
    if request.param == "a key":
        monkeypatch.setenv(environ.KEY, "5" * 64)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home that is the working directory too, and an environment that sets nothing."""
    for name in [entry.variable for entry in FIELDS] + ["HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARFLUNG_RUN_DIR", "none")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def benchmark(monkeypatch):
    """A function that loads a module of benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return import_module


@pytest.fixture(scope="session")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3, monkeypatch):
    """The address of a run in a bucket, which this process and those that it starts can use."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    yield s3.address()
    s3.set()


@pytest.fixture
def hub(bucket, s3):
    """The same in a Storage Bucket of Hugging Face."""
    return s3.hub_address()
