# SPDX-License-Identifier: Apache-2.0
"""Small runs of each kind, stopped in the middle of something: their checkpoints are kept in `frozen/`, for good.

Data and weights are whole numbers and rates powers of two, so that what is trained on is the same on every machine.
`python -m tests.checkpoint.frozen_runs` adds what is missing in `frozen/`. Remove nothing there: what users have on
their disks was written by the code of then.
"""

import hashlib
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from farflung import Accelerator
from farflung.base.tree import leaves_of
from farflung.comm.shards import local
from farflung.methods.arguments import OuterConfig
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.outer.traces import HALVES, RATE, Sums, loss_of, whole

FROZEN = Path(__file__).parent / "frozen"
EXPECTED = FROZEN / "expected.json"
SAMPLES, BATCH = 48, 2


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    ranks: int  # that wrote the checkpoint
    loads: tuple[int, ...]  # on how many ranks it is loaded
    saved_after: int  # micro-batches
    data: str = "shuffled"
    columns: int = 1  # ranks over which the model is sharded
    state_dict_type: str = "SHARDED_STATE_DICT"
    outer: tuple[str, dict] | None = None  # a recipe and its settings
    accumulation: int = 1
    precision: str = "no"


KINDS = {
    "epoch": Kind(1, (1, 2), saved_after=17),
    "window": Kind(2, (2, 1), saved_after=5, accumulation=3),
    "stream": Kind(2, (2, 1), saved_after=4, data="stream"),
    "torchdata": Kind(1, (1,), saved_after=4, data="torchdata"),
    "scaler": Kind(1, (1,), saved_after=9, precision="fp16"),
    "four": Kind(4, (4, 2), saved_after=4),
    "diloco": Kind(2, (2, 1), saved_after=5, outer=("diloco", {"every": 3, **HALVES})),
    "streaming": Kind(
        2, (2, 1), saved_after=6, outer=("streaming_diloco", {"every": 4, "fragments": 2, "delay": 2, **HALVES})
    ),
    "eager": Kind(2, (2, 1), saved_after=5, outer=("eager_diloco", {"every": 3, **HALVES})),
    "sharded": Kind(2, (2, 1), saved_after=4, columns=2, accumulation=3),
    "gathered": Kind(2, (2, 1), saved_after=4, columns=2, state_dict_type="FULL_STATE_DICT"),
    "islands": Kind(4, (4,), saved_after=5, columns=2, outer=("diloco", {"every": 3, **HALVES})),
}


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(whole(SAMPLES, 3, seed=0), whole(SAMPLES, 2, seed=1), strict=True)


class Counter:
    """A registered object."""

    def __init__(self):
        self.seen = torch.zeros(1)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()


class Run:
    """The objects of one rank of a run, made anew."""

    def __init__(self, kind, ranks):
        AcceleratorState._reset_state(reset_partial_state=False)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        columns = min(kind.columns, ranks)
        asked = {} if kind.outer is None else {"outer": OuterConfig(kind.outer[0], **kind.outer[1])}
        if columns > 1:
            asked["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind.state_dict_type)
            asked["parallelism_config"] = ParallelismConfig(ranks // columns, dp_shard_size=columns)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=kind.precision,
            gradient_accumulation_steps=kind.accumulation,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=kind.data == "torchdata"),
            **asked,
        )
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        data = torch.utils.data.TensorDataset(whole(SAMPLES, 3, seed=0), whole(SAMPLES, 2, seed=1))
        loader = {
            "shuffled": lambda: DataLoader(data, BATCH, shuffle=True),
            "stream": lambda: DataLoader(Stream(), BATCH),
            "torchdata": lambda: StatefulDataLoader(data, BATCH, shuffle=True),
        }[kind.data]()
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch):
        """Train on a micro-batch; return its inputs."""
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model, inputs, targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.seen += 1
        return inputs

    def found(self):
        """Digests of all that a checkpoint holds, as it is here now."""
        scaler = self.accelerator.scaler
        return {
            "model": digest([*map(local, self.accelerator.unwrap_model(self.model).state_dict().values())]),
            "optimizer": digest(self.optimizer.state_dict()),
            "gradients": digest([parameter.grad for parameter in self.model.parameters()]),
            "scheduler": digest(self.scheduler.state_dict()),
            "scaler": digest(scaler and scaler.state_dict()),
            "counter": digest(self.counter.state_dict()),
            "loops": digest([without_times(loop.state_dict()) for loop in self.accelerator.outer_loops]),
        }

    def rest(self, batches):
        """Digests of the rest of the epoch, of what is drawn afterwards, and of the weights on which it would train."""
        seen = [self.step(batch) for batch in batches]
        drawn = [torch.rand(2), random.random(), np.random.rand()]
        for loop in self.accelerator.outer_loops:
            loop.flush()
        end = self.found()["model"]
        self.accelerator.end_training()
        return {"rest": digest(seen), "drawn": digest(drawn), "end": end}


def without_times(state):
    """The state of an outer loop without what a clock says, and without what it has since, in the order of then."""
    names = ("description", "position", "synced", "began", "are_alike", "shard", "lr", "rounds")
    since = {"layout", "changes", "agreed", "proposed", "parts"}
    assert {*names, "seconds", "stats", *since} == {*state}
    return without({name: state[name] for name in names}, {"trained", "proposal", "left_out", "history"})


def without(node, names):
    """A nested value without what has these names; nothing of a fragment's history was kept by rounds then."""
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in names}
    return {key: as_then(value) if key == "fragments" else without(value, names) for key, value in kept.items()}


def as_then(node):
    """The states of fragments without what they have since."""
    if isinstance(node, list):
        return [as_then(one) for one in node]
    since = {"kept", "num_averaged", "look_ahead"}
    return {key: as_then(one) for key, one in node.items() if key not in since} if isinstance(node, dict) else node


def digest(node):
    """A digest of the values in a nested value, in their order; both zeros are one."""
    parts = [
        (local(leaf).detach() + 0).contiguous().numpy().tobytes()
        if isinstance(leaf, torch.Tensor)
        else repr(leaf).encode()
        for leaf in leaves_of(node)
    ]
    return hashlib.blake2b(b"|".join(parts), digest_size=6).hexdigest()


def saved(name):
    """Train and save on each rank; return what there is, and what comes after."""
    kind = KINDS[name]
    run = Run(kind, kind.ranks)
    batches = iter(run.loader)
    for batch in itertools.islice(batches, kind.saved_after):
        run.step(batch)
    run.accelerator.save_state(FROZEN / name)
    return {**run.found(), **run.rest(batches)}


def loaded(names, ranks, folder=FROZEN):
    """Load checkpoints into fresh objects on each rank, and go on; return the same, by name."""
    found = {}
    for name in names:
        run = Run(KINDS[name], ranks)
        run.accelerator.load_state(folder / name)
        found[name] = {**run.found(), **run.rest(run.loader)}
    return found


def names_for(ranks):
    """The kinds that are loaded on so many ranks."""
    return [name for name, kind in KINDS.items() if ranks in kind.loads]


def main():
    """Write the checkpoints that are missing, and what is found in them."""
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name, kind in KINDS.items():
        if (FROZEN / name).exists():
            continue
        before = run_ranks(saved, kind.ranks, name)
        for ranks in kind.loads:
            after = [found[name] for found in run_ranks(loaded, ranks, [name], ranks)]
            if ranks == kind.ranks and after != before:
                raise SystemExit(f"{name} on {ranks} ranks: {before} became {after}")
            expected[f"{name} on {ranks}"] = after
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
