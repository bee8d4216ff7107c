# SPDX-License-Identifier: Apache-2.0
"""Several ranks write one checkpoint: all parts are on the disk before it counts, and an error on one is everyone's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from farflung.base.errors import CheckpointError, ConfigError, StateError, Unsupported
from farflung.checkpoint import atomic, layout, pieces
from farflung.checkpoint.checksum import sums_of
from farflung.checkpoint.manifest import Entry, Manifest
from farflung.checkpoint.pieces import Piece, Staging
from farflung.comm import collectives
from farflung.comm.exchange import Exchange

Busy = Literal["wait", "refuse"]
_WRITERS = 3  # files that a rank writes at a time
_OURS = {kind.__name__: kind for kind in (ConfigError, StateError, Unsupported)}


@dataclass(frozen=True)
class Crew:
    """The ranks that write checkpoints together.

    Attributes:
        exchange: what they talk through.
        leader: the rank that makes this one's folder and puts it in place: of all, or of this machine.
    """

    exchange: Exchange
    leader: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.exchange.rank == self.leader

    def agree(self, doing: str, act: Callable[[], Any]) -> list[Any]:
        """Do something on every rank and return what came of it, by rank.

        Raises:
            CheckpointError: it failed on a rank; the same error on all of them. Where it was another one of ours on
                each rank that failed, it stays that one.
        """
        value, failure, cause = None, None, None
        try:
            value = act()
        except Exception as error:  # also of a script's own hooks and states; the others wait, and have to hear of it
            failure, cause = (type(error).__name__, str(error)), error
        words = collectives.gather_object(self.exchange, [(value, failure)])
        failures = {rank: word for rank, (_, word) in enumerate(words) if word is not None}
        if failures:
            if cause is not None and len(words) == 1 and not isinstance(cause, OSError):
                raise cause
            named = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in failures.items())
            kinds = {kind for kind, _ in failures.values()}
            ours = _OURS.get(kinds.pop()) if len(kinds) == 1 else None
            raise (ours or CheckpointError)(f"{doing} failed, but training can continue. {named}") from cause
        return [value for value, _ in words]


@dataclass(frozen=True)
class Order:
    """A checkpoint to be written.

    Attributes:
        target: its folder.
        aside: where it is written meanwhile, None: next to the target.
        facts: what the manifest says of the run: step, iteration, world_size, versions, written_at.
        afterwards: called on the leader once the checkpoint is in place.
        must_be_new: a folder that is there already is an error.
    """

    target: Path
    aside: Path | None
    facts: dict[str, Any]
    afterwards: Callable[[], None] = lambda: None
    must_be_new: bool = False

    @property
    def doing(self) -> str:
        """What to say of it in an error."""
        return f"Writing the checkpoint {self.target}"


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that has begun to be written.

    Attributes:
        folder: where this rank puts its files.
        draft: on the leader, what puts the folder in place.
    """

    order: Order
    folder: Path
    draft: atomic.Draft | None

    def discard(self) -> None:
        """Take away what was written."""
        if self.draft is not None:
            self.draft.discard()


@dataclass
class Saver:
    """Writes checkpoints one after the other, at once or in the background."""

    crew: Crew
    _background: Crew | None = None
    _thread: Thread | None = None
    _failure: BaseException | None = None
    _staging: Staging = field(default_factory=Staging)

    def begin(self, order: Order) -> Attempt:
        """Make the folder in which the files are put meanwhile. All ranks call this together, as all that follows."""
        draft = atomic.Draft(order.target, secrets.token_hex(4), order.aside) if self.crew.leads else None

        def make() -> str:
            if draft is None:
                return ""
            if order.target.exists() and not order.target.is_dir():
                raise ConfigError(f"{order.target} is a file. Name a folder for the checkpoint.")
            if order.must_be_new and order.target.exists():
                raise ConfigError(
                    f"{order.target} already exists. Load it first, or set ProjectConfiguration(iteration=...) to "
                    "the next number."
                )
            draft.begin()
            return os.fspath(draft.folder)

        folders = self.crew.agree(order.doing, make)
        return Attempt(order, Path(folders[self.crew.leader]), draft)

    def write(self, attempt: Attempt, parts: Sequence[Piece]) -> None:
        """Write this rank's parts, and put the checkpoint in place when all ranks have theirs on the disk."""
        _write(self.crew, attempt, parts, at_once=True)

    def write_behind(self, attempt: Attempt, parts: Sequence[Piece]) -> None:
        """Copy this rank's parts and return; a thread writes them and puts the checkpoint in place."""
        if self._background is None:
            exchange = self.crew.exchange
            group = exchange.group.split(exchange.size) if exchange.size > 1 else exchange.group
            self._background = Crew(Exchange(group), self.crew.leader)
        crew = self._background
        copies = self._staging.copied(parts)

        def work() -> None:
            try:
                _write(crew, attempt, copies, at_once=False)  # nobody waits, and no thread may start at the very end
            except BaseException as error:  # raised by the next call, in the thread that can do something about it
                self._failure = error

        # No daemon: the interpreter waits for it at its end.
        self._thread = Thread(target=work, name="farflung checkpoint")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self, busy: Busy = "wait") -> None:
        """Wait for the checkpoint that is being written in the background, if there is one.

        Raises:
            StateError: there is one, and `busy` is `refuse`.
            CheckpointError: it could not be written. It is said once.
        """
        if self._thread is not None:
            if busy == "refuse" and self._thread.is_alive():
                raise StateError(
                    "save_state: the previous checkpoint is still being written. Use busy='wait', or save later."
                )
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _write(crew: Crew, attempt: Attempt, parts: Sequence[Piece], at_once: bool) -> None:
    order, draft = attempt.order, attempt.draft
    try:
        entries = crew.agree(order.doing, lambda: _write_all(parts, attempt.folder, at_once))

        def place() -> None:
            if draft is not None:
                _complete(attempt.folder, {name: entry for found in entries for name, entry in found.items()}, order)
                draft.commit()
                order.afterwards()

        crew.agree(order.doing, place)
    except BaseException:
        attempt.discard()
        raise


def _write_all(parts: Sequence[Piece], folder: Path, at_once: bool) -> dict[str, Entry]:
    if not folder.is_dir():
        raise CheckpointError(
            f"this rank does not see {folder}, which another rank created. Use a folder shared by all machines, or "
            "ProjectConfiguration(save_on_each_node=True)."
        )
    if not at_once:
        return {part.name: pieces.write(part, folder, threaded=False) for part in parts}
    with ThreadPoolExecutor(_WRITERS, "farflung writer") as writers:
        # Most of writing is copying and summing, outside of Python's lock; and one file is summed while another waits.
        entries = list(writers.map(lambda part: pieces.write(part, folder), parts))
    return {part.name: entry for part, entry in zip(parts, entries, strict=True)}


def _complete(folder: Path, entries: dict[str, Entry], order: Order) -> None:
    """Write the manifest, over what hooks have put into the folder too."""
    files = {}
    for name in atomic.names_in(folder):
        entry = entries.get(name)
        if entry is None:
            entry = Entry(*sums_of(folder / name))
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
        files[name] = entry
    Manifest(files=files, **order.facts).write(folder / layout.MANIFEST)
