# SPDX-License-Identifier: Apache-2.0
"""The state that replicas share, as it lies at the address of their run: whole, and for whoever comes later.

Each rank of a replica writes its own part. A state counts once all of them are there, which a log says; the last two
are kept. Objects are JSON and plain bytes, each with a checksum. For processes that read each state a replica adds by
how much the weights to evaluate differ from those of the state before it: see `difference`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from math import prod
from typing import Any

import torch
from torch import Tensor

from farflung.address.board import Log, forget
from farflung.address.objects import ObjectBoard
from farflung.address.packed import Damaged, packed, unpack
from farflung.address.seal import SealError
from farflung.address.state_transfer import filled, form_of
from farflung.base.bars import Bar
from farflung.base.errors import Unreachable

_KEPT, _READERS = 2, "readers/"
_HEADER_BYTES = 64 * 1024 * 1024  # of a part, at most
_RANKS_S, _PAUSES = 600.0, 10  # how long a rank may take longer than another one; pauses of the board between looks


@dataclass(frozen=True)
class Saved:
    """A state that lies there."""

    name: str  # the generation's number, the position, and a word that no other writer has drawn
    position: int  # in the schedule
    ranks: int  # of the replica that has written it
    parts: tuple[str, ...]
    logs: Mapping[str, str] = field(default_factory=dict)  # values of logs of the run that belong to it, by name
    description: str = ""  # of the replica, as it describes itself when it asks to be admitted
    is_last: bool = False  # the run has come to its end with it
    since: int = 0  # how many fragments' rounds had landed since the state before
    # Names of states, this one the last, by dtype: each but the first has the difference to the one before it.
    chains: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """The generation's number and the position: a later state has no smaller one."""
        return order_of(self.name)

    @property
    def generation(self) -> int:
        return self.order[0]


def order_of(name: str) -> list[int]:
    """Return the order of a state of this name, see `Saved`."""
    return [int(number) for number in name.split(".")[:2]]


