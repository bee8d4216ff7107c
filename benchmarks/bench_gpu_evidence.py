# SPDX-License-Identifier: Apache-2.0
"""What do outer loops keep of DDP's gain with 121M parameters? Four replicas, one after the other on one GPU.

All methods have the same first tenth, made by DDP (none `--from_scratch`), the same text, inner optimizer and learning
rates, none of them tuned. Steps are compiled, in bf16 with fp32 weights; exchanges are the package's own, in memory,
and count their bytes.

python benchmarks/bench_gpu_evidence.py [--seconds 300] [--steps N] [--size 121M] [--seed 0] [--from_scratch] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from _measure import report, seeded
from evidence.runs import Run, draws, texts
from torch import Tensor, nn
from torch.func import functional_call

from farflung.comm.group import Group
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import Shape
from farflung.outer import OuterLoop, diloco, streaming_diloco
from farflung.testing.sim import run_replicas

QUESTION = "what do outer loops keep of DDP's gain, on a GPU?"
SHAPES = {"121M": Shape(17, 768, 12, 1024), "tiny": Shape(2, 32, 2, 64)}
REPLICAS, BATCH = 4, 4  # sequences of a replica in a step
LR, BETAS, DECAY, MAX_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0
HELD_OUT = 128  # sequences
METHODS = {
    "DDP": None,
    "alone": None,
    "diloco(8, codec='e3m0')": diloco(8, codec="e3m0"),
    "diloco(32)": diloco(32),
    "streaming_diloco(32, 2)": streaming_diloco(32, 2),
}


class Trainer:
    """A model on the GPU with its optimizer; all of them share one compiled step, whose weights are arguments."""

    def __init__(self, size: str, seed: int, common: float) -> None:
        self.seed, self.common = seed, common
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape = SHAPES[size]
        self.text = texts()[0].to(self.device)
        self.span = torch.arange(self.shape.context + 1, device=self.device)
        shell = GPT(self.shape).to("meta")
        names = [name for name, _ in shell.named_parameters()]

        def loss(weights: tuple[Tensor, ...], batch: Tensor) -> Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                logits = functional_call(shell, dict(zip(names, weights, strict=True)), (batch[:, :-1],))
            return loss_per_sequence(logits.float(), batch[:, 1:]).mean()

        self.loss, self.compiled = loss, torch.compile(loss, dynamic=False)

    def plan(self, steps: int) -> None:
        """Draw what each replica sees in so many steps."""
        self.run = Run("", "", LR, self.seed, steps, batch=BATCH, common=self.common)
        self.starts = draws(self.run, self.shape.context).to(self.device)
        torch.manual_seed(self.seed)

    def fresh(self) -> tuple[nn.Module, torch.optim.AdamW]:
        model = GPT(self.shape).to(self.device)
        fused = self.device == "cuda"
        return model, torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=fused)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: slice) -> None:
        """Make a step on what these ranks draw for it, as one batch."""
        starts = self.starts[ranks, number].reshape(-1, 1)
        batch = self.text[starts + self.span].long()
        self.compiled(tuple(model.parameters()), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = LR * self.run.factor(number)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        """Return the loss in nats a byte of the text that is held out."""
        text = texts()[1].to(self.device)
        starts = torch.linspace(0, len(text) - len(self.span), HELD_OUT).long().to(self.device)
        batches = text[starts[:, None] + self.span].long().split(BATCH)
        return sum(self.loss(tuple(model.parameters()), one).item() for one in batches) / len(batches)


def continued(group: Group, trainer: Trainer, start: Callable[[], Any], recipe: Any) -> dict[str, Any]:
    """Train a replica through its outer loop from the common start to the end."""
    model, optimizer = start()
    ranks = slice(group.rank, group.rank + 1)
    with OuterLoop(model, recipe, group, inner=optimizer) as outer:
        for number in range(trainer.run.split, trainer.run.steps):
            trainer.step(model, optimizer, number, ranks)
            outer.step()
    if group.rank:
        return {}
    return {"loss": trainer.judge(model), "bytes": outer.stats().bytes_sent, "rounds": outer.stats().rounds}


def seconds_of(act: Callable[[int], None], calls: int) -> float:
    for number in range(-3, calls):
        act(max(number, 0))
        if number in (-1, calls - 1) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if number == -1:
            began = time.perf_counter()
    return (time.perf_counter() - began) / calls


def affordable(trainer: Trainer, seconds: float) -> int:
    """Return how many steps all methods can make in the time, from a few of each kind; these compile what they need."""
    trainer.plan(16)
    model, optimizer = trainer.fresh()
    one = seconds_of(lambda number: trainer.step(model, optimizer, number, slice(0, 1)), 16)
    all_of_them = seconds_of(lambda number: trainer.step(model, optimizer, number, slice(0, REPLICAS)), 16)
    print(f"a step: {one:.4f} s of one replica, {all_of_them:.4f} s of DDP", flush=True)
    outer_loops = len(METHODS) - 2
    return int(seconds / (all_of_them + 0.9 * one * (1 + REPLICAS * outer_loops)))


def measured(trainer: Trainer, steps: int, write: bool) -> None:
    trainer.plan(steps)
    model, optimizer = trainer.fresh()
    numel = sum(parameter.numel() for parameter in model.parameters())
    ddp_bytes = 4 * numel * 2 * (REPLICAS - 1) / REPLICAS  # of a step
    for number in range(trainer.run.split):
        trainer.step(model, optimizer, number, slice(0, REPLICAS))
    kept = deepcopy((model.state_dict(), optimizer.state_dict()))

    def start() -> tuple[nn.Module, torch.optim.AdamW]:
        model, optimizer = trainer.fresh()
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(deepcopy(kept[1]))
        return model, optimizer

    for name, recipe in METHODS.items():
        began = time.perf_counter()
        if recipe is None:
            model, optimizer = start()
            ranks = slice(0, 1 if name == "alone" else REPLICAS)
            for number in range(trainer.run.split, steps):
                trainer.step(model, optimizer, number, ranks)
            sent = ddp_bytes * (steps - trainer.run.split) if name == "DDP" else 0
            found = {"loss": trainer.judge(model), "bytes": sent, "rounds": 0}
        else:
            found = run_replicas(continued, REPLICAS, trainer, start, recipe)[0]
        figures = {
            "held_out_loss": round(found["loss"], 5),
            "bytes_sent": round(found["bytes"] + ddp_bytes * trainer.run.split),
            "rounds": found["rounds"],
            "seconds": round(time.perf_counter() - began, 1),
        }
        facts = {"method": name, "parameters": numel, "replicas": REPLICAS, "batch": BATCH, "steps": steps, "lr": LR}
        facts["common"] = trainer.common
        report(QUESTION, figures, seed=trainer.seed, write_to="gpu.jsonl" if write else None, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long all steps may take together")
    parser.add_argument("--steps", type=int, help="instead of as many as the time allows")
    parser.add_argument("--size", choices=SHAPES, default="121M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from_scratch", action="store_true", help="without a first tenth made by DDP")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/gpu.jsonl")
    given = parser.parse_args()
    seeded(given.seed)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(given.size, given.seed, 0.0 if given.from_scratch else Run.common)
    measured(trainer, given.steps or affordable(trainer, given.seconds), given.write)


if __name__ == "__main__":
    main()
