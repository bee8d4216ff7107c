# SPDX-License-Identifier: Apache-2.0
"""Numbers and lists as a message says them: `1 process`, `2 processes`, `ranks 1 and 3`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAX_SHOWN = 8  # before the rest is counted
_LONG_WORD = re.compile(r"(?<!\S)(\S{100})\S{101,}(\S{100})")
_LONG_LINE = re.compile(r"^(.{500}).{501,}(.{500})$", re.MULTILINE)


def shortened(message: str) -> str:
    """Return a message in which long words and lines have lost their middle: a value in it may be a whole file."""
    return _LONG_LINE.sub(r"\1...\2", _LONG_WORD.sub(r"\1...\2", message))


def counted(number: int, noun: str) -> str:
    """Return `1 process`, or `2 processes`."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return `processes` for `process`, `batches` for `batch`, `files` for `file`."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def listed(numbers: Iterable[int]) -> str:
    """Return `1`, or `1, 2 and 3`; of more than eight, the first ones and how many more there are."""
    words = [str(number) for number in numbers]
    if len(words) > _MAX_SHOWN:
        words = [*words[:_MAX_SHOWN], f"{len(words) - _MAX_SHOWN} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 1, 2 and 3`, as `listed` has the numbers."""
    numbers = list(numbers)
    return f"{noun if len(numbers) == 1 else plural(noun)} {listed(numbers)}"


def in_bytes(count: float) -> str:
    """Format a number of bytes with a suitable unit: 1.6 MB, 98 kB."""
    return _in_steps(count, ("B", "kB", "MB", "GB", "TB"))


def in_rate(bits: float) -> str:
    """Format bits per second with a suitable unit: 100 Mbit/s."""
    return _in_steps(bits, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def in_seconds(seconds: float) -> str:
    """Format a time with a suitable unit: 50 ms, 1.25 s."""
    if seconds >= 0.9995 or seconds == 0:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} us"


def _in_steps(amount: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} {units[-1]}" if amount < 999.5 else f"{amount:,.0f} {units[-1]}"
