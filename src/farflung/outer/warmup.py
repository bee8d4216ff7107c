# SPDX-License-Identifier: Apache-2.0
"""The first steps of a recipe with a warm-up: gradients are averaged, as data-parallel training does."""

from __future__ import annotations

import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch
from farflung.comm.group import Group
from farflung.outer.agreement import average
from farflung.outer.stats import Meter
from farflung.outer.weighting import in_proportion

_HALF = 2**24  # whole numbers below this are exact in fp32


def average_gradients(model: nn.Module, group: Group, meter: Meter, finished: bool) -> tuple[bool, bool]:
    """Average in place the gradients of all ranks that still have data.

    Args:
        finished: this rank has no more data, and brings nothing.

    Returns:
        whether any rank has data, and whether all have.

    Raises:
        CollectiveMismatch: the ranks train different numbers of values.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    ballot = torch.tensor([float(not finished), *map(float, divmod(numel, _HALF))], dtype=torch.float32)
    with meter.timed("exposed"), torch.no_grad():
        flags, *sizes = group.all_gather_small(ballot).T.tolist()
        meter.add("bytes_voting", (group.size - 1) * ballot.nbytes)
        numels = [int(high) * _HALF + int(low) for high, low in zip(*sizes, strict=True)]
        if len(set(numels)) > 1:
            raise CollectiveMismatch(
                f"The ranks have different numbers of trainable values: {numels}. Change the model in the same way "
                "on all ranks."
            )
        decision = in_proportion(flags)
        if not decision.total:
            return False, False
        if not finished:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [p.grad for p in trained if p.grad is not None and not finished]
        sent = average(gradients or [torch.zeros_like(p) for p in trained], group, decision)
    meter.add("bytes_sent", sent)
    meter.add("bytes_received", sent)
    return True, all(flags)
