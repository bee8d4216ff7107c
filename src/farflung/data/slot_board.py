# SPDX-License-Identifier: Apache-2.0
"""The agreement of replicas on the order of an epoch's batches, and on which replica holds which part of it.

Orders are not sent, but drawn from one seed and the number of the epoch. Each loader has a log whose last record holds
all parts. All values are JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import torch

from farflung.address.board import Board, Log
from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.checkpoint import rng
from farflung.data.ledger import Done
from farflung.data.samplers import made_generator
from farflung.data.torch_loaders import Source

_T = TypeVar("_T")
Landed: TypeAlias = "dict[str, tuple[int, int]]"  # the latest round, by outer loop: its generation and its vote

Rounds: TypeAlias = "dict[str, tuple[int, tuple[int, int]]]"

_GIVEN_UP = 0  # in place of an owner; the ids of members begin at 1
_SLOTS_EACH = 16  # of each of the most replicas, so that the last one to finish is late by 1/16 of a share at most
_BATCHES_EACH = 16  # in a slot, as a claim is a question to the store, if that leaves
_FEW_EACH = 4  # slots of each of the most replicas, so that equal ones get about equal shares of a short epoch
_DECIDED_AT_A_TIME = 128  # claims of all replicas, at most
_COMPARED = 1000  # batches; orders that were drawn apart differ in them


def proposed_seed(source: Source) -> int:
    """Return the seed that a loader has or would draw."""
    seeded = source.seeded_samplers
    if seeded:
        return seeded[0].initial_seed % 2**63
    generator = next(iter(source.generators), None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def agreed_order(batches: Iterable[Any], source: Source, seed: int, epoch: int) -> list[Any]:
    """Return the batches of an epoch, in an order that depends on the seed and the epoch alone.

    The samplers get the epoch through `set_epoch`; all random states are restored afterwards.
    """
    samplers, host = source.samplers, rng.read_host()
    generators = [(one, one.generator) for one in samplers if hasattr(one, "generator")]
    of_epoch = (seed + epoch) % 2**63
    random.seed(of_epoch)
    np.random.seed(of_epoch % 2**32)
    torch.default_generator.manual_seed(of_epoch)
    for sampler, _ in generators:
        sampler.generator = made_generator().manual_seed(of_epoch)
    for seeded in source.seeded_samplers:
        seeded.initial_seed = seed
    try:
        source.announce(epoch)
        return list(batches)
    finally:
        rng.write_host(host)
        for sampler, generator in generators:
            sampler.generator = generator


def digest_of(order: list[Any]) -> int:
    """Return a digest of an order, which differs if replicas have drawn different ones."""
    try:  # releases of numpy write their integers in different ways
        text = json.dumps(order[:_COMPARED], default=int)
    except (TypeError, ValueError, RuntimeError):  # indices that are objects of the script's
        text = repr(order[:_COMPARED])
    return crc32(text.encode())


class Claim(NamedTuple):
    """The rest of a slot; its first `done` batches count already."""

    epoch: int
    slot: int
    done: int


def num_slots(batches: int, most: int) -> int:
    """Return the number of slots of an epoch with so many batches: a few for each replica that there may be."""
    return min(batches, max(_FEW_EACH * most, min(_SLOTS_EACH * most, batches // _BATCHES_EACH)))


@dataclass
class _Open:
    """An epoch that is not over: how far its slots were claimed, and those that are not done: owner, and how far."""

    batches: int
    digest: int
    slots: int
    claimed: int = 0
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def record(self, slot: int, done: int) -> None:
        """Record how many batches of a slot are done; it is forgotten once all are."""
        owner, before = self.held[slot]
        self.held[slot] = owner, max(before, done)
        if self.held[slot][1] >= len(range(slot, self.batches, self.slots)):
            del self.held[slot]


@dataclass
class _LoaderRecord:
    seed: int
    epoch: int = -1  # the furthest that was begun
    ended: int = -1  # the furthest that a replica has come to the end of, and synchronized after
    open: dict[int, _Open] = field(default_factory=dict)
    landed: Landed = field(default_factory=dict)  # the latest rounds that any writer had applied before its change

    def encode(self) -> bytes:
        rows = [
            (number, (one.batches, one.digest, one.slots, one.claimed), list(one.held.items()))
            for number, one in self.open.items()
        ]
        return json.dumps((self.seed, self.epoch, self.ended, rows, self.landed)).encode()

    @classmethod
    def decode(cls, content: bytes) -> _LoaderRecord:
        seed, epoch, ended, rows, landed = json.loads(content)
        opened = {
            number: _Open(batches, digest, slots, claimed, dict(held))
            for number, (batches, digest, slots, claimed), held in rows
        }
        return cls(seed, epoch, ended, opened, {loop: (number, vote) for loop, (number, vote) in landed.items()})


def landed_in(loop: str, content: bytes) -> tuple[int, int]:
    """Return the latest round of an outer loop whose batches may be in a record of a loader's epochs."""
    return _LoaderRecord.decode(content).landed.get(loop, (0, 0))


