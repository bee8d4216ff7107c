# SPDX-License-Identifier: Apache-2.0
"""Tensors as one object: a checksum, a header in JSON and the plain bytes, so that a reader knows what it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import Any

from torch import Tensor

from farflung.base.bars import Bar
from farflung.comm.checksum import crc32
from farflung.comm.tensor_memory import bytes_of

_BLOCK = 4 * 2**20  # bytes that are read at a time


class Damaged(ValueError):
    """An object is not what its author has written."""


def packed(header: Any, tensors: Sequence[Tensor], width: int = 0) -> list[bytes | memoryview]:
    """Return the parts of an object. The tensors' memory is theirs, if it is the host's and contiguous.

    Args:
        width: bytes of the header, at least, so that readers know where the object ends.
    """
    line = json.dumps(header).encode().ljust(width)
    plain = [view_of(tensor.detach().cpu().contiguous()) for tensor in tensors]
    checksum = crc32(line)
    for one in plain:
        checksum = crc32(one, checksum)
    return [b"%08x " % checksum, line, b"\n", *plain]


def packed_bytes(width: int, num_bytes: int) -> int:
    """Return how long the object is that `packed` makes of a header of this width and `num_bytes` bytes of tensors."""
    return len(b"%08x " % 0) + width + len(b"\n") + num_bytes


def unpack(
    file: BufferedReader,
    size: int,
    limit: int,
    memory: Callable[[Any], Sequence[Tensor]],
    bar: Bar | None = None,
) -> None:
    """Read an object of `size` bytes into tensors on the host.

    Args:
        limit: of the header, in bytes.
        memory: returns the tensors for a header; Damaged if it is not one that can be meant.
        bar: counts the bytes of tensors that were read.

    Raises:
        Damaged: it has another size than these tensors, or another checksum than it should.
    """
    line = file.readline(limit)
    written, _, header = line.rstrip(b"\n").partition(b" ")
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        raise Damaged("it has no header") from None
    plain = [view_of(tensor) for tensor in memory(found)]
    if size != len(line) + sum(map(len, plain)):
        raise Damaged(f"{found} in {size} bytes instead of {len(line) + sum(map(len, plain))}")
    checksum = crc32(header)
    for one in plain:
        num_bytes = 0
        while num_bytes < len(one) and (count := file.readinto(one[num_bytes : num_bytes + _BLOCK])):
            checksum = crc32(one[num_bytes : num_bytes + count], checksum)
            num_bytes += count
            if bar is not None:
                bar.advance(count)
    if written != b"%08x" % checksum:
        raise Damaged("its checksum shows that it is damaged")


def view_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes."""
    return memoryview(bytes_of(tensor).numpy().data)
