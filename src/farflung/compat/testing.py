# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers for tests that make an `Accelerator`."""

from __future__ import annotations

from unittest import TestCase

import torch

from farflung.accelerator.operations import gather
from farflung.accelerator.views import AcceleratorState


class AccelerateTestCase(TestCase):
    """Tests after each of which this process has no `Accelerator` and no world any more."""

    def tearDown(self) -> None:
        """Forget what was settled, and leave the world."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Say whether all processes have brought the same tensor."""
    return all(torch.equal(other, tensor.cpu()) for other in gather(tensor[None]).cpu())
