# SPDX-License-Identifier: Apache-2.0
"""The inner optimizers of the runs, on the rows of a run: AdamW, or Muon on hidden matrices with AdamW on the rest.

Each replica is a row. Where all of them get the same gradient, it is given once, as a single row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
MOMENTUM, ITERATIONS, COEFFICIENTS, LEAST_NORM = 0.95, 5, (3.4445, -4.7750, 2.0315), 1e-7  # torch.optim.Muon's defaults


class AdamW:
    """AdamW on `weights`, `[replicas, parameters]`, in place."""

    def __init__(self, weights: Tensor) -> None:
        self._weights, self._updates = weights, 0
        self.state = torch.zeros_like(weights), torch.zeros_like(weights)  # the two moments

    def step(self, gradients: Tensor, lr: float) -> None:
        self._updates += 1
        first, second = self.state
        first.lerp_(gradients.expand_as(first), 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradients, gradients, value=1 - BETAS[1])
        corrections = [1 - beta**self._updates for beta in BETAS]
        self._weights.mul_(1 - lr * WEIGHT_DECAY)
        self._weights.addcdiv_(
            first, second.sqrt().div_(math.sqrt(corrections[1])).add_(EPS), value=-lr / corrections[0]
        )


class Muon:
    """What `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does, on `weights`, `[replicas, out, in]`, in place.

    An update is as long, per value, as one of AdamW, so that both parts of a model have one learning rate.

    Source: Muon (kellerjordan.github.io/posts/muon); the length of its updates: arXiv:2502.16982.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights, self._momentum = weights, torch.zeros_like(weights)
        self.state = (self._momentum,)

    def step(self, gradients: Tensor, lr: float) -> None:
        gradients = gradients.view(-1, *self._weights.shape[1:])
        self._momentum.lerp_(gradients.expand_as(self._momentum), 1 - MOMENTUM)
        # Rows that have always had one gradient have one momentum.
        update = orthogonalized(gradients.lerp(self._momentum[: len(gradients)], MOMENTUM))
        self._weights.mul_(1 - lr * WEIGHT_DECAY)
        self._weights.add_(update, alpha=-0.2 * lr * math.sqrt(max(self._weights.shape[1:])))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Bring the singular values of `[replicas, out, in]` near 1, by five Newton-Schulz iterations in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def parts(inner: str, weights: Tensor, model: nn.Module) -> Iterator[tuple[slice, AdamW | Muon]]:
    """Return the columns of `weights`, `[replicas, parameters]`, each range with what trains it.

    Args:
        inner: `adamw`, or `muon`, which leaves the embedding, the head, norms and biases to AdamW.
    """
    if inner == "adamw":
        yield slice(None), AdamW(weights)
        return
    begin = 0
    for name, parameter in model.named_parameters():
        columns = slice(begin, begin + parameter.numel())
        begin = columns.stop
        part = weights[:, columns]
        if parameter.dim() == 2 and name not in ("embed.weight", "head.weight"):
            yield columns, Muon(part.view(-1, *parameter.shape))
        else:
            yield columns, AdamW(part)