class SavedStates:
    """The states of one outer loop.

    Args:
        board: of the loop.
    """

    def __init__(self, board: ObjectBoard) -> None:
        self._board, self._log = board, Log(board, "saved")
        self._replaced = set[str]()  # names of states

    def write(
        self, name: str, rank: int, parts: Mapping[str, Any], is_current: Callable[[], bool] = lambda: True
    ) -> None:
        """Write a rank's part of a state: by name, trees of dicts, lists, tuples, numbers, texts and tensors.

        Args:
            is_current: whether the writer still may; asked before each part.
        """
        for part, tree in parts.items():
            if not is_current():
                return
            tensors: dict[str, Tensor] = {}
            form = form_of(tree, part, tensors)
            rows = [[key, str(x.dtype).removeprefix("torch."), list(x.shape)] for key, x in tensors.items()]
            header = {"form": form, "tensors": rows}
            self._board.write(_key(name, rank, part), packed(header, list(tensors.values())))
        self._board.put(_key(name, rank, "done"), b"1")

    def finish(self, saved: Saved, is_current: Callable[[], bool] | None = None, within_s: float = _RANKS_S) -> bool:
        """Wait for all ranks, record that a state is whole, and delete those before the last one.

        Args:
            is_current: whether the writer still may. None: the state counts, whatever lies there.
            within_s: how long a rank may take longer than this one.

        Returns:
            False if the writer was excluded, or has been overtaken by a newer state: its own is deleted.
        """
        deadline = time.monotonic() + within_s
        while not self._board.has(_done(saved)):
            if is_current is not None and not is_current():
                break  # the other ranks have stopped writing too
            if time.monotonic() > deadline:
                raise Unreachable(f"Some ranks have not written their parts of it within {within_s:g} s.")
            time.sleep(self.look_s)
        while True:
            number, content = self._log.last()  # before the question: whoever excluded this one has appended since
            name = saved.name if content is None else json.loads(content)["name"]
            if content is not None and name == saved.name:
                return True
            is_newer = order_of(name) <= saved.order
            if is_current is not None and not (is_newer and is_current()):
                forget(self._board, f"state/{saved.name}/")
                return False
            if self._log.append(number, json.dumps(asdict(saved)).encode()):
                break
        kept = {one.name for one in self.newest()}
        if number >= _KEPT and (content := self._log.get(number + 1 - _KEPT)) is not None:
            self._replaced.add(json.loads(content)["name"])  # while its writer waits in a flush, the order is the same
        chained = {(name, dtype) for dtype, names in saved.chains.items() for name in names[1:]}
        doomed = []
        for key in self._board.list("state/"):
            name, part = key.split("/")[1], key.rpartition("/")[2]
            if (
                name not in kept
                and (name, part) not in chained
                and (name in self._replaced or order_of(name) < saved.order)
            ):
                doomed.append(key)  # unlike a later one, which other ranks may be writing
        self._board.delete(*doomed)
        return True

    @property
    def look_s(self) -> float:
        """How many seconds to wait between two looks for what others write."""
        return _PAUSES * self._board.pause_s

    def is_whole(self, saved: Saved) -> bool:
        """Return whether all ranks have written their parts of a state; a listing may show that too late."""
        return all(self._board.map(self._board.get, _done(saved)))

    def newest(self) -> Iterator[Saved]:
        """Return the states that were kept, the newest first."""
        last = self._log.last()[0]
        for number in range(last, max(0, last - _KEPT), -1):
            if content := self._log.get(number):
                row = json.loads(content)
                yield Saved(**{**row, "parts": tuple(row["parts"])})

    def read(self, saved: Saved, rank: int, bar: Bar | None = None) -> dict[str, Any]:
        """Return a rank's part of a state; Damaged if it is not what was written. `bar` counts what is read."""
        return {part: self.read_part(saved.name, rank, part, bar) for part in saved.parts}

    def note_reader(self, dtype: str, name: str) -> None:
        """Note up to which state a process has read, unless another one has read a later one; Unreachable if refused.

        Args:
            dtype: of the differences that it reads.
        """
        if order_of(name) > self._noted(f"{_READERS}{dtype}"):
            self._board.patient(0).put(f"{_READERS}{dtype}", name.encode())

    def readers(self) -> dict[str, list[int]]:
        """Return the order of the latest state that `note_reader` has noted, by dtype."""
        return {key.removeprefix(_READERS): self._noted(key) for key in self._board.list(_READERS)}

    def _noted(self, key: str) -> list[int]:
        with suppress(ValueError):  # of no note of ours
            return order_of((self._board.get(key) or b"").decode())
        return []

    def forget_readers(self, dtype: str) -> None:
        self._board.delete(f"{_READERS}{dtype}")

    def num_bytes(self, saved: Saved) -> int:
        """Return how many bytes the parts of all ranks have."""
        keys = [_key(saved.name, rank, part) for rank in range(saved.ranks) for part in saved.parts]
        with suppress(SealError):
            return sum(self._board.read(key, lambda _, size: size) or 0 for key in keys)
        return 0

    def read_part(self, name: str, rank: int, part: str, bar: Bar | None = None) -> Any:
        """Return one part of a rank's, as `read` does."""
        key = _key(name, rank, part)
        tensors: dict[str, Tensor] = {}
        form: Any = None

        def act(file: BufferedReader, size: int) -> bool:
            def memory(header: Any) -> Sequence[Tensor]:
                nonlocal form
                form, rows = _checked(header, size)
                tensors.update({name: torch.empty(shape, dtype=dtype) for name, dtype, shape in rows})
                return list(tensors.values())

            tensors.clear()
            unpack(file, size, _HEADER_BYTES, memory, bar)
            return True

        try:
            is_there = self._board.read(key, act)
        except SealError as error:
            raise Damaged(f"{key} can't be used: {error}") from None
        if not is_there:
            raise Damaged(f"{key} is not there")
        return filled(form, tensors)


def _key(name: str, rank: int, part: str) -> str:
    return f"state/{name}/{rank}/{part}"


def _done(saved: Saved) -> list[str]:
    return [_key(saved.name, rank, "done") for rank in range(saved.ranks)]


def _checked(header: Any, size: int) -> tuple[Any, list[tuple[str, torch.dtype, list[int]]]]:
    """Return form and tensors of a part that has so many bytes; Damaged if that can't be."""
    try:
        rows = [(str(key), getattr(torch, kind), list(map(int, shape))) for key, kind, shape in header["tensors"]]
        least = min((length for *_, shape in rows for length in shape), default=0)
        if sum(prod(shape) * dtype.itemsize for _, dtype, shape in rows) > size or least < 0:
            raise Damaged("it tells of more than it has")
        return header["form"], rows
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its header is wrong: {error}") from None


def tensors_of(parts: Mapping[str, Any]) -> list[str]:
    """Return a line for each tensor of a state, like those of a replica that asks to be admitted."""
    rows = [row for part, tree in parts.items() if part != "place" for kind in tree["names"].values() for row in kind]
    return [f"{name} {dtype} {list(shape)}" for name, dtype, shape, *_ in rows]
