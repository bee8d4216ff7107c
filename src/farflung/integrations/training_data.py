# SPDX-License-Identifier: Apache-2.0
"""Which of a script's samplers it trains from: their epochs are those of the training."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data.distributed import DistributedSampler


class TrainedSamplers:
    """The samplers of passes in which steps were made.

    A rank that has made no step yet takes the passes for training that began with its model in train mode.

    Args:
        is_training: whether a model that is trained is in train mode.
    """

    def __init__(self, is_training: Callable[[], bool]) -> None:
        self._is_training = is_training
        self._trained: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()
        self._begun: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()  # in train mode
        self._latest: weakref.ref[DistributedSampler[Any]] | None = None  # of these

    def begins(self, sampler: DistributedSampler[Any]) -> None:
        """Note that a pass over the indices of `sampler` begins."""
        if self._is_training():
            self._begun.add(sampler)
            self._latest = weakref.ref(sampler)

    def stepped(self) -> None:
        """Note that a step was made in the latest pass."""
        sampler = None if self._latest is None else self._latest()
        if sampler is not None:
            self._trained.add(sampler)

    def __contains__(self, sampler: DistributedSampler[Any]) -> bool:
        return sampler in (self._trained or self._begun)
