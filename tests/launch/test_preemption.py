# SPDX-License-Identifier: Apache-2.0
"""A scheduler's signal to a launcher, or to all processes of a run: it is saved, and asks to be started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from farflung.checkpoint.checkpoint import Checkpoint
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import FAILED, REQUEUE
from farflung.launch.plan import make_plan
from farflung.testing.patience import patience
from tests.launch.test_replicas import TRAINS, until_further
from tests.launch.test_run import LEAVES_LOGS, SAVES, signals, wait_for
from tests.launch.test_tether import NOTEBOOK
from tests.python import call_farflung, run_python
from tests.waits import until

TRAIN = """
import os, sys, time
import torch
from farflung import Accelerator
from farflung.utils import set_seed
epochs, pause = int(sys.argv[1]), float(sys.argv[2])
accelerator = Accelerator(cpu=True, save_on_signal=sys.argv[4] if len(sys.argv) > 4 else None)
set_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=2, shuffle=True, num_workers=int(sys.argv[3]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
step = 0
for epoch in range(loader.iteration, epochs):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 4:
            open(f"up{accelerator.process_index}", "w").close()
        time.sleep(pause)
with open(f"end{accelerator.process_index}", "w") as file:
    file.write(repr([value.tolist() for value in model.parameters()]))
"""


@pytest.fixture
def train(home, warm):
    (home / "train.py").write_text(TRAIN)
    return home


def start(*words):
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def launch(*words, processes=2, saves="saved"):
    flags = ["--cpu", "--num_processes", processes, *(["--save_on_signal", saves] if saves else [])]
    return start("-m", "farflung", "launch", *flags, *words)


def end(launcher, seconds=60):
    """Return the exit code and what was printed."""
    said = launcher.communicate(timeout=patience(seconds))[1]
    return launcher.returncode, said


def everyone(home):
    """The launcher and all that it has started, workers too: what runs in the home, but for the clients of `warm`."""
    there = []
    for process in psutil.process_iter():  # the server of `warm` may be no child of this process
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # a worker, at the end of its epoch; another user's
            there += [process] if process.cwd() == str(home) and "-IS" not in process.cmdline() else []
    return [process for process in there if process.pid != os.getpid()]


def send(number, processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.fixture(autouse=True)
def nobody_stays(home):
    """Let no run go on after a test that fell."""
    yield
    send(signal.SIGKILL, everyone(home))


@pytest.mark.parametrize(
    ("number", "to_all", "more"),
    [
        (signal.SIGUSR1, False, ["--max_restarts", 2, "--rdzv_backend", "c10d"]),
        (signal.SIGTERM, True, ["--outer", "diloco", "--outer-every", 5]),
        pytest.param(signal.SIGTERM, False, ["--max_restarts", 2], marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, True, ["--rdzv_backend", "c10d"], marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_signalled_is_saved_and_continues_bit_by_bit_when_it_is_started_again(
    number, to_all, more, train
):
    workers = 1 if to_all else 0
    assert end(launch(*(more if "--outer" in more else []), "train.py", 3, 0, workers, saves=None))[0] == 0
    whole = [(train / f"end{rank}").read_text() for rank in range(2)]
    for old in train.glob("[ue][pn]*"):
        old.unlink()
    launcher = launch(*more, "train.py", 1000, patience(0.1), workers)
    wait_for(train / "up0", train / "up1")
    send(number, everyone(train) if to_all else [launcher])
    code, said = end(launcher)
    assert code == REQUEUE, said
    assert "from which accelerator.resume() continues" in said
    assert "Traceback" not in said
    assert "restart" not in said
    ((stopped,),) = [Checkpoint.open(folder).manifest.optimizer_steps for folder in (train / "saved").iterdir()]
    assert stopped >= 4
    assert end(launch(*more, "train.py", 3, 0, workers))[0] == 0
    if stopped < 36:  # on a slow machine the vote may have come later
        assert [(train / f"end{rank}").read_text() for rank in range(2)] == whole


@pytest.mark.parametrize(
    ("flags", "saves", "words"), [([], "saved", []), (["--json"], "saved", []), (["--json"], None, ["saved"])]
)
def test_one_process_has_the_same_code_with_and_without_a_launcher_above_it(flags, saves, words, train):
    """Also if the script alone says where to save."""
    launcher = launch(*flags, "train.py", 1000, 0.05, 0, *words, processes=1, saves=saves)
    wait_for(train / "up0")
    launcher.send_signal(signal.SIGTERM)
    code, said = end(launcher)
    assert code == REQUEUE, said
    assert Checkpoint.open(train / "saved" / "checkpoint_0").verify()


# Saves for a second when it is warned, and ends well; without torch.
OWN = """
import os, signal, sys, time
name = os.environ.get("FARFLUNG_MEMBER") or os.environ["RANK"]
def warned(number, frame):
    with open(f"heard{name}", "a") as file:
        print(number, file=file, flush=True)
    time.sleep(1.0)
    open(f"saved{name}", "w").close()
    sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGRTMIN + 3):
    signal.signal(number, warned)
