# SPDX-License-Identifier: Apache-2.0
"""What a membership that may change costs while nothing happens: rounds of it and of fixed ranks in turns.

`python benchmarks/bench_elastic.py --ranks 2` prints the median microseconds of a round of each, and their ratio: the
median of several runs, as where memory and threads came to lie makes one run's ratio differ by 5 % either way.
"""

import argparse
import socket
import statistics

import torch
import torch.distributed as dist
from _measure import interleave, medians_us, ratios, report
from torch import nn

from farflung.address.c10d_transport import C10dTransport
from farflung.address.keyed_store import KeyedServer
from farflung.base.torch_internals import default_store
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop, diloco
from farflung.outer.membership import FixedMembership
from farflung.testing.ranks import run_ranks


def measure(numel, rounds, is_odd):
    """Return the seconds of rounds under a fixed membership and under one that may change."""
    if dist.get_rank() == 0:
        server = KeyedServer(socket.create_server(("127.0.0.1", 0)), "127.0.0.1", None)
        default_store().set("port", str(server.port))
    transport = C10dTransport(("127.0.0.1", int(default_store().get("port"))))
    memberships = {
        "fixed": FixedMembership(TorchGroup(), SoloGroup()),
        "elastic": Elastic(transport, dist.get_rank() + 1, expected=dist.get_world_size()),
    }
    loops = {
        name: OuterLoop(nn.Linear(numel, 1, bias=False), diloco(1), membership=membership)
        for name, membership in sorted(memberships.items(), reverse=is_odd)
    }
    seconds = interleave({name: loop.step for name, loop in loops.items()}, rounds, before=dist.barrier)
    for loop in loops.values():
        loop.close()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="add the line to benchmarks/results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for run in range(asked.runs):
        ranks = run_ranks(measure, asked.ranks, asked.numel, asked.rounds, bool(run % 2), timeout_s=600)
        runs.append(medians_us({name: [s for rank in ranks for s in rank[name]] for name in ranks[0]}))
    figures = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    of_fixed = [ratios(run, "fixed")["elastic"] for run in runs]
    report(
        "what a membership that may change costs while nothing happens, beside fixed ranks",
        {"round_us": figures, "of_fixed": round(statistics.median(of_fixed), 3), "of_fixed_by_run": of_fixed},
        seed=0,
        write_to="elastic_cost.jsonl" if asked.write else None,
        ranks=asked.ranks,
        numel=asked.numel,
        rounds=asked.rounds,
    )


if __name__ == "__main__":
    main()
