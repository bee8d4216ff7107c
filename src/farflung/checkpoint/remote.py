# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at an address: their files are sent to a bucket, and fetched from it to a folder, every byte checked.

A bucket has no rename. Each save of `first` sends its files to `first/0001-TOKEN/`, with a number that grows, and
creates the manifest there last: what has none is no checkpoint, and the highest number is the newest. Those before it,
and what killed saves have left, are removed after that. Such a folder, copied from the bucket, is a checkpoint like any
other; and one that was copied to a bucket is read too.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from farflung.address.objects import FileParts, ObjectBoard, try_out
from farflung.address.schemes import objects_at
from farflung.base.bars import Bar, bar
from farflung.base.checks import Address
from farflung.base.errors import CheckpointError, Unreachable
from farflung.checkpoint import atomic, paths
from farflung.checkpoint.atomic import StagedDir
from farflung.checkpoint.checkpoint import Checkpoint, in_order
from farflung.checkpoint.manifest import FileRecord, Manifest
from farflung.checkpoint.writer import BLOCK, FileWriter
from farflung.comm.checksum import crc32
from farflung.comm.threads import side_by_side

_T = TypeVar("_T")

_SAVE = re.compile(r"(\d{4,})-[0-9a-f]{8}")  # the folder of one save
_OWN = re.compile(rf"({_SAVE.pattern}/).+")  # what a later save may remove: of one checkpoint, and of numbered ones
_NUMBERED = re.compile(rf"({paths.PREFIX}\d+/{_SAVE.pattern}/).+")
_RETRIES = 8  # of a request, within some seconds; then all of the file, as long as the store may be silent
_AT_ONCE = 3  # files
_BLOCK = 2**20  # bytes that are fetched at a time, to be checked
_BLOCKS = 8  # of a file that ranks read in parts, in one request at most
_SCRATCH, _YOUNG_S = "farflung-checkpoint-", 60.0  # of temporary folders; its process may be about to lock it


