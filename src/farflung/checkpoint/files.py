# SPDX-License-Identifier: Apache-2.0
"""Files on the disk: only regular ones inside their folder are opened; their sizes and checksums.

A named pipe would make its reader wait for ever, and a device never ends.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from farflung.base.bars import Bar
from farflung.base.errors import CheckpointError
from farflung.comm.checksum import crc32

_BLOCK = 2**20  # bytes at a time; small enough to stay in a processor's cache between the file and the checksum
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def inside(name: str) -> str:
    """Return `name` unchanged; CheckpointError if it is absolute, climbs out of its folder, or is no plain path."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise CheckpointError(f"{name!r} names a file outside of its folder, so it was neither read nor written.")
    return name


def kind_of(mode: int) -> str | None:
    """Return what the `st_mode` of a path stands for; None: a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, or a link to one; CheckpointError if something else has the name."""
    try:
        kind = kind_of(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}).") from error
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}, not a file, so it was not opened. Remove it, or name another folder.")
    return True


def sums_of(path: Path, bar: Bar | None = None) -> tuple[int, int]:
    """Return the size and the checksum of a file, as it is on the disk now; `bar` counts what is read."""
    is_file(path)
    total = found = 0
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found = crc32(buffer[:count], found)
            total += count
            if bar is not None:
                bar.advance(count)
    return total, found
