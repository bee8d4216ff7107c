# SPDX-License-Identifier: Apache-2.0
"""The law of a good end: a run that trains well ends with 0, whatever disks, pipes, links and clocks do meanwhile."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.python import call_farflung

# torch's agent, which is in this process here, leaves its log files open.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
# What happens to a rank, at a step: its disk takes no more than `size` bytes a file, and so on.
TRAINS = """
import json, os, random, resource, shutil, sys, time
from contextlib import suppress
from pathlib import Path
import torch
from farflung import Accelerator

def disk(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def folder(size):
    shutil.rmtree("run", ignore_errors=True)

def links(size):
    for folder, _, names in os.walk("run"):  # which another rank may be removing
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                path.unlink()
                path.symlink_to("/dev/full" if size % 2 else "no/where")

def clock(size):
    real, draw = time.time, random.Random(size)
    time.time = lambda: real() + draw.choice((-1, 1)) * size * 1000

Path("began").touch()
torch.set_num_threads(1)
accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(12):
    for at, trouble, size in json.loads(os.environ["TROUBLES"]):
        if at == step and trouble in globals():
            globals()[trouble](size)
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": step}, step=step)
    print("step", step, "x" * 100)
    print("step", step, file=sys.stderr)
    time.sleep(0.02)
accelerator.end_training()
Path(f"trained{os.environ.get('FARFLUNG_MEMBER', os.environ['RANK'])}").touch()
"""
WAYS = {
    "one": (1, []),
    "two": (2, ["--num_processes", "2"]),
    "tee": (2, ["--num_processes", "2", "--tee", "3"]),
    "elastic": (2, ["--elastic", "2:2"]),
    "elastic tee": (1, ["--elastic", "1:1", "--tee", "3"]),
    # A warm Python has no pipe for what the launcher there reports.
    "ssh": (1, ["--hosts", "a", "--engine-options", f"python={sys.executable}"]),
}
TROUBLES = ("disk", "folder", "links", "clock", "pipe")


@contextmanager
def launcher_in(troubles: list[tuple[int, str, int]]) -> Iterator[None]:
    """Have the same happen to the launcher, which is this process, once the script has begun; until the block ends.

    What the launcher prints goes to pipes, and what ranks print nowhere: the files that pytest keeps have limits too.
    """
    limit, real, streams = resource.getrlimit(resource.RLIMIT_FSIZE), time.time, (sys.stdout, sys.stderr)
    pipes, kept, nowhere = [os.pipe() for _ in streams], [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    open_ends, is_over = [read for read, _ in pipes], threading.Event()

    def disk(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))

    def clock(size):
        draw = random.Random(size)
        time.time = lambda: real() + draw.choice((-1, 1)) * size * 1000

    def pipe(size):
        while open_ends:
            os.close(open_ends.pop())

    def act():
        while not Path("began").exists() and not is_over.wait(0.01):
            pass
        for step, (at, name, size) in enumerate(sorted(troubles)):
            if name in acts and not is_over.wait(0.05 * (at - step)):
                acts[name](size)

    acts, thread = {"disk": disk, "clock": clock, "pipe": pipe}, threading.Thread(target=act)
    sys.stdout, sys.stderr = (os.fdopen(write, "w", buffering=1) for _, write in pipes)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        time.time = real
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.close()
        sys.stdout, sys.stderr = streams
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)
        pipe(0)


def drawn(seed: str) -> list[tuple[int, str, int]]:
    """Return some troubles, each with its step and a size."""
    draw = random.Random(seed)
    names = draw.sample(TROUBLES, draw.randrange(1, 4))
    return [(draw.randrange(1, 11), name, draw.choice([0, 1, 100, 999, 5000])) for name in names]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("way", "seed"),
    [pytest.param(way, k, marks=[pytest.mark.long] if k or way == "ssh" else []) for way in WAYS for k in range(4)],
)
def test_a_run_that_trains_well_ends_well(way, seed, home, monkeypatch):
    count, flags = WAYS[way]
    troubles = drawn(f"{way} {seed}")
    monkeypatch.setenv("TROUBLES", json.dumps(troubles))
    (home / "train.py").write_text(TRAINS)
    (home / "ssh").write_text('#!/bin/bash\nexec sh -c "${!#}"\n')  # to this machine
    (home / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    words = ["--outer", "diloco", "--outer-every", "4", "--run-dir", "run", *flags]
    with launcher_in(troubles):
        code = call_farflung("launch", "--cpu", *words, "train.py")
    assert (code, len(list(home.glob("trained*")))) == (0, count), troubles
