# SPDX-License-Identifier: Apache-2.0
"""What pages say was measured is what lies in benchmarks/results."""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from farflung.cost.model import Run, cost_of
from farflung.cost.recipes import method_of
from farflung.demo.gpt import GPT
from farflung.demo.settings import SIZES
from farflung.demo.train import DDP, seconds_on_line
from farflung.outer import diloco, local_sgd, streaming_diloco
from farflung.outer.momentum import rate_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
DEMO_PAGE = (ROOT / "docs" / "concepts" / "demo.md").read_text(encoding="utf-8")
PARAMETERS = sum(parameter.numel() for parameter in GPT(SIZES["small"]).parameters())


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


def test_the_page_of_recipes_has_the_losses_by_momentum_of_which_the_default_is_within_1_percent_of_the_best(
    monkeypatch,
):
    module = benchmark("bench_outer_momentum", monkeypatch)
    for line in module.summary().splitlines():
        assert line in PAGE, line
    by_run = {}
    for run in module.read():
        steps, schedule, rate, seed, momentum = module.place(run)
        by_run.setdefault((steps, schedule, seed), {})[momentum, rate] = run["figures"]["validation_loss"]
    assert {steps for steps, _, _ in by_run} == {200, 500, 2000}
    for losses in (found for (_, schedule, _), found in by_run.items() if schedule == "falling"):
        assert losses[module.GROWS, rate_of(module.EVERY)] <= 1.01 * min(losses.values())


@pytest.mark.parametrize(("megabits", "share"), [(5, 0.9), (20, 0.95), (100, 0.95), (200, 0.9)])
def test_the_page_of_recipes_has_the_times_over_a_slow_line(megabits, share):
    run = over_a_line(megabits)
    assert run["batch"] == 8
    for name, one in run["figures"].items():
        assert row(name, one) in PAGE, row(name, one)
    best = run["figures"]["streaming_diloco(24, 3)"]
    sooner = f"{best['faster_than_ddp']:.1f} times sooner than DDP with 1/{best['fewer_bytes_than_ddp']:.0f}"
    assert f"{sooner} of its bytes, at {best['of_throughput_alone']} of the throughput" in " ".join(EVIDENCE.split())
    assert best["of_throughput_alone"] >= share


def test_the_page_of_evidence_has_the_throughput_of_a_larger_model_over_a_line():
    share = over_a_line(100, "large")["figures"]["streaming_diloco(24, 3)"]["of_throughput_alone"]
    assert f"14M parameters, over 100 Mbit/s, it is {share} of that throughput" in " ".join(EVIDENCE.split())
    assert share >= 0.95


def test_the_page_of_checkpoints_has_the_times_of_loading():
    run = json.loads((ROOT / "benchmarks" / "results" / "load.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    page = (ROOT / "docs" / "concepts" / "checkpoint.md").read_text(encoding="utf-8")
    assert f"Loading {run['bytes'] / 1e9:.2f} GB" in page
    for kind, words in (("cold", " times as long as"), ("warm", " times\n  from the file cache")):
        seconds = dict(run["figures"][kind])
        assert f"{seconds.pop('farflung') / min(seconds.values()):.2f}{words}" in page


def test_the_page_of_the_demo_says_how_real_lines_compare_with_what_the_demo_computes():
    run = over_a_line(20)
    recipes = {
        "local_sgd(8)": local_sgd(8),
        "diloco(32)": diloco(32),
        "streaming_diloco(24, 3)": streaming_diloco(24, 3),
    }
    methods = {name: method_of(recipe, PARAMETERS, name=name) for name, recipe in recipes.items()}
    tokens = run["batch"] * SIZES["small"].context
    alone_s = tokens / run["figures"]["alone"]["tokens_per_s"]
    computed = Run(PARAMETERS, SIZES["small"].depth, alone_s, replicas=2, bandwidth_bps=1e6 * run["megabits"])
    for name, method in {"ddp": DDP, **methods}.items():
        sent = cost_of(computed, method).bytes_sent_per_step
        real_s = tokens / run["figures"][name]["tokens_per_s"]
        ratio = real_s / seconds_on_line(method, computed, 1, sent)
        assert f"{ratio:.2f} (`{name}`)" in " ".join(DEMO_PAGE.split())
        assert 0.9 < ratio < 1.15


def test_the_page_of_evidence_has_the_figures_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("evidence.tables")
    results = tables.Results()
    shown = {title: "\n".join(lines) for title, lines in tables.all_tables(results).items()}
    assert all(table in EVIDENCE for table in shown.values())
    for text in (EVIDENCE, (ROOT / "README.md").read_text(encoding="utf-8")):
        headlines = re.findall(r"<!-- (\w+): (.+) -->", text)
        assert headlines
        for size, name in headlines:
            assert tables.headline(results, size, name) in " ".join(text.split()), name
    for share in re.findall(r"\d+ ± \d+ %", " ".join(EVIDENCE.split())):
        assert share in "\n".join(shown.values())


def test_the_defaults_of_each_recipe_end_within_1_percent_of_what_was_tuned(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("evidence.tables")
    lines = [line.strip("| ").split(" | ") for line in tables.defaults_table(tables.Results())[2:]]
    assert {steps for _, steps, *_ in lines} == {"500", "2000", "4000"}
    for name, steps, _, _, above, seeds in lines:
        assert float(above.split()[0]) <= 1.0, (name, steps)
        assert seeds == "3", (name, steps)


def test_diloco_over_muon_ends_at_a_lower_loss_than_over_adamw(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("evidence.tables")
    for size, name in (("34k", "Muon"), ("34k", "Muon at half its rates"), ("100k", "Muon")):
        found = tables.collect(tables.Results(), "4", size)
        mean, error = tables.mean_and_error(tables.saved_by(found[name], found["AdamW"]))
        assert mean > 2 * error
    assert "ended at a lower loss than over AdamW" in " ".join(PAGE.split())


def over_a_line(megabits, size="small"):
    """Return the last run of bench_slow_network at this rate, with the demo's model of this size."""
    lines = map(json.loads, (ROOT / "benchmarks" / "results" / "slow_network.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["megabits"] == megabits and f"({size})" in line["model"]][-1]


def row(name, one):
    cells = [f"`{name}`", one["final_loss"], one["seconds_to_loss"], one.get("faster_than_ddp"), one["mb_to_loss"]]
    cells.append(None if name == "alone" else one.get("fewer_bytes_than_ddp"))
    cells.append(one.get("of_throughput_alone"))
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"
