# SPDX-License-Identifier: Apache-2.0
"""The first member writes the state that all share to the run's address every few rounds, while it trains."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from farflung.address.board import Board, Log
from farflung.address.folder import FolderTransport
from farflung.address.member_store import LauncherNotes, MemberStore
from farflung.address.objects import ObjectBoard
from farflung.address.packed import Damaged
from farflung.address.saved_state import Saved, SavedStates, tensors_of
from farflung.address.state_transfer import form_of
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import Event, Kind
from farflung.base.words import counted, in_seconds
from farflung.comm.collectives import from_first, gather_object
from farflung.comm.exchange import Exchange
from farflung.comm.threads import ThreadedCall
from farflung.members.differences import DifferenceWriter
from farflung.votes.generation import Needs

_logger = logging.getLogger(__name__)

_EVERY, _REST = 10, 9  # rounds; times as long as a state took to write, no other one is begun
_KEEP_WITHIN_S = 20.0  # how long a rank waits for those that keep the rest of the state
_LOG_KEEPS = 128  # as many records as the logs of a run keep at most


class Saver:
    """Writes states, and reads the one that a run continues from.

    Args:
        run, loop: the boards of the run and of the outer loop.
        share_group: the ranks that train this replica.
        every: rounds, each of all fragments, lost at most if all replicas die, provided that a state is written
            within half as many. None: 10, or more where states would take more than a tenth of the time.

    Attributes:
        logs: names of the run's logs whose values belong to a state.
        landed_in: returns the latest round, as its generation and its vote, that a value of a log may know of.
        description: of this replica, as it describes itself when it asks to be admitted.
        has_kept: the address is gone, and the state lies in a folder of this process.
    """

    def __init__(self, run: Board, loop: ObjectBoard, share_group: Exchange, every: int | None) -> None:
        self.logs: Sequence[str] = ()
        self.landed_in: Callable[[bytes], tuple[int, int]] = lambda _: (0, 0)
        self.description, self.has_kept = "", False
        self._run, self._loop, self._states = run, loop, SavedStates(loop)
        self._members, self._differences = MemberStore(loop), DifferenceWriter(self._states)
        self._share_group, self._every, self._may_rest = share_group, max(1, (every or _EVERY) // 2), every is None
        self._took_s, self._rests_until = 0.0, 0.0
        self._place: dict[str, Any] = {}  # in the schedule, after the latest round
        self._num_fragments, self._has_warned = 1, False
        self._since, self._is_due = 0, True  # landings; one that has become the first member writes a state at once
        self._saving: ThreadedCall[bool] | None = None
        self._noting: ThreadedCall[None] | None = None
        self._landed = 0, 0  # the latest round
        self._values: dict[str, str] = {}  # of the logs, with nothing of later rounds
        self._read: tuple[str, dict[str, Any]] = "", {}
        self._damaged = set[str]()  # names

    # ---- of the first member

    def note_round(self, landed: tuple[int, int], needs: Needs, is_first: bool) -> None:
        """Called after a round was applied; on the first member, begin to write a state if one is due.

        Args:
            landed: the round's generation and vote.
        """
        self._landed = landed
        self._place = {**needs.state(False)["place"], "due": []}  # nobody has begun the next round with it
        every, self._since = self._every * self._num_fragments, self._since + 1
        if not is_first:
            self._since, self._is_due = min(self._since, every), True  # the first member has written one since
            return
        is_free = self._saving is None or self._saving.is_over
        has_rested = not self._may_rest or time.monotonic() >= self._rests_until
        if from_first(self._share_group, lambda: is_free and (self._is_due or (self._since >= every and has_rested))):
            since, self._since, self._is_due = self._since, 0, False
            self._saving = self._begin(landed[0], needs, since)
        elif self._since >= 2 * every and not self._has_warned and (is_free or not self._may_rest):
            self._warn()
        if self._share_group.rank == 0 and (self._noting is None or self._noting.is_over):
            self._noting = ThreadedCall(partial(self._note, landed, self._since), "note a round")

    def _warn(self) -> None:
        if not self._may_rest:
            why = f"takes longer to write than {counted(self._every, 'round')}, so more than {2 * self._every} are lost"
            _logger.warning(f"A state of this run {why} if all replicas die. Give --state_every a larger number.")
        elif self._took_s:
            took, each = in_seconds(self._took_s), in_seconds((1 + _REST) * self._took_s)
            why = f"takes {took} to write, so one is written every {each} and not every {counted(self._every, 'round')}"
            _logger.warning(f"A state of this run {why}. Give --state_every to lose less if all replicas die.")
        self._has_warned = not self._may_rest or self._took_s > 0

    def finish(self, generation: int, member: int, needs: Needs, is_last: bool, is_alone: bool) -> None:
        """Write the last state, and wait until it is whole.

        Args:
            is_last: the loop has come to its end; otherwise a state that lies there already is not written again.
            is_alone: the other ranks of this replica come here at other times, or not at all.
        """
        for task in (self._saving, self._noting):
            with suppress(Unreachable):  # of a note
                _ = task and task.result()
        has_all = not is_last and (self.has_kept or not (self._place and self._since))
        if is_alone:
            is_written = has_all or self._begin(generation, needs, self._since, "end").result()
        else:
            is_there = from_first(self._share_group, lambda: has_all)
            was_written = is_there or self._begin(generation, needs, self._since, is_last=is_last).result()
            is_written = from_first(self._share_group, lambda: was_written)
        if not is_written:
            _logger.warning(self.keep_here(member, needs))

    def keep_here(self, member: int, needs: Needs) -> str:
        """Write the state to a folder of this process, as the address is gone; return how to continue, in words.

        The other ranks of this replica may not answer any more, so they meet in the folder alone.
        """
        rank = self._share_group.rank
        folder = Path(f"farflung-state-{member}").absolute()
        try:
            folder.mkdir(exist_ok=True)
            seal = self._loop.seal and self._loop.seal.at_root()
            states = SavedStates(FolderTransport(folder, 0, seal).board.part("loop1"))
            saved, parts = self._state(0, needs, "kept")
            states.write(saved.name, rank, parts)
            if rank == 0:
                states.finish(replace(saved, logs=self._values), within_s=_KEEP_WITHIN_S)
            self.has_kept = True
        except (OSError, ConfigError, Unreachable) as error:
            return f"The shared state of the replicas could not be written to {folder} either: {error}"
        return (
            f"The shared state of the replicas lies in {folder}, from step {saved.position}. Continue with --meet "
            f"{folder.as_uri()}, where only replicas that can use this folder take part, or get the weights by "
            f"`farflung checkpoint pull {folder.as_uri()} model.safetensors`."
        )

    def has_last(self, generation: int) -> bool:
        """Return whether the state with which a run has ended in a generation lies at its address."""
        return any(one.is_last and one.generation == generation for one in self._states.newest())

    def _begin(
        self, generation: int, needs: Needs, since: int, word: str = "", is_last: bool = False
    ) -> ThreadedCall[bool]:
        """Begin to write a state. Given a `word` for its name, no rank waits for another, and the last one finishes."""
        named = partial(from_first, self._share_group, lambda: (secrets.token_hex(4), self._differences.wanted))
        name, wanted = (word, ()) if word else named()
        saved, parts = self._state(generation, needs, name)
        saved = replace(saved, is_last=is_last, since=since)
        return ThreadedCall(partial(self._write, self._landed, saved, parts, wanted, waits=not word), "write a state")

    def _state(self, generation: int, needs: Needs, word: str) -> tuple[Saved, dict[str, Any]]:
        found = needs.state(True)
        place = self._place or {**found["place"], "due": []}
        parts = {**found, "place": {**found["place"], **place}}
        position, self._num_fragments = parts["place"]["position"], len(parts) - 1
        name = f"{generation}.{position}.{word}"
        return Saved(name, position, self._share_group.size, tuple(parts), description=self.description), parts

    def _write(
        self, landed: tuple[int, int], saved: Saved, parts: Mapping[str, Any], wanted: Sequence[str], waits: bool
    ) -> bool:
        """Write the state after a round, unless this replica was excluded meanwhile; return False if that failed."""

        def is_current() -> bool:
            return self._members.current().number == saved.generation

        began = time.monotonic()
        try:
            differences = self._differences.to(saved.name, parts, wanted)
            self._states.write(saved.name, self._share_group.rank, {**parts, **differences}, is_current)
            if self._share_group.rank == 0 if waits else self._states.is_whole(saved):
                # Read now, as the others have recorded their part of the round meanwhile.
                logs = self._values_at(landed)
                saved = replace(saved, logs=logs, chains=self._differences.chains())
                if self._states.finish(saved, is_current):
                    self._differences.look()
                else:
                    self._differences.clear()
                if landed == self._landed:
                    self._loop.put(f"g{landed[0]}/landings", b"0")
                self._took_s = time.monotonic() - began
                self._rests_until = time.monotonic() + _REST * self._took_s
            return True
        except Unreachable as error:
            self._differences.clear()
            self._since, self._is_due = self._since + saved.since, True  # the next round tries again
            _logger.warning(f"The state at step {saved.position} was not written: {error}")
            return False

    def note_generation(self, number: int) -> None:
        """Record in a generation how many rounds have landed since the last state: the first member calls this."""
        self._loop.put(f"g{number}/landings", str(self._since).encode())

    def _note(self, landed: tuple[int, int], since: int) -> None:
        self._loop.put(f"g{landed[0]}/landings", str(since).encode())  # where one that was excluded does no harm
        self._values = self._values_at(landed)

    def _values_at(self, landed: tuple[int, int]) -> dict[str, str]:
        """Return the newest values of the logs that know of no round after this one; those known before if forgotten.

        The weights after a round hold all batches that are recorded there, and nobody's later ones.
        """
        found = dict(self._values)
        for name in self.logs:
            log = Log(self._run, name)
            number, value = log.last()
            while value is not None and self.landed_in(value) > landed:
                number -= 1
                value = log.get(number) if number else None
            if value is not None:
                found[name] = value.decode()
        return found

    # ---- of those that begin again

    def found(self) -> Saved | None:
        """Return the newest state that is whole, having read it; None if there is none."""
        for saved in self._states.newest():
            if self._read[0] == saved.name:
                return saved
            if saved.name in self._damaged:
                continue
            try:
                found, *_ = [self._states.read(saved, rank) for rank in range(saved.ranks)]
                self._read = saved.name, found
                return saved
            except Damaged as error:
                self._damaged.add(saved.name)
                message = f"the state at step {saved.position} is damaged ({error})"
                LauncherNotes(self._run).send(Event.now(Kind.NOTE, message=message))
        return None

    def lines(self) -> list[str]:
        """Return a line for each tensor of the state that `found` has returned."""
        return tensors_of(self._read[1])

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the newest state, by the names that they have in a transfer."""
        found: dict[str, Tensor] = {}
        with suppress(Damaged, Unreachable, StopIteration):
            for part, tree in self._states.read(next(self._states.newest()), self._share_group.rank).items():
                form_of(tree, part, found)
        return found

    def restore_logs(self, saved: Saved, is_still_due: Callable[[], bool]) -> None:
        """Give logs the values that belong to a state, unless a later generation has begun meanwhile."""
        for name, value in saved.logs.items():
            log = Log(self._run, name, _LOG_KEEPS)
            while True:  # what a killed replica had asked for may still be carried out
                number, _ = log.last()
                if not is_still_due():
                    return
                if log.append(number, value.encode()):
                    break

    def num_lost(self, saved: Saved) -> int:
        """Return how many rounds have landed since a state, which a run that continues from it has lost."""
        record = self._members.record()
        landings = self._loop.get(f"g{0 if record is None else record.number}/landings")
        newer = takewhile(lambda one: one.name != saved.name, self._states.newest())  # which are damaged
        return -(-(int(landings or 0) + sum(one.since for one in newer)) // (len(saved.parts) - 1))

    def given(self, name: str) -> dict[str, Any]:
        """Return this rank's part of a state: a collective of its replica. RankFailure if it can't be read."""
        rank, why = self._share_group.rank, ""
        try:
            if self._read[0] != name or rank:
                saved = next(one for one in self._states.newest() if one.name == name)
                self._read = name, self._states.read(saved, rank)
        except (Damaged, Unreachable, StopIteration) as error:
            why = f"the state {name} can't be read: {error}"
        for said in gather_object(self._share_group, [why]):
            if said:
                raise RankFailure(said)
        found, self._read = self._read[1], ("", {})
        return found
