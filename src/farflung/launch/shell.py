# SPDX-License-Identifier: Apache-2.0
"""Writes commands of ours, and for shells that others chose, so that each word arrives as it was, whatever it has."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

# Single quotes protect these in sh, bash, dash, zsh, fish and tcsh alike: ASCII without `!` and newlines, which tcsh
# reads even there, and without backslashes, which fish does. sbatch refuses scripts that hold \r\n.
_IS_PLAIN = re.compile(r"""[ "-\[\]-~]*""")
_UNSAFE = re.compile(rb"""[^ "-&(-\[\]-~]""")  # of those, without the quote itself

# `python -m` looks for all modules in the current folder first, those of Python itself too; this looks there last, and
# for Farflung alone.
CURRENT_LAST = "import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); "
_START = CURRENT_LAST + "import farflung; sys.path[-1] or sys.path.pop(); from {} import main; main()"


def start_of(module: str, python: str | None = None, *flags: str) -> tuple[str, ...]:
    """Return the first words of a command that calls the `main` of a module of ours in this Python, or another."""
    return python or sys.executable, *flags, "-c", _START.format(module)


def sh_text(text: str) -> str:
    """Return a line in plain ASCII that a POSIX shell runs as it would run `text`."""
    if _IS_PLAIN.fullmatch(text):
        return text
    octal = _UNSAFE.sub(lambda byte: b"\\%04o" % ord(byte[0]), os.fsencode(text)).decode("ascii")
    return f"""eval "$(printf %b '{octal}')\""""


def shell_line(words: Sequence[str]) -> str:
    """Return a command that every shell runs as these words; words added to the line are added to the command."""
    text = shlex.join(words)
    if _IS_PLAIN.fullmatch(text):
        return text
    line = sh_text(f'exec {text} "$@"')
    return f"/bin/sh -c {shlex.quote(line)} sh"
