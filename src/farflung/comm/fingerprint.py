# SPDX-License-Identifier: Apache-2.0
"""Numbers that tell whether tensors have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

_ROW = 4096  # words of 8 bytes
_SMALL = 64 * 1024  # bytes; a tensor of fewer takes longer to look at than to copy


def bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, whose dimensions of one element may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def fingerprint(x: Tensor) -> int:
    """Return a whole number of 48 bits in which tensors differ that have other bits, or the same ones in other places.

    The bits are added up along rows and along columns: on a device, in one look at its memory for each.
    """
    flat = _flat(x)
    if flat.storage_offset() % 8 or len(flat) % 8:
        flat = pad(flat, (0, -len(flat) % 8)).clone()
    words = flat.view(torch.int64)
    rows = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :]]).cpu()
    return int.from_bytes(hashlib.blake2b(sums.numpy().tobytes(), digest_size=6).digest(), "big")


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return numbers like `fingerprint`'s for several tensors: one each for large ones, and one for all small ones."""
    found: list[int] = []
    small: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        if x.nbytes > _SMALL:
            found.append(fingerprint(x))
        else:
            small.setdefault(x.device, []).append(_flat(x))
    return found + [fingerprint(torch.cat(parts)) for parts in small.values()]


def _flat(x: Tensor) -> Tensor:
    return bytes_of(x.detach().resolve_conj().resolve_neg().contiguous())
