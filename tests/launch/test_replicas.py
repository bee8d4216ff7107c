# SPDX-License-Identifier: Apache-2.0
"""Launchers of replicas that come and go: who is started again, who joins, and which code all of it ends with."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import psutil
import pytest

from farflung.launch.codes import FAILED
from tests.launch.engines.test_connections import RANK, WORST
from tests.launch.machines import ADDRESSES, two_machines
from tests.launch.screen import Screen, launcher
from tests.outer.elastic_run import transport_at
from tests.python import call_farflung
from tests.waits import until

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with OuterLoop(model, diloco(2), membership=launched_membership()) as outer:
    Path(f"in{os.getpid()}").touch()
    while not Path("last").exists() or outer.position < int(Path("last").read_text()):
        time.sleep(0.005)
        outer.step()
        Path("at").write_text(str(outer.position))
time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)
"""
RESUMES = """
import json, os, sys, torch
from pathlib import Path
from farflung import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
if Path("kept").exists():
    accelerator.load_state("kept")
loop, draw = accelerator.outer_loops[0], torch.randn(1).item()
begins = loop.position
while loop.position < int(sys.argv[1]):
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if loop.position % 4 == 0:
        accelerator.save_state("kept")
accelerator.end_training()
accelerator.save_model(model, "out")
Path(f"ended{os.getpid()}").write_text(json.dumps([begins, draw, model.weight.tolist()]))
if sys.argv[2:] == ["fails"]:
    raise ValueError("a bad value")
"""
RANKS = """
import os, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
torch.seed()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
Path(f"rank{dist.get_rank()}_{os.getpid()}").touch()
last = torch.zeros(())
while not last:
    last += Path("last").exists()
    dist.all_reduce(last)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DILOCO = ["--outer", "diloco", "--outer-every", "4"]


@pytest.fixture
def far(home, warm, either_key):
    """Two machines with a launcher each, whose two replicas train with those of the other; and what they print."""
    (home / "train.py").write_text(TRAINS)
    first = ["--elastic", "2:4", "--main_process_ip", ADDRESSES[0], "--main_process_port", "29600", "train.py"]
    join = ["--join", f"{ADDRESSES[0]}:29600", "--replicas", "2", "train.py"]
    with two_machines() as machines:
        screens = [Screen(machines.start(0, ["farflung", "launch", "--cpu", *first], home))]
        screens[0].wait_for("generation 1: training begins with 2 replicas")
        screens.append(Screen(machines.start(1, ["farflung", "launch", "--cpu", *join], home)))
        screens[0].wait_for("joined; 4 replicas train")
        yield machines, *screens


def position(home):
    """The step at which the replicas of `TRAINS` are."""
    return int((home / "at").read_text() or 0) if (home / "at").exists() else 0


def until_further(home):
    """Wait until training has gone on for twenty steps."""
    began = position(home)
    until(lambda: position(home) > began + 20)


def end_in_40_steps(home):
    (home / "last.tmp").write_text(str(position(home) + 40))
    (home / "last.tmp").rename(home / "last")


@pytest.mark.usefixtures("warm")
def test_a_killed_replica_starts_again_another_launcher_joins_and_all_end_well(home):
    (home / "train.py").write_text(TRAINS)
    with launcher("--elastic", "2:3", "--replicas", "2", "train.py") as first:
        where = first.wait_for(r"more join with `farflung launch --join (\S+) --cpu train.py`$")[1]
        first.wait_for("generation 1: training begins with 2 replicas")
        mine = until(lambda: len(found := list(home.glob("in*"))) == 2 and found)
        os.kill(int(mine[0].name[2:]), signal.SIGKILL)
        lost = first.wait_for(r"(replica \d) was killed by SIGKILL; it starts again in 1 s \(restart 1 of 3 within")[1]
        # Fewer than the least go on.
        first.wait_for(f"generation 2: {lost} is out: was killed by SIGKILL; training continues with 1 replica$")
        first.wait_for(f"generation 3: {lost} joined; 2 replicas train")
        with launcher("--join", where, "train.py", "1.5") as second:  # seconds that it takes longer to end
            second.wait_for(f"1 replica of a run at {where}$")
            first.wait_for(r"generation 4: replica 0 of \S+ joined; 3 replicas train")
            end_in_40_steps(home)
            assert (first.ended(), second.ended()) == (0, 0)
        said = sorted(second.lines[1:])  # by the launcher, and by the replica itself
        assert re.fullmatch(r"farflung: replica 0 of \S+ was let in; 3 replicas train\n", said[2])
        assert said[1] == "farflung: 3 replicas have ended with equal weights\n"
        assert said[0] == "This replica differs from those that it has joined: arguments: '1.5' instead of ''\n"
        assert len(said) == 3, said


@pytest.mark.parametrize("kind", ["folder", pytest.param("bucket", marks=pytest.mark.long)])
@pytest.mark.usefixtures("warm", "either_key")
def test_launchers_of_the_same_line_meet_at_an_address_and_outlive_the_first_one(home, kind, request):
    script = TRAINS.replace("in{os.getpid()}", "in{os.environ['FARFLUNG_MEMBER']}_{os.getpid()}")
    (home / "train.py").write_text(script)
    where = f"file://{home}/run%207" if kind == "folder" else request.getfixturevalue("bucket")
    line = "--elastic", "1:4", "--meet", where, "--heartbeat_s", "1", "train.py"
    with launcher(*line) as one, launcher(*line) as another:
        for screen in (one, another):
            screen.wait_for(f"1 replica of a run at {where}; the same line on any machine adds more$")
        begun = until(lambda: [it for it in (one, another) if any("training begins" in text for text in it.lines)])
        assert len(begun) == 1
        first, second = (one, another) if begun == [one] else (another, one)
        first.wait_for(r"training begins with 2 replicas$|joined; 2 replicas train$")
        board = transport_at(where).of_run(b"").board
        machine = board.get("first")
        (member,) = [key for key in board.list("machine/") if board.get(key) == machine]
        (replica,) = until(lambda: list(home.glob(f"in{member.partition('/')[2]}_*")))
        until(lambda: len(list(home.glob("in*"))) == 2)  # the newcomer has the state
        for pid in (machine.rpartition(b":")[2].partition(b".")[0], replica.name.partition("_")[2]):
            os.kill(int(pid), signal.SIGKILL)
        second.wait_for(r"generation \d: replica 0 is out: its machine gave no sign for .*; training continues")
        with launcher(*line, "0.5") as back:
            second.wait_for(r"generation \d: replica 0 of \S+ joined; 2 replicas train$")
            end_in_40_steps(home)
            assert (second.ended(), back.ended()) == (0, 0)


@pytest.mark.parametrize("kind", ["bucket", pytest.param("folder", marks=pytest.mark.long)])
@pytest.mark.usefixtures("warm", "either_key")
def test_a_run_whose_launcher_and_replicas_were_all_killed_goes_on_with_the_same_line(farflung, home, kind, request):
    (home / "train.py").write_text(TRAINS)
    where = f"file://{home}/run" if kind == "folder" else request.getfixturevalue("bucket")
    line = "--elastic", "2:4", "--meet", where, "--heartbeat_s", "1", "--grace_s", "1", "--state_every", "4", "train.py"
    nothing = farflung("checkpoint", "pull", where, "model.safetensors", code=2)
    assert re.search(r"Nothing can be pulled from \S+. No state was written there yet|No such file", nothing.stderr)
    with launcher(*line) as first:
        first.wait_for("training begins with 2 replicas")
        until(lambda: position(home) > 40)
        pulled = farflung("checkpoint", "pull", where, "model.safetensors")
        kept = re.fullmatch(r"model.safetensors has 2 tensors after step (\d+)\n", pulled.stdout)
        assert kept, pulled.stderr
        os.kill(first.process.pid, signal.SIGKILL)
        for one in psutil.process_iter(["cmdline", "cwd"]):
            if "train.py" in (one.info["cmdline"] or []) and one.info["cwd"] == str(home):
                one.kill()
    (home / "at").unlink()
    with launcher(*line) as again:
        found = again.wait_for(r"continues with 2 replicas from the state at step (\d+), (\w+) (later )?rounds? lost")
        assert int(found[1]) >= int(kept[1]) > 0
        until(lambda: position(home) > int(found[1]) + 10)
        (home / "last").write_text("1")
        assert again.ended() == 0


@pytest.mark.usefixtures("warm")
def test_with_tee_files_have_what_each_replica_prints_byte_by_byte(home):
    lines = [*random.Random(1).choices(WORST, k=2000), b"x" * 1_000_000 + b"\n", b"no newline at the end"]
    (home / "lines").write_text(repr(lines))
    (home / "train.py").write_text(RANK)
    words = ["launch", "--cpu", "--elastic", "1:2", "--replicas", "2", "--tee", "3", "--run-dir", "run", "train.py"]
    assert call_farflung(*words) == 0
    files = sorted((home / "run" / "logs").rglob("std*.log"))
    assert [file.name for file in files].count("stdout.log") == 2
    for file in files:
        assert file.read_bytes() == b"".join(lines)


@pytest.mark.usefixtures("warm")
def test_replicas_of_several_ranks_are_started_from_a_file(farflung, home):
    line = "'{RANK} of {WORLD_SIZE}\\n'.format(**os.environ)"  # in one piece, as the ranks share a pipe
    (home / "train.py").write_text(f"import os\nprint({line}, end='', flush=True)")
    (home / "farflung.yaml").write_text("use_cpu: true\nelastic: 1:2\nranks_per_replica: 2\n")
    done = farflung("launch", "train.py", code=0)
    assert sorted(done.stdout.split("\n")) == ["", "0 of 2", "1 of 2"]


@pytest.mark.usefixtures("warm")
def test_one_replica_writes_the_checkpoint_from_which_another_number_of_them_goes_on(farflung, home):
    (home / "train.py").write_text(RESUMES)
    for size, begins, steps in (2, 0, 8), (3, 8, 16):
        farflung("launch", "--cpu", "--elastic", f"{size}:{size}", *DILOCO, "train.py", str(steps), code=0)
        ended = list(home.glob("ended*"))
        began, draws, weights = zip(*(json.loads(file.read_text()) for file in ended), strict=True)
        assert began == (begins,) * size
        assert len(set(draws)) == size
        assert weights == weights[:1] * size
        for file in ended:
            file.unlink()
    assert sorted(path.name for path in home.iterdir()) == ["kept", "out", "train.py"]


@pytest.mark.usefixtures("warm")
def test_what_several_replicas_fail_with_is_shown_once_in_a_box_that_names_the_newest_checkpoint(farflung, home):
    (home / "train.py").write_text(RESUMES)
    done = farflung("launch", "--cpu", "--elastic", "2:2", *DILOCO, "train.py", "4", "fails", code=FAILED)
    assert done.stderr.count("Traceback") == done.stderr.count(" failed on ") == 1
    assert "Resume from kept, the newest checkpoint of this run" in done.stderr
    for name in ("replica 0", "replica 1"):
        how = f"{name} ended with exit code 1 (ValueError: a bad value) after its training was over"
        assert f"{how}; it is not started again" in done.stderr


@pytest.mark.usefixtures("warm")
def test_a_run_that_ends_well_ends_well_for_replicas_too_that_wait_to_be_let_in(home):
    (home / "train.py").write_text(TRAINS)
    with launcher("--elastic", "1:1", "--grace_s", "2", "train.py") as first:
        where = first.wait_for(r"--join (\S+)")[1]
        first.wait_for("training begins with 1 replica")
        with launcher("--join", where, "train.py", "1.5") as second:
            first.wait_for(r"replica 0 of \S+ waits: the others admit it")
            (home / "last").write_text("1")
            assert (first.ended(), second.ended()) == (0, 0)
    assert re.search(r"replica 0 of \S+ is not let in: the others have finished the work", "".join(second.lines))
    assert len(second.lines) == 2, second.lines


def test_a_second_ctrl_c_kills_what_a_replica_that_did_not_heed_the_first_has_started(home):
    (home / "train.sh").write_text(
        "trap 'touch heard' INT\nsleep 300 & echo $! > part; mv part up; while true; do wait; done"
    )
    with launcher("--elastic", "1:2", "--no_python", "sh", "train.sh") as run:
        for before in "up", "heard":
            until((home / before).exists)
            run.process.send_signal(signal.SIGINT)
        assert run.ended() == 128 + signal.SIGINT
        until(lambda: not psutil.pid_exists(int((home / "up").read_text())))


@pytest.mark.namespace
@pytest.mark.timeout(240)
def test_a_machine_that_is_cut_off_comes_back_with_the_line_and_one_that_is_gone_is_out(far):
    machines, first, second = far

    def generations(told):
        return set(re.findall(rf"generation (\d+): .*{told}", first.text))

    machines.cut()
    first.wait_for("is out: its machine gave no sign for")
    first.wait_for("training continues with 2 replicas")
    time.sleep(10.0)
    machines.mend()
    until(lambda: len(generations("joined; 4 replicas train")) == 2, lambda: first.text + second.text)
    before = generations("training continues with 2 replicas")
    machines.kill(1)
    until(lambda: generations("training continues with 2 replicas") > before, lambda: first.text + second.text)
    assert "generation" not in second.end()


@pytest.mark.namespace
@pytest.mark.timeout(240)
def test_without_the_first_launcher_training_goes_on_until_the_next_loss_ends_it(far, home):
    machines, first, second = far
    until_further(home)  # the last one that joined needed the store
    psutil.Process(first.process.pid).kill()
    second.wait_for("is gone; replicas train on, but none is started again")
    until_further(home)
    machines.kill(0)
    said = second.end()
    assert said.count("failed on node1") == 1
    assert said.count("The replicas can't agree on how to continue") == 3  # box and lines
    assert second.process.returncode == FAILED


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_newcomer_trains_by_the_recipe_that_auto_has_chosen_for_the_others(home):
    (home / "train.py").write_text(RANKS)
    with launcher("--elastic", "2:3", "--outer", "auto", "train.py") as first:
        where = first.wait_for(r"--join (\S+)")[1]
        recipe = first.wait_for(r"auto: 2 replicas .* The same by hand: --outer (\w+)")[1]
        with launcher("--join", where, "--outer", "auto", "train.py") as second:
            second.wait_for(f"auto: continues with --outer {recipe} ")
            first.wait_for("joined; 3 replicas train")
            (home / "last").touch()
            assert (first.ended(), second.ended()) == (0, 0)
