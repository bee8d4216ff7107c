# SPDX-License-Identifier: Apache-2.0
"""Functions started from a notebook run in connected processes, and their errors come back with the rank's name."""

from __future__ import annotations

import inspect
import json
import logging
import signal
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from farflung import Accelerator
from farflung.base.errors import ConfigError, RankFailure, StateError
from farflung.base.events import Kind, record
from farflung.config import environ
from farflung.launch import cell
from farflung.launch.agent import Outcome
from farflung.launch.notebook import debug_launcher, notebook_launcher
from farflung.launch.plan import usable_cores
from farflung.observe.run import ObservedRun
from farflung.outer import local_sgd
from farflung.process.place import Place
from tests.python import run_python

# A notebook: a process of its own, functions defined in __main__. Two ranks can see each other only when connected.
NOTEBOOK = """
import json, os, signal, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from farflung.base.errors import RankFailure
from farflung.config import environ
from farflung.launch.notebook import debug_launcher, notebook_launcher

def wait_for_reports(count):
    while len(list(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].glob("*/error.json"))) < count:
        time.sleep(0.02)

def train(name, fail=False):
    dist.init_process_group("gloo")
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (dist.get_rank(), name, environ.text("ACCELERATE_MIXED_PRECISION")))
    if fail:  # rank 1 first, and both before the launcher sees any end
        wait_for_reports(1 - dist.get_rank())
        threading.Thread(target=wait_for_reports, args=(2,)).start()
        raise ValueError("bad value") if dist.get_rank() else RuntimeError("Connection closed by peer")
    dist.barrier()
    if dist.get_rank() == 0:
        with open(f"{name.strip('$')}.json", "w") as file:
            signalled = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
            json.dump([ranks, environ.text("ACCELERATE_USE_CPU"), torch.get_num_threads(), signalled], file)
    dist.destroy_process_group()
    return lambda: "not picklable"

# As with GPUs and a driver that looks at them, whose count would make it unusable in forks.
counted = []
torch.cuda._is_compiled, torch.cuda._device_count_nvml = (lambda: True), (lambda: 0)
torch._C._cuda_getDeviceCount = lambda: counted.append(1) or 0
handler = signal.getsignal(signal.SIGTERM)
torch.randn(64, 64) @ torch.randn(64, 64)
debug_launcher(train, ("$$debug",))
notebook_launcher(train, ("notebook",), num_processes=2, mixed_precision="bf16")
try:
    notebook_launcher(train, ("failed", True), num_processes=2)
except torch.multiprocessing.ProcessRaisedException as error:  # as with Accelerate
    assert isinstance(error, RankFailure) and error.msg == str(error)
    with open("failed.json", "w") as file:
        json.dump(str(error), file)
assert signal.getsignal(signal.SIGTERM) is handler
assert environ.text("ACCELERATE_USE_CPU") is None
assert not counted
"""