class TemporaryStagedDir(StagedDir):
    """A folder for the files of one checkpoint while this process sends or has fetched them; then it is removed.

    It is among the temporary ones of this machine, and locked as long as its process lives: the next one that is made
    removes those whose processes were killed.
    """

    def __init__(self, name: str) -> None:
        self.target = Path(name)
        self.is_ours, self.save = True, ""

    def begin(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
            _remove_if_left(left)
        self._shell = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        self._lock = os.open(self._shell, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = self._shell / self.target.name
        self.folder.mkdir()

    def commit(self) -> None:
        self.discard()

    def discard(self) -> None:
        super().discard()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # it is another user's, its process lives, or another one removes it
        number = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if time.time() - os.fstat(number).st_mtime > _YOUNG_S:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(number)


@dataclass(frozen=True)
class RemoteCheckpoints:
    """The checkpoints below an address: one, or several with names."""

    address: Address

    @cached_property
    def _board(self) -> ObjectBoard:
        return replace(objects_at(self.address, retries=_RETRIES), is_strict=True)

    @contextmanager
    def _asked(self) -> Iterator[ObjectBoard]:
        try:
            yield self._board
        except Unreachable as error:
            raise CheckpointError(str(error)) from error

    def _names(self) -> Sequence[str]:
        with self._asked() as board:
            return board.names_below("")

    # ---- saving

    def try_out(self) -> None:
        """Make each kind of request once; CheckpointError or ValueError if the bucket refuses one of them."""
        with self._asked() as board:
            try_out(board)

    def numbers(self) -> list[int]:
        """Return the numbers of the automatically named checkpoints, in order; CheckpointError if it can't be asked."""
        return _numbers(whole(self._names()))

    def next_save(self, name: str) -> str:
        """Return below which key a new save of a checkpoint is to send its files."""
        within = f"{name}/" if name else ""
        tails = (key.removeprefix(within) for key in self._names() if key.startswith(within))
        numbers = [int(found[1]) for tail in tails if (found := _SAVE.match(tail))]
        return f"{within}{max(numbers, default=0) + 1:04}-{secrets.token_hex(4)}/"

    def send(self, folder: Path, names: Sequence[str], save: str, threaded: bool, is_shown: bool = False) -> None:
        """Send files of a folder; CheckpointError if the bucket does not take one of them.

        Args:
            threaded: several at a time; False if no thread may start any more.
        """
        sizes = {name: (folder / name).stat().st_size for name in names}
        with bar(f"Sending {folder.name}", sum(sizes.values()), is_shown) as shown, self._asked() as board:

            def one(name: str) -> None:
                board.write_name(save + name, FileParts(folder / name, sizes[name], shown.advance), is_new=False)

            side_by_side([partial(one, name) for name in names], _AT_ONCE if threaded else 1)

    def complete(self, folder: Path, manifest: Manifest, save: str) -> None:
        """Create the manifest of a save, which the folder has; all its other files were sent."""
        lacking = sorted(manifest.files.keys() - {key.removeprefix(save) for key in self._names()})
        if lacking:
            raise CheckpointError(
                f"{self.address}/{save}{lacking[0]} was sent, and is gone: another process saves there, or a rule "
                "deletes objects. Give each run an address of its own."
            )
        with self._asked() as board, suppress(FileExistsError):  # by a request of ours whose answer was lost
            board.write_name(save + paths.MANIFEST, [(folder / paths.MANIFEST).read_bytes()], is_new=True)

    def prune(self, is_numbered: bool, total_limit: int | None) -> None:
        """Remove what newer saves replace, numbered checkpoints beyond a limit, and what killed saves have left.

        What other checkpoints below the address have stays. A failure is a warning; a later save tries again.
        """
        try:
            keys = self._names()
            newest = {name: saves[-1] for name, saves in whole(keys).items()}
            for number in _numbers(newest)[:-total_limit] if is_numbered and total_limit else ():
                del newest[paths.checkpoint(number)]
            ours, kept = _NUMBERED if is_numbered else _OWN, set(newest.values())
            doomed = [key for key in keys if (found := ours.fullmatch(key)) and found[1] not in kept]
            manifests = [key for key in doomed if key.endswith(f"/{paths.MANIFEST}")]
            with self._asked() as board:
                for some in (manifests, doomed):  # without its manifest the rest is no checkpoint
                    if some:
                        board.delete_names(some)
        except CheckpointError as error:
            warnings.warn(f"Old checkpoints could not be removed: {error} The next save tries again.", stacklevel=2)

    # ---- loading

    def candidates(self, inner: str = "", is_series: bool = False) -> tuple[list[str], bool]:
        """Return the newest whole save of each checkpoint, the newest first, and whether these are several by name.

        Args:
            inner: the folder that is searched if no checkpoint lies directly below the address.
            is_series: only checkpoints with names count.

        Raises:
            CheckpointError: there is none.
        """
        found = {name: saves[-1] for name, saves in whole(self._names()).items()}
        if "" in found and not is_series:
            return [found[""]], False
        named = {name: save for name, save in found.items() if name and "/" not in name}
        if inner and not named:
            named = {name: save for name, save in found.items() if name.rpartition("/")[0] == inner}
        if not named:
            raise CheckpointError(f"There is no complete checkpoint at {self.address}.")
        return [named[name] for name in in_order(named, lambda name: self._written_at(named[name]))], True

    def _written_at(self, save: str) -> float:
        try:
            return self.manifest(save).written_at
        except CheckpointError as error:
            if isinstance(error.__cause__, Unreachable):
                raise
            return 0.0

    def manifest(self, save: str) -> Manifest:
        """Return the manifest of a save; CheckpointError if it is damaged or gone."""
        with tempfile.TemporaryDirectory() as folder:
            self._fetch(save + paths.MANIFEST, Path(folder, paths.MANIFEST), None)
            found = Manifest.read(Path(folder))
        assert found is not None
        return found

    def fetch(
        self, save: str, stack: ExitStack, keep_local: Path | None, is_shown: bool = False, is_lazy: bool = False
    ) -> Checkpoint:
        """Fetch a checkpoint, every byte checked: to a folder in `keep_local` that may have it, or to a temporary one.

        Args:
            stack: for as long as it is open the folder is there.
            is_lazy: leave files of shards to `LazyFiles`, unless a copy is kept; all other files are checked.

        Raises:
            CheckpointError: a file is missing or not what was written, or the bucket gives no answer.
        """
        name, manifest = name_of(save), self.manifest(save)
        address = self.address / name if name else self.address
        within = save.removeprefix(f"{name}/" if name else "")
        if keep_local is not None and (there := _copy_in(keep_local / address.name, manifest)):
            return replace(there, origin=address, save=within)
        staged: StagedDir = TemporaryStagedDir(address.name)
        if keep_local is not None:
            staged = StagedDir(keep_local / address.name, secrets.token_hex(4))
        staged.begin()
        stack.callback(staged.discard)
        is_lazy &= keep_local is None
        lazy = {file for file, record in manifest.files.items() if is_lazy and len(record.blocks) > 1}
        sizes = {file: record.num_bytes for file, record in manifest.files.items()}
        with bar(f"Fetching {address.name}", sum(sizes[file] for file in sizes.keys() - lazy), is_shown) as shown:
            for file in sizes:
                (staged.folder / file).parent.mkdir(parents=True, exist_ok=True)
            acts = [
                partial(self._fetch_whole, save, file, staged.folder, manifest, shown) for file in sizes.keys() - lazy
            ]
            acts += [partial(self._prepare, save + file, staged.folder / file, manifest.files[file]) for file in lazy]
            side_by_side(acts, _AT_ONCE)
        manifest.write(staged.folder / paths.MANIFEST)
        if keep_local is not None:
            staged.commit()
        found = Checkpoint.open(staged.folder if keep_local is None else staged.target)
        return replace(found, origin=address, save=within, lazy=frozenset(lazy))

    def newest(
        self,
        stack: ExitStack,
        keep_local: Path | None,
        is_shown: bool,
        is_series: bool = False,
        is_lazy: bool = False,
    ) -> Checkpoint:
        """Fetch the checkpoint that is here, or the newest of several that is whole, as `fetch` does."""
        saves, has_several = self.candidates(is_series=is_series)
        passed: list[str] = []
        for save in saves:
            try:
                with ExitStack() as meanwhile:
                    found = self.fetch(save, meanwhile, keep_local, is_shown, is_lazy)
                    stack.push(meanwhile.pop_all())
                    return replace(found, passed=tuple(passed))
            except CheckpointError as error:
                if not has_several or isinstance(error.__cause__, Unreachable):
                    raise
                passed.append(str(error))
        reasons = "".join(f"\n  {reason}" for reason in passed)
        raise CheckpointError(f"There is no complete checkpoint at {self.address}.{reasons}")

    def _fetch_whole(self, save: str, name: str, folder: Path, manifest: Manifest, shown: Bar) -> None:
        found = self._fetch(save + name, folder / name, shown)
        num_bytes, written, _ = manifest.files[name]
        if found != (num_bytes, written):
            raise CheckpointError(
                f"{self.address}/{save}{name} is damaged: it has {found[0]} bytes and the checksum {found[1]:08x}, but "
                f"{num_bytes} bytes and {written:08x} were written."
            )

    def _fetch(self, key: str, path: Path, shown: Bar | None) -> tuple[int, int]:
        """Fetch an object to a file, and return its size and its checksum."""

        def take(file: BufferedReader, size: int) -> tuple[int, int]:
            with _writing(path), FileWriter(path, bar=shown) as writer:
                while block := file.read(_BLOCK):
                    writer.write(block)
            if writer.num_bytes != size:
                raise OSError(f"{key} ended after {writer.num_bytes} of {size} bytes")
            return writer.num_bytes, writer.crc32

        return self._read(key, take)

    def _prepare(self, key: str, path: Path, record: FileRecord) -> None:
        """Make room for an object that is there, and for a byte about each of its blocks: whether it was fetched."""
        self._read(key, lambda *_: True, (0, 1))
        for target, size in ((path, record.num_bytes), (_there(path), len(record.blocks))):
            target.touch()
            os.truncate(target, size)

    def fetch_blocks(self, key: str, path: Path, record: FileRecord, numbers: range, shown: Bar) -> None:
        """Fetch some blocks of an object, each checked, to their places in a file."""
        start, end = numbers.start * BLOCK, min(numbers.stop * BLOCK, record.num_bytes)

        def take(file: BufferedReader, _: int) -> bool:
            with _writing(path), open(path, "r+b") as target:
                target.seek(start)
                for number in numbers:
                    block = file.read(min(BLOCK, end - number * BLOCK))
                    if crc32(block) != record.blocks[number]:
                        raise CheckpointError(f"{self.address}/{key} is damaged in its block {number}.")
                    target.write(block)
                    shown.advance(len(block))
            return True

        self._read(key, take, (start, end - start))

    def _read(self, key: str, take: Callable[[BufferedReader, int], _T], span: tuple[int, int] | None = None) -> _T:
        with self._asked() as board:
            found = board.read_name(key, take, span)
        if found is None:
            raise CheckpointError(f"{self.address}/{key} is missing: it was removed, or a newer save has replaced it.")
        return found


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # what the store says
        raise
    except OSError as error:  # for which the store is not to be asked again
        raise CheckpointError(
            f"{path} can't be written ({error.strerror}). Set TMPDIR, or keep_local in the ProjectConfiguration, to a "
            "folder with room for the checkpoint."
        ) from error


def _there(path: Path) -> Path:
    return path.with_name(f"{path.name}.there")


class LazyFiles:
    """Fetches the blocks of a checkpoint's `lazy` files that are read next, each to its machine once.

    Attributes:
        has_failed: a block could not be fetched, or is not what was written.
    """

    def __init__(self, checkpoint: Checkpoint, is_shown: bool) -> None:
        self._checkpoint, self._remote = checkpoint, RemoteCheckpoints(Address(checkpoint.origin))
        self._is_shown, self.has_failed = is_shown, False

    def __call__(self, path: Path, spans: Iterable[tuple[int, int]]) -> None:
        try:
            self._fetch(path, spans)
        except CheckpointError:
            self.has_failed = True
            raise

    def _fetch(self, path: Path, spans: Iterable[tuple[int, int]]) -> None:
        name, manifest = path.relative_to(self._checkpoint.folder).as_posix(), self._checkpoint.manifest
        if manifest is None or name not in self._checkpoint.lazy:
            return
        wanted = {n for start, length in spans for n in range(start // BLOCK, -(-(start + length) // BLOCK))}
        key, record, runs = self._checkpoint.save + name, manifest.files[name], list[range]()
        with open(_there(path), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # other ranks of this machine may read the same
            there = bytearray(file.read())
            for number in sorted(number for number in wanted if not there[number]):
                if runs and runs[-1].stop == number and len(runs[-1]) < _BLOCKS:
                    runs[-1] = range(runs[-1].start, number + 1)
                else:
                    runs.append(range(number, number + 1))
            with bar(f"Fetching {name}", BLOCK * sum(map(len, runs)), self._is_shown) as shown:
                fetch = partial(self._remote.fetch_blocks, key, path, record, shown=shown)
                side_by_side([partial(fetch, run) for run in runs], _AT_ONCE)
            for number in wanted:
                there[number] = 1
            file.seek(0)
            file.write(there)


def _copy_in(folder: Path, manifest: Manifest) -> Checkpoint | None:
    """Return the checkpoint in a folder if it is this one, every byte checked; None: it is not."""
    try:
        if Manifest.read(folder) == manifest:
            return Checkpoint.open(folder).verify()
    except CheckpointError:
        pass
    return None


def numbers_in(place: Path | Address) -> list[int]:
    """Return the numbers of the automatically named checkpoints in a folder or at an address, in order."""
    return (
        list(map(atomic.number_of, atomic.numbered(place)))
        if isinstance(place, Path)
        else RemoteCheckpoints(place).numbers()
    )


def whole(keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the saves that have a manifest, by the name of their checkpoint, the oldest first."""
    found = defaultdict(list)
    for key in keys:
        save, _, file = key.rpartition("/")
        if file == paths.MANIFEST and not paths.SHARDS.fullmatch(save.rpartition("/")[2]):
            save += "/" if save else ""
            found[name_of(save)].append(save)
    return {name: sorted(saves, key=_order) for name, saves in found.items()}


def name_of(save: str) -> str:
    """Return the name of the checkpoint that a save belongs to; empty if it is the only one of its address."""
    above, _, last = save.rstrip("/").rpartition("/")
    return above if _SAVE.fullmatch(last) else save.rstrip("/")


def _order(save: str) -> tuple[int, str]:
    found = _SAVE.fullmatch(save.rstrip("/").rpartition("/")[2])
    return (int(found[1]) if found else 0), save


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(found[1]) for name in names if (found := paths.NAMED.fullmatch(name)))
