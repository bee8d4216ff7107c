# SPDX-License-Identifier: Apache-2.0
"""The first steps of a run, in which replicas average their gradients as in plain data parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farflung.base.errors import CollectiveMismatch
from farflung.comm.group import Group
from farflung.outer.aggregate import Shares
from farflung.outer.average import average
from farflung.outer.weigh import alike_as_one

_HALF = 2**24  # whole numbers below this are exact in fp32
VOTE_BYTES = 12


def average_gradients(model: nn.Module, group: Group, finished: bool = False) -> tuple[int, bool] | None:
    """Average in place the gradients of all ranks that still have data, those that are missing being 0: a collective.

    Args:
        finished: this rank has no more data, and only stays for the others.

    Raises:
        CollectiveMismatch: the ranks train different numbers of values.

    Returns:
        The bytes that were sent, beside `VOTE_BYTES` to each other rank, and whether all ranks still have data, so that
        their weights stay alike; None where none has.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flags, *sizes = group.meet(_said(not finished, sum(p.numel() for p in trained))).T.tolist()
    if len(set(zip(*sizes, strict=True))) > 1:
        numels = [int(high) * _HALF + int(low) for high, low in zip(*sizes, strict=True)]
        raise CollectiveMismatch(
            f"The ranks have different numbers of trainable values: {numels}. Change the model in the same way on all "
            "ranks."
        )
    shares = Shares(*alike_as_one(flags), group.rank)
    if not shares.total:
        return None
    if finished:
        return average([torch.zeros_like(parameter) for parameter in trained], group, shares), False
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sent = average([parameter.grad for parameter in trained if parameter.grad is not None], group, shares)
    return sent, all(flags)


def _said(has_data: bool, numel: int) -> Tensor:
    """What a rank tells the others before it averages; each number is exact in fp32."""
    return torch.tensor([float(has_data), *map(float, divmod(numel, _HALF))])
