# SPDX-License-Identifier: Apache-2.0
"""What tests of `--outer` around DDP scripts share, and a comparison of ranks that others use too."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from farflung.hosts.data_parallel import DDPTakeover
from farflung.methods.arguments import OuterConfig


def installed(config: OuterConfig) -> DDPTakeover:
    takeover = DDPTakeover(config)
    takeover.install()
    return takeover


def is_the_same(value: Any) -> bool:
    """Whether all ranks, each of which must ask, have the same value."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(each == value for each in everyone)
