# SPDX-License-Identifier: Apache-2.0
"""What tests of `--outer` around DDP scripts share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from farflung.integrations.data_parallel import DDPTakeover
from farflung.outer.arguments import OuterConfig


def installed(config: OuterConfig) -> DDPTakeover:
    takeover = DDPTakeover(config)
    takeover.install()
    return takeover


def of_all_ranks(value: Any) -> list[Any]:
    """The value of each rank, which all of them ask for."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def is_the_same(value: Any) -> bool:
    """Whether all ranks have the same value."""
    return all(each == value for each in of_all_ranks(value))
