# SPDX-License-Identifier: Apache-2.0
"""Two ranks in different calls: whatever the two are, both get the same `CollectiveMismatch` within seconds."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, LocalSGD
from farflung.base.errors import CollectiveMismatch
from farflung.data_loader import prepare_data_loader
from farflung.outer import OuterLoop, diloco, eager_diloco, hierarchical, local_sgd, streaming_diloco
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import broadcast_object_list, synchronize_rng_states

WITHIN_S = 12  # and most of it is the start of two processes on a busy machine


ROUNDS = {
    "round": ((3, 2), local_sgd(1)),
    "round of two": ((5, 4), local_sgd(1)),
    "anchored round": ((3, 2), diloco(1)),
    "hierarchical round": ((3, 2), hierarchical({1: None})),
    "round in the background": ((3, 2), streaming_diloco(1, 1, delay=1)),
    "eager round": ((3, 2), eager_diloco(1)),
}


class Script:
    """What both ranks have made before they part: models, loops, loaders."""

    def __init__(self):
        self.accelerator = accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        data = torch.arange(24.0).reshape(8, 3)
        self.shuffled = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
        self.dispatched = prepare_data_loader(DataLoader(data, batch_size=2), dispatch_batches=True)
        self.loops = {name: OuterLoop(nn.Linear(*size), recipe) for name, (size, recipe) in ROUNDS.items()}

    def trains(self):
        """LocalSGD's own round."""
        with LocalSGD(accelerator=self.accelerator, model=self.model, local_sgd_steps=1) as local_sgd:
            for _ in range(2):
                self.accelerator.backward(self.model(torch.ones(1, 3)).sum())
                self.optimizer.step()
                local_sgd.step()

    def lends(self):
        """What a loop without an anchor averages for an evaluation."""
        with self.loops["round"].synced():
            pass

    def steps(self, name):
        for _ in range(2):
            self.loops[name].step()


CALLS = {
    "gather": lambda script: script.accelerator.gather(torch.ones(3)),
    "large gather": lambda script: script.accelerator.gather(torch.ones(200_000)),
    "reduce": lambda script: script.accelerator.reduce(torch.ones(3)),
    "broadcast": lambda script: broadcast_object_list([1, 2]),
    "barrier": lambda script: script.accelerator.wait_for_everyone(),
    "start of a shuffled pass": lambda script: next(iter(script.shuffled)),
    "dispatched batch": lambda script: next(iter(script.dispatched)),
    "random states": lambda script: synchronize_rng_states(["torch"]),
    "opening a loop": lambda script: OuterLoop(nn.Linear(3, 2), local_sgd(1)),
    "LocalSGD": Script.trains,
    "lending": Script.lends,
    "flush": lambda script: script.loops["anchored round"].flush(),
    **{name: lambda script, name=name: script.steps(name) for name in ROUNDS},
}
# Each call against one that exchanges headers, and those that do and those that don't against each other.
PAIRS = [
    *(("gather", other) for other in CALLS if other != "gather"),
    ("broadcast", "LocalSGD"),
    ("barrier", "start of a shuffled pass"),
    ("barrier", "round in the background"),
    ("start of a shuffled pass", "LocalSGD"),
    ("LocalSGD", "round in the background"),
    ("round", "round of two"),
    ("anchored round", "eager round"),
    ("lending", "hierarchical round"),
    ("opening a loop", "dispatched batch"),
]


def parts_ways(first, second):
    script = Script()
    rank = script.accelerator.process_index
    began = time.monotonic()
    try:
        CALLS[(first, second)[rank]](script)
        script.accelerator.wait_for_everyone()  # the one that sends batches does not wait for those who read them
        said = "nothing"
    except CollectiveMismatch as error:
        said = str(error)
    return said, time.monotonic() - began


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_both_ranks_get_the_same_error(first, second):
    (one, one_s), (two, two_s) = run_ranks(parts_ways, 2, first, second)
    assert one == two
    assert "rank 0" in one or "ranks 0" in one
    assert one != "nothing"
    assert second != "start of a shuffled pass" or "iter(loader)" in one
    assert max(one_s, two_s) < patience(WITHIN_S)
