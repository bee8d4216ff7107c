# SPDX-License-Identifier: Apache-2.0
"""Files that survive their writers: replaced as a whole by a rename, or continued after a line that was torn."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

WRITING = ".writing-"  # in the name of a file that is being written, or whose writer was killed


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a place to write a new file to; leaving the block puts it in place, and an error removes it.

    Readers and memory maps of the old file keep what they have.
    What is no regular file, such as a device or a pipe, can't be replaced: it is written to where it is. Of a link, the
    file that it leads to is replaced. A new file has the permissions of the one that it replaces.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # A part of the name is enough for people; all of it could make the new one longer than a name may be.
    aside = target.with_name(f".{target.name[:40]}{WRITING}{os.urandom(4).hex()}")
    try:
        yield aside
        with suppress(FileNotFoundError):
            os.chmod(aside, stat.S_IMODE(target.stat().st_mode))
        os.replace(aside, target)
    finally:
        with suppress(OSError):
            aside.unlink()


@contextmanager
def utf8_name(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a name of a file or a folder for a library that takes UTF-8 alone, as safetensors does."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        yield name


def open_lines(path: Path, is_shared: bool = False) -> TextIO:
    """Open a file to add lines to it, each written at once. A last line that a full disk tore stays a line.

    If several processes add lines, one that is being written looks torn: `is_shared` keeps the others out until the
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
