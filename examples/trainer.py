# SPDX-License-Identifier: Apache-2.0
"""A trainer class with callbacks: `no_sync` by hand, norms in the log, and a scheduler that ends where it should.

Run it with `python trainer.py --epochs 3`, `farflung launch --cpu --num_processes 2 trainer.py --max_steps 50` or
`torchrun --nproc_per_node 2 trainer.py`.
"""

import argparse
import math
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler

from farflung import Accelerator
from farflung.utils import set_seed


@dataclass
class Plan:
    """What to train for: `max_steps` optimizer steps where it is given, else `epochs`."""

    epochs: int = 3
    max_steps: int | None = None
    gradient_accumulation_steps: int = 1
    max_norm: float = 1.0


class Callback:
    """Hears of what the trainer does; override what you need."""

    def on_train_begin(self, trainer):
        pass

    def on_step_end(self, trainer, log):
        pass

    def on_epoch_end(self, trainer):
        pass

    def on_train_end(self, trainer):
        pass


class PrintLog(Callback):
    """Prints the log of each `every`-th step, on the main process."""

    def __init__(self, every=10):
        self.every = every

    def on_step_end(self, trainer, log):
        if trainer.step % self.every == 0:
            words = "  ".join(f"{name} {value:.4g}" for name, value in log.items())
            trainer.accelerator.print(f"step {trainer.step}: {words}")

    def on_train_end(self, trainer):
        trainer.accelerator.print(f"trained for {trainer.step} steps, learning rate {trainer.learning_rate:.4g}")


class KeepLog(Callback):
    """Keeps the log of each step."""

    def __init__(self):
        self.history = []

    def on_step_end(self, trainer, log):
        self.history.append(log)


class Trainer:
    """Trains a model on one loader; `prepare` is called here, so bring the bare objects."""

    def __init__(self, accelerator, model, optimizer, loader, loss_function, plan, *, num_warmup_steps=0, callbacks=()):
        self.accelerator = accelerator
        self.loss_function = loss_function
        self.plan = plan
        self.callbacks = list(callbacks)
        self.step = 0
        self.loader = accelerator.prepare(loader)  # first: the horizon depends on how many batches are this process's
        scheduler = get_scheduler(
            "linear",
            optimizer,
            num_warmup_steps=num_warmup_steps * self.ticks_per_step,
            num_training_steps=self.num_steps * self.ticks_per_step,
        )
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)

    @property
    def steps_per_epoch(self):
        """Optimizer steps in one pass over this process's batches; the last one may take fewer batches."""
        return math.ceil(len(self.loader) / self.plan.gradient_accumulation_steps)

    @property
    def num_steps(self):
        """Optimizer steps in all."""
        return self.plan.max_steps or self.plan.epochs * self.steps_per_epoch

    @property
    def ticks_per_step(self):
        """How far one optimizer step moves a prepared scheduler.

        It counts the batches of all processes: as many of a loader's own batch size as there are processes, or one
        where `split_batches` cuts each batch into shares.
        """
        return 1 if self.accelerator.split_batches else self.accelerator.num_processes

    @property
    def learning_rate(self):
        return self.scheduler.get_last_lr()[0]

    def train(self):
        self._tell("on_train_begin")
        self.model.train()
        while self.step < self.num_steps:
            batches = iter(self.loader)
            while window := list(islice(batches, self.plan.gradient_accumulation_steps)):
                log = self._learn(window)
                self.step += 1
                self._tell("on_step_end", log)
                if self.step == self.num_steps:
                    break
            self._tell("on_epoch_end")
        self._tell("on_train_end")

    def _learn(self, window):
        """Take one optimizer step on the batches of `window`; gradients are exchanged with the last of them only."""
        for batch in window[:-1]:
            with self.accelerator.no_sync(self.model):
                self._backward(batch, len(window))
        loss = self._backward(window[-1], len(window))
        parameters = list(self.model.parameters())
        norm_before = self.accelerator.clip_grad_norm_(parameters, self.plan.max_norm)
        log = {
            "loss": self.accelerator.reduce(loss, "mean").item(),
            "grad_norm": norm_before.item(),
            "clipped_grad_norm": norm(p.grad for p in parameters if p.grad is not None),
            "weight_norm": norm(parameters),
            "learning_rate": self.learning_rate,
        }
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return log

    def _backward(self, batch, num_batches):
        inputs, targets = batch
        loss = self.loss_function(self.model(inputs), targets)
        self.accelerator.backward(loss / num_batches)
        return loss.detach()

    def _tell(self, event, *details):
        for callback in self.callbacks:
            getattr(callback, event)(self, *details)


def norm(tensors):
    """Return the length of all `tensors` laid end to end."""
    return torch.linalg.vector_norm(torch.stack([tensor.detach().norm() for tensor in tensors])).item()


def make_trainer(accelerator, plan, *, batch_size=16, learning_rate=1e-2, callbacks=()):
    """Put together a small task: to recover a random linear map from noisy samples."""
    set_seed(0)
    inputs = torch.randn(500, 8)
    targets = inputs @ torch.randn(8, 2) + 0.1 * torch.randn(500, 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=True)
    return Trainer(accelerator, model, optimizer, loader, torch.nn.functional.mse_loss, plan, callbacks=callbacks)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, help="optimizer steps; goes before --epochs")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--log_every", type=int, default=5)
    args = parser.parse_args()
    plan = Plan(args.epochs, args.max_steps, args.gradient_accumulation_steps)
    make_trainer(Accelerator(), plan, callbacks=[PrintLog(args.log_every)]).train()


if __name__ == "__main__":
    main()
