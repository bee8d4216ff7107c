# SPDX-License-Identifier: Apache-2.0
"""Steps whose loss or gradients are not finite on any rank are skipped by all of them.

Nothing more is sent for it where gradients are averaged: a loss that is not finite gives gradients that are NaN, which
travel with the others. The ranks of a sharded model have parts of the gradients, and exchange one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from farflung.base.errors import NonFinite, Unsupported
from farflung.base.events import Kind, record
from farflung.base.torch_internals import before_calls
from farflung.comm.shards import largest, local, mesh_over


class SkipNonfinite:
    """Skips steps of the optimizers of one Accelerator.

    Args:
        most: how many skipped steps in a row raise `NonFinite`.
        tells: this rank records each as an event.

    Attributes:
        total: steps skipped so far.
    """

    def __init__(self, most: int, tells: bool) -> None:
        self._most, self._tells = most, tells
        self.total = self._in_a_row = 0
        self._norm: tuple[set[int], Tensor] = set(), torch.zeros(())
        self._buffers: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def forget(self) -> None:
        """Let go of all models."""
        self._buffers.clear()

    def follow(self, model: nn.Module) -> None:
        """Give the buffers of a model back what they had, when a step is skipped whose forward passes changed them."""
        before_calls(model, self._keep_buffers)

    @torch.no_grad()
    def _keep_buffers(self, model: nn.Module, *_: Any) -> None:
        if model.training and model not in self._buffers:
            self._buffers[model] = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def marked(self, loss: Tensor) -> Tensor:
        """Return a loss with the same bits and gradients if it is finite, else one whose gradients are NaN."""
        return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan).to(loss) * loss

    def note_norm(self, parameters: Iterable[Tensor], norm: Tensor) -> None:
        """Take the norm that the whole gradients of these had, the same on all ranks, in place of an own look."""
        self._norm = set(map(id, parameters)), norm

    def step(self, parameters: list[Tensor], step: Callable[[], bool], has_scaler: bool, has_closure: bool) -> bool:
        """Make a step if the gradients of all ranks are finite; return whether it was made: a collective.

        Args:
            step: makes it, and returns False if the loss scaler of fp16 has skipped it.
        """
        if has_closure:
            raise Unsupported(
                "skip_nonfinite with a closure: its gradients come within the step, which can't be undone."
            )
        done = (has_scaler or self._are_finite(parameters)) and step()
        self._norm = set(), self._norm[1]
        buffers, self._buffers = self._buffers, {}
        self._in_a_row = 0 if done else self._in_a_row + 1
        if done:
            return True
        self.total += 1
        with torch.no_grad():
            for tensor, value in (pair for pairs in buffers.values() for pair in pairs):
                tensor.copy_(value)
        if self._tells:
            record(Kind.SKIPPED, in_a_row=self._in_a_row, total=self.total)
        if self._in_a_row >= self._most:
            raise NonFinite(
                f"{self._in_a_row} steps in a row were skipped because losses or gradients were not finite, and "
                f"skip_nonfinite is {self._most}. Look at the latest batches and the learning rate; "
                "torch.autograd.set_detect_anomaly(True) names the operation that gives the first NaN."
            )
        return False

    def _are_finite(self, parameters: list[Tensor]) -> bool:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        seen, norm = self._norm
        if seen and seen.issuperset(map(id, trained)):
            return bool(torch.isfinite(norm))
        parts = [_values(local(one.grad)) for one in trained if one.grad is not None]
        norm = get_total_norm(parts)
        if not torch.isfinite(norm):  # squares of finite gradients may overflow; the largest magnitude is slow to find
            norm = get_total_norm([part for part in parts if part.numel()], torch.inf)
        odd = (~torch.isfinite(norm)).float()
        for mesh, one in {mesh_over(one): one for one in trained}.items():
            odd = odd if mesh is None else largest(odd, one)
        return not odd


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
