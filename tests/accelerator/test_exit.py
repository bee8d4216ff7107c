# SPDX-License-Identifier: Apache-2.0
"""Processes end: no hang in destructors, and no child left behind."""

import atexit
import contextlib
import os
import re
import sys
import time
import weakref

import psutil
import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import RankFailure
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.outer import OuterLoop, local_sgd
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.faults import lives_until
from tests.python import run_farflung

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from farflung import Accelerator, LocalSGD

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for steps in (1, 2):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=steps == 2) as local_sgd:
        for (x,) in loader:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
accelerator.print("loss", accelerator.gather(model(x).mean()).tolist())
"""


@on_ranks(2, each=(True, True), connect=False)
def test_no_thread_of_the_process_group_outlives_it():
    """One that does may need the interpreter while that ends: `terminate called without an active exception`.

    The group is gone after what Python calls at its end, though all that used it is still held.
    """
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with OuterLoop(accelerator.unwrap_model(model), local_sgd(1)) as outer:
        outer.step()
    group = weakref.ref(torch.distributed.group.WORLD)
    atexit._run_exitfuncs()
    return group() is None, accelerator is not None and model is not None and outer is not None


def children_running(marker):
    """The processes whose command line has `marker` in it."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if marker in " ".join(one.info["cmdline"] or [])]


@pytest.mark.long
def test_a_script_of_two_processes_ends_each_time(tmp_path):
    script = tmp_path / "trains_and_ends.py"
    script.write_text(SCRIPT)
    # benchmarks/soak_exit.py repeats it
    ended = run_farflung("launch", "--cpu", "--num_processes", "2", script)
    assert ended.stdout.count("loss") == 1
    time.sleep(0.2)
    assert children_running(script.name) == []


def lose_a_rank(sharded, printed):
    """Rank 2 dies, rank 1 is busy meanwhile, and rank 0 waits for both in a collective of torch's own."""
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Linear(4, 4))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.process_index == 2:
        os._exit(7)
    if accelerator.process_index == 1:
        lives_until((printed.parent / "told").exists)
        return
    with printed.open("w") as file, contextlib.redirect_stderr(file):
        try:
            for _ in range(3):  # what a dead rank has sent before may still arrive
                accelerator.backward(model(torch.ones(2, 4)).sum())
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    (printed.parent / "told").touch()


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
def test_the_rank_that_is_lost_in_a_pass_is_named_and_a_busy_one_is_not(sharded, tmp_path):
    with pytest.raises(RankFailure, match="exit code 7"):
        run_ranks(lose_a_rank, 3, sharded, tmp_path / "printed", grace_s=8)
    last = (tmp_path / "printed").read_text().splitlines()[-1]
    assert re.search("Failure: A collective of rank 0 failed: rank 2 sent no heartbeat .* The transport said: .", last)
    assert "rank 1" not in last
