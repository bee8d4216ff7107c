# SPDX-License-Identifier: Apache-2.0
"""What does a nested collective cost? Ours, Accelerate's, and one hand-packed collective, turn by turn in one run.

python benchmarks/bench_collectives.py [--ranks 2] [--leaves 10] [--rounds 200] [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from _measure import interleave, medians_us, report, seeded
from torch import Tensor

import farflung
from farflung.testing.ranks import run_ranks

SEED = 0
ROWS, COLUMNS = 8, 16
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--leaves", type=int, default=10, help="tensors in the dictionary")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="append the line to results/collectives.jsonl")
    chosen = parser.parse_args()
    times = run_ranks(measure, chosen.ranks, chosen.leaves, chosen.rounds, timeout_s=300)[0]
    report(
        "What does a nested collective cost?",
        {
            "median_us": times,
            "ours_over_accelerate": {
                name: round(times[f"farflung {name}"] / times[f"accelerate {name}"], 3)
                for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
            },
            "gather_over_bare": round(times["farflung gather"] / times["bare gather"], 3),
        },
        seed=SEED,
        write_to="collectives.jsonl" if chosen.write else None,
        ranks=chosen.ranks,
        tree=f"dict of {chosen.leaves} fp32 tensors [{ROWS}, {COLUMNS}]",
        accelerate=accelerate.__version__,
    )


def measure(num_leaves: int, rounds: int) -> dict[str, float]:
    ours, theirs = farflung.Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    assert ours.num_processes == theirs.num_processes == dist.get_world_size(), "not every one joined the group"
    seeded(SEED)
    tree = {f"leaf{k}": torch.randn(ROWS, COLUMNS) for k in range(num_leaves)}
    uneven = {key: torch.randn(ROWS + ours.process_index, COLUMNS) for key in tree}
    contestants: dict[str, Callable[[], Any]] = {"bare gather": lambda: hand_packed(tree)}
    for name, peer in (("farflung", ours), ("accelerate", theirs)):
        contestants[f"{name} gather"] = partial(peer.gather, tree)
        contestants[f"{name} gather_for_metrics"] = partial(peer.gather_for_metrics, tree)
        contestants[f"{name} reduce"] = partial(peer.reduce, tree, "mean")
        contestants[f"{name} pad_across_processes"] = partial(peer.pad_across_processes, uneven)
    return medians_us(interleave(contestants, rounds))


def hand_packed(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one would write by hand for this one tree: same shapes and dtype everywhere, and nothing checked."""
    size = dist.get_world_size()
    mine = torch.cat([leaf.view(-1) for leaf in tree.values()])
    everyone = torch.empty(size * mine.numel())
    _all_gather_flat(everyone, mine)
    columns = everyone.view(size, -1).split([leaf.numel() for leaf in tree.values()], dim=1)
    return {key: column.reshape(-1, COLUMNS) for key, column in zip(tree, columns, strict=True)}


if __name__ == "__main__":
    main()
