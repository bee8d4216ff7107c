# SPDX-License-Identifier: Apache-2.0
"""Files that survive their writers: replaced as a whole by a rename, or continued after a line that was torn."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

FORMER_NAME = "laconic"  # the project's before 0.1.0: files under it are still read
WRITING = ".writing-"  # in the name of a file that is being written, or whose writer was killed


class AtomicFile:
    """A place (`path`) to write a new file to; leaving the block puts it in place, and an error removes it.

    Readers and memory maps of the old file keep what they have.
    What is no regular file, such as a device or a pipe, can't be replaced: it is written to where it is. Of a link, the
    file that it leads to is replaced. A new file has the permissions of the one that it replaces.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = Path(os.path.realpath(path))
        self._is_replaced = self._target.is_file() or not self._target.exists()
        # A part of the name is enough for people; all of it could make the new one longer than a name may be.
        name = f".{self._target.name[:40]}{WRITING}{secrets.token_hex(4)}"
        self.path = self._target.with_name(name) if self._is_replaced else self._target

    def commit(self) -> None:
        if self._is_replaced:
            with suppress(FileNotFoundError):
                os.chmod(self.path, stat.S_IMODE(self._target.stat().st_mode))
            os.replace(self.path, self._target)

    def discard(self) -> None:
        if self._is_replaced:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()
        else:
            self.discard()


def open_lines(path: Path, is_shared: bool = False) -> TextIO:
    """Open a file to add lines to it, each written at once. A last line that a full disk tore stays a line.

    Where several processes add lines, one that is being written looks torn: `is_shared` keeps the others out until the
    file is closed.
    """
    file = path.open("a", encoding="utf-8", buffering=1)
    if is_shared:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as old:
            old.seek(-1, os.SEEK_END)
            file.write("" if old.read() == b"\n" else "\n")
    return file
