# SPDX-License-Identifier: Apache-2.0
"""What a membership that may change costs while nothing happens: rounds of it and of fixed ranks in turns, one run.

`python benchmarks/bench_elastic.py --ranks 2` prints the median seconds of a round of each, and their ratio.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from farflung.base.torch_internals import default_store
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop, diloco
from farflung.outer.elastic import Elastic
from farflung.outer.membership import FixedMembership
from farflung.testing.ranks import run_ranks


def measure(numel, rounds):
    """Return the seconds of rounds under a fixed membership and under one that may change."""
    members = dist.get_world_size()
    memberships = {
        "fixed": FixedMembership(TorchGroup(), SoloGroup()),
        "elastic": Elastic(default_store(), dist.get_rank() + 1, expected=members),
    }
    loops = {
        name: OuterLoop(nn.Linear(numel, 1, bias=False), diloco(1), membership=membership)
        for name, membership in memberships.items()
    }
    seconds = {name: [] for name in loops}
    for number in range(rounds):
        for name in sorted(loops, reverse=bool(number % 2)):
            dist.barrier()
            start = time.perf_counter()
            loops[name].step()
            seconds[name].append(time.perf_counter() - start)
    for loop in loops.values():
        loop.close()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    first = run_ranks(measure, asked.ranks, asked.numel, asked.rounds, timeout_s=600)[0]
    medians = {name: statistics.median(times[4:]) for name, times in first.items()}
    ratios = [elastic / fixed for elastic, fixed in zip(first["elastic"][4:], first["fixed"][4:], strict=True)]
    print({name: round(value, 5) for name, value in medians.items()}, "ratio", round(statistics.median(ratios), 4))


if __name__ == "__main__":
    main()
