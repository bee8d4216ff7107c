# SPDX-License-Identifier: Apache-2.0
"""Real runs: processes are connected, failures are named, exit codes are the script's, and nobody is left behind."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import psutil
import pytest
import torch.distributed.elastic.agent.server.api

from farflung.commands.launch import launch_command, launch_command_parser
from farflung.config import environ
from farflung.launch.codes import ENGINE, FAILED, REQUEUE
from farflung.launch.network import get_free_port
from farflung.launch.shell import start_of
from farflung.observe.run import ObservedRun
from farflung.process.failure import PREEMPTED
from farflung.testing.patience import patience
from tests.launch.machines import LISTENING
from tests.python import call_farflung, run_python
from tests.waits import until

# Each rank writes what it sees, and the sum over all ranks of rank + 1, which only connected processes can know.
CONNECTED = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
seen = {"size": dist.get_world_size(), "total": total.item(), "argv": sys.argv[1:], "environ": dict(os.environ)}
with open(f"rank{dist.get_rank()}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""

# Each rank says what the launcher made of the script, and how many numbers of the model it holds.
SHARDED = """
import torch
from farflung import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)))
held = sum(parameter.to_local().numel() for parameter in model.parameters())
print(accelerator.num_processes, accelerator.distributed_type, held, flush=True)
"""

ALONE = """
import json, os, sys
with open("alone.json", "w") as file:
    json.dump({"argv": sys.argv[1:], "environ": dict(os.environ), "name": __name__}, file)
