# SPDX-License-Identifier: Apache-2.0
"""Several ranks write one checkpoint: all parts are on the disk before it counts, and an error on one is everyone's."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from farflung.base.bars import bar
from farflung.base.checks import Address
from farflung.base.errors import CheckpointError, ConfigError, StateError, Unsupported
from farflung.base.events import FILES_ONLY, Kind, record
from farflung.base.words import in_bytes
from farflung.checkpoint import atomic, paths
from farflung.checkpoint.atomic import StagedDir
from farflung.checkpoint.entries import Entry, Staging
from farflung.checkpoint.files import sums_of
from farflung.checkpoint.manifest import FileRecord, Manifest
from farflung.checkpoint.remote import RemoteCheckpoints, TemporaryStagedDir, numbers_in
from farflung.checkpoint.writer import sync, tensor_bytes
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.process.failure import CHECKPOINT, leave_note

Busy = Literal["wait", "refuse"]
_WRITERS = 3  # files that a rank writes at a time
_OURS = {kind.__name__: kind for kind in (ConfigError, StateError, Unsupported)}


@dataclass(frozen=True)
class CheckpointGroup:
    """The ranks that write checkpoints together."""

    exchange: Exchange
    leader: int  # the rank that makes this one's folder and puts it in place: of all, or of this machine
    call: str  # what the script called, as errors name it

    @property
    def leads(self) -> bool:
        return self.exchange.rank == self.leader

    def agree(self, doing: str, act: Callable[[], Any]) -> list[Any]:
        """Do something on every rank and return what came of it, by rank.

        An error on one rank is raised on all, as CheckpointError, or as the one of ours that each failed rank had.
        """
        value, failure, cause = None, None, None
        try:
            value = act()
        except Exception as error:  # also of a script's own hooks and states; the others wait, and have to hear of it
            failure, cause = (type(error).__name__, str(error)), error
        words = collectives.gather_object(self.exchange, [(value, failure)], name=self.call)
        failures = {rank: word for rank, (_, word) in enumerate(words) if word is not None}
        if failures:
            if cause is not None and len(words) == 1 and not isinstance(cause, OSError):
                raise cause
            named = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in failures.items())
            kinds = {kind for kind, _ in failures.values()}
            ours = _OURS.get(kinds.pop()) if len(kinds) == 1 else None
            raise (ours or CheckpointError)(f"{doing} failed; nothing else has changed. {named}") from cause
        return [value for value, _ in words]


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint to be written."""

    target: Path | Address
    facts: dict[str, Any]  # what the manifest says of the run
    is_numbered: bool = False  # by automatic naming, which refuses to mix two runs
    total_limit: int | None = None  # how many numbered ones stay; None: all
    is_shown: bool = False  # a bar on a terminal may show how far this process is
    keep_local: Path | None = None  # the folder in which a copy of one at an address stays

    @property
    def doing(self) -> str:
        return f"Writing the checkpoint {self.target}"

    @cached_property
    def remote(self) -> RemoteCheckpoints | None:
        """Where it goes in a bucket: its own address, or that of its series; None: it is written to a folder."""
        if isinstance(self.target, Path):
            return None
        return RemoteCheckpoints(self.target.parent if self.is_numbered else self.target)

    @property
    def folder(self) -> Path | None:
        """Where it is on this machine; None: in temporary folders, one for each rank, as long as it is being sent."""
        if isinstance(self.target, Path):
            return self.target
        return self.keep_local and self.keep_local / self.target.name

    def check(self) -> None:
        """Raise ConfigError if nothing may be written there."""
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file. Name a folder for the checkpoint.")
        others = numbers_in(self.target.parent) if self.is_numbered else []
        if others and others[-1] >= atomic.number_of(self.target):
            raise ConfigError(
                f"{self.target.parent} already has {paths.checkpoint(others[-1])} of another run, and "
                f"{self.target.name} would be mixed up with its checkpoints. Resume it with load_state(), use another "
                "project_dir, or delete or move the old checkpoints."
            )

    def make_folder(self, leads: bool) -> StagedDir | None:
        """Return the folder in which a rank puts its files, made by it; None: another rank makes it."""
        if self.folder is None:
            staged: StagedDir = TemporaryStagedDir(self.target.name)
        elif not leads:
            return None
        else:
            aside = atomic.aside_of(self.folder.parent) if self.is_numbered else None
            staged = StagedDir(self.folder, secrets.token_hex(4), aside)
        if self.remote is not None and leads:
            staged.save = self.remote.next_save(self.target.name if self.is_numbered else "")
        staged.begin()
        return staged


