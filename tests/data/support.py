# SPDX-License-Identifier: Apache-2.0
"""Data sets, loaders of all ranks, and what the tests of this room ask of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.config.handlers import DataLoaderConfiguration
from farflung.data.prepare import prepare_loader
from farflung.loop.state import LoopState

CPU = torch.device("cpu")


class Stream(IterableDataset):
    """0, 1, ... n-1, shared out among workers in the way that torch asks for."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(self.n) if worker is None else range(worker.id, self.n, worker.num_workers)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.n


_has_arrived = multiprocessing.Event()


class Late(list[int]):
    """Indices; its number 2 is read by a worker after the batch of `out_of_order` has come to this process."""

    def __getitem__(self, index: Any) -> Any:
        assert index != 2 or _has_arrived.wait(60)
        return index


class _Early(list[int]):
    def __reduce__(self) -> Any:
        return _arrived, ([*self],)


def _arrived(numbers: list[int]) -> torch.Tensor:
    _has_arrived.set()
    return torch.tensor(numbers)


def out_of_order(early: int) -> dict[str, Any]:
    """Arguments of a loader over `Late` whose workers hand out the batch with number `early` before that with 2."""
    _has_arrived.clear()

    def collate(batch: list[int]) -> Any:
        return _Early(batch) if early in batch else torch.tensor(batch)

    return {"num_workers": 2, "in_order": False, "multiprocessing_context": "fork", "collate_fn": collate}


class Seat(SoloGroup):
    """A rank among several in a test of one process; whoever collects something finds only itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def prepared(loader: DataLoader, group: Any = None, state: LoopState | None = None, **settings: Any) -> Any:
    """Prepare `loader` with `settings` of `DataLoaderConfiguration`, or `rng_types`, `device`, `slice_fn`, ..."""
    is_seat = isinstance(group, Seat)
    arguments = {name: settings.pop(name) for name in ("rng_types", "slice_fn", "slots", "readers") if name in settings}
    return prepare_loader(
        loader,
        exchange=Exchange(SoloGroup() if group is None or is_seat else group),
        fixed_rank=group if is_seat else None,
        device=settings.pop("device", CPU),
        state=state or LoopState(),
        config=DataLoaderConfiguration(**settings),
        **{"rng_types": ["generator"], **arguments},
    )


def walk(loader: Any) -> list[tuple[list[int], bool, int]]:
    """Iterate once: for each batch its values, whether the loader calls it the last, and the remainder."""
    return [(values(batch), loader.end_of_dataloader, loader.remainder) for batch in loader]


def on_two_ranks(loader: DataLoader, **settings: Any) -> list[list[tuple[list[int], bool, int]]]:
    """What `walk` returns on each of two ranks."""
    return [walk(prepared(loader, Seat(rank, 2), **settings)) for rank in range(2)]


def values(batch: Any) -> list[int]:
    """The numbers in a batch made of a tensor."""
    return batch.reshape(-1).tolist()


def gathered(walks: list[list[tuple[list[int], bool, int]]]) -> list[int]:
    """What gathering for metrics returns over a whole iteration: rank after rank in each step, cut to the remainder."""
    found: list[int] = []
    for step in range(max(map(len, walks), default=0)):
        here = [walk[step] for walk in walks if step < len(walk)]
        remainders = {remainder for _, _, remainder in here}
        assert len(remainders) == 1, f"ranks disagree about the remainder: {remainders}"
        together = [value for numbers, _, _ in here for value in numbers]
        found += together[: remainders.pop() or None]
    return found


def world() -> TorchGroup:
    """The ranks that `run_ranks` has connected."""
    return TorchGroup()