sys.exit(5)
"""

# Rank 1 does what the arguments say; the others, and what each has started, would stay for minutes.
DOOMED = """
import os, signal, subprocess, sys, time
from farflung.base.causes import Cause
from farflung.base.errors import RankFailure
from farflung.process.failure import install_failure_report
rank = int(os.environ["RANK"])
install_failure_report(rank)
subprocess.Popen(["sleep", "300"])
open(f"up{rank}", "w").close()
while not all(os.path.exists(f"up{other}") for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
if rank == 1:
    exec(sys.argv[1])
time.sleep(300)
"""

SAVES = ["--save_on_signal", "saved"]
# Files of torch's agent, which is in this process here, stay open.
LEAVES_LOGS = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def mark():
    """A variable that all processes of a test inherit, so that those left behind can be found."""
    word = f"LEFT_BEHIND_{uuid4().hex}"  # one that begins with FARFLUNG_ would be refused
    environ.export({word: "1"})
    yield word
    environ.remove(word)


def check_none_left(mark: str) -> None:
    """Wait until no process that carries the mark is alive."""

    def left() -> list[list[str]]:
        there = psutil.process_iter(["environ", "cmdline"])
        return [one.info["cmdline"] for one in there if mark in (one.info["environ"] or ())]

    until(lambda: not left(), lambda: str(left()), 5.0)


@contextmanager
def signals(*steps: tuple[int, Callable[[], Any]]) -> Iterator[None]:
    """Send this process each signal once its condition is true, from a thread."""

    def send() -> None:
        for number, condition in steps:
            until(condition)
            os.kill(os.getpid(), number)

    thread = Thread(target=send)
    thread.start()
    yield
    thread.join()


def wait_for(*files: Path) -> None:
    until(lambda: all(file.exists() for file in files))
    time.sleep(0.3)  # whoever wrote the file is in its long sleep now


def seen_by(name: str) -> dict:
    return json.loads(Path(name).read_text())


def launch_as_accelerate(*words: str) -> None:
    launch_command(launch_command_parser().parse_args(words))


@pytest.mark.parametrize("launch", [partial(call_farflung, "launch"), launch_as_accelerate])
def test_what_a_replica_launches_is_a_run_of_its_own(launch, home, monkeypatch):
    (home / "train.py").touch()
    seen = {}
    monkeypatch.setattr("farflung.launch.run.start", lambda *_: seen.update(environ.snapshot()) or 0)
    of_run = {environ.RUN_FOLDER: "run", environ.RUN_ATTEMPT: "1", environ.REPLICA: "replica 3"}
    of_run |= dict(zip(environ.MEMBER_VARIABLES, ("127.0.0.1:7", "3"), strict=True))
    with environ.patched(of_run):
        launch("--cpu", "--num_processes", "2", "train.py")
        assert environ.snapshot().items() >= of_run.items(), "the process that launches is still a replica"
    assert seen
    assert not seen.keys() & of_run.keys()


@pytest.mark.usefixtures("warm")
def test_two_processes_are_connected_and_told_what_was_set(farflung, home):
    (home / "train.py").write_text(CONNECTED)
    settings = "mixed_precision: bf16\ngradient_accumulation_steps: 4\ndynamo_config: {backend: EAGER}\n"
    (home / "farflung.yaml").write_text(settings)
    own = ["--num_processes", "7", "${local_rank}", "$$", "a b", "", "--", "--help"]
    more = ["--dynamo-use-dynamic", "--hang_timeout_s", "7.5"]
    done = farflung("launch", "--cpu", "--num-processes", "2", *more, "train.py", *own)
    assert (done.returncode, done.stderr, done.stdout) == (0, "farflung: settings from farflung.yaml\n", "")
    for rank in (0, 1):
        seen = seen_by(f"rank{rank}.json")
        assert (seen["size"], seen["total"], seen["argv"]) == (2, 3, own)
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
        told |= {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
        told |= {"ACCELERATE_DYNAMO_BACKEND": "eager", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
        assert seen["environ"].items() >= (told | {"FARFLUNG_HANG_TIMEOUT_S": "7.5"}).items()
        assert "ACCELERATE_DYNAMO_MODE" not in seen["environ"]
        assert environ.LAUNCHER not in seen["environ"], "what a rank starts is not tied to it"
        assert int(seen["environ"]["OMP_NUM_THREADS"]) >= 1


def test_flags_alone_shard_a_script_over_cpu_processes(forked, home):
    (home / "train.py").write_text(SHARDED)
    flags = ["--use_fsdp", "--fsdp_auto_wrap_policy", "size_based_wrap", "--fsdp_min_num_params", "4"]
    printed = forked("--cpu", "--num_processes", "2", *flags, "--fsdp_offload_params", "false", "train.py")
    assert printed.splitlines() == ["2 DistributedType.FSDP 4"] * 2


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("is_launched", [True, False])
def test_on_one_machine_everything_listens_on_loopback_alone(is_launched, farflung, home):
    (home / "train.py").write_text(LISTENING)
    if is_launched:
        assert farflung("launch", "--cpu", "--num_processes", "2", "train.py").returncode == 0
    else:  # as under mpirun: rank 0 serves the store
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(get_free_port())}
        places = [{"RANK": rank, "LOCAL_RANK": rank, **common, "ACCELERATE_USE_CPU": "true"} for rank in "01"]
        ranks = [subprocess.Popen([sys.executable, "train.py"], env=environ.snapshot() | place) for place in places]
        assert [rank.wait(patience(90)) for rank in ranks] == [0, 0]
    for rank in (0, 1):
        addresses = seen_by(f"rank{rank}.json")
        assert addresses
        assert {*addresses} == {"127.0.0.1"}


def test_streams_that_the_caller_has_closed_are_open_to_nowhere_in_each_process(home):
    (home / "train.py").write_text(
        "import os\nprint('hello', flush=True)\n"
        "open(f'rank{os.environ[\"RANK\"]}', 'w').write(str([os.fstat(number).st_mode for number in range(3)]))\n"
    )
    command = [sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", "2", "train.py"]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=home, timeout=patience(60))
    assert closed.returncode == 0
    assert [(home / f"rank{rank}").read_text().count(",") for rank in range(2)] == [2, 2]


def test_processes_may_have_as_many_connections_as_the_machine_allows(home, monkeypatch):
    """Strangers at a port of gloo, which ends the process when no file is left for one more."""
    (home / "train.py").touch()
    seen = []
    monkeypatch.setattr("farflung.launch.run.start", lambda *_: seen.append(resource.getrlimit(kind)[0]) or 0)
    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (min(soft, 512), hard))
    try:
        assert call_farflung("launch", "--cpu", "--num_processes", "2", "train.py") == 0
    finally:
        resource.setrlimit(kind, (soft, hard))
    assert seen == [min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536]


def test_one_process_is_the_script_itself(farflung, home):
    (home / "train.py").write_text(ALONE)
    with environ.patched({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}):
        done = farflung("launch", "--cpu", "train.py", "--cpu", "$x")
    assert (done.returncode, done.stderr) == (5, "")
    seen = seen_by("alone.json")
    assert (seen["argv"], seen["name"]) == (["--cpu", "$x"], "__main__")
    assert (seen["environ"]["WORLD_SIZE"], seen["environ"]["RANK"]) == ("1", "0")
    assert "LOCAL_RANK" not in seen["environ"]


def test_what_a_program_has_printed_before_it_becomes_the_script_is_kept(home, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (home / "train.py").write_text("print('the script')")
    lines = "print('the program')\nfrom farflung.launch.main import main\nmain(['launch', '--cpu', 'train.py'])"
    assert run_python("-c", lines).stdout == "the program\nthe script\n"


def test_modules_and_programs_are_started_too(farflung, home):
    (home / "package").mkdir()
    (home / "package" / "train.py").write_text(ALONE)
    assert farflung("launch", "--cpu", "-m", "package.train", "x").returncode == 5
    assert seen_by("alone.json")["argv"] == ["x"]
    assert farflung("launch", "--cpu", "--no_python", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize("flags", [(), ("--num_processes", "2")])
def test_what_the_system_refuses_to_start_is_answered_by_a_sentence(flags, farflung, home):
    (home / "run.sh").write_text("echo trained\n")
    (home / "run.sh").chmod(0o755)
    done = farflung("launch", "--cpu", *flags, "--run_dir", "run", "--no_python", "./run.sh")
    assert done.returncode == ENGINE
    assert "EngineFailure: The system refused what the run needs: [Errno 8] Exec format error" in done.stderr
    assert "must begin with a line such as #!/bin/sh" in done.stderr
    assert "Traceback" not in done.stderr
    assert ObservedRun(home / "run").state == "failed (5)"


def test_a_run_that_the_system_refuses_is_no_interrupt(home, monkeypatch, capsys):
    (home / "train.py").touch()
    launch = ("launch", "--cpu", "--num_processes", "2", "--run_dir", "run", "train.py")
    for error, code in ((OSError(11, "Resource temporarily unavailable"), ENGINE), (BrokenPipeError(), 141)):
        monkeypatch.setattr("farflung.launch.run.start", Mock(side_effect=error))
        assert call_farflung(*launch) == code
    assert "EngineFailure: The system refused what the run needs: [Errno 11] Resource temp" in capsys.readouterr().err
    events = [json.loads(line) for line in (home / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in events if event["event"] == "ended"] == [ENGINE, 130]


NOTE = "from farflung.process.failure import leave_note; leave_note('newest_checkpoint', os.getcwd()); "


@pytest.mark.parametrize(
    ("deed", "flags", "how", "words"),
    [
        ("raise ValueError('bad value')", [], "exit code 1", ["ValueError: bad value", "Traceback"]),
        (f"{NOTE}sys.exit(7)", [], "exit code 7", ["It ended itself with exit code 7 (", "Resume from "]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["--debug"], "signal 9 (SIGKILL)", ["memory"]),
    ],
)
@LEAVES_LOGS
def test_a_rank_that_fails_is_named_once_and_takes_all_with_it(deed, flags, how, words, home, mark, capfd, caplog):
    (home / "train.py").write_text(DOOMED)
    launch = ("launch", "--cpu", "--num_processes", "3", "--run-dir", "run", *flags, "train.py", deed)
    assert call_farflung(*launch) == FAILED
    said = capfd.readouterr().err
    report = said[said.index("╭") :]
    assert report.count("rank 1 failed") == 1
    assert "then ended by the launcher: ranks 0 and 2" in report
    assert [word for word in (how, *words) if word not in report] == []
    assert ("Resume from " in report) == ("Resume from " in words)
    assert "ChildFailedError" not in said
    assert any(name.startswith("torch.distributed.elastic") for name, *_ in caplog.record_tuples) == bool(flags)
    events = [json.loads(line) for line in (home / "run" / "events.jsonl").read_text().splitlines()]
    (lost,) = [event for event in events if event["event"] == "lost" and event["rank"] == 1]
    assert (lost["how"], lost["why"].startswith(how if "signal" in how else words[0])) == (how, True)
    own = [event["why"] for event in events if event["event"] == "failed" and "why" in event]
    assert own == (words[:1] if "Traceback" in words else [])
    check_none_left(mark)


@pytest.mark.parametrize(
    ("deed", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("raise RankFailure('over', Cause.RUN_ENDED)", 1)]
)
@LEAVES_LOGS
def test_a_launcher_under_that_of_replicas_ends_as_its_rank_did(deed, code, home, capfd):
    (home / "train.py").write_text(DOOMED)
    stated = '{"use_cpu": true, "num_processes": 2, "json": true, "run_dir": "none"}'
    assert call_farflung("launch", "--stated", stated, "train.py", deed) == code
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    ends = [abs(event["failed_at"] - event["time"]) < 60 for event in events if event["event"] == "failed"]
    assert ends == ([True] if code == 137 else [])  # the end of the run is no failure


EARLY = """
import sys, torch
from farflung import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.process_index == 1:
    sys.exit(0)
accelerator.prepare(torch.nn.Linear(2, 1))
"""


@pytest.mark.usefixtures("warm")
def test_a_rank_that_ends_early_without_an_error_is_named_as_the_cause(farflung, home):
    (home / "train.py").write_text(EARLY)
    done = farflung("launch", "--cpu", "--num_processes", "2", "train.py", code=FAILED)
    report = done.stderr[done.stderr.index("╭") :]
    assert "rank 1 ended with exit code 0 while others still needed it" in report
    assert "another machine" not in report


@LEAVES_LOGS
def test_a_signal_to_the_launcher_ends_all_quietly(home, mark, capfd):
    (home / "train.py").write_text(DOOMED)
    fails = "[signal.signal(number, lambda *_: 1 / 0) for number in (signal.SIGINT, signal.SIGTERM)]"  # as it is ended
    deed = f"{fails}; open('ready', 'w')"
    words = ("launch", "--cpu", "--num_processes", "2", "train.py", deed)
    with signals((signal.SIGINT, (home / "ready").exists)):
        assert call_farflung(*words) == 130
    assert capfd.readouterr().err == ""
    check_none_left(mark)


@LEAVES_LOGS
def test_what_failed_before_an_interrupt_is_said_and_a_second_one_ends_ranks_that_are_slow(
    home, mark, capfd, monkeypatch
):
    (home / "train.py").write_text(DOOMED)
    monkeypatch.setattr("farflung.launch.agent._PATIENCE_S", 0.05)
    deed = "import threading; threading.Thread(target=time.sleep, args=(300,)).start(); "
    deed += "signal.signal(signal.SIGINT, signal.SIG_IGN); raise ValueError('bad value')"
    words = ("launch", "--cpu", "--num_processes", "2", "--log_dir", "logs", "--run-dir", "run", "train.py", deed)
    slow = "the processes have 30 s to shut down; press Ctrl-C again to kill them now."
    events = home / "run" / "events.jsonl"
    steps = [lambda: [*home.glob("logs/*/attempt_0/1/error.json")], lambda: slow in events.read_text()]
    with signals(*((signal.SIGINT, condition) for condition in steps)):
        assert call_farflung(*words) == 130
    said = capfd.readouterr().err
    assert (said.count("ValueError: bad value"), said.count(f"farflung: {slow}\n")) == (1, 1)
    check_none_left(mark)


@pytest.mark.parametrize(
    ("number", "count", "flags", "has_rank", "code"),
    [
        *((number, 1, SAVES, False, REQUEUE) for number in (signal.SIGTERM, signal.SIGUSR1)),
        *((signal.SIGINT, 1, SAVES, False, 130), (signal.SIGTERM, 1, [], False, 143)),
        (signal.SIGRTMIN + 3, 1, [], False, 128 + signal.SIGRTMIN + 3),
        *(
            (signal.SIGTERM, 1, [], True, 143),
            (signal.SIGTERM, 1, SAVES, True, 0),
            (signal.SIGTERM, 2, SAVES, True, 143),
        ),
    ],
)
def test_a_signal_ends_the_launcher_unless_a_rank_is_to_save_at_the_first_one(
    number, count, flags, has_rank, code, home, monkeypatch, capsys
):
    def agent(*words):  # in place of torch's
        with subprocess.Popen(["sleep", "60"]) if has_rank else nullcontext() as rank:
            try:
                for _ in range(count):
                    os.kill(os.getpid(), number)
            finally:
                rank and rank.kill()

    (home / "train.py").touch()
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda config, entrypoint: agent)
    monkeypatch.setattr("farflung.base.signals._SAME_S", -1.0)  # each signal is a request
    assert call_farflung("launch", "--cpu", "--num_processes", "2", *flags, "train.py") == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("backend", "flags"), [("static", ["--only_rank", "3"]), ("c10d", ["--json"])])
def test_torchs_agent_gets_the_settings_and_each_attempt_that_has_failed_is_shown(
    backend, flags, home, monkeypatch, capsys, caplog
):
    (home / "train.py").touch()
    (home / "kept").mkdir()
    variables, log = (environ.SHOWS_ATTEMPTS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", environ.LAUNCHER), {}
    agents = logging.getLogger(torch.distributed.elastic.agent.server.api.__name__)
    caplog.set_level(logging.INFO, agents.name)

    def launch(config, entrypoint):
        log.update(vars(config), level=agents.level, entrypoint=entrypoint)
        log["environ"] = [environ.text(name) for name in variables]
        log["filter"] = config.logs_specs._local_ranks_filter
        report = json.dumps({"message": {"message": "E: x", "extraInfo": {"exit_code": 7}}})
        for _, file in sorted(config.logs_specs.reify({rank: {} for rank in range(2)}).error_files.items()):
            Path(file).write_text(report if Path(file).parent.name == "1" else "{")
            Path(file).with_name("newest_checkpoint").write_text(str(home / "kept"))
        for attempt in (1, 2) if backend == "static" else ():
            config.rdzv_configs["begins"](attempt)
        return lambda *words: None

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    row = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", "7"]
    row += ["--num_processes", "4", "--role", "trainer", "--monitor_interval", "0.7", "--max_restarts", "3"]
    row += ["--rdzv_backend", backend, "--log_dir", "logs", *flags]
    earlier = home / "logs" / "farflung_of_yesterday" / "attempt_9" / "0"  # which was preempted, and failed then
    earlier.mkdir(parents=True)
    (earlier / PREEMPTED).touch()
    (earlier / "error.json").write_text('{"message": "ValueError: of yesterday"}')
    assert call_farflung("launch", "--cpu", *row, "train.py") == 0
    expected = {"min_nodes": 2, "max_nodes": 2, "nproc_per_node": 2, "run_id": "farflung", "role": "trainer"}
    expected |= {"rdzv_endpoint": "127.0.0.1:7", "max_restarts": 3, "monitor_interval": 0.7, "local_addr": "127.0.0.1"}
    assert log.items() >= (expected | {"entrypoint": sys.executable}).items()
    ours = backend == "static"
    assert log["environ"] == ["true" if ours else None, None if ours else "1", str(os.getpid())]
    assert (log["level"], agents.level) == (logging.ERROR if ours else logging.CRITICAL + 1, logging.INFO)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    if ours:
        assert (log["filter"], log["rdzv_configs"]["rank"], log["rdzv_configs"]["listen"]) == ({1}, 1, None)
        assert said.count("rank 3 failed on") == said.count(" failed on ") == 1
        words = ("exit code 7", "E: x Its output is above.", "Resume from kept", "start again (restart 1 of 3)")
        assert [word for word in words if word not in said] == []


FAILS_ONCE = """
import os, torch
from farflung import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
if accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad value")
assert accelerator.reduce(torch.ones(1)).item() == 2
os.write(1, b"fine%d " % accelerator.process_index)
"""


@pytest.mark.usefixtures("warm")
def test_a_failed_run_is_tried_again_as_often_as_asked_for_and_each_failure_is_shown_once(farflung, home):
    (home / "train.py").write_text(FAILS_ONCE)
    flags = ["--num_processes", "2", "--max_restarts", "1", "--log_dir", "logs", "--quiet"]
    done = farflung("launch", "--cpu", *flags, "train.py")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["fine0", "fine1"])
    assert done.stderr.count("ValueError: bad value") == done.stderr.count("Traceback") == 1
    assert "rank 1 failed on " in done.stderr
    assert "farflung: the processes start again (restart 1 of 1)" in done.stderr
    assert any((home / "logs").iterdir())


def test_a_script_may_end_while_gloo_still_needs_pythons_lock(tmp_path):
    script = """
import sys, threading, time
import torch
import torch.distributed as dist

def late(future):  # called by gloo's thread, as the script ends
    entered.set()
    time.sleep(0.02)

sys.setswitchinterval(100)  # who has the lock keeps it
entered = threading.Event()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1), async_op=True).get_future().then(late)
entered.wait()
deadline = time.monotonic() + 0.05
while time.monotonic() < deadline:
    pass
"""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    run_python(*start_of("farflung.launch.rank")[1:], tmp_path / "train.py")
