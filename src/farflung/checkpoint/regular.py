# SPDX-License-Identifier: Apache-2.0
"""Only regular files are opened: a named pipe makes its reader wait for ever, and a device never ends."""

from __future__ import annotations

import stat
from pathlib import Path

from farflung.base.errors import CheckpointError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(path: Path) -> str | None:
    """Return what `path` is where it is no regular file, and no link to one; None where it is one.

    Raises:
        OSError: there is nothing, or it can't be looked at.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return next((kind for test, kind in _KINDS if test(mode)), "something else")


def is_file(path: Path) -> bool:
    """Say whether there is a regular file at `path`; nothing is opened.

    Raises:
        CheckpointError: something else has its name, or it can't be looked at.
    """
    try:
        kind = kind_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}).") from error
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}, not a file, so it was not opened. Remove it, or name another folder.")
    return True
