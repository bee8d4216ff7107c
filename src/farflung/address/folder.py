# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet in a folder that all of them can write to, on one machine or a network file system.

Values are files. Each is written aside and then renamed or linked to its name, so no reader sees a part of one. Readers
open files by name, as listings of a network file system may be late.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, TypeVar

from farflung.address.object_group import ObjectTransport
from farflung.address.objects import PATIENCE_S, ObjectBoard, try_out
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, Unreachable

_T = TypeVar("_T")

_ASIDE = ".aside"  # the folder of files that are being written; names of objects have no dot
_VALUE = ".value"
_ATTEMPTS = 20  # to create a folder that others delete, as it is empty
_ABANDONED_S = 86_400.0  # after which a file aside is that of a process that was killed


class FolderTransport(ObjectTransport):
    """Groups of replicas that meet in a folder, which exists.

    Raises:
        ConfigError: this process can't write, rename and delete there, or the file system has no hard links.
    """

    def __init__(self, path: str | os.PathLike[str], patience_s: float = PATIENCE_S, seal: Seal | None = None) -> None:
        folder = Path(path).absolute()
        board = folder_at(folder, patience_s, seal)
        try:
            _delete_abandoned(folder / _ASIDE)
            try_out(board.patient(0))
        except (OSError, Unreachable, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"Replicas can't meet in the folder {folder}: {why}. It must exist, be writable, and allow to rename "
                "and delete files and to create hard links."
            ) from None
        super().__init__(board, folder.as_uri())
        self._path = folder

    def _below(self, name: str) -> ObjectTransport:
        seal = self.board.seal and self.board.seal.below(name)
        return FolderTransport(self._path / name, self.board.patience_s, seal)  # if it vanishes, nothing makes it again


def folder_at(path: str | os.PathLike[str], patience_s: float = PATIENCE_S, seal: Seal | None = None) -> FolderBoard:
    """Return the files of a folder, which may be one that this process can't write to."""
    folder = Path(path).absolute()
    return FolderBoard(f"folder {folder}", patience_s=patience_s, path=str(folder), seal=seal)


def _open_file(path: str, flags: int) -> int:
    """Open a file; IsADirectoryError if it is something else, such as a named pipe, whose reader would wait forever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "Is not a file", path)
    return descriptor


def _delete_abandoned(aside: Path) -> None:
    """Make the folder of files that are being written, and delete what was abandoned there; ValueError if it is a link.

    Others may write next to it: it is opened once, so that a link that they put in its place leads nowhere.
    """
    aside.mkdir(exist_ok=True)
    try:
        folder = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        if aside.is_symlink():
            raise ValueError(f"{aside.name} there is a link, and files would be deleted where it leads") from None
        raise
    try:
        mine = secrets.token_hex(8)
        descriptor = os.open(mine, os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        now = os.fstat(descriptor).st_mtime  # as the file system's clock has it
        os.close(descriptor)
        os.unlink(mine, dir_fd=folder)
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # another process has renamed it meanwhile
                if os.stat(name, dir_fd=folder).st_mtime < now - _ABANDONED_S:
                    os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class FolderBoard(ObjectBoard):
    """The files of a folder.

    Args:
        path: of the folder, which a `FolderTransport` has tried out.
    """

    path: str = field(kw_only=True)
    pause_s: ClassVar[float] = 0.02
    heartbeat_s: ClassVar[float] = 1.0

    def delete_names(self, names: Sequence[str]) -> None:
        def delete(path: str) -> None:
            with suppress(FileNotFoundError):
                os.unlink(path)

        paths = [self._path(name) for name in names]
        for path in paths:
            self.ask(partial(delete, path), "delete")
        for folders in dict.fromkeys(map(self._folders, paths)):
            with suppress(OSError):  # the first one that is not empty
                for folder in folders[:0:-1]:
                    os.rmdir(folder)

    def write_name(self, name: str, parts: Iterable[bytes | memoryview], is_new: bool) -> None:
        place = os.link if is_new else os.replace
        path, aside = self._path(name), os.path.join(self.path, _ASIDE, secrets.token_hex(8))

        def write() -> None:
            is_aside = True
            try:
                with open(aside, "wb") as file:
                    file.writelines(parts)
                    if is_new:  # what others act on is no empty file after a power cut
                        file.flush()
                        os.fsync(file.fileno())
                for attempt in range(_ATTEMPTS):
                    try:
                        place(aside, path)
                        is_aside = is_new
                        return
                    except FileNotFoundError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                        with suppress(FileNotFoundError):  # others delete empty ones
                            os.makedirs(os.path.dirname(path), exist_ok=True)
            finally:
                with suppress(FileNotFoundError):
                    if is_aside:
                        os.unlink(aside)

        self.ask(write, "write")

    def read_name(
        self, name: str, act: Callable[[BufferedReader, int], _T], span: tuple[int, int] | None = None
    ) -> _T | None:
        path, start = self._path(name), span[0] if span else 0

        def read() -> _T | None:
            for is_last in (False, True):
                try:
                    with open(path, "rb", opener=_open_file) as file:
                        file.seek(start)
                        return act(file, span[1] if span else os.fstat(file.fileno()).st_size)
                except OSError as error:
                    if error.errno == errno.EISDIR and self.seal is not None:
                        return act(BufferedReader(io.BytesIO()), 0)  # what is not sealed
                    if error.errno not in (errno.ENOENT, errno.ESTALE):
                        raise
                if is_last or not self._renew(path):
                    break
            return None

        return self.ask(read)

    def find_names(self, folder: str, found: MutableSequence[str]) -> bool:
        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # it was empty, and another process has deleted it
                raise error

        def files() -> Iterator[str]:
            for where, _, names in os.walk(os.path.join(self.path, folder), onerror=failed):
                yield from (os.path.relpath(os.path.join(where, name), self.path) for name in names)

        os.stat(self.path)
        found[:] = [file.removesuffix(_VALUE) for file in files() if file.endswith(_VALUE)]
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self.path, *name.split("/")) + _VALUE

    def _folders(self, path: str) -> tuple[str, ...]:
        """Return the folders above a file, from the root on."""
        names = path.removeprefix(self.path).lstrip(os.sep).split(os.sep)[:-1]
        return tuple(accumulate(names, os.path.join, initial=self.path))

    def _renew(self, path: str) -> bool:
        """Open the folders above a file: a client of NFS then asks its server again whether the file exists.

        Returns:
            whether all of these folders exist.
        """
        for folder in self._folders(path):
            try:
                os.close(os.open(folder, os.O_RDONLY))
            except FileNotFoundError:
                if folder == self.path:
                    raise
                return False
        return True
