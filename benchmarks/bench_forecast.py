# SPDX-License-Identifier: Apache-2.0
"""Does `farflung plan --from RUN` forecast what the run takes on another line? As root: two network namespaces.

A small GPT trains by DiLoCo between two machines at each rate; from what the folder of each run has measured, its steps
are forecast at the other rate and compared with those that were made there.

python benchmarks/bench_forecast.py [--rates 20 50] [--steps 192] [--every 16] [--write]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _lab import _SPACES, ADDRESSES, DEVICE, is_possible, line
from _measure import report, seeded

from farflung.cost.model import Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.observe.figures import writers
from farflung.observe.planned import measured
from farflung.observe.run import ObservedRun
from farflung.outer import diloco

SEED = 0
TRAINS = """
import sys, torch
from farflung import Accelerator
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import Shape
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = GPT(Shape(depth=2, width=96, heads=4, context=64))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
torch.manual_seed(1 + accelerator.process_index)
for step in range(int(sys.argv[1])):
    batch = torch.randint(256, (8, 65))
    accelerator.backward(loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs=2, default=[20.0, 50.0], metavar="MBIT")
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/forecast.jsonl")
    options = parser.parse_args()
    if not is_possible():
        raise SystemExit("This needs root, iproute2 and tc.")
    seeded(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAINS)
        runs = {rate: trained(folder, rate, options.steps, options.every) for rate in options.rates}
    figures: dict[str, Any] = {}
    for here, there in (options.rates, options.rates[::-1]):
        found, actual = measured(runs[here]), step_seconds(runs[there])
        forecast = forecast_s(found, there, options.every)
        figures[f"from {here:g} to {there:g} Mbit/s"] = {
            "measured": found,
            "step_s_forecast": round(forecast, 4),
            "step_s_there": round(actual, 4),
            "ratio": round(forecast / actual, 3),
        }
    write_to = "forecast.jsonl" if options.write else None
    question = "Does `farflung plan --from RUN` forecast what the run takes on another line?"
    report(question, figures, seed=SEED, write_to=write_to, steps=options.steps, every=options.every)


def trained(folder: Path, rate: float, steps: int, every: int) -> ObservedRun:
    """Train on two machines with a line of so many Mbit/s; return the run of the first one."""
    words = ["launch", "--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", ADDRESSES[0]]
    words += ["--network_interface", DEVICE, "--outer", "diloco", "--outer-every", str(every)]
    with line(rate):
        ranks = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", space, sys.executable, "-m", "farflung", *words),
                    *("--machine_rank", str(rank), "--run-dir", f"{rate:g}-{rank}", "train.py", str(steps)),
                ],
                cwd=folder,
                stderr=subprocess.DEVNULL,
            )
            for rank, space in enumerate(_SPACES)
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    return ObservedRun(folder / f"{rate:g}-0")


def step_seconds(run: ObservedRun) -> float:
    """Return how long a step took, rounds included: from the first round's end to the last one's."""
    rows = run.rounds_of(writers(run)[0].row.get("member"))
    return float((rows[-1].time - rows[0].time) / (rows[-1].step - rows[0].step))


def forecast_s(found: dict[str, Any], rate: float, every: int) -> float:
    """Return the seconds of a step at another rate, with what was measured."""
    numbers = {"parameters": int(found["parameters"]), "layers": 2, "step_s": float(found["step_seconds"])}
    latency_s = float(found["latency"].removesuffix("ms")) / 1000
    costed = Workload(**numbers, replicas=2, bandwidth_bps=rate * 1e6, latency_s=latency_s)
    return cost_of(costed, method_of(diloco(every), numbers["parameters"], name="diloco")).seconds_per_step


if __name__ == "__main__":
    main()
