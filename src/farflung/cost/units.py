# SPDX-License-Identifier: Apache-2.0
"""Parse numbers with units, as people write them: `1.1B`, `100Mbit`, `50ms`."""

from __future__ import annotations

import math
import re

from farflung.base.errors import ConfigError

_WRITTEN = re.compile(r"\s*((?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\S*)\s*", re.ASCII)
_STEPS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_RATE = re.compile(r"([kmgt]?)(?:(?:[bB]its?|b)|([bB]ytes?|B))(?:/s|ps)")


def parse_count(text: str, called: str) -> int:
    """Parse a whole number, with or without k, M, B (or G) or T: `1.1B` is 1,100,000,000."""
    number, unit = _split(text)
    scale = _COUNTS.get(unit.lower().replace("g", "b"))
    count = math.nan if scale is None else number * scale
    if not (count >= 1 and abs(count - round(count)) < 1e-6):
        raise ConfigError(f"{called} is {text!r}; it must be a whole number above zero, such as 350000, 124M or 1.1B.")
    return round(count)


def parse_rate(text: str, called: str) -> float:
    """Parse bits per second: `100Mbit`, `1 Gbit/s`, `20 Mbps`; a capital B means bytes: `10 MB/s` is 80,000,000."""
    number, unit = _split(text)
    # `Mbit` alone is how networks are sold; `MB` alone is an amount, not a rate.
    is_rate = unit.endswith(("/s", "ps"))
    lowered = "".join(letter if letter == "B" else letter.lower() for letter in unit)  # B differs from b
    match = _RATE.fullmatch(lowered if is_rate else f"{lowered}/s")
    if match is None or not number > 0 or (match[2] and not is_rate):
        raise ConfigError(
            f"{called} is {text!r}; it must be a rate above zero with its unit, such as 100Mbit, 1Gbit/s or 12.5MB/s."
        )
    return number * _STEPS[match[1]] * (8 if match[2] else 1)


def parse_seconds(text: str, called: str, *, bare: bool = False) -> float:
    """Parse a time: `50ms`, `0.5 s`, `200us`; `0` needs no unit, and if `bare`, seconds need none."""
    number, unit = _split(text)
    scale = 1.0 if unit == "" and (bare or number == 0) else _SECONDS.get(unit)
    if scale is None or not number >= 0:
        raise ConfigError(f"{called} is {text!r}; it must be a time with its unit, such as 50ms, 200us or 1.5s.")
    return number * scale


def _split(text: str) -> tuple[float, str]:
    """Split a text into its number, NaN if it has no finite one, and its unit."""
    match = _WRITTEN.fullmatch(text)
    number = math.nan if match is None else float(match[1])
    return (number, match[2]) if match is not None and math.isfinite(number) else (math.nan, text)