def test_functions_run_in_connected_processes(home):
    (home / "notebook.py").write_text(NOTEBOOK)
    done = run_python("-W", "error", "notebook.py", timeout_s=90)
    assert (done.stdout, done.stderr) == ("", "")
    debug, notebook, failed = (json.loads((home / f"{n}.json").read_text()) for n in ("debug", "notebook", "failed"))
    as_in_fresh_ones = ["true", max(1, usable_cores() // 2), True]
    assert debug == [[[0, "$$debug", "no"], [1, "$$debug", "no"]], *as_in_fresh_ones]
    assert notebook == [[[0, "notebook", "bf16"], [1, "notebook", "bf16"]], *as_in_fresh_ones]
    assert failed.startswith("rank 1 failed on ")
    assert 'raise ValueError("bad value")' in failed
    assert failed.endswith("then lost the connection to it: rank 0")


def test_one_process_is_this_one():
    seen = []

    def train(value):
        seen.append((value, environ.text("ACCELERATE_MIXED_PRECISION")))

    notebook_launcher(train, (3,), num_processes=1, mixed_precision="bf16")
    assert seen == [(3, "bf16")]
    assert environ.text("ACCELERATE_MIXED_PRECISION") is None


def test_variables_count_where_no_argument_states_anything(monkeypatch):
    own = {"FARFLUNG_HANG_TIMEOUT_S": "7200", "ACCELERATE_DYNAMO_BACKEND": "eager", "ACCELERATE_DEBUG_MODE": "true"}
    own |= {"ACCELERATE_USE_CPU": "true"}
    seen = []
    monkeypatch.setattr(
        "farflung.launch.notebook.run_agent", lambda plan, *_: seen.append(dict(plan.variables)) or Outcome()
    )
    with environ.patched({**own, "ACCELERATE_MIXED_PRECISION": "bf16"}):
        notebook_launcher(lambda: seen.append(environ.snapshot()), num_processes=1)
        notebook_launcher(print, num_processes=2, mixed_precision="fp16")
        debug_launcher(print)
    for one in seen:
        assert own | one == one | own
    assert [one["ACCELERATE_MIXED_PRECISION"] for one in seen] == ["no", "fp16", "no"], "as Accelerate's arguments"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(({name: -1}, f"^{name} is -1") for name in ("node_rank", "num_nodes")),
        ({"num_processes": 2, "num_nodes": 2, "use_port": 0}, "^use_port is 0"),
        ({"num_processes": 100_000_000}, "num_processes asks for 100000000 processes on this machine's CPU"),
        ({"num_processes": 2, "use_port": "http"}, "use_port is 'http'"),
        ({"num_processes": 2, "num_nodes": 2, "master_addr": "not a host"}, "master_addr is 'not a host'"),
        ({"num_processes": 2, "meet": "file:///x/run"}, "num_processes is 2, .* this process alone"),
        ({"num_nodes": 2, "meet": "file:///x/run"}, "num_nodes is 2, .* this process alone"),
        ({"max_restarts": 3, "meet": "file:///x/run"}, "max_restarts is 3, .* this process alone"),
        ({"elastic": "2:4"}, "elastic is '2:4', without meet, so replicas are fixed"),
        ({"meet": "file:///missing/run"}, "can't meet in the folder /missing/run"),
        ({"meet": "file:///x/run", "elastic": "2"}, "elastic"),
    ],
)
def test_settings_that_can_not_work_are_refused(said, message):
    with pytest.raises(ConfigError, match=message):
        notebook_launcher(print, **said)
    with environ.patched({"FARFLUNG_EVRY": "1"}), pytest.raises(ConfigError, match="FARFLUNG_EVRY is not a setting"):
        notebook_launcher(print, num_processes=2)
    with pytest.raises(ConfigError, match="asks for 100000000 processes"):
        debug_launcher(print, num_processes=100_000_000)


def test_a_cell_trains_a_replica_of_a_run_and_may_be_interrupted_and_run_again(home, monkeypatch):
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    outer = []

    def train(steps):
        accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with accelerator.outer(model, local_sgd(every=4)) as loop:
            outer.append((loop.position, sys.argv))
            record(Kind.NOTE, message="of the cell")
            warnings.showwarning(f"{steps} steps", UserWarning, __file__, 1)
            for _ in range(steps):
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
            if steps == 24:
                raise KeyboardInterrupt
        return model

    address = (home / "run").as_uri()
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(train, (24,), meet=address)
    model = notebook_launcher(train, (8,), meet=address)
    assert outer == [(0, ["train"]), (24, ["train"])]
    assert isinstance(model, torch.nn.Linear)
    assert Place.launched().member is None
    seen = ObservedRun(home / "farflung-runs" / "latest")
    assert [(row.name.partition(" of ")[0], row.state) for row in seen.ranks] == [("replica 0", "finished")]
    said = [event.facts.get("message") for event in seen.events]
    assert (said.count("of the cell"), said.count("8 steps")) == (1, 1)
    numbers = [row.number for row in seen.rounds]
    assert numbers
    assert numbers == sorted(set(numbers)), "each round once"
    assert not logging.getLogger("farflung.rounds").isEnabledFor(logging.DEBUG)
    with pytest.raises(RankFailure, match="The run has ended"):
        notebook_launcher(train, (8,), meet=address)


