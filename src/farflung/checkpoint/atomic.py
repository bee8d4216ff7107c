# SPDX-License-Identifier: Apache-2.0
"""Folders that are whole or not there: written aside, put in place by one rename, and the old taken away after it.

A checkpoint `a/b` is written to `a/.b.writing-TOKEN/b`. If `a/b` is not there yet, that folder is renamed to it.
If it is, with files of the script's own in it perhaps, everything is written to `a/b/.writing-TOKEN/b`, and the one
rename is that of `.writing-TOKEN` to `.ready`: from then on the new checkpoint counts, though its files still have to
be moved up, which `finish` does, at once or when the folder is next looked at. A process may be killed anywhere.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farflung.base.checks import Address
from farflung.base.errors import CheckpointError
from farflung.base.files import WRITING
from farflung.checkpoint import paths
from farflung.checkpoint.manifest import Manifest, names_of
from farflung.checkpoint.writer import sync_folder

READY = ".ready"
_TRASH = ".trash-"


class StagedDir:
    """The folder in which a checkpoint is written before it is put in place by `commit`.

    One rank begins, commits or discards it; the others put files into its `folder`, and set `is_ours` to False. The
    `token` tells it from folders of earlier saves; it is `aside`, on the target's file system, or else next to the
    target.
    """

    def __init__(self, target: Path, token: str, aside: Path | None = None) -> None:
        target = Path(os.path.abspath(target))  # `.` has no name
        self.target = target
        self._is_fresh = not target.exists()
        self._aside = aside or target.parent
        self._name = f".{target.name}" if aside is None else f"{_series(target.parent)}{target.name}"
        self._shell = self._aside / f"{self._name}{WRITING}{token}" if self._is_fresh else target / f"{WRITING}{token}"
        self.folder = self._shell / target.name
        self.is_ours = True
        self.save = ""  # below which key its files go, if they are sent to an address too

    def begin(self) -> None:
        """Make the folder, once what earlier attempts have left is gone."""
        self._aside.mkdir(parents=True, exist_ok=True)
        left = list(self._aside.glob(f"{glob.escape(self._name)}{WRITING}*"))
        if not self._is_fresh:
            finish(self.target)
            left += self.target.glob(f"{WRITING}*")
        for path in left:
            shutil.rmtree(path, ignore_errors=True)  # it is in nobody's way; the next one tries again
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True)

    def commit(self) -> None:
        """Put the checkpoint in place, its manifest being there and all of its files on the disk."""
        for folder, _, _ in os.walk(self._shell):
            sync_folder(Path(folder))
        if self._is_fresh:
            try:
                os.rename(self.folder, self.target)
            except OSError:
                if not self.target.is_dir():
                    raise
            else:
                sync_folder(self.target.parent)
                self._shell.rmdir()
                return
        os.rename(self._shell, self.target / READY)  # there is a folder, perhaps by now only
        sync_folder(self.target)
        finish(self.target)

    def discard(self) -> None:
        if self.is_ours:
            shutil.rmtree(self._shell, ignore_errors=True)  # what can't be removed now is removed by the next `begin`


def finish(target: Path) -> None:
    """Move up the files of a checkpoint that is ready, and remove those before it; CheckpointError if it can't."""
    ready = target / READY
    if not ready.is_dir():
        return
    try:
        with _locked(target):
            if ready.is_dir():  # another process may have been first
                for folder in ready.iterdir():
                    _move_up(folder, target)
                shutil.rmtree(ready)
                sync_folder(target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the checkpoint in {ready} is complete, but its files could not be moved up: {error}. Move them "
            "by hand, or make the folder writable."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from moving up files in the same folder, if its file system can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # a process forked meanwhile has the file open too
        os.close(number)


def _move_up(folder: Path, target: Path) -> None:
    new = Manifest.read(folder)
    if new is None:  # the manifest goes last, so everything has been moved
        if not folder.is_dir() or any(files_in(folder)):
            raise CheckpointError(
                f"{folder} is not a checkpoint, so nothing was moved out of it. Take it away by hand."
            )
        return
    manifest = folder / paths.MANIFEST
    for name in _belonging(target) - new.files.keys():
        (target / name).unlink(missing_ok=True)
    for path in [path for path in files_in(folder) if path != manifest]:
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    for inner in target.iterdir():
        if paths.SHARDS.fullmatch(inner.name) and inner.is_dir() and not any(inner.iterdir()):
            inner.rmdir()  # it would be read in place of the new file
    for inner in {place.parent for place in (target / name for name in new.files)}:
        sync_folder(inner)
    os.replace(manifest, target / paths.MANIFEST)


def _belonging(target: Path) -> set[str]:
    """Return the names of a checkpoint's files, whoever wrote it; exported weights where its manifest names them."""
    inner = [path for path in target.iterdir() if path.name in paths.FOLDERS or paths.SHARDS.fullmatch(path.name)]
    there = [path for folder in [target, *inner] if folder.is_dir() for path in folder.iterdir()]  # not all in there
    names = {path.relative_to(target).as_posix() for path in there}
    known = {name for name in names if paths.KNOWN.fullmatch(name) and not paths.EXPORTED.fullmatch(name)}
    return known | names_of(target)


def numbered(automatic: Path) -> list[Path]:
    """Return the automatically named checkpoints in a folder, the oldest first."""
    there = automatic.iterdir() if automatic.is_dir() else ()
    return sorted((path for path in there if paths.NAMED.fullmatch(path.name) and path.is_dir()), key=number_of)


def number_of(checkpoint: Path | Address) -> int:
    """Return the number of an automatically named checkpoint."""
    return int(checkpoint.name.removeprefix(paths.PREFIX))


def aside_of(automatic: Path) -> Path:
    """Return where numbered checkpoints are written: outside of their folder, where others look for numbers alone."""
    outside = automatic.parent
    is_other_disk = os.path.exists(automatic) and automatic.stat().st_dev != outside.stat().st_dev
    if is_other_disk or _is_mounted(automatic) or not os.access(outside, os.W_OK):
        return automatic
    return outside


def _is_mounted(folder: Path) -> bool:
    """Return whether something is mounted at a folder: nothing is renamed into it then, even on the same disk."""
    point = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", os.path.realpath(folder))
    with suppress(OSError):  # other systems than Linux mount other disks alone
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
        return any(line.split(" ")[4] == point for line in mounts)
    return False


def _series(automatic: Path) -> str:
    """Return how names begin of what is written outside of such a folder, where those of other runs may be too."""
    return f".{Path(os.path.abspath(automatic)).name}."


def prune(newest: Path, total_limit: int | None) -> None:
    """Remove the oldest numbered checkpoints, so that `total_limit` are left, and what killed processes have left."""
    aside = aside_of(newest.parent)
    for path in list(aside.glob(f"{glob.escape(_series(newest.parent))}{paths.PREFIX}*")):
        if WRITING in path.name or _TRASH in path.name:
            shutil.rmtree(path, ignore_errors=True)  # it is out of the way already
    old = [path for path in numbered(newest.parent) if path != newest]
    for folder in [] if total_limit is None else old[: max(0, len(old) + 1 - total_limit)]:
        remove(folder, aside)


def remove(folder: Path, aside: Path) -> None:
    """Take a checkpoint away by one rename, then from the disk. A failure is a warning; a later save tries again.

    A folder of an image's lower layer can't be renamed: overlayfs says that it is on another device.
    """
    trash = aside / f"{_series(folder.parent)}{folder.name}{_TRASH}{secrets.token_hex(4)}"
    try:
        try:
            os.rename(folder, trash)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            (folder / paths.MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no checkpoint
            trash = folder
        shutil.rmtree(trash)
    except OSError as error:
        warnings.warn(
            f"The old checkpoint {folder} could not be removed: {error}. The next save tries again.", stacklevel=2
        )


def files_in(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, but for those of attempts to write a checkpoint into it."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if not path.name.startswith(READY) and WRITING not in path.name:
                yield from files_in(path)
        else:
            yield path


def names_in(folder: Path) -> list[str]:
    """Return the names of all files below a folder, relative to it."""
    return [path.relative_to(folder).as_posix() for path in files_in(folder)]
