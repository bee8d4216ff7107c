# SPDX-License-Identifier: Apache-2.0
"""Does `auto` choose as well as somebody who tries a grid by hand? Two ranks in network namespaces; needs root.

The demo's GPT trains between two machines at each rate, with the demo's learning rate, which falls to 0: by `auto`, by
the rows of a small grid, and with no exchange. A step takes a fixed time, what is left of it is slept: so that the
ranks of one machine and their exchange do not take the processor from each other, as they would not between two
machines. What a method comes to is its goodput: how many of DDP's steps on a free line end at its loss, by how long
it took. All run in turns, or `--jobs` at a time, each on a line of its own: a job takes two cores for as long as its
steps compute.

With `--change` the rate of the line changes while `auto` trains, so that each of `--megabits` has as many steps, and a
picture shows it. What its rounds come to on a line, 30 of them after the change, is to be compared with another run's
that has this line from the start: `--change --megabits 10`.

python benchmarks/bench_auto.py [--size small] [--megabits 5 20 100 1000] [--steps 600] [--step-s 0.06] [--seeds 3]
    [--only auto ...] [--jobs N] [--change] [--picture docs/images/auto.png] [--write]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import _lab
import torch
import torch.distributed as dist
from _measure import report
from bench_slow_network import judge
from evidence.efficiency import steps_to

from farflung.auto.choice import Measurements, choose
from farflung.auto.trial import RecipeTrial
from farflung.auto.tuner import LineTuner
from farflung.config.outer import OuterSettings
from farflung.cost.methods import efficiency, name_of
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import SIZES
from farflung.demo.text import load_text
from farflung.demo.train import rise_and_fall
from farflung.methods.arguments import OuterConfig
from farflung.outer import OuterLoop

AUTO, NONE = "auto", "no exchange"
GRID: dict[str, dict[str, Any]] = {
    **{f"diloco({every}) e3m0": {"recipe": "diloco", "every": every, "codec": "e3m0"} for every in (8, 16, 30)},
    "streaming_diloco(8, 3, delay=2)": {"recipe": "streaming_diloco", "every": 8, "fragments": 3, "delay": 2},
    "streaming_diloco(30, 3, delay=7)": {"recipe": "streaming_diloco", "every": 30, "fragments": 3, "delay": 7},
    "sparse_loco(8)": {"recipe": "sparse_loco", "every": 8},
}
METHODS = {AUTO: {"recipe": "auto"}, **GRID, NONE: {}}
FREE = "ddp"  # on a line that costs nothing, for several lengths
LENGTHS = (3, 4, 5, 6, 7, 8)  # of DDP's runs, in eighths of the steps
LEARNING_RATE = {"small": 1.5e-3, "large": 4e-4}


@dataclass
class Run:
    """One training of a rank."""

    method: str
    seed: int
    opened_s: float
    seconds: float  # of all steps, with the rounds that are due in them
    closed_s: float
    computed_s: float  # in the steps, without exchange and sleep
    waited_s: float  # in rounds
    bytes_sent: int
    loss: float
    digest: str  # of the weights
    recipe: str  # that auto has chosen
    forecast: float | None  # of its goodput
    changes: list[list[int]]
    rounds: list[tuple[float, int, float, int]]  # when, after which step, share of the time waited, H


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(LEARNING_RATE), default="small")
    parser.add_argument("--megabits", type=float, nargs="+", default=[5.0, 20.0, 100.0, 1000.0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-s", type=float, default=0.06)
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences in a step; 0: gradients are noise, for the time"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="how many trainings run at a time")
    parser.add_argument("--only", nargs="+", choices=[*METHODS, FREE], default=[*METHODS, FREE])
    parser.add_argument("--change", action="store_true", help="change the rate in mid-run instead, through --megabits")
    parser.add_argument("--picture", type=Path, help="where to draw what --change did")
    parser.add_argument("--write", action="store_true", help="append the lines to benchmarks/results/auto.jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(**json.loads(chosen.worker))
        return
    if not _lab.is_possible():
        sys.exit("This benchmark makes network namespaces: run it as root, with iproute2 installed.")
    write_to = "auto.jsonl" if chosen.write else None
    facts = {name: getattr(chosen, name) for name in ("size", "steps", "step_s", "batch")}
    if chosen.change:
        figures = changed(chosen, facts)
        report("Does `auto` follow a line that changes?", figures, seed=0, write_to=write_to, **facts)
        return
    tasks = [
        (megabits, method, seed, facts)
        for megabits in chosen.megabits
        for seed in range(chosen.seeds)
        for method in chosen.only
        if method != FREE
    ]
    question = "Does `auto` choose as well as somebody who tries a grid by hand?"
    if FREE in chosen.only:
        report(
            question, {FREE: [free(seed, **facts) for seed in range(chosen.seeds)]}, seed=0, write_to=write_to, **facts
        )
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
        runs = list(pool.map(on_a_line, *zip(*tasks, strict=True)))
    for megabits in chosen.megabits:
        mine = [run for task, run in zip(tasks, runs, strict=True) if task[0] == megabits]
        more = {"megabits": megabits, "seeds": chosen.seeds, "jobs": chosen.jobs, **facts}
        report(question, compared(mine), seed=0, write_to=write_to, **more)


def on_a_line(megabits: float, method: str, seed: int, facts: dict[str, Any]) -> list[Run]:
    """Train by one method on a line of its own."""
    with _lab.line(megabits):
        return pair(method, seed, facts)


def pair(method: str, seed: int, facts: dict[str, Any]) -> list[Run]:
    """Train by one method in both namespaces; return the run of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"method": method, "seed": seed, "folder": folder, **facts}
        _lab.run_pair([sys.executable, __file__, "--worker", json.dumps(task)], {"OMP_NUM_THREADS": "1"}, 3000)
        runs = [Run(**json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in range(2)]
    assert method == NONE or runs[0].digest == runs[1].digest, f"{method}: the replicas differ"
    first = runs[0]
    sent = f"{first.bytes_sent / 1e6:.2f} MB, waited {first.waited_s:.1f} s, computed {first.computed_s:.1f} s"
    print(f"{method:34} seed {seed}: {first.seconds:.1f} s, loss {first.loss:.3f}, {sent}", file=sys.stderr)
    print(f"{'':34} {first.recipe} {first.changes}" * bool(first.recipe), file=sys.stderr)
    return runs


def compared(runs: list[list[Run]]) -> dict[str, Any]:
    """Return the medians over seeds of each method; throughput is that next to no exchange, of the same seed."""
    alone = {first.seed: first.seconds for first, _ in runs if first.method == NONE}
    lines: dict[str, Any] = {}
    for method in dict.fromkeys(first.method for first, _ in runs):
        mine = [first for first, _ in runs if first.method == method]
        lines[method] = {
            "seconds": _middle(run.seconds for run in mine),
            "opened_s": _middle(run.opened_s for run in mine),
            "closed_s": _middle(run.closed_s for run in mine),
            "computed_s": _middle(run.computed_s for run in mine),
            "waiting": _middle(run.waited_s / run.seconds for run in mine),
            "mb_sent": _middle(run.bytes_sent / 1e6 for run in mine),
            "losses": [round(run.loss, 4) for run in mine if not math.isnan(run.loss)],
        }
        if alone:
            lines[method]["throughput"] = _middle(alone[run.seed] / run.seconds for run in mine)
        if method == AUTO:
            lines[method] |= {"recipes": [run.recipe for run in mine], "changes": [run.changes for run in mine]}
            lines[method]["forecasts"] = [run.forecast for run in mine]
    return lines


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the page of evidence for one size, by rate; the best by hand has the most goodput.

    The loss of a recipe doesn't depend on its line: any line with losses, and any that has its time, will do. Of times
    the shortest counts, as others may use the machine; of `auto`, whose choices change, the last run.
    """
    free_runs = [line for line in lines if FREE in line["figures"]]
    curves = free_runs[-1]
    by_rate: dict[float, dict[str, Any]] = {}
    efficiency = {}
    for line in lines[lines.index(free_runs[0]) + 1 :]:
        for method, figures in line["figures"].items() if "megabits" in line else ():
            found = by_rate.setdefault(line["megabits"], {})
            if method != AUTO:
                found[method] = min(found.get(method, figures), figures, key=lambda one: one["seconds"])
            elif figures["losses"]:
                found[method] = figures
            if figures["losses"]:
                efficiency[method] = efficiency_of(figures["losses"], curves)
    alone_s = min(methods[NONE]["seconds"] for methods in by_rate.values() if NONE in methods)
    rows = []
    for megabits, methods in sorted(by_rate.items()):
        auto = methods[AUTO]
        learns = {**efficiency, AUTO: efficiency_of(auto["losses"], curves)}
        goodput = {name: learns[name] * alone_s / methods[name]["seconds"] for name in methods if name != NONE}
        best = max(goodput.keys() & GRID.keys(), key=lambda name: goodput[name])
        chosen = [json.loads(recipe) for recipe in auto["recipes"]]
        names = " or ".join(dict.fromkeys(f"`{one['recipe']}({one.get('every', '')})`" for one in chosen))
        forecast = f"{statistics.median(auto['forecasts']):.2f}"
        cells = [f"{megabits:g} Mbit/s", names, forecast, *_cells(methods[AUTO], goodput[AUTO])]
        rows.append(f"| {' | '.join([*cells, f'`{best}`', *_cells(methods[best], goodput[best])])} |")
    return rows


def efficiency_of(losses: list[float], curves: dict[str, Any]) -> float:
    """Return the median over seeds of how many of DDP's steps end at the same loss, for each step."""
    by_seed = [{int(steps): loss for steps, loss in one.items()} for one in curves["figures"][FREE]]
    return _middle(steps_to(loss, one) / curves["steps"] for loss, one in zip(losses, by_seed, strict=False))


def _cells(figures: dict[str, Any], goodput: float) -> list[str]:
    return [f"{goodput:.2f}", f"{figures['waiting']:.1%}"]


def _middle(values: Any) -> float:
    return round(statistics.median(values), 4)


def changed(chosen: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Train by `auto` on a line whose rate changes; return how many rounds it took until waiting was below 10 %."""
    each = chosen.steps // len(chosen.megabits)
    with _lab.line(chosen.megabits[0]), tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "steps"
        ends: list[float] = []
        watcher = threading.Thread(target=_change, args=(chosen.megabits, each, marks, ends), daemon=True)
        watcher.start()
        first, _ = pair(AUTO, 0, facts | {"marks": str(marks)})
    parts = [[row for row in first.rounds if each * n < row[1] <= each * (n + 1)] for n in range(len(chosen.megabits))]
    figures = {
        "megabits": chosen.megabits,
        "rounds_until_low": [_rounds_until_low([row[2] for row in part]) for part in parts],
        "goodput": [_goodput(json.loads(first.recipe), part[30:], **facts) for part in parts],
        "recipe": first.recipe,
        "changes": first.changes,
        "replicas_are_equal": True,  # or `pair` would have failed
        "rounds": [[round(row[0], 2), row[1], round(row[2], 3), row[3]] for row in first.rounds],
    }
    if chosen.picture:
        draw(figures, each, chosen.picture)
    return figures


def _rounds_until_low(shares: list[float]) -> int | None:
    """Return after how many rounds the median of ten stays below a tenth; None: it never does."""
    low = [statistics.median(shares[max(0, end - 10) : end]) < 0.1 for end in range(1, len(shares) + 1)]
    last = max((number for number, is_low in enumerate(low, 1) if not is_low), default=0)
    return last if last < len(shares) else None


def _goodput(recipe: dict[str, Any], rounds: list[Any], size: str, steps: int, **_: Any) -> float | None:
    """Return what rounds of these intervals and waits come to, by the evidence; None: there are no rounds."""
    delay = recipe.get("delay", 1)
    name = name_of(recipe["recipe"], recipe.get("codec"), delay)
    learns = [efficiency(name, every, 2, steps).mean * (1 - waited) for _, _, waited, every in rounds]
    return round(statistics.mean(learns), 3) if learns else None


def _change(rates: list[float], each: int, marks: Path, ends: list[float]) -> None:
    for number, rate in enumerate(rates[1:], 1):
        while not marks.exists() or int(marks.read_text() or 0) < each * number:
            time.sleep(0.05)
        _lab.shape_line(rate)


def draw(figures: dict[str, Any], each: int, path: Path) -> None:
    """Draw waiting and H over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 4))
    steps = [row[1] for row in figures["rounds"]]
    above.plot(steps, [100 * row[2] for row in figures["rounds"]], ".-", linewidth=0.8, markersize=3)
    above.axhline(10, color="grey", linewidth=0.8, linestyle=":")
    above.set_ylabel("waiting, % of the time")
    below.step(steps, [row[3] for row in figures["rounds"]], where="post")
    below.set_ylabel("H, steps")
    below.set_xlabel("step")
    for number, rate in enumerate(figures["megabits"]):
        above.text(each * (number + 0.5), above.get_ylim()[1], f"{rate:g} Mbit/s", ha="center", va="bottom")
        for axis in (above, below):
            axis.axvline(each * number, color="grey", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def free(seed: int, size: str, steps: int, step_s: float, batch: int) -> dict[int, float]:
    """Return the losses at which DDP ends after so many steps, each run under a schedule of its own."""
    torch.set_num_threads(1)
    text, found = load_text(None), {}
    train, length = torch.frombuffer(bytearray(text.train), dtype=torch.uint8), min(SIZES[size].context, 64)
    for part in LENGTHS:
        some = steps * part // LENGTHS[-1]
        model, optimizer, rate = prepared(seed, size, some)
        ranks = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(2)]
        for _ in range(some):
            drawn = torch.cat([drawn_from(train, length, batch, rank) for rank in ranks])
            loss_per_sequence(model(drawn[:, :-1]), drawn[:, 1:]).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
        (found[some],) = judge(model, [model.state_dict()], text.validation, length)
        print(f"DDP, {some} steps, seed {seed}: loss {found[some]:.3f}", file=sys.stderr)
    return found


