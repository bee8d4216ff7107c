# SPDX-License-Identifier: Apache-2.0
"""Slurm, a real one of two nodes on this machine: what runs as a job, what as an array, and what is refused before."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from farflung.launch.codes import DONE, ENGINE, FAILED, USAGE, EngineFailure
from farflung.launch.engines.engine import Job
from farflung.testing.patience import patience
from tests.launch.engines.slurm_cluster import slurm_cluster, why_impossible
from tests.launch.engines.test_arguments import DUMP, HOSTILE, make_arguments, seen
from tests.launch.engines.test_engine import submitted
from tests.launch.keyed import check_sealed_and_unseen, end_soon, write_key
from tests.launch.screen import started
from tests.launch.test_run import CONNECTED, seen_by
from tests.python import call_farflung, run_farflung
from tests.waits import until

pytestmark = pytest.mark.timeout(240)
START, EVERY = 2**20, 4
# Each replica moves its weight by -1 in each step and the outer optimizer takes the mean, so that the weight is
# START - position after every step of every replica, as long as no step is lost and none counts twice. One that signs
# out has made fewer steps in its last round, so from then on all have the same rest, of less than a round's steps.
ADDS = f"""
import json, os, time
from dataclasses import replace
from pathlib import Path
import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, {START})
said = open(f"said{{os.environ['FARFLUNG_MEMBER']}}", "w", buffering=1)
recipe = replace(diloco({EVERY}, lr=1.0, momentum=0.0), same_data=True)
with OuterLoop(model, recipe, membership=launched_membership()) as outer:
    while not Path("last").exists() or outer.position < int(Path("last").read_text()):
        time.sleep(0.02)
        with torch.no_grad():
            model.weight -= 1
        outer.step()
        row = {{"pid": os.getpid(), "task": os.environ["SLURM_ARRAY_TASK_ID"], "position": outer.position}}
        print(json.dumps(row | {{"weight": model.weight.item(), "at": time.time()}}), file=said)
