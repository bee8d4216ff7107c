# SPDX-License-Identifier: Apache-2.0
"""What does one Local SGD synchronisation cost? Ours, Accelerate's, and a bare all-reduce of the same bytes, in turns.

`by hand` is what one would write, with a flat buffer at hand: one call to copy the weights into it, the all-reduce, one
to divide and one to copy back. It neither looks for values that are not finite nor knows what each rank has done.

python benchmarks/bench_sync.py [--ranks 2] [--rounds-small 300] [--rounds-large 15] [--recipes] [--write]
python benchmarks/bench_sync.py --memory [--write]      what the loop keeps, and needs while it synchronises
python benchmarks/bench_sync.py --average [--write]     what a running mean of the weights adds to a round of DiLoCo
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from _measure import interleave, medians_us, peak_bytes, ratios, report, seeded
from accelerate.local_sgd import LocalSGD
from torch import nn

from farflung.outer import E3M0, Cast, Int8, OuterLoop, Recipe, diloco, local_sgd
from farflung.testing.ranks import run_ranks

SEED = 0
SMALL = [(2048,)] * 500
EVICTED_BYTES = 128 * 2**20  # of memory that is written to between two contestants, as training steps would


def gpt2_shapes() -> list[tuple[int, ...]]:
    """110M values in 199 tensors: 16 blocks of 12, embeddings, a final norm."""
    wide = 704
    block = [(wide,), (wide,), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
    block += [(wide,), (wide,), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    head = [(50257 // 2, wide)] * 1 + [(1024, wide), (wide,), (wide,), (1024,), (1024,), (1024,)]
    return head + block * 16


class Bag(nn.Module):
    """Parameters of given shapes, and nothing else."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds-small", type=int, default=300, help="timings of 500 tensors x 2048")
    parser.add_argument("--rounds-large", type=int, default=15, help="timings of 110M values in 199 tensors")
    parser.add_argument("--recipes", action="store_true", help="measure DiLoCo and bf16 too")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--average", action="store_true", help="measure rounds with and without a running mean")
    parser.add_argument("--write", action="store_true", help="append the lines to results/sync.jsonl")
    chosen = parser.parse_args()
    if chosen.memory:
        shapes = gpt2_shapes()
        report(
            "What memory does a synchronisation need beyond the model?",
            {
                "weights_mb": round(sum(4 * torch.Size(shape).numel() for shape in shapes) / 1e6, 1),
                "mb": {name: run_ranks(memory, chosen.ranks, shapes, name, timeout_s=600)[0] for name in RECIPES},
            },
            seed=SEED,
            write_to="sync.jsonl" if chosen.write else None,
            ranks=chosen.ranks,
        )
        return
    measured = measure_average if chosen.average else partial(measure, recipes=chosen.recipes)
    for name, shapes, rounds in (
        ("500 tensors x 2048", SMALL, chosen.rounds_small),
        ("110M values in 199 tensors", gpt2_shapes(), chosen.rounds_large),
    ):
        if rounds == 0:
            continue
        times = run_ranks(measured, chosen.ranks, shapes, rounds, timeout_s=600)[0]
        over = {} if chosen.average else {"over_bare_all_reduce": ratios(times, "bare all_reduce")}
        report(
            f"What does {'a running mean add to a round' if chosen.average else 'one Local SGD synchronisation cost'}?",
            {"median_us": times, **over},
            seed=SEED,
            write_to="sync.jsonl" if chosen.write else None,
            ranks=chosen.ranks,
            tensors=name,
            megabytes=round(sum(4 * torch.Size(shape).numel() for shape in shapes) / 1e6, 1),
            accelerate=accelerate.__version__,
        )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "local_sgd": lambda: local_sgd(1),
    "local_sgd int8": lambda: local_sgd(1, codec=Int8()),
    "diloco": lambda: diloco(1),
    "diloco average": lambda: diloco(1, average=10),
    "diloco int8": lambda: diloco(1, codec=Int8()),
    "diloco 4 bits": lambda: diloco(1, codec=E3M0()),
}


def memory(shapes: list[tuple[int, ...]], name: str) -> dict[str, float]:
    """Return what the loop and its first round need beyond the model, and a later round beyond that, in MB."""
    model = Bag(shapes)
    OuterLoop(Bag(SMALL), RECIPES[name]()).step()  # what the process needs once is not charged to the loop
    loops: list[OuterLoop] = []

    def begin() -> None:
        loops.append(OuterLoop(model, RECIPES[name]()))
        loops[0].step()

    peak = peak_bytes(begin)
    again = peak_bytes(loops[0].step)
    return {"first_round": round(peak / 1e6, 1), "each_round": round(again / 1e6, 1)}


def measure(shapes: list[tuple[int, ...]], rounds: int, recipes: bool) -> dict[str, float]:
    seeded(SEED)
    contestants: dict[str, Callable[[], Any]] = {}
    flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes))
    contestants["bare all_reduce"] = lambda: dist.all_reduce(flat)
    contestants["by hand"] = by_hand(Bag(shapes))
    # Nothing is trained, so replicas stay alike, which trained ones are looked at for in their first rounds alone.
    ours = {"farflung": local_sgd(1)}
    if recipes:
        ours |= {"farflung bf16": local_sgd(1, codec=Cast("bf16")), "farflung diloco": diloco(1)}
    for name, recipe in ours.items():
        contestants[name] = OuterLoop(Bag(shapes), replace(recipe, same_data=True)).step
    theirs = accelerate.Accelerator(cpu=True)
    assert theirs.num_processes == dist.get_world_size(), "Accelerate did not join the group"
    averaging = LocalSGD(accelerator=theirs, model=theirs.prepare(Bag(shapes)), local_sgd_steps=1, enabled=True)
    averaging.__enter__()
    train = partial(_train, torch.zeros(EVICTED_BYTES // 4))
    seconds = interleave(contestants, rounds, warmup=3, before=train)
    # Apart, as half a second of it would leave time for few rounds of the others, which differ from call to call.
    apart = {"bare all_reduce": contestants["bare all_reduce"], "accelerate": averaging.step}
    seconds["accelerate"] = interleave(apart, max(3, rounds // 15), warmup=1, before=train)["accelerate"]
    return medians_us(seconds)


def _train(work: torch.Tensor) -> None:
    """Leave the caches as training does, and no rank with a lead from the turn before."""
    work.add_(1)
    dist.barrier()


def measure_average(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Return the time of a round without and with a running mean, and of one pass: a mean of two flat tensors."""
    seeded(SEED)
    flat, other = (torch.randn(sum(torch.Size(shape).numel() for shape in shapes)) for _ in range(2))
    contestants: dict[str, Callable[[], Any]] = {"one pass": lambda: flat.lerp_(other, 0.1)}
    for name in ("diloco", "diloco average"):
        contestants[name] = OuterLoop(Bag(shapes), replace(RECIPES[name](), same_data=True)).step
    work = torch.zeros(EVICTED_BYTES // 4)
    return medians_us(interleave(contestants, rounds, warmup=3, before=partial(_train, work)))


def by_hand(model: nn.Module) -> Callable[[], Any]:
    """What replaces the weights by their mean over all ranks."""
    weights = [parameter.detach().view(-1) for parameter in model.parameters()]
    flat = torch.zeros(sum(weight.numel() for weight in weights))
    parts = torch.split(flat, [weight.numel() for weight in weights])

    def average() -> None:
        torch.cat(weights, out=flat)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        torch._foreach_copy_(weights, parts)

    return average


if __name__ == "__main__":
    main()