def test_a_cell_ends_with_its_launcher_and_not_with_its_picture(home, monkeypatch, capsys):
    monkeypatch.setattr(cell, "launch_script", lambda *_: 5)
    with pytest.raises(RankFailure, match="The launcher ended with exit code 5 before it started this replica"):
        notebook_launcher(print, meet=(home / "run").as_uri())
    monkeypatch.setattr(cell, "_DRAW_S", 0.01)
    monkeypatch.setitem(sys.modules, "IPython", Mock())
    with cell._drawn(SimpleNamespace(variables={environ.RUN_FOLDER: str(home / "missing")})):
        pass
    assert "the run is not drawn any more: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("farflung.launch.cell.current_world", SimpleNamespace(rank=3, size=4), "is rank 3 of 4 already"),
        ("torch.cuda.is_initialized", True, "CUDA is already initialized"),
    ],
)
def test_a_process_that_can_not_be_forked_is_not(name, value, why, monkeypatch):
    monkeypatch.setattr(name, lambda: value)
    for start in (notebook_launcher, debug_launcher):
        with pytest.raises(StateError, match=rf"{why}.*[\s\S]*inside the function only"):
            start(print, num_processes=2)


def test_a_cell_in_a_world_already_or_with_launchers_under_it_joins_no_run(home, monkeypatch):
    with environ.patched({"FARFLUNG_TEE": "3"}), pytest.raises(ConfigError, match=r"one process: leave .* tee"):
        notebook_launcher(print, meet=(home / "run").as_uri())
    monkeypatch.setattr("farflung.launch.cell.current_world", lambda: SimpleNamespace(rank=0, size=1))
    with pytest.raises(StateError, match=r"rank 0 of 1 already, so it can't join"):
        notebook_launcher(print, meet=(home / "run").as_uri())


def test_each_process_needs_a_gpu_where_there_are_some(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="num_processes is 2, but this machine has 1 GPU;"):
        notebook_launcher(print, num_processes=2)
    notebook_launcher(print, num_processes=1)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_torchs_rendezvous_is_that_which_is_named_and_a_signal_ends_the_cell(number, error, home, monkeypatch):
    plans = []

    def run(plan, settings, line_prefix):
        plans.append((plan, settings.max_restarts, settings.monitor_interval, line_prefix))
        return SimpleNamespace(signal=number, failures=[])

    monkeypatch.setattr("farflung.launch.notebook.run_agent", run)
    monkeypatch.setattr("farflung.launch.plan.usable_cores", lambda: 9)
    if number == signal.SIGTERM:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:7", "rdzv_id": "run7", "rdzv_conf": {"timeout": 3}}
    words = {
        "num_nodes": 2,
        "node_rank": 1,
        "max_restarts": 5,
        "monitor_interval": 0.7,
        "log_line_prefix_template": "x",
    }
    with pytest.raises(error) as ended:
        notebook_launcher(print, num_processes=2, **meeting, **words)
    assert getattr(ended.value, "code", 143) == 143
    [(plan, *others)] = plans
    found = plan.meeting
    assert (found.backend, found.endpoint, found.run_id, found.num_machines) == ("c10d", "127.0.0.1:7", "run7", 2)
    assert (found.conf, found.interface.address) == ({"rank": 1, "timeout": 3}, "127.0.0.1")
    assert plan.variables.get("OMP_NUM_THREADS") == ("4" if number == signal.SIGINT else None)
    assert (plan.num_local, others) == (2, [5, 0.7, "x"])


def test_the_parameters_are_accelerates():
    launchers = pytest.importorskip("accelerate.launchers")
    for each in (notebook_launcher, debug_launcher):
        ours, theirs = (inspect.signature(one).parameters for one in (each, getattr(launchers, each.__name__)))
        kept = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in kept] == [(p.name, p.default) for p in theirs.values()]
