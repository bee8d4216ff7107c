# SPDX-License-Identifier: Apache-2.0
"""The key of a run: 32 random bytes as text, in a file that nobody else may read or in `FARFLUNG_KEY`."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config import environ

_KEY = re.compile(r"[0-9a-f]{64}")


def new_key() -> str:
    """Return the text of a new key."""
    return secrets.token_hex(32)


def write_key(path: str) -> None:
    """Write a new key to a new file that nobody else may open.

    Raises:
        ConfigError: the file is there, can't be made, or others may open it whatever its mode is to be.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if (mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode)) & 0o077:
                os.unlink(path)
                raise ConfigError(f"{path!r} has mode {mode:o} there. Keep keys where `chmod 600` works.")
            file.write(f"{new_key()}\n")
    except FileExistsError:
        raise ConfigError(f"{path!r} is there already. Give the name of a new file, or remove it.") from None
    except OSError as error:
        raise ConfigError(f"{path!r} can't be made: {error.strerror}.") from None


def run_key(path: str | None = None) -> bytes | None:
    """Return the key in a file, or else that of the environment; None if neither has one.

    Args:
        path: of the file; None: the one that `FARFLUNG_KEY_FILE` names, if any.

    Raises:
        ConfigError: it is no key, the two differ, or others may read the file. No message has a part of a key.
    """
    path, text = path or environ.text(environ.KEY_FILE), environ.text(environ.KEY)
    in_environment = _parsed(text, environ.KEY) if text else None
    if not path:
        return in_environment
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(4096)
    except OSError as error:
        raise ConfigError(f"key_file is {path!r}, which can't be read: {error.strerror}.") from None
    if mode & 0o077:
        raise ConfigError(
            f"key_file is {path!r}, which others on this machine may read or write (mode {mode:o}). `chmod 600 {path}` "
            "keeps it to you; if it has been so for long, make another key."
        )
    in_file = _parsed(content, f"key_file {path!r}")
    if in_environment not in (None, in_file):
        raise ConfigError(f"The key in {path!r} is not the one in {environ.KEY}. Give one of them.")
    return in_file


def key_variables(path: str | None) -> dict[str, str]:
    """Return the variables by which processes find the key of a file, wherever they work; the key is not in them."""
    return {environ.KEY_FILE: str(Path(path).absolute())} if path else {}


def _parsed(text: str, where: str) -> bytes:
    if not _KEY.fullmatch(text.strip()):
        raise ConfigError(f"{where} holds no key of a run: 64 hexadecimal digits, as `farflung key` prints them.")
    return bytes.fromhex(text.strip())
