# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers for tests that make an `Accelerator`, and its smallest task: a line through points."""

from __future__ import annotations

from typing import Any
from unittest import TestCase

import numpy as np
import torch
from torch import Tensor, nn

from farflung.accelerator.operations import gather
from farflung.accelerator.views import AcceleratorState


class AccelerateTestCase(TestCase):
    """Tests after each of which this process has no `Accelerator` and no world any more."""

    def tearDown(self) -> None:
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Say whether all processes have brought the same tensor."""
    return all(torch.equal(other, tensor.cpu()) for other in gather(tensor[None]).cpu())


class RegressionDataset:
    """Points near the line `y = a x + b`, with normal noise of 0.1; equal seeds give equal points."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + random.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The line `a x + b`, of two trained numbers. Its first call prints the dtypes that it computes with."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Any = None) -> Tensor:
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        result: Tensor = x * self.a + self.b
        return result
