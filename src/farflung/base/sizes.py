# SPDX-License-Identifier: Apache-2.0
"""Sizes: bytes as people write them, how much travels at a time, and how many rounds a run should have."""

from __future__ import annotations

import re

from farflung.base.errors import ConfigError

CAP_BYTES = 25 * 2**19  # two of them, one copied and one on the wire, are 25 MB
HOP_BYTES, HOP_BYTES_OF_REQUESTS = 32 * 1024, 512 * 1024  # what a second hop has to save, on a line or at an address
NAMED_BYTES = 128  # of a share that may lie in the name of an object
FEW_ROUNDS = 10  # a run with fewer gets a warning
_FEW = 3  # ranks: so few read each other's objects however small they are
_LEAST_BYTES = 4 * 2**20  # they stay in a cache between copy and wire

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)(B)\s*", re.IGNORECASE)


def num_bytes(size: int | str, called: str, least: int = 1, has_bits: bool = True) -> int:
    """Return a size in bytes: `5GB` is 5 * 10**9, `5GiB` is 5 * 2**30; a small b counts bits, 8 of them a byte.

    A text needs a unit. What is no size, or less than `least`, raises ConfigError by the name that it is `called`.
    `has_bits` is False if a small b counts bytes too.
    """
    count = -1
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        count = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
        count //= 8 if has_bits and match[4] == "b" and not match[3] else 1
    elif isinstance(size, int):
        count = size
    if count < least:
        raise ConfigError(f"{called} is {size!r}; it must be a size with its unit, such as 25MiB or 4MB.")
    return count


def bucket_bytes_for(trained_bytes: int) -> int:
    """Return the default bucket size of an outer loop: an eighth of the trained bytes, 4 to 12.5 MB."""
    return min(CAP_BYTES, max(_LEAST_BYTES, trained_bytes // 8))


def saves_by_two_hops(wire_bytes: float, num_ranks: int, hop_bytes: int = HOP_BYTES) -> bool:
    """Return whether ranks should reduce the parts of a wire, and then gather the sums, in place of all whole wires.

    A rank then receives 2(M-1)/M wires and not M - 1, in M - 1 messages more. What has to be saved for these takes 13
    ms on a line of 20 Mbit/s; the requests of an address take 0.2 s.
    """
    return wire_bytes * (num_ranks - 1) * (1 - 2 / num_ranks) >= hop_bytes


def lie_in_names(num_ranks: int, lists_at_once: bool) -> bool:
    """Return whether small shares are names of objects, which a listing has: for the price of about a dozen reads."""
    return lists_at_once and num_ranks > _FEW


def num_buffers_among(num_ranks: int) -> int:
    """Return how many buckets take turns: one is copied, one travels, and with several others two wait for them all."""
    return 2 if num_ranks <= 2 else 4
