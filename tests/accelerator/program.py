# SPDX-License-Identifier: Apache-2.0
"""A program that tests stop and resume: what it trains, what it counts, and a digest of all that must continue."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.base.tree import leaves_of
from farflung.utils import set_seed


class Counter(SimpleNamespace):
    """A registered object."""

    def __init__(self) -> None:
        super().__init__(epoch=0, seen=torch.zeros(1))

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.seen = state["epoch"], state["seen"].clone()


class Program:
    """What one process trains, freshly made, and a count of its epochs and micro-batches, which is registered."""

    def __init__(self, accumulate: int = 1, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
        self.counter = Counter()
        set_seed(5)

    def prepare(self, *loaders: DataLoader, model: nn.Module | None = None, parts: int = 1) -> list[Any]:
        """Make and prepare all of it, and return the loaders.

        Args:
            model: of which each row has four values. None: one with dropout.
            parts: how many optimizers, each of which has a scheduler, share the model's weights.
        """
        model = model or nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 1))
        weights = list(model.parameters())
        size = -(-len(weights) // parts)
        optimizers = [torch.optim.AdamW(weights[k * size : (k + 1) * size], lr=0.02) for k in range(parts)]
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 3, 0.8) for one in optimizers]
        self.model, *rest = self.accelerator.prepare(model, *optimizers, *schedulers, *loaders)
        self.optimizers, self.schedulers = rest[:parts], rest[parts : 2 * parts]
        self.accelerator.register_for_checkpointing(self.counter)
        return rest[2 * parts :]

    @property
    def steps(self) -> int:
        return int(self.counter.seen)

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def step(self, x: Tensor, optimizers: list[Any] | None = None) -> Tensor:
        """Train on one micro-batch, with all optimizers or with these, and return its loss."""
        with self.accelerator.accumulate(self.model):
            loss = self.loss(x)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            for part in [*(optimizers or self.optimizers), *self.schedulers]:
                part.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.counter.seen += 1
        return loss.detach()

    def digest(self, *counts: Any) -> str:
        """A digest of the weights, of the state of optimizers and schedulers, and of these counts."""
        state = [part.state_dict() for part in (self.model, *self.optimizers, *self.schedulers)]
        parts = [x.tolist() if isinstance(x, Tensor) else x for x in leaves_of(state)]
        return hashlib.sha256(repr((parts, counts)).encode()).hexdigest()


def rows_of(batch: Any) -> Tensor:
    """The rows of a batch of `Noisy`, `NoisyStream` or `Stateful`."""
    return batch["x"] if isinstance(batch, dict) else batch
