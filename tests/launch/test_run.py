# SPDX-License-Identifier: Apache-2.0
"""Real runs: processes are connected, failures are named, exit codes are the script's, and nobody is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from farflung.config import environ
from farflung.launch.codes import FAILED
from farflung.launch.network import get_free_port
from farflung.testing.patience import patience
from tests.launch.machines import LISTENING
from tests.launch.screen import launcher
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


def wait_for(*files: Path) -> None:
    until(lambda: all(file.exists() for file in files))
    time.sleep(0.3)  # whoever wrote the file is in its long sleep now


def seen_by(name: str) -> dict:
    return json.loads(Path(name).read_text())


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
        assert int(seen["environ"]["OMP_NUM_THREADS"]) >= 1


def test_flags_alone_shard_a_script_over_cpu_processes(forked, home):
    (home / "train.py").write_text(SHARDED)
    flags = ["--use_fsdp", "--fsdp_auto_wrap_policy", "size_based_wrap", "--fsdp_min_num_params", "4"]
    printed = forked("--cpu", "--num_processes", "2", *flags, "--fsdp_offload_params", "false", "train.py")
    assert printed.splitlines() == ["2 DistributedType.FSDP 4"] * 2


@pytest.mark.usefixtures("warm")
def test_two_machines_meet(home):
    (home / "train.py").write_text(CONNECTED)
    port = str(get_free_port())
    common = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port, "--cpu"]
    command = [sys.executable, "-m", "farflung", "launch", *common, "--machine_rank"]
    machines = [subprocess.Popen([*command, rank, "train.py"], stderr=subprocess.PIPE, text=True) for rank in "01"]
    said = [machine.communicate(timeout=patience(90))[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    # torch warns by itself where the machine that serves the store has ended before the other one says goodbye.
    ours = [line for text in said for line in text.splitlines() if line.startswith("farflung:")]
    waits = f"of 2 waits for the others at 127.0.0.1:{port}, over lo (127.0.0.1)"
    assert ours == [f"farflung: machine {rank} {waits}" for rank in "01"]
    assert [seen_by(f"rank{rank}.json")["total"] for rank in (0, 1)] == [3, 3]


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


# It waits as gloo may still be connecting the others, who would miss one that ends.
ACCELERATED = """
import os
from accelerate import Accelerator
accelerator = Accelerator()
assert accelerator.mixed_precision == 'bf16' and accelerator.device.type == 'cpu'
os.write(1, f'rank {accelerator.process_index} of {accelerator.num_processes}\\n'.encode())
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_on_real_accelerate_is_connected_too(farflung, home):
    pytest.importorskip("accelerate")
    (home / "train.py").write_text(ACCELERATED)
    done = farflung("launch", "--num_processes", "2", "--mixed_precision", "bf16", "--cpu", "train.py", code=0)
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]


def test_one_process_is_the_script_itself(farflung, home):
    (home / "train.py").write_text(ALONE)
    with environ.patched({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}):
        done = farflung("launch", "--cpu", "train.py", "--cpu", "$x")
    assert (done.returncode, done.stderr) == (5, "")
    seen = seen_by("alone.json")
    assert (seen["argv"], seen["name"]) == (["--cpu", "$x"], "__main__")
    assert (seen["environ"]["WORLD_SIZE"], seen["environ"]["RANK"]) == ("1", "0")
    assert "LOCAL_RANK" not in seen["environ"]


def test_modules_and_programs_are_started_too(farflung, home):
    (home / "package").mkdir()
    (home / "package" / "train.py").write_text(ALONE)
    assert farflung("launch", "--cpu", "-m", "package.train", "x").returncode == 5
    assert seen_by("alone.json")["argv"] == ["x"]
    assert farflung("launch", "--cpu", "--no_python", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(
    ("deed", "flags", "words"),
    [
        ("raise ValueError('bad value')", [], ["exit code 1", "ValueError: bad value", "Traceback"]),
        ("sys.exit(7)", [], ["exit code 7", "It ended itself with exit code 7 ("]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["--debug"], ["signal 9 (SIGKILL)", "memory"]),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_rank_that_fails_is_named_once_and_takes_all_with_it(deed, flags, words, home, mark, capfd, caplog):
    (home / "train.py").write_text(DOOMED)
    assert call_farflung("launch", "--cpu", "--num_processes", "3", *flags, "train.py", deed) == FAILED
    said = capfd.readouterr().err
    report = said[said.index("╭") :]
    assert report.count("rank 1 failed") == 1
    assert "then ended by the launcher: ranks 0 and 2" in report
    assert all(word in report for word in words)
    assert "ChildFailedError" not in said
    assert any(name.startswith("torch.distributed.elastic") for name, *_ in caplog.record_tuples) == bool(flags)
    check_none_left(mark)


@pytest.mark.parametrize(
    ("deed", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("raise RankFailure('over', Cause.RUN_ENDED)", 1)]
)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all_quietly(number, code, home, mark):
    (home / "train.py").write_text(DOOMED)
    fails = "[signal.signal(number, lambda *_: 1 / 0) for number in (signal.SIGINT, signal.SIGTERM)]"  # as it is ended
    with launcher("--num_processes", "2", "train.py", fails) as run:
        wait_for(home / "up0", home / "up1")
        run.process.send_signal(number)
        assert (run.ended(), run.end()) == (code, "")
        check_none_left(mark)


@pytest.mark.long
def test_a_run_under_nohup_outlives_its_terminal(home):
    waits = "while not os.path.exists('go'): time.sleep(0.01)\n"
    (home / "train.py").write_text(f"import os, time\nopen('up' + os.environ['RANK'], 'w').close()\n{waits}")
    words = ["nohup", sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", "2", "train.py"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        wait_for(home / "up0", home / "up1")
        launcher.send_signal(signal.SIGHUP)
        time.sleep(1)
        (home / "go").touch()
        assert launcher.wait(timeout=patience(30)) == 0


@pytest.mark.long
def test_what_failed_before_an_interrupt_is_still_said(home, mark):
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # a rank that hangs while the launcher ends it
        "rank = os.environ['RANK']\n"
        "open('up' + rank, 'w').close()\n"
        "if rank == '1':\n"
        "    while not os.path.exists('up0'): time.sleep(0.01)\n"
        "    raise ValueError('bad value')\n"
        "time.sleep(300)\n"
    )
    (home / "train.py").write_text(script)
    with launcher("--num_processes", "2", "train.py") as run:
        wait_for(home / "up0", home / "up1")
        time.sleep(1)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 130
        assert run.end().count("ValueError: bad value") == 1
        check_none_left(mark)


@pytest.mark.long
def test_a_second_interrupt_ends_ranks_that_do_not_heed_the_first(home, mark):
    deaf = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open('up' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(300)\n"
    )
    (home / "train.py").write_text(deaf)
    with launcher("--num_processes", "2", "train.py") as run:
        wait_for(home / "up0", home / "up1")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("press Ctrl-C again to kill them now")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(timeout=patience(10)) == 130
        check_none_left(mark)


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
    run_python("-m", "farflung.launch.rank", tmp_path / "train.py")
