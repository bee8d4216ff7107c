# SPDX-License-Identifier: Apache-2.0
"""The first steps of a run, in which replicas average their gradients as in plain data parallelism."""

from __future__ import annotations

import torch
from torch import nn

from farflung.comm.group import Group
from farflung.outer.aggregate import Shares
from farflung.outer.average import average
from farflung.outer.weigh import alike_as_one

VOTE_BYTES = 4


def average_gradients(model: nn.Module, group: Group, finished: bool = False) -> tuple[int, bool] | None:
    """Average in place the gradients of all ranks that still have data, those that are missing being 0: a collective.

    Args:
        finished: this rank has no more data, and only stays for the others.

    Returns:
        The bytes that were sent, beside `VOTE_BYTES` to each other rank, and whether all ranks still have data, so that
        their weights stay alike; None where none has.
    """
    flags = group.meet(torch.tensor([float(not finished)])).flatten().tolist()
    shares = Shares(*alike_as_one(flags), group.rank)
    if not shares.total:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if finished:
        return average([torch.zeros_like(parameter) for parameter in trained], group, shares), False
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sent = average([parameter.grad for parameter in trained if parameter.grad is not None], group, shares)
    return sent, all(flags)