def prepared(seed: int, size: str, steps: int, is_trained: bool = True) -> tuple[GPT, Any, Any]:
    """Return the model, its optimizer and the schedule of its rate."""
    torch.manual_seed(seed)
    model = GPT(SIZES[size])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if is_trained:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[size], betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step / steps))


def drawn_from(train: torch.Tensor, length: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Return `[batch, length + 1]` bytes."""
    places = torch.randint(len(train) - length - 1, (batch,), generator=generator)
    return torch.stack([train[place : place + length + 1] for place in places.tolist()])


class ForecastTuner(LineTuner):
    """Keeps the goodput that is forecast of the recipe that is chosen."""

    forecast: float | None = None

    def chosen(self, settings: OuterSettings, measured: Measurements | None, steps: int | None, is_first: bool) -> None:
        super().chosen(settings, measured, steps, is_first)
        if measured is not None and (said := re.search(r"([\d.]+) of DDP", choose(measured).reason)):
            self.forecast = float(said[1])


# ---- in the namespaces


def work(
    method: str,
    seed: int,
    folder: str,
    size: str,
    steps: int,
    step_s: float,
    batch: int,
    marks: str | None = None,
) -> None:
    """Train one replica, and write down how it went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, text, shape = dist.get_rank(), load_text(None), SIZES[size]
    model, optimizer, rate = prepared(seed, size, steps, bool(batch))
    draw_places = torch.Generator().manual_seed(1000 * seed + rank)
    train = torch.frombuffer(bytearray(text.train), dtype=torch.uint8)
    began, loop, tuner = time.perf_counter(), None, None
    options = METHODS[method]
    if options:
        tuner = ForecastTuner(rates=lambda: (optimizer.param_groups[0]["lr"],))
        chooser = RecipeTrial(tuner) if method == AUTO else None
        loop = OuterLoop(model, OuterConfig(**options, steps=steps), inner=optimizer, chooser=chooser)
        if method == AUTO:
            tuner.follow(loop)
    rounds: list[tuple[float, int, float, int]] = []
    if loop is not None and method == AUTO:
        loop.listeners.append(lambda this: rounds.append(_row(this, loop)))
    dist.barrier()
    start, sent = time.perf_counter(), _lab.bytes_out()
    noises = [torch.randn(parameter.shape, generator=draw_places) for parameter in model.parameters() if not batch]
    opened_s, computed_s, length = start - began, 0.0, min(shape.context, 64)
    for step in range(1, steps + 1):
        at = time.perf_counter()
        if batch:
            drawn = drawn_from(train, length, batch, draw_places)
            loss_per_sequence(model(drawn[:, :-1]), drawn[:, 1:]).mean().backward()
        else:
            for parameter, noise in zip(model.parameters(), noises, strict=True):
                parameter.grad = noise.clone()
        took_s = time.perf_counter() - at
        time.sleep(max(0.0, step_s - took_s))
        if loop is not None:
            loop.average_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        computed_s += took_s
        if loop is not None:
            loop.step()
        if marks and rank == 0:
            Path(marks).write_text(str(step))
    end = time.perf_counter()
    recipe, changes, waited_s = "", [], 0.0
    if loop is not None:
        waited_s = loop.stats().seconds_exposed
        recipe = loop.state_dict().get("auto", "")
        changes = [[change.step, change.every, change.delay] for change in loop.changes]
        loop.close()
    closed_s = time.perf_counter() - end
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    (loss,) = judge(model, [model.state_dict()], text.validation, length) if batch else (float("nan"),)
    numbers = (opened_s, end - start, closed_s, computed_s, waited_s, _lab.bytes_out() - sent, loss)
    run = Run(method, seed, *numbers, digest, recipe, tuner and tuner.forecast, changes, rounds)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(run)))
    _lab.go_home()


_AT = [0.0]


def _row(this: Any, loop: OuterLoop) -> tuple[float, int, float, int]:
    now = time.perf_counter()
    elapsed, _AT[0] = now - _AT[0], now
    every = getattr(loop.schedule, "every", 0)
    return now, this.step, min(1.0, this.seconds_exposed / max(elapsed, 1e-9)), every


if __name__ == "__main__":
    main()
