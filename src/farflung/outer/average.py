# SPDX-License-Identifier: Apache-2.0
"""The mean of tensors over the ranks, in place and at once: for what is agreed on outside of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.comm.sizes import CAP_BYTES
from farflung.outer.aggregate import Mean, Shares
from farflung.outer.codec.base import Identity


def average(tensors: Sequence[Tensor], group: Group, shares: Shares, cap_bytes: int = CAP_BYTES) -> int:
    """Replace `tensors` by their mean over the ranks, weighted by `shares`: a collective.

    Args:
        tensors: floating ones of any shapes, the same on every rank.
        cap_bytes: how much is copied and sent at a time.

    Returns:
        The bytes that this rank sent, which are as many as it received.
    """
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    buckets, mean, identity, sent = Buckets(tensors, dtype, cap_bytes=cap_bytes), Mean(), Identity(), 0
    for k in range(len(buckets)):
        pending = mean.start(mean.prepare(buckets.pack(k), identity, group, None), identity, group, shares)
        pending.wait()
        buckets.unpack(k, pending.divisor)
        sent += pending.bytes_sent
    return sent
