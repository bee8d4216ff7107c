# SPDX-License-Identifier: Apache-2.0
"""Where an iteration of a loader stands, so that another process goes on there: the batches, and the randomness.

An iteration draws random numbers when it starts (an order, the seed of its workers) and reads ahead of the training
loop. To go on in its middle, the start is repeated with the random states of then, what was handed out is left out, and
what had been prefetched is taken from the checkpoint, since it was made with random numbers that are spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from farflung.checkpoint import rng
from farflung.data.resume.workers import WorkerPlan
from farflung.data.torch_loaders import samplers_of


@dataclass(frozen=True)
class RandomStates:
    """The random states in which an iteration began: the process's own, and those of the loader's generators."""

    host: dict[str, Any]
    generators: list[Tensor]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> RandomStates:
        return cls(rng.read_host(), [generator.get_state() for generator in generators_of(loader)])

    def restore(self, loader: DataLoader[Any]) -> None:
        rng.write(self.host)
        set_generators(loader, self.generators)
        own = generators_of(loader)
        if own and not self.generators:  # one process drew its order in this way, several share a generator
            torch.empty((), dtype=torch.int64).random_()  # the seed of workers
            own[0].manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            rng.write(self.host)


# Of a position after so many batches, of which nothing else is known.
NOTHING_READ: dict[str, Any] = {"num_prefetched": 0, "exhausted": False}
NOTHING_READ |= dict.fromkeys(("prefetched", "first", "dataset", "worker_plan"))

# What the keys of a loader's state were called in checkpoints of before 0.1.0, which are still read.
_FORMER_KEYS = {
    "ahead": "prefetched",
    "drawn": "worker_states",
    "num_ahead": "num_prefetched",
    "place": "position",
    "plan": "workers",
    "turns": "worker_plan",
    "warm": "has_workers",
}


def with_present_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's saved state with the keys that it has now."""
    present = {_FORMER_KEYS.get(key, key): value for key, value in state.items()}
    for inner in ("position", "worker_plan"):
        if isinstance(present.get(inner), Mapping):
            present[inner] = with_present_keys(present[inner])
    return present


@dataclass(frozen=True)
class Position:
    """A position in an iteration."""

    batches: int  # that were handed out, with those that were skipped
    ended: bool  # the last one was among them
    start: RandomStates  # in which it began
    num_prefetched: int = 0  # how many batches (of a dispatching loader: rounds) had been read, but not handed out
    prefetched: Any = None  # those, or None where they are no plain data
    first: Any = None  # of a dispatching loader, its first round, whose samples complete the last one
    dataset: Any = None  # the state of a data set, or of a loader, that keeps one, after what was prefetched
    exhausted: bool = False  # the data set has nothing more
    has_workers: bool = False  # persistent ones were there when it began, so that it drew no seed for them
    worker_plan: WorkerPlan | None = None  # how they go on; None: as workers start by themselves

    @property
    def is_read(self) -> bool:
        """Whether nothing more is to be read. A data set would take its old state for the next iteration then."""
        return self.exhausted or self.ended

    def to_dict(self) -> dict[str, Any]:
        own, plan = dict(vars(self)), self.worker_plan
        start = own.pop("start")
        return {**own, **vars(start), "worker_plan": None if plan is None else plan.to_dict()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Position:
        """Undo `to_dict`; KeyError, TypeError or ValueError where it is something else."""
        own, plan = dict(saved), saved.get("worker_plan")
        start = RandomStates(own.pop("host"), own.pop("generators"))
        rng.check(start.host)
        return cls(start=start, **{**own, "worker_plan": None if plan is None else WorkerPlan.from_dict(plan)})

    def moved(self, batches: int) -> Position:
        """Return the position after `batches` of the same iteration, of which nothing has been read."""
        return replace(self, batches=batches, **NOTHING_READ)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of a loader, of its samplers, and of its data set."""
    found: list[torch.Generator] = []
    dataset: Any = loader.dataset
    for owner in (loader, *samplers_of(loader), dataset, getattr(dataset, "dataset", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def set_generators(loader: DataLoader[Any], states: list[Tensor]) -> None:
    """Give the generators of a loader these states; where it has none, as one process has not, its sampler gets one."""
    own = generators_of(loader)
    if len(states) == 1 and not own:
        for sampler in samplers_of(loader):
            if getattr(sampler, "generator", loader) is None:
                sampler.generator = torch.Generator()
                own = [sampler.generator]
    if len(own) == len(states):
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
