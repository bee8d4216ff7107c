# SPDX-License-Identifier: Apache-2.0
"""Where an iteration of a loader stands, so that another process goes on there: the batches, and the randomness.

An iteration draws random numbers when it starts (an order, the seed of its workers) and reads ahead of the training
loop. To go on in its middle, the start is repeated with the random states of then, what was handed out is left out, and
what had been prefetched is taken from the checkpoint, since it was made with random numbers that are spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.checkpoint import rng
from farflung.process import world as slot

_BETWEEN_UPDATES = 500  # batches read again between two looks at the progress bar, which costs as much as some of them


class NotPlain(Exception):
    """Something that a checkpoint can't hold."""


@dataclass(frozen=True)
class RandomStates:
    """The random states in which an iteration began: the process's own, and those of the loader's generators."""

    host: dict[str, Any]
    generators: list[Tensor]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> RandomStates:
        """Read the states that are there now."""
        return cls(rng.read_host(), [generator.get_state() for generator in generators_of(loader)])

    def restore(self, loader: DataLoader[Any]) -> None:
        """Make the states those of then."""
        rng.write(self.host)
        set_generators(loader, self.generators)
        own = generators_of(loader)
        if own and not self.generators:  # one process drew its order in this way, several share a generator
            torch.empty((), dtype=torch.int64).random_()  # the seed of workers
            own[0].manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            rng.write(self.host)


# Of a position after so many batches, of which nothing else is known.
NOTHING_READ: dict[str, Any] = {
    "num_prefetched": 0,
    "prefetched": None,
    "first": None,
    "dataset": None,
    "exhausted": False,
    "worker_plan": None,
}


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
    """A position in an iteration.

    Attributes:
        batches: those that were handed out, with those that were skipped.
        ended: the last one was among them.
        start: the random states in which it began.
        num_prefetched: how many batches (of a dispatching loader: rounds) had been read, but not handed out.
        prefetched: those, or None where they are no plain data.
        first: of a dispatching loader, its first round, whose samples complete the last one.
        dataset: the state of a data set, or of a loader, that keeps one, after what was prefetched; or None.
        exhausted: the data set has nothing more.
        has_workers: persistent workers were there when it began, so that it drew no seed for them.
        worker_plan: how workers go on, with their random states; None: as workers start by themselves.
    """

    batches: int
    ended: bool
    start: RandomStates
    num_prefetched: int = 0
    prefetched: Any = None
    first: Any = None
    dataset: Any = None
    exhausted: bool = False
    has_workers: bool = False
    worker_plan: dict[str, Any] | None = None

    @property
    def is_read(self) -> bool:
        """Whether nothing more is to be read. A data set would take its old state for the next iteration then."""
        return self.exhausted or self.ended

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "start"}
        return {**own, "host": self.start.host, "generators": self.start.generators}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Position:
        """Build what `to_dict` returned; KeyError or TypeError where it is something else."""
        own = dict(saved)
        start = RandomStates(own.pop("host"), own.pop("generators"))
        rng.check(start.host)
        return cls(start=start, **own)

    def moved(self, batches: int) -> Position:
        """Return the position after `batches` of the same iteration, of which nothing has been read."""
        return replace(self, batches=batches, **NOTHING_READ)


@dataclass
class Resumption:
    """A position where the next iteration goes on.

    Attributes:
        now: the random states with which training goes on, once the position is reached.
    """

    position: Position
    now: RandomStates | None = field(default=None)

    def begin(self, loader: DataLoader[Any]) -> None:
        """Go back to the random states of the iteration's start."""
        self.now = RandomStates.of(loader)
        self.position.start.restore(loader)

    def arrive(self, stream: DataLoader[Any] | None = None) -> None:
        """Go on with the random states of the training; the generators of the loader stay as the start left them.

        Args:
            stream: a loader of a stream, whose generators go on too where its data set's state was loaded: that does
                not draw again what it drew before.
        """
        assert self.now is not None
        rng.write(self.now.host)
        if stream is not None and self.position.dataset is not None:
            set_generators(stream, self.now.generators)


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader and those inside them."""
    found: list[Any] = []
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop()
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


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


def plain(node: Any) -> Any:
    """Return a batch as plain data on the CPU, which a checkpoint can hold.

    Raises:
        NotPlain: it is made of something else too, such as a class of the script's.
    """
    kind = type(node)
    if kind is Tensor:
        return node.detach().cpu()
    if kind is dict:
        return {plain(key): plain(value) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind([plain(value) for value in node])
    if node is None or kind in (int, float, bool, str, bytes, complex):
        return node
    if kind is np.ndarray and node.dtype.kind in "biufc":
        return node
    raise NotPlain(kind.__name__)


def plain_or_none(node: Any) -> Any:
    """Return a batch as plain data, None where it is none."""
    try:
        return plain(node)
    except NotPlain:
        return None


def state_of(keeper: Any) -> Any:
    """Return the state of a data set, None where it keeps none that a checkpoint can hold."""
    if not (hasattr(keeper, "state_dict") and hasattr(keeper, "load_state_dict")):
        return None
    return plain_or_none(keeper.state_dict())


def replay(batches: Iterator[Any], number: int, to_the_end: bool = False) -> None:
    """Read the first batches of data that can only be read from its beginning, with a word about it.

    Args:
        to_the_end: there may be fewer, in a last round that was not whole.

    Raises:
        ConfigError: there are fewer.
    """
    world = slot.current()
    if number == 0:
        return
    from rich.console import Console
    from rich.progress import Progress

    restore = "all batches" if to_the_end else counted(number, "batch")
    console = Console(stderr=True, quiet=world is not None and not world.is_main)
    console.print(
        f"farflung: reading {restore} again to go on behind, as the data set has no state_dict.",
        highlight=False,
        soft_wrap=True,
    )
    done = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading again", total=number)
        while done < number:
            piece = min(_BETWEEN_UPDATES, number - done)
            count = sum(1 for _ in islice(batches, piece))
            done += count
            progress.update(task, completed=done)
            if count < piece:
                break
    if done < number and not to_the_end:
        raise ConfigError(
            f"The data had {counted(number, 'batch')} when the checkpoint was written, and {done} now. "
            "Check that it is the same dataset."
        )
