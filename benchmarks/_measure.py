# SPDX-License-Identifier: Apache-2.0
"""What every benchmark needs: contestants measured in turns, medians, and one JSON line that says where and when."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleave(
    contestants: Mapping[str, Callable[[], Any]],
    rounds: int = 200,
    warmup: int = 10,
    calls: int = 1,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Time each contestant once a round, so that a slow spell of the machine hits all of them alike.

    Each round has an order of its own, the same on all ranks: what one leaves behind (caches, a rank's lead) meets all
    others alike. Those that measure collectives together must pass the same contestants in the same order.

    Args:
        rounds: how often each one is timed.
        warmup: untimed rounds before.
        calls: calls in one timing, for what takes less than a microsecond or two.
        before: called before each timing, untimed: a barrier, so that nobody pays for a lead that one rank has.

    Returns:
        seconds for one call, `rounds` of them, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffler = list(contestants), random.Random(0)
    was_on = gc.isenabled()
    gc.disable()  # a collection in the middle would be charged to whoever happens to run
    try:
        for turn in range(warmup + rounds):
            shuffler.shuffle(order)
            for name in order:
                contestant = contestants[name]
                if before is not None:
                    before()
                start = time.perf_counter()
                for _ in range(calls):
                    contestant()
                took = (time.perf_counter() - start) / calls
                if turn >= warmup:
                    seconds[name].append(took)
            gc.collect(0)
    finally:
        if was_on:
            gc.enable()
    return seconds


def medians_us(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contestant's timings in microseconds."""
    return {name: round(1e6 * statistics.median(values), 2) for name, values in seconds.items()}


def ratios(figures: Mapping[str, float], to: str) -> dict[str, float]:
    """Return how many times the figure of `to` each of the other figures is."""
    return {name: round(figure / figures[to], 3) for name, figure in figures.items() if name != to}


def peak_bytes(act: Callable[[], Any]) -> int:
    """Return by how much this process's memory grew at most while `act` ran, in bytes. Linux only.

    Memory that was freed before and is still held by the process counts as used already: give it back first, or build
    what is needed in a fresh process.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the highest water mark to the water
    before = _memory("VmRSS")
    act()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def seeded(seed: int) -> int:
    """Seed Python and torch; return `seed`."""
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


def report(question: str, figures: Mapping[str, Any], *, seed: int, write_to: str | None = None, **facts: Any) -> str:
    """Print one JSON line: the question, the figures, and the commit, machine and versions they belong to.

    Args:
        figures: what was measured, units in the names.
        write_to: name of a file in `benchmarks/results` (such as `collectives.jsonl`) that gets the line too.
        facts: settings that the figures depend on.

    Returns:
        the line.
    """
    record = {"question": question, **facts, "figures": dict(figures), "seed": seed, **_circumstances()}
    line = json.dumps(record)
    print(line)
    if write_to is not None:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / write_to, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    return line


def _circumstances() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """The short commit, with `+` behind it when the package's sources differ from it."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "../src"], cwd=here)
    return head.stdout.strip() + ("+" if changed.returncode else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
