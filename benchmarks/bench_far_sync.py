# SPDX-License-Identifier: Apache-2.0
"""What does one synchronisation cost over a slow or far line, next to the time its bytes need? Needs root.

python benchmarks/bench_far_sync.py [--megabits 100] [--rtt-ms 50] [--rounds 5] [--tensors 77] [--values N] [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import _lab
import torch
import torch.distributed as dist
from _measure import interleave, medians_us, report, seeded
from torch import nn

from farflung.outer import E3M0, GatherMean, Identity, Int8, OuterLoop, local_sgd


class Bag(nn.Module):
    """`tensors` parameters that hold `values` numbers together."""

    def __init__(self, tensors: int, values: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(values // tensors)) for _ in range(tensors)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabits", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=77)
    parser.add_argument("--values", type=int, default=4_900_000)
    parser.add_argument("--write", action="store_true", help="append the line to results/far_sync.jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(**json.loads(chosen.worker))
        return
    if not _lab.is_possible():
        sys.exit("This benchmark makes network namespaces: run it as root, with iproute2 installed.")
    task = {"tensors": chosen.tensors, "values": chosen.values, "rounds": chosen.rounds}
    with _lab.line(chosen.megabits, chosen.rtt_ms / 1e3):
        command = [sys.executable, __file__, "--worker", json.dumps(task)]
        times: dict[str, float] = json.loads(_lab.run_pair(command, {"OMP_NUM_THREADS": "1"}, timeout_s=900)[0])
    floor = 4 * chosen.values * 8 / (chosen.megabits * 1e6)  # what each of two ranks sends in an all-reduce
    report(
        "What does one synchronisation cost over a far line?",
        {
            "median_s": {name: round(each / 1e6, 4) for name, each in times.items()},
            "over_the_time_of_fp32_bytes": {name: round(each / 1e6 / floor, 3) for name, each in times.items()},
        },
        seed=0,
        write_to="far_sync.jsonl" if chosen.write else None,
        megabits=chosen.megabits,
        rtt_ms=chosen.rtt_ms,
        tensors=chosen.tensors,
        values=chosen.values,
        seconds_of_fp32_bytes=round(floor, 4),
    )


def work(tensors: int, values: int, rounds: int) -> None:
    """Time one synchronisation of each kind, in turns; rank 0 prints the medians in microseconds."""
    torch.set_num_threads(1)
    seeded(0)
    dist.init_process_group("gloo")
    contestants: dict[str, Any] = {}
    flat = torch.randn(values)
    contestants["bare all_reduce"] = lambda: dist.all_reduce(flat)
    for name, codec in (("fp32", Identity()), ("int8", Int8()), ("4 bit", E3M0())):
        recipe = local_sgd(1, codec=codec)
        contestants[f"farflung {name}"] = OuterLoop(Bag(tensors, values), recipe).step
        assert isinstance(recipe.aggregator, GatherMean) == (name != "fp32")
    contestants["accelerate"] = theirs(Bag(tensors, values))
    turns: dict[str, Any] = {}
    for name, contestant in contestants.items():
        turns |= {f"barrier before {name}": dist.barrier, name: contestant}
    times = medians_us(interleave(turns, rounds, warmup=1))
    if dist.get_rank() == 0:
        print(json.dumps({name: times[name] for name in contestants}), flush=True)
    _lab.go_home()


def theirs(model: nn.Module) -> Any:
    """Return what makes Accelerate's LocalSGD average once."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, "Accelerate did not join the group"
    wrapped = accelerator.prepare_model(model)
    averaging = LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=1, enabled=True)
    averaging.__enter__()
    return averaging.step


if __name__ == "__main__":
    main()
