# SPDX-License-Identifier: Apache-2.0
"""What does a prepared loop add to a step? Loader, accumulate, backward, clip, step, scheduler: raw, Accelerate, ours.

Bare, under DDP, and under FSDP, where Accelerate does not run on CPUs. Each contestant trains the same tiny MLP, so
that nearly all time is overhead. They take turns of eight updates each: a training loop finds its own code in the
caches. The same code in a new process may be 3 % faster or slower (where things lie in memory), so each case is
measured in several and the median is told with the extremes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from _measure import interleave, medians_us, ratios, report, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung import FullyShardedDataParallelPlugin
from farflung.testing.ranks import run_ranks

SEED = 0


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, LambdaLR]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(4096, 16), torch.randn(4096, 1))
    return model, optimizer, data, LambdaLR(optimizer, lambda step: 1.0)


def raw_loop(accumulation: int, ranks: int, sharded: bool) -> Iterator[None]:
    model, optimizer, data, scheduler = parts()
    sampler = DistributedSampler(data, shuffle=False) if ranks > 1 else None
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
    elif ranks > 1:
        model = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    while True:
        for number, (x, y) in enumerate(loader, 1):
            whole = number % accumulation == 0
            if sharded:
                model.set_requires_gradient_sync(whole)
            with nullcontext() if whole or ranks == 1 or sharded else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y)
                (loss / accumulation if accumulation > 1 else loss).backward()
            if whole:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                for _ in range(ranks):
                    scheduler.step()
                optimizer.zero_grad()
            yield


def prepared_loop(library: str, accumulation: int, sharded: bool) -> Iterator[None]:
    if library == "accelerate":
        from accelerate import Accelerator
    else:
        from farflung import Accelerator
    settings = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **settings)
    model, optimizer, data, scheduler = parts()
    loader = DataLoader(data, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield


def measure(accumulation: int, ranks: int, sharded: bool, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate would train unconnected copies
    loops = {
        "raw": raw_loop(accumulation, ranks, sharded),
        "farflung": prepared_loop("farflung", accumulation, sharded),
    }
    if not sharded:
        loops["accelerate"] = prepared_loop("accelerate", accumulation, sharded)
    barrier = dist.barrier if ranks > 1 else None
    contestants = {name: partial(next, loop) for name, loop in loops.items()}
    return medians_us(interleave(contestants, rounds=rounds, warmup=20, calls=8 * accumulation, before=barrier))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150, help="turns of each contestant in one run")
    parser.add_argument("--runs", type=int, default=7, help="processes, or groups of them, that measure each case")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/step.jsonl")
    options = parser.parse_args()
    seeded(SEED)
    for ranks, sharded in ((1, False), (2, False), (2, True)):
        for accumulation in (1, 4):
            case = (accumulation, ranks, sharded, options.rounds)
            runs = [run_ranks(measure, ranks, *case, timeout_s=580, connect=ranks > 1)[0] for _ in range(options.runs)]
            us = {name: round(median(run[name] for run in runs), 2) for name in runs[0]}
            shares = sorted(round(run["raw"] / run["farflung"], 3) for run in runs)
            figures = {
                "us_per_micro_batch": us,
                "times_raw": ratios(us, to="raw"),
                "share_of_raw_speed": median(shares),
                "worst_and_best_share": [shares[0], shares[-1]],
                "us_added": round(median(run["farflung"] - run["raw"] for run in runs), 2),
            }
            report(
                "what does a prepared loop add to a step?",
                figures,
                seed=SEED,
                write_to="step.jsonl" if options.write else None,
                ranks=ranks,
                accumulation=accumulation,
                wrapped="FSDP" if sharded else "DDP" if ranks > 1 else "nothing",
                model="MLP 16-32-32-1, batch 8, AdamW",
            )


if __name__ == "__main__":
    main()