"""
# The demo's model on real text. It ends with the weights of each rank in a file, all of them to the last bit.
RESUMES = """
import argparse, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from farflung import Accelerator
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import SIZES
from farflung.utils import set_seed
torch.set_num_threads(1)
set_seed(3)
accelerator, model = Accelerator(), GPT(SIZES["tiny"])
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
loader = DataLoader(text[: 320 * 65].view(320, 65), 4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
print("resumed", accelerator.resume(), flush=True)
for epoch in range(loader.iteration, 3):
    for number, tokens in enumerate(loader):
        logits = torch.nn.functional.dropout(model(tokens[:, :-1]), 0.1)
        accelerator.backward(loss_per_sequence(logits, tokens[:, 1:].long()).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            Path(f"epoch{epoch}").touch()
        time.sleep(1.0 if Path("slow").exists() else 0.05)
weights = [tensor.tolist() for tensor in accelerator.unwrap_model(model).state_dict().values()]
Path(f"{sys.argv[1]}{accelerator.process_index}").write_text(repr(weights))
"""
PLACED = """
import os, torch
from farflung import Accelerator
from farflung.process.world import current_world
accelerator = Accelerator(cpu=True)
rank, total = accelerator.process_index, accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
local = f"{accelerator.local_process_index} of {current_world().local_size}"
print(f"{rank} of {accelerator.num_processes}, {local} on its machine, {int(total)} at {os.environ['MASTER_ADDR']}")
"""


@pytest.fixture(scope="session")
def cluster():
    """The slurm.conf of a cluster that serves all tests of this worker."""
    if why := why_impossible():
        pytest.skip(why)
    with slurm_cluster() as conf:
        yield conf


@pytest.fixture
def slurm(cluster, home, warm, monkeypatch):
    """An empty home from which jobs can be submitted, whose Python has torch loaded; none of them is left behind."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    yield home
    asked("scancel", "--user=root")
    until(lambda: not asked("squeue", "--noheader", "--states=RUNNING,COMPLETING"))


def asked(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=patience(60), check=True).stdout


def launched(*flags, run="run", arguments=()):
    """Submit the script, which trains on the CPU, with a folder of its own."""
    engine = ("--engine", "slurm", "--engine_options", "partition=cpu,time=1:00:00")
    return started("launch", *engine, "--run-dir", run, "--cpu", *flags, "train.py", *arguments)


def rows(home):
    """What replicas have said of their steps, by the ids of members."""
    found = {}
    for file in home.glob("said*"):
        whole = file.read_text().rpartition("\n")[0]
        found[int(file.name[4:])] = [json.loads(line) for line in whole.splitlines()]
    return {member: said for member, said in found.items() if said}


def scaled(count, answer):
    said = run_farflung("scale", "run", count).stdout
    assert re.fullmatch(f"{answer}\n", said), said


def longest_stop(said, since, until):
    """The longest time between two steps of a replica, in seconds, between two moments."""
    times = [since, *(row["at"] for row in said if row["at"] > since)]
    return max(after - before for before, after in pairwise(times) if before < until)


@pytest.mark.server
def test_a_fixed_run_is_one_job_whose_launchers_find_their_places(slurm):
    (slurm / "train.py").write_text(CONNECTED + "print('rank', os.environ['RANK'], flush=True)\n")
    with launched("--num_machines", "2", "--num_processes", "4", run="the run") as run:
        said = run.end(DONE)
    seen = [seen_by(f"rank{rank}.json") for rank in range(4)]
    assert [(one["size"], one["total"]) for one in seen] == [(4, 10)] * 4
    assert [one["environ"]["SLURMD_NODENAME"] for one in seen] == ["node0", "node0", "node1", "node1"]
    for machine in (0, 1):
        assert f"{machine}: farflung: one of 2 tasks (SLURM_STEP_NUM_TASKS): machine_rank {machine}" in said
        assert f"{machine}: rank {2 * machine}\n" in said
    assert re.search(r"farflung: job \d+ is completed, exit code 0\n", said)
    again = run_farflung("follow", "the run")
    assert "1: rank 3\n" in again.stdout


@pytest.mark.server
def test_srun_starts_launchers_or_ranks_that_find_their_places_by_themselves(slurm):
    program = [sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", "4", "train.py"]
    (slurm / "train.py").write_text(CONNECTED)
    asked("srun", "--nodes=2", "--ntasks-per-node=1", *program)
    seen = [seen_by(f"rank{rank}.json") for rank in range(4)]
    assert [(one["total"], one["environ"]["SLURMD_NODENAME"][-1]) for one in seen] == [(10, k) for k in "0011"]
    (slurm / "train.py").write_text(PLACED)
    said = asked("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "train.py")
    assert sorted(said.splitlines()) == [
        f"{rank} of 4, {rank % 2} of 2 on its machine, 10 at node0" for rank in range(4)
    ]


@pytest.mark.server
def test_every_argument_arrives_as_it_was_by_srun_and_in_a_batch_script(slurm, monkeypatch):
    folder, arguments = slurm / HOSTILE, make_arguments()
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text(DUMP)
    program = [sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", "1", "train.py"]
    asked("srun", "--nodes=1", *program, *arguments)
    assert seen(folder) == arguments
    for flags in ((), ("--elastic", "1:1")):
        Path("seen").unlink()
        with launched(*flags, run=f"{slurm}/{len(flags)}\n$(touch injected) it's !x", arguments=arguments) as run:
            run.end(DONE)
        assert seen(folder) == arguments


@pytest.mark.server
@pytest.mark.parametrize("lines", ["import sys\nsys.exit(7)", "import time\ntime.sleep(60)"])
def test_a_job_that_fails_or_is_cancelled_ends_with_its_code(slurm, lines):
    (slurm / "train.py").write_text(f"open('up', 'w').close()\n{lines}")
    with launched("--max_restarts", "0", "--num_processes", "2") as run:
        until((slurm / "up").exists)
        if "sleep" in lines:
            assert re.fullmatch(r"cancelled \d+\n", run_farflung("cancel", "run").stdout)
        said = run.end(FAILED if "exit" in lines else 128 + signal.SIGTERM)
    assert f"is {'failed' if 'exit' in lines else 'cancelled'}" in said


@pytest.mark.server
@pytest.mark.law("standstill")
def test_replicas_of_an_array_are_killed_preempted_cancelled_added_and_ended_and_the_others_lose_no_step(slurm):
    (slurm / "train.py").write_text(ADDS)
    moments = []

    def after(event, words, count=1):
        moments.append(time.time())
        event()
        until(lambda: run.text.count(words) >= count, lambda: run.text)

    with launched("--elastic", "3:4", "--replicas", "3") as run:
        run.wait_for("training begins with 3 replicas")
        until(lambda: len(rows(slurm)) == 3 and all(said[-1]["position"] > 20 for said in rows(slurm).values()))
        members = {said[0]["task"]: member for member, said in rows(slurm).items()}
        job = until(lambda: re.search(r"job (\d+)_0 is running", run.text), lambda: run.text)[1]
        killed = rows(slurm)[members["1"]][0]["pid"]
        after(lambda: os.kill(killed, signal.SIGKILL), "was killed by SIGKILL; training continues with 2 replicas")
        run.wait_for("joined; 3 replicas train")
        after(lambda: asked("scancel", "--signal=USR1", f"{job}_2"), "joined; 3 replicas train", 2)  # it is requeued
        assert f"job {job}_2 is pending (BeginTime)" in run.text
        after(lambda: asked("scancel", f"{job}_1"), "training continues with 2 replicas", 3)
        after(lambda: scaled(4, "4 replicas: 2 submitted"), "4 replicas train")
        after(lambda: scaled(3, r"3 replicas: \d+_4 ended"), "training continues with 3 replicas")
        last = max(said[-1]["position"] for said in rows(slurm).values()) + 40
        (slurm / "last.part").write_text(str(last))
        (slurm / "last.part").rename(slurm / "last")
        text = run.end(DONE)
    assert f"job {job}_0 is pending (BeginTime)" not in text
    said = rows(slurm)
    stays = said[members["0"]]
    assert [row["position"] for row in stays] == [*range(1, stays[-1]["position"] + 1)]
    assert stays[-1]["position"] >= last
    rests = [(row["at"], row["weight"] - START + row["position"]) for each in said.values() for row in each]
    assert {rest for at, rest in rests if at < moments[1]} == {0}
    assert len({rest for _, rest in rests}) <= 4  # three have signed out
    assert all(0 <= rest < 3 * EVERY for _, rest in rests)
    stops = [longest_stop(stays, moment, moment + 5) for moment in moments]
    assert max(stops) < patience(2.0), (stops, text)


@pytest.mark.server
def test_a_key_is_read_on_the_nodes_unseen_and_seals_the_run(slurm):
    key, meet = write_key(slurm), slurm / "meet"
    meet.mkdir()
    with launched("--elastic", "2:2", "--meet", meet.as_uri(), "--key_file", str(key)) as run:
        run.wait_for("training begins with 2 replicas")
        end_soon(slurm)
        text = run.end(DONE)
    check_sealed_and_unseen(slurm, meet, text, asked("scontrol", "show", "jobs"))


@pytest.mark.server
def test_a_fixed_run_that_is_preempted_goes_back_into_the_queue_and_ends_as_one_that_is_not(slurm):
    (slurm / "train.py").write_text(RESUMES)
    flags = ["--num_machines", "2", "--num_processes", "4", "--outer", "diloco", "--outer-every", "5"]
    for name in ("whole", "preempted"):
        with launched(*flags, "--save_on_signal", f"kept/{name}", run=name, arguments=[name]) as run:
            if name == "preempted":
                until((slurm / "epoch1").exists)
                job = until(lambda: re.search(r"job (\d+) is running", run.text), lambda: run.text)[1]
                asked("scancel", "--signal=USR1", job)
                until((slurm / "epoch2").exists)
                (slurm / "slow").touch()  # so that it trains when Slurm gets to it
                asked("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
                until(lambda: "SIGTERM at rank" in run.text, lambda: run.text)
                (slurm / "slow").unlink()
            said = run.end(DONE)
        assert said.count("resumed False\n") == 4
        assert said.count("resumed True\n") == (8 if name == "preempted" else 0)
        for file in slurm.glob("epoch*"):
            file.unlink()
    assert "SIGUSR1 at rank" in said
    assert "SIGTERM at rank" in said
    for rank in range(4):
        assert (slurm / f"preempted{rank}").read_text() == (slurm / f"whole{rank}").read_text()


OPTIONS = (
    "partition=cpu,account=mine,time=4:00:00,gres=gpu:8,cpus_per_task=16,nodelist=node[0-1],setup=module load cuda"
)


@pytest.mark.parametrize("name", ["fixed", "elastic"])
def test_what_would_be_submitted_is_shown(home, name, capsys):
    (home / "train.py").touch()
    flags = ["--num_machines", "2"] if name == "fixed" else ["--elastic", "2:8", "--replicas", "4", "--outer", "diloco"]
    command = ["--engine", "slurm", "--engine_options", f"{OPTIONS},python=python3", "--dry-run", "--run-dir", "run"]
    assert call_farflung("launch", *command, *flags, "train.py", "--lr", "0.1 ") == DONE
    shown = capsys.readouterr().out.replace(str(home), "/shared/home")
    golden = Path(__file__).with_name(f"slurm_{name}.sh")
    if "UPDATE" in os.environ:
        golden.write_text(shown)
    assert shown == golden.read_text()


# Flags, and words of the answer: the value that is wrong, and what to do.
WRONG = [
    ("--engine_options partition=gpu", "partition is 'gpu', but this cluster has cpu, high, small"),
    ("--engine_options partition=smal", "Did you mean `small`"),
    ("--num_machines 3", "num_machines is 3, but partition cpu has 2 nodes"),
    ("--num_machines 2 --engine_options partition=small", "num_machines is 2, but partition small has 1 node."),
    ("--engine_options time=long", "sbatch refused: Invalid --time specification"),
    ("--engine_options mem=100T", "sbatch refused: .*Memory specification can not be satisfied"),
    ("--engine_options gres=gpu:8", "sbatch refused: .*Invalid generic resource"),
    ("--engine_options reservation=mine", "sbatch refused: .*reservation"),
    ("--engine_options nodelist=node7", "sbatch refused: .*Invalid node name"),
]


@pytest.mark.server
@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_what_cannot_work_is_refused_in_few_lines_and_nothing_is_submitted(slurm, flags, words, capsys):
    (slurm / "train.py").touch()
    ended = call_farflung("launch", "--engine", "slurm", "--cpu", *flags.split(), "train.py")
    said = capsys.readouterr().err
    assert ended == ENGINE, said
    assert re.search(words, said), said
    assert len(said.splitlines()) <= 15
    assert not asked("squeue", "--noheader")


@pytest.fixture
def commands(home, monkeypatch):
    """Commands that stand in for Slurm's and answer as a test says; others are not found."""
    (home / "bin").mkdir()
    monkeypatch.setenv("PATH", str(home / "bin"))
    (home / "train.py").touch()

    def make(name, answer, code=0, stream=1):
        notes = f"echo ${{0##*/}} $* >> {home}/asked"
        (home / "bin" / name).write_text(f"#!/bin/sh\n{notes}\necho '{answer}' >&{stream}\nexit {code}\n")
        (home / "bin" / name).chmod(0o755)

    return make


def test_what_is_missing_here_or_not_shared_with_the_nodes_is_refused(commands, capsys):
    def refused(folder="run", script="train.py", code=ENGINE):
        assert call_farflung("launch", "--engine", "slurm", "--cpu", "--run-dir", folder, script) == code
        return capsys.readouterr().err

    assert f"There is no sbatch on {socket.gethostname()}. Submit from a login node of the cluster." in refused()
    commands("sbatch", "12")
    assert "sinfo, a command of Slurm's, gave no answer" in refused()
    commands("sinfo", "Unable to contact slurm controller", 1, 2)
    assert "sinfo refused: Unable to contact slurm controller" in refused()
    commands("sinfo", "", 4)
    assert "sinfo refused: exit code 4\n" in refused()
    commands("sinfo", "cpu*|node7")
    why = (
        r"folder is /tmp/run, which \S+ does not share with node7. Name one with --run_dir that all nodes can write to"
    )
    assert re.search(why, refused("/tmp/run"))
    assert "Did you mean `train.py`" in refused(script="tran.py", code=USAGE)


@pytest.mark.parametrize(("flags", "words"), WRONG[:4])
def test_what_the_partitions_do_not_have_is_refused(flags, words, commands, capsys):
    commands("sbatch", "12")
    commands("sinfo", "cpu*|node0\ncpu*|node1\nsmall|node0\nhigh|node0")
    assert call_farflung("launch", "--engine", "slurm", "--run-dir", "run", *flags.split(), "train.py") == ENGINE
    assert words in capsys.readouterr().err


def test_replicas_are_added_ended_by_their_numbers_and_cancelled(commands, home, capsys):
    submitted(home, {"jobs": ["12"], "next": 11}, engine="slurm", elastic="1:6", replicas=4)
    rows = ["12_0|RUNNING|0|None|", "12_10|RUNNING|0|None|", "12_9|PENDING|0|None|", "12_1|COMPLETING|0|None|"]
    commands("squeue", "\n".join([*rows, "12_2|FAILED|256|None|"]))
    commands("sbatch", "13;cluster")
    commands("scancel", "")
    answers = {1: "1 replica: 12_9, 12_10 ended\n", 3: "3 replicas: none ended\n", 5: "5 replicas: 2 submitted\n"}
    for count, answer in answers.items():
        assert call_farflung("scale", "run", count) == 0
        assert answer in capsys.readouterr().out
    assert Job.read(home / "run").handle == {"jobs": ["12", "13"], "next": 13}
    assert (call_farflung("cancel", "run"), capsys.readouterr().out) == (0, "cancelled 12, 13\n")
    lines = (home / "asked").read_text().splitlines()
    jobs = "squeue --noheader --array --states=all --jobs={} --Format=JobArrayID:|,State:|,exit_code:|,Reason:|"
    assert {line for line in lines if line.startswith("squeue")} == {jobs.format("12")}
    assert [line for line in lines if not line.startswith("squeue")] == [
        *("scancel 12_9", "scancel --signal=TERM 12_10"),
        *(f"sbatch --parsable --chdir={home}/run --array=11-12 {home}/run/slurm.sh", "scancel 12 13"),
    ]
    commands("squeue", "12_0|COMPLETED|0|None|")
    assert call_farflung("scale", "run", 2) == ENGINE
    assert "The work of run is done: a replica of it has finished." in capsys.readouterr().err


ENDS = [
    ("12|FAILED|4021|JobLaunchFailure|", None, ENGINE, "its node can't write into {}, which all nodes must share"),
    ("12|CANCELLED|15|None|", None, 143, "job 12 is cancelled, exit code 143\n"),
    ("12|NODE_FAIL|0|NodeDown|", None, FAILED, "job 12 is node fail, exit code 3 (NodeDown)"),
    ("12_0|FAILED|512|None|\n12_1|COMPLETED|0|None|", "1:4", DONE, "job 12_0 is failed, exit code 2\n"),
    ("12_0|FAILED|512|None|\n12_1|FAILED|1024|None|", "1:4", 4, "job 12_1 is failed, exit code 4\n"),
]


@pytest.mark.parametrize(("rows", "elastic", "code", "words"), ENDS)
def test_a_job_ends_with_the_code_that_slurm_knows(rows, elastic, code, words, commands, home, clock, capsys):
    submitted(home, {"jobs": ["12"], "next": 1}, engine="slurm", elastic=elastic)
    commands("squeue", rows)
    assert call_farflung("follow", "run") == code
    assert words.format(home / "run") in capsys.readouterr().err


def test_a_controller_may_be_away_for_ten_minutes(commands, home, clock, monkeypatch, capsys):
    submitted(home, {"jobs": ["12"], "next": 1}, engine="slurm")
    monkeypatch.setattr("farflung.launch.engines.slurm._run", Mock(side_effect=EngineFailure("squeue refused: away")))
    clock.pause_s = 0
    assert call_farflung("follow", "run") == ENGINE
    assert "squeue refused: away" in capsys.readouterr().err
    assert 600 < clock.now < 605


@pytest.mark.parametrize(("elastic", "codes", "code"), [(None, [3], 3), ("1:4", [0, 143], 0), (None, [], FAILED)])
def test_of_a_job_that_slurm_has_forgotten_the_folder_tells_how_it_ended(
    commands, home, clock, elastic, codes, code, capsys
):
    commands("squeue", "slurm_load_jobs error: Invalid job id specified", 1, 2)
    submitted(home, {"jobs": ["12"], "next": 1}, engine="slurm", elastic=elastic)
    (home / "run" / "slurm-12.out").write_text("the last line")
    rows = "".join(json.dumps({"event": "ended", "time": 0.0, "code": one}) + "\n" for one in codes)
    (home / "run" / "events.jsonl").write_text(rows)
    assert call_farflung("follow", "run") == code
    said = capsys.readouterr()
    assert said.out == "the last line\n"
    assert f"job 12 is {'failed' if code else 'completed'}, exit code {code} (forgotten)" in said.err


LINES = b"".join(b"%d\rof a \xff bar\xe2\x80\xa8\x1b[1m\n" % k for k in range(20))


@pytest.mark.parametrize("trouble", ["none", "pipe", "disk", "file"])
def test_a_job_that_ends_well_is_followed_to_its_end_whatever_happens_here(trouble, home, monkeypatch):
    draw, answers, limit = random.Random(trouble), iter(range(20)), resource.getrlimit(resource.RLIMIT_FSIZE)
    output = home / "run" / "slurm-12.out"

    def run(name, *words):
        if name == "sbatch":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if trouble == "disk" else limit[0], limit[1]))
            return "12"
        if name == "sinfo":
            return f"cpu*|{socket.gethostname()}"
        if draw.random() < 0.5:
            raise EngineFailure("squeue refused: Unable to contact slurm controller")
        number = next(answers)
        if trouble == "file" and number == 9:
            output.unlink()
            output.mkdir()
        elif trouble != "disk":
            if output.is_dir():
                output.rmdir()
            output.write_bytes(LINES[: len(LINES) * (number + 1) // 20])
        return f"12|{'COMPLETED' if number == 19 else 'RUNNING'}|0|None|"

    for name, value in {"_run": run, "_ASK_S": 0.02, "_LOOK_S": 0.01}.items():
        monkeypatch.setattr(f"farflung.launch.engines.slurm.{name}", value)
    monkeypatch.setattr("shutil.which", lambda name: name)
    (home / "train.py").touch()
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}  # no files, which have a limit
    if trouble == "pipe":
        read, write = os.pipe()
        os.close(read)
        streams["stdout"] = os.fdopen(write, "w")
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    try:
        code = call_farflung("launch", "--engine", "slurm", "--cpu", "--run-dir", "run", "train.py")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = streams["stderr"].buffer.getvalue()
    assert code == DONE, said
    if trouble in ("none", "file"):
        assert streams["stdout"].buffer.getvalue() == LINES
    assert trouble == "disk" or "--job-name=run\n" in (home / "run" / "slurm.sh").read_text()
    assert (b"Later commands won't find the run: jobs ['12']" in said) == (trouble == "disk")
    streams["stdout"].close()