@dataclass
class CheckpointSaver:
    """Writes checkpoints one after the other, at once or in the background.

    `group` are those that write the next one.
    """

    group: CheckpointGroup
    _background: CheckpointGroup | None = None
    _thread: Thread | None = None
    _failure: BaseException | None = None
    _staging: Staging = field(default_factory=Staging)

    @contextmanager
    def begin(self, request: SaveRequest) -> Iterator[StagedDir]:
        """Make the folder in which the files are put meanwhile, and discard it if the block fails.

        All ranks call this together, as all that follows.
        """

        here: StagedDir | None = None

        def make() -> StagedDir | None:
            nonlocal here
            if self.group.leads:
                request.check()
            here = request.make_folder(self.group.leads)
            return here if self.group.leads else None

        try:
            leaders: StagedDir = self.group.agree(request.doing, make)[self.group.leader]
            staged = here or leaders
            staged.save, staged.is_ours = leaders.save, here is not None
            begun = time.perf_counter()
            yield staged
        except BaseException:
            if here is not None:
                here.discard()
            raise
        if self.group.leads:
            record(Kind.SAVING, level=FILES_ONLY, seconds=time.perf_counter() - begun)

    def write(self, request: SaveRequest, staged: StagedDir, parts: Sequence[Entry], block: bool = True) -> None:
        """Write this rank's parts into the folder that was begun, and put it in place when all ranks have.

        Without `block`, copy the parts and return; a thread does it.
        """
        if block:
            _write(self.group, request, staged, parts, at_once=True)
            return
        group = self._in_background()
        copies: list[Entry] = []
        self.group.agree(request.doing, lambda: copies.extend(self._staging.copied(parts)))

        def work() -> None:
            try:
                _write(group, request, staged, copies, at_once=False)  # no thread may start at the very end
            except BaseException as error:  # raised by the next call, in the thread that can do something about it
                staged.discard()
                self._failure = error

        # No daemon: the interpreter waits for it at its end.
        self._thread = Thread(target=work, name="farflung checkpoint")
        self._thread.start()

    def _in_background(self) -> CheckpointGroup:
        """Return the ranks that write together, for a thread: a collective of them, the first time."""
        exchange = self.group.exchange
        if exchange.size == 1:
            return self.group
        if self._background is None:
            self._background = replace(self.group, exchange=Exchange(exchange.group.split(exchange.size)))
        return self._background

    def settle(self, busy: Busy = "wait") -> None:
        """Wait for the checkpoint that is being written in the background, and raise its error, once.

        With `busy="refuse"` raise StateError instead, on all ranks where it is being written on any; they call this
        together.
        """
        if busy == "refuse":
            self.group.agree("save_state with busy='refuse'", self._refuse)
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _refuse(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise StateError(
                "save_state: the previous checkpoint is still being written. Use busy='wait', or save later."
            )


def _write(
    group: CheckpointGroup, request: SaveRequest, staged: StagedDir, parts: Sequence[Entry], at_once: bool
) -> None:
    remote = request.remote

    def write() -> tuple[int, dict[str, Any]]:
        found = _write_all(parts, staged.folder, at_once, request.is_shown)
        return group.leader, found if request.folder is not None else found | _others(found, staged.folder)

    all_written = group.agree(request.doing, write)
    written = [found if leader == group.leader else {} for leader, found in all_written]  # of one machine, or of all
    sent: list[str] = []
    if remote is not None:
        before = {name for found in written[: group.exchange.rank] for name in found}
        sent += [name for name in atomic.names_in(staged.folder) if name not in before] if staged.is_ours else []
        shown = at_once and request.is_shown
        send = partial(remote.send, staged.folder, save=staged.save, threaded=at_once, is_shown=shown)
        group.agree(request.doing, lambda: send(sent))

    def place() -> None:
        if group.leads:
            manifest = _complete(staged.folder, parts, written, request.facts)
            if remote is not None:
                left = [name for name in atomic.names_in(staged.folder) if name not in (*sent, paths.MANIFEST)]
                send(left)
                remote.complete(staged.folder, manifest, staged.save)
            staged.commit()
            leave_note(CHECKPOINT, os.fspath(request.target))
            record(Kind.CHECKPOINT, level=FILES_ONLY, folder=os.fspath(request.target))
            if remote is not None:
                remote.prune(request.is_numbered, request.total_limit)
            if request.is_numbered and request.folder is not None:
                atomic.prune(request.folder, request.total_limit)

    group.agree(request.doing, place)
    if request.folder is None:
        staged.discard()


def _others(written: dict[str, Any], folder: Path) -> dict[str, FileRecord]:
    """Return the records of files that hooks have put into the folder that a rank has of its own."""
    names = [name for name in atomic.names_in(folder) if name not in written and name.split("/")[0] not in written]
    return {name: FileRecord(*sums_of(folder / name)) for name in names}


def _write_all(parts: Sequence[Entry], folder: Path, at_once: bool, is_shown: bool) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"this rank does not see {folder}, which another rank created. Use a folder shared by all machines, or "
            "ProjectConfiguration(save_on_each_node=True)."
        )
    try:
        if not at_once:
            return {part.name: part.write(folder, threaded=False) for part in parts}
        with (
            bar(f"Writing {folder.name}", tensor_bytes([part.content for part in parts]), is_shown) as shown,
            ThreadPoolExecutor(_WRITERS, "farflung writer") as writers,
        ):
            # Most of writing is copying and summing, outside of Python's lock; one file is summed while another waits.
            records = list(writers.map(lambda part: part.write(folder, bar=shown), parts))
        return {part.name: record for part, record in zip(parts, records, strict=True)}
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, f"{error.strerror} ({_space(parts, folder)})", error.filename) from error


def _space(parts: Sequence[Entry], folder: Path) -> str:
    """Say how many bytes this rank's parts take, and how many were free for the parts of all ranks."""
    written = sum(path.stat().st_size for path in atomic.files_in(folder))  # which goes away again
    free = shutil.disk_usage(folder).free + written
    needed = tensor_bytes([part.content for part in parts])
    return f"this rank writes {in_bytes(needed)}; {in_bytes(free)} were free"


def _complete(
    folder: Path, parts: Sequence[Entry], written: Sequence[dict[str, Any]], facts: dict[str, Any]
) -> Manifest:
    """Finish the folders of all ranks, and write the manifest, over what hooks have put into the folder too."""
    mine = {part.name: part for part in parts}
    records: dict[str, FileRecord] = {}
    for name in dict.fromkeys(name for found in written for name in found):
        entry = mine.get(name, Entry(name, None))
        records.update(entry.finish(folder, [found[name] for found in written if name in found]))
    for name in atomic.names_in(folder):
        if name not in records:
            records[name] = FileRecord(*sums_of(folder / name))
            with open(folder / name, "rb") as file:
                sync(file.fileno())
    manifest = Manifest(records, **facts)
    manifest.write(folder / paths.MANIFEST)
    return manifest
