# SPDX-License-Identifier: Apache-2.0
"""Compares the weights that replicas have agreed on: a digest in some votes, and each tensor if the digests differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch
from farflung.base.words import numbered
from farflung.outer.agreement import Averaged
from farflung.outer.ballot import Voters, digest_of

_DIGEST_EVERY = 50  # rounds of a fragment between two checks that the ranks still agree,
_WATCHED = 8  # and in how many after newcomers have come each one is checked


@dataclass(eq=False)
class Comparison:
    """Compares the weights of one fragment.

    Args:
        names: of its parameters.

    Attributes:
        digest: of what the last round agreed on, where it is to be compared with that of other ranks; else -1.
    """

    names: Sequence[str]
    digest: int = -1
    _num_watched: int = 0  # rounds that are still to be checked, as newcomers have come

    def note_round(self, weights: Averaged, num_rounds: int, is_common: bool) -> None:
        """Keep a digest of a round's result now and then, if that is the same on all ranks."""
        is_due = num_rounds % _DIGEST_EVERY == 1 or self._num_watched > 0
        self._num_watched = max(0, self._num_watched - 1)
        self._note(weights, is_common and is_due)

    def note_newcomers(self, weights: Averaged, is_common: bool) -> None:
        """Compare the agreed weights in the first rounds, and in the next vote if all share them between rounds."""
        self._num_watched = _WATCHED
        self._note(weights, is_common)

    def continue_from(self, other: Comparison) -> None:
        self.digest, self._num_watched = other.digest, other._num_watched

    def check(self, weights: Averaged, digests: Sequence[int], voters: Voters) -> None:
        """Compare the digests of all ranks; CollectiveMismatch names the first tensor that differs."""
        if len(set(digests)) == 1:
            return
        mine = self._checksums(weights)
        everyone = voters.group.all_gather_small(torch.tensor(mine, dtype=torch.float64))
        for column, name in enumerate(self.names):
            values = everyone[:, column].tolist()
            usual = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != usual]
            if odd:
                where = numbered(voters.noun, odd)
                raise CollectiveMismatch(
                    f"The replicas no longer agree on {name}: its value on {where} is not that of the others. "
                    "Something has written to it, or their machines compute differently."
                )
        raise CollectiveMismatch(
            f"The replicas no longer agreed at the end of their last round (digests {list(digests)}), though the "
            "tensors are equal now: something wrote to them in between."
        )

    def _note(self, weights: Averaged, is_compared: bool) -> None:
        self.digest = digest_of(" ".join(map(str, self._checksums(weights)))) if is_compared else -1

    def _checksums(self, weights: Averaged) -> list[int]:
        """Return a checksum of the agreed value of each parameter."""
        found: dict[int, int] = {}
        for k in range(len(weights.buckets)):
            for number, piece in zip(weights.buckets.owners(k), weights.agreed(k), strict=True):
                found[number] = (31 * found.get(number, 0) + int(checksum(piece))) % 2**48
        return [found.get(number, 0) for number in range(len(self.names))]


def checksum(x: Tensor) -> Tensor:
    """Sum the bits of all elements as whole numbers, which no order of summing changes."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()]
    together = 8 // x.element_size()  # elements that are one long number: torch would copy what it sums in another type
    flat = x.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() % together:
        flat = flat.clone(memory_format=torch.contiguous_format)
    whole = flat.numel() // together * together
    return flat[:whole].view(torch.int64).sum() + flat[whole:].view(words).sum(dtype=torch.int64)
