# SPDX-License-Identifier: Apache-2.0
"""A communication hook for torch's DDP that averages gradients over a group chosen in each pass, or sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def average_hook(ranks: Callable[[], dist.ProcessGroup | None], dtype: torch.dtype | None = None) -> Any:
    """Return a hook for `DistributedDataParallel.register_comm_hook`.

    Args:
        ranks: the group to average over in this pass; None: nothing is sent, and gradients stay as they are.
        dtype: in which they travel; None: their own. torch's hooks of that name are refused by some backends.
    """

    # No annotations: torch looks at them, and does not understand postponed ones.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        group, gradient = ranks(), bucket.buffer()
        if group is None:
            kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            kept.set_result(gradient)
            return kept
        sent = gradient.to(dtype or gradient.dtype).div_(group.size())
        work = dist.all_reduce(sent, group=group, async_op=True)
        assert work is not None
        done: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: gradient.copy_(future.value()[0])
        )
        return done

    return hook