class SlotBoard:
    """The shared records of the epochs of one loader.

    Args:
        board: for this loader alone.
        member: this replica's id.
        rounds: returns for each outer loop the generation in which its training began, and the latest round that this
            replica has applied, or the 0th of the generation that it is in.

    Attributes:
        has_begun: this replica has a seed from here.
    """

    def __init__(self, board: Board, member: int, rounds: Callable[[], Rounds]) -> None:
        self._board, self._member, self._rounds = board, member, rounds
        self._log = Log(board, "epochs", _DECIDED_AT_A_TIME)
        self.has_begun = False
        self._claimed: set[tuple[int, int]] = set()  # epochs and slots that are not done, as far as is known here

    def seed(self, proposed: int) -> int:
        """Return the seed that all replicas draw their orders from: the one that the first replica proposed."""
        self.has_begun = True
        return self._change(lambda state: state.seed, _LoaderRecord(proposed))

    def begin(self, epoch: int, batches: int, digest: int, most: int, goes_on: bool = False) -> bool:
        """Begin an epoch, unless it has begun; return whether the others have finished it, so that nothing is left.

        Epochs before it have left what lost replicas had claimed, and, if this one `goes_on` with what it has not done
        of them, all that is not claimed. ConfigError: others have begun it with other batches, or in an order with
        another digest.
        """

        def act(state: _LoaderRecord) -> bool:
            if epoch < state.epoch or epoch <= state.ended:
                return True
            if epoch > state.epoch:
                state.epoch = epoch
                if not goes_on:  # it has left those early that were not claimed to their end
                    state.open = {number: one for number, one in state.open.items() if one.claimed == one.slots}
                    for one in state.open.values():
                        one.held = {slot: held for slot, held in one.held.items() if held[0] != self._member}
                if batches:
                    state.open[epoch] = _Open(batches, digest, num_slots(batches, most))
            theirs = state.open.get(epoch)
            if theirs is not None and theirs.batches != batches:
                raise ConfigError(
                    f"Epoch {epoch} has {counted(theirs.batches, 'batch')} at another replica, and {batches} here. "
                    "Give all replicas the same data set and the same batch size."
                )
            if theirs is not None and theirs.digest != digest:
                raise ConfigError(
                    f"Epoch {epoch} has its batches in another order at another replica. An order must be drawn from "
                    "the generators of torch, numpy or random, which are seeded alike on all replicas, or from the "
                    "number that set_epoch gives; not from a generator of the sampler's own."
                )
            return False

        self._claimed = {place for place in self._claimed if goes_on or place[0] >= epoch}
        return self._change(act)

    def end(self, epoch: int) -> None:
        """Record that a replica has come to the end of an epoch, and synchronized after it."""
        self._change(lambda state: setattr(state, "ended", max(state.ended, epoch)))

    def claim(self, epoch: int, is_member: Callable[[int], bool]) -> Claim | None:
        """Claim a data slot: first what others have left, of epochs before too; None if there is none."""

        def act(state: _LoaderRecord) -> Claim | None:
            if state.epoch != epoch and epoch not in state.open:
                return None
            for number, one in sorted(state.open.items()):
                for slot, (owner, done) in one.held.items():
                    if owner != self._member and (owner == _GIVEN_UP or not is_member(owner)):
                        one.held[slot] = self._member, done
                        return Claim(number, slot, done)
                if number <= epoch and one.claimed < one.slots:
                    one.held[one.claimed] = self._member, 0
                    one.claimed += 1
                    return Claim(number, one.claimed - 1, 0)
            return None

        claimed = self._change(act)
        if claimed is not None:
            self._claimed.add(claimed[:2])
        return claimed

    def holds_all(self) -> bool:
        """Return whether no other replica has claimed what this one had, as it was left out."""

        def act(state: _LoaderRecord) -> bool:
            rows = [(number, slot, held) for number, one in state.open.items() for slot, held in one.held.items()]
            return self._claimed <= {(number, slot) for number, slot, (owner, _) in rows if owner == self._member}

        return self._change(act)

    def record(self, done: Done, owner: int | None = None) -> None:
        """Record how many batches of an owner's slots are done; slots that are not the owner's are left out."""
        owner = self._member if owner is None else owner

        def act(state: _LoaderRecord) -> set[tuple[int, int]]:
            finished = set()
            for (number, slot), count in done.items():
                if number in state.open and state.open[number].held.get(slot, (_GIVEN_UP, 0))[0] == owner:
                    state.open[number].record(slot, count)
                    finished |= {(number, slot)} - {(number, left) for left in state.open[number].held}
            return finished

        self._claimed -= self._change(act)

    def give_up(self) -> None:
        """Free the slots of this replica for others, and forget its records of them."""

        def act(state: _LoaderRecord) -> None:
            for one in state.open.values():
                for slot, (owner, done) in one.held.items():
                    if owner == self._member:
                        one.held[slot] = _GIVEN_UP, done

        self._board.delete(f"sent/{self._member}")
        self._claimed.clear()
        self._change(act)

    # ---- what may be in a round that others have applied, and this replica did not live to record

    def record_sent(self, steps: list[tuple[int, int]], done: Done) -> None:
        """Record how far this replica's slots are at these steps of its outer loops, each with its generation."""
        rows = [(*place, count) for place, count in done.items()]
        self._board.put(f"sent/{self._member}", json.dumps((steps, rows)).encode())

    def record_for(self, lost: int, landed: Iterable[tuple[int, int]]) -> None:
        """Record for a lost replica which of its batches have landed.

        Args:
            lost: its id.
            landed: for each outer loop, since which generation the replica was a member, and up to which step the
                rounds have landed.
        """
        if content := self._board.get(f"sent/{lost}"):
            steps, rows = json.loads(content)
            pairs = zip(steps, landed, strict=False)
            if all(number >= since and step <= last for (number, step), (since, last) in pairs):
                self.record({(epoch, slot): count for epoch, slot, count in rows}, lost)
            self._board.delete(f"sent/{lost}")

    def _change(self, act: Callable[[_LoaderRecord], _T], first: _LoaderRecord | None = None) -> _T:
        while True:
            number, content = self._log.last()
            state = first if content is None else _LoaderRecord.decode(content)
            assert state is not None, "a seed was agreed on first"
            rounds = {loop: (*one, state.landed.get(loop, one[1])) for loop, one in self._rounds().items()}
            if any(known[0] < began for began, _, known in rounds.values()):
                state = _LoaderRecord(state.seed)  # all that trained by it were lost before a state was written
            is_left_out = any(known[0] > last[0] for _, last, known in rounds.values())
            found = act(state)
            for epoch, one in list(state.open.items()):
                if not one.held and one.claimed == one.slots:
                    del state.open[epoch]  # it is over
            if is_left_out or state.encode() == content:
                return found
            state.landed |= {loop: max(last, known) for loop, (_, last, known) in rounds.items()}
            if self._log.append(number, state.encode()):
                return found
