# SPDX-License-Identifier: Apache-2.0
"""What pages say was measured is what lies in benchmarks/results."""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SLOW = ROOT / "benchmarks" / "results" / "slow_network.jsonl"


def benchmark(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_recipes_has_the_losses_that_were_measured(monkeypatch):
    lines = benchmark("bench_convergence", monkeypatch).summary().splitlines()
    assert len(lines) > 8
    for line in lines[2:]:
        assert line in PAGE, line


def test_the_page_of_recipes_has_the_times_over_a_slow_line():
    run = json.loads(SLOW.read_text(encoding="utf-8").splitlines()[-1])
    assert (run["megabits"], run["batch"]) == (20.0, 8)
    for name, one in run["figures"].items():
        assert row(name, one) in PAGE, row(name, one)


def row(name, one):
    cells = [f"`{name}`", one["final_loss"], one["seconds_to_loss"], one.get("faster_than_ddp"), one["mb_to_loss"]]
    cells.append(None if name == "alone" else one.get("fewer_bytes_than_ddp"))
    cells.append(one.get("of_throughput_alone"))
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"