open(f"up{name}", "w").close()
while True:
    time.sleep(0.1)
"""
FIXED = ["-m", "farflung", "launch", "--cpu", "--num_processes", "2", "train.py"]
REPLICAS = ["-m", "farflung", "launch", "--cpu", "--elastic", "1:2", "--replicas", "2", "train.py"]


@pytest.mark.parametrize(
    ("words", "number", "to_all", "code"),
    [
        (FIXED, signal.SIGXCPU, True, 0),
        (FIXED, signal.SIGRTMIN + 3, False, 0),
        pytest.param(REPLICAS, signal.SIGUSR2, True, 0, marks=pytest.mark.long),
        (REPLICAS, signal.SIGUSR1, False, REQUEUE),
        (["notebook.py"], signal.SIGUSR2, False, 0),
    ],
)
def test_a_handler_of_the_script_hears_a_warning_once_and_the_launcher_waits_for_it(
    words, number, to_all, code, home, request
):
    if not to_all:  # or else each rank must be the process that the launcher takes it for
        request.getfixturevalue("warm")
    (home / "train.py").write_text(OWN)
    (home / "notebook.py").write_text(NOTEBOOK)
    launcher = start(*words)
    until(lambda: len(list(home.glob("up*"))) == 2)
    send(number, everyone(home) if to_all else [launcher])
    ended, printed = end(launcher)
    assert ended == code, printed
    assert len(list(home.glob("saved*"))) == 2
    assert [file.read_text() for file in home.glob("heard*")] == [f"{int(number)}\n"] * 2


@pytest.mark.parametrize(
    ("number", "flags", "deed", "code"),
    [
        *((number, SAVES, "", REQUEUE) for number in (signal.SIGUSR1, signal.SIGTERM)),
        (signal.SIGUSR1, [], "", FAILED),
        (signal.SIGTERM, SAVES, "kill -TERM $$;", FAILED),  # which nobody has sent to the launcher
    ],
)
@LEAVES_LOGS
def test_a_signal_before_there_is_anything_to_save_asks_for_a_restart_too(number, flags, deed, code, home, capfd):
    words = ("launch", "--cpu", "--log_dir", "logs", *flags, "--no_python", "sh", "-c", f"touch up; {deed} sleep 60")
    with subprocess.Popen(["sleep", "60"]) as other:  # a child that is no rank, as a notebook may have
        with signals(*[] if deed else [(number, (home / "up").exists)]):
            ended = call_farflung(*words)
        is_there = other.poll() is None
        other.kill()
    assert (ended, is_there) == (code, True)
    assert (f"signal {int(number)} ({number.name})" in capfd.readouterr().err) == (code == FAILED)


def test_the_folder_is_made_where_there_is_none(home):
    settings = LaunchSettings(use_cpu=True, save_on_signal="new/saved")
    assert make_plan(settings, __file__, []).variables["FARFLUNG_SAVE_ON_SIGNAL"] == "new/saved"
    assert os.listdir("new/saved") == []


@pytest.mark.usefixtures("warm")
def test_a_launcher_of_replicas_passes_a_warning_on_and_asks_to_be_started_again(home):
    (home / "train.py").write_text(TRAINS)
    launcher = start(*REPLICAS)
    until(lambda: len(list(home.glob("in*"))) == 2 and (home / "at").exists())
    until_further(home)
    launcher.send_signal(signal.SIGUSR1)
    code, said = end(launcher)
    assert code == REQUEUE, said
    assert "starts again" not in said


WORKER = """
import multiprocessing, os, signal, sys
from functools import partial
import torch
from farflung import Accelerator

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, k):
        return torch.full((2,), float(os.getpid()))

if __name__ == "__main__":
    options = {"multiprocessing_context": sys.argv[1], "worker_init_fn": partial(print, "worker", flush=True)}
    accelerator = Accelerator(cpu=True, save_on_signal="saved")
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1, persistent_workers=True, **options)
    loader = accelerator.prepare(loader)
    for number, batch in enumerate(loader):
        for one in (signal.SIGTERM, signal.SIGUSR1) if number in (3, 6) else ():
            os.system(f"kill -{one} {int(batch[0, 0])}")  # not from this process, as a scheduler does
    worker = int(batch[0, 0])
    os.kill(worker, 0)
    (child,) = multiprocessing.active_children()
    child.terminate()
    child.join(20)
    print(number, worker, child.exitcode, flush=True)
"""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("spawn", "forkserver"))]
)
def test_workers_of_a_loader_ignore_the_signals_and_end_with_their_rank(method, home, request):
    if method == "fork":
        request.getfixturevalue("warm")
    (home / "train.py").write_text(WORKER)
    done = run_python("train.py", method)
    *started, number, worker, code = done.stdout.split()
    assert (started, number, code) == (["worker", "0"], "31", "0")
    assert not Path(f"/proc/{worker}").exists()
