# SPDX-License-Identifier: Apache-2.0
"""What pages say was measured is what lies in benchmarks/results."""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

from farflung.base.words import in_rate
from farflung.cost.methods import Rows
from farflung.cost.model import Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.demo.gpt import GPT
from farflung.demo.report import gain_kept, verdicts
from farflung.demo.settings import SIZES, Point, Result
from farflung.demo.train import DDP, seconds_on_line
from farflung.outer import diloco, local_sgd, streaming_diloco
from farflung.outer.momentum import rate_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
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


LINES = {5: 0.9, 20: 0.95, 100: 0.95, 200: 0.9}  # Mbit/s, and the throughput that streaming keeps at least


def test_the_page_of_recipes_has_the_times_over_a_slow_line():
    runs = {megabits: over_a_line(megabits) for megabits in LINES}
    assert all(run["batch"] == 8 for run in runs.values())
    figures = {megabits: run["figures"] for megabits, run in runs.items()}
    for name in figures[20]:
        assert row(name, figures) in PAGE, row(name, figures)
    page = " ".join(PAGE.split())
    assert (
        "{}, {}, {} and {} s (medians)".format(*(found["ddp"]["seconds_to_loss"] for found in figures.values())) in page
    )
    for megabits, share in LINES.items():
        best = figures[megabits]["streaming_diloco(24, 3)"]
        assert sooner(best) in " ".join(EVIDENCE.split())
        assert best["of_throughput_alone"] >= share


def sooner(one):
    compared = f"{one['faster_than_ddp']:.1f} times sooner than DDP with 1/{one['fewer_bytes_than_ddp']:.0f}"
    return f"{compared} of its bytes, at {one['of_throughput_alone']} of the throughput"


def over_a_line_sentences():
    return [sooner(over_a_line(megabits)["figures"]["streaming_diloco(24, 3)"]) for megabits in (5, 20, 100, 200)]


def test_the_page_of_evidence_has_the_throughput_of_a_larger_model_over_a_line():
    share = over_a_line(100, "large")["figures"]["streaming_diloco(24, 3)"]["of_throughput_alone"]
    assert f"14M parameters, over 100 Mbit/s, it is {share} of that throughput" in " ".join(EVIDENCE.split())
    assert share >= 0.95


def test_the_page_of_checkpoints_has_the_times_of_loading():
    run = json.loads((ROOT / "benchmarks" / "results" / "load.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    page = " ".join((ROOT / "docs" / "concepts" / "checkpoint.md").read_text(encoding="utf-8").split())
    assert f"Loading {run['bytes'] / 1e9:.2f} GB" in page
    for kind, words in (("cold", " times as long as"), ("warm", " times from the file cache")):
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
    computed = Workload(PARAMETERS, SIZES["small"].depth, alone_s, replicas=2, bandwidth_bps=1e6 * run["megabits"])
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
    for title, lines in tables.page_tables(results).items():
        assert "\n".join(lines) in EVIDENCE, title
    text = " ".join(word for line in EVIDENCE.splitlines() if not line.startswith("|") for word in line.split())
    for said in headlines(tables, results) + tables.phrases(results):
        assert said in text, said
        text = text.replace(said, "")
    lines = "\n".join(over_a_line_sentences())
    for share in re.findall(r"-?[\d.]+ % \(-?[\d.]+ to -?[\d.]+\)", text):
        assert share in "\n".join(shown.values()), share
        text = text.replace(share, "")
    fewer = [float(cell.replace(",", "")) for cell in re.findall(r"\| ([\d.,]+) \| \d \|", "\n".join(shown.values()))]
    for part in re.findall(r"1/[\d.,]*\d", text):
        assert part in {f"1/{ratio:,.0f}" for ratio in fewer} or f"{part} of its bytes" in lines, part
    assert set(re.findall(r"[\d.]+ %", text)) <= SETTINGS_IN_PERCENT


# Parts of the run that are DDP, its schedule, weights, and what is said to be missing or rounded up on the page.
SETTINGS_IN_PERCENT = {"1 %", "2 %", "5 %", "30 %", "80 %"}
FROM_SCRATCH = (
    *((size, f"diloco({every}) e3m0") for size in ("100k", "34k") for every in (8, 32)),
    ("100k", "sparse_loco(8)"),
    ("385k", "diloco(8) e3m0"),
)
AFTER_A_START = (("100k", "diloco(8) e3m0"), ("100k", "diloco(32)"))


def headlines(tables, results):
    """What the page of evidence says in its first sentences."""
    later = [tables.with_common_start(results, size, name) for size, name in AFTER_A_START]
    return [tables.headline(results, size, name) for size, name in FROM_SCRATCH] + later


MEASURE = r"1/\d+|\d[\d.,]*[ -]?(?:%|times|s\b|ms|[kMG]?B\b|[MG]bit|[kM]\b)"


def demo_runs():
    """The demo's runs on several processors, each as its line and results; the last one has the picture."""
    for line in (ROOT / "benchmarks" / "results" / "demo.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        figures = run["figures"].values()
        yield run, [Result(**{**one, "curve": [Point(**point) for point in one["curve"]]}) for one in figures]


def test_each_figure_of_the_readme_has_its_line(monkeypatch):
    """What is left when all that lines say is taken out measures nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("evidence.tables")
    text = " ".join(re.sub(r"^```(sh|python)\n.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL).split())
    by_way, (*_, (line, results)) = {}, demo_runs()
    rate = in_rate(line["bandwidth_bps"])
    assert "\n".join(verdicts(results, rate)) in DEMO_PAGE
    for _, run in demo_runs():
        for result in run:
            by_way.setdefault(result.way, set()).add(int(gain_kept(result, run).removesuffix(" %")))
    shares = {way: " to ".join(map(str, sorted({min(found), max(found)}))) + " %" for way, found in by_way.items()}
    said = [
        f"DiLoCo keeps {shares['DiLoCo']} of DDP's gain over a replica alone, streaming DiLoCo "
        f"{shares['Streaming DiLoCo']}, `auto` {shares['auto']} and Local SGD {shares['Local SGD']}",
        f"line of {rate}",
        "385k parameters trained from scratch",
        "models of up to 14M parameters",
        f"also with {runs_on_a_gpu()['DDP']['parameters'] / 1e6:.0f}M on one NVIDIA H100",
    ]
    large = sum(parameter.numel() for parameter in GPT(SIZES["large"]).parameters())
    assert over_a_line(100, "large")
    assert round(large / 1e6) == 14
    said.append(f"keep {tables.headline(tables.Results(), '385k', 'diloco(8) e3m0')}")
    for one in said:
        assert one in text, one
        text = text.replace(one, "")
    assert "<!--" not in README
    assert [found for found in re.findall(MEASURE, text) if found != "200 MB"] == []  # the size of a download


def test_the_picture_of_the_readme_comes_on_its_first_screen():
    above = README[: README.index("![")].splitlines()
    assert len(above) <= 40
    assert README.count("\n") <= 90
    assert all(word in "\n".join(above) for word in ("PyTorch", "DiLoCo", "alpha", "pip install", "--outer diloco"))
    titles = re.findall(r"^## (.+)$", README, flags=re.MULTILINE)
    assert titles.index("Replicas come and go") < titles.index("Scripts written for Accelerate")
    assert titles[-1] == "What is not there"


def test_the_plan_has_the_shares_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kept = importlib.import_module("evidence.kept")
    assert kept.TARGET.read_text(encoding="utf-8") == kept.source(kept.Results())


def test_the_page_of_costs_has_the_rows_of_the_plan_that_were_run():
    page = " ".join((ROOT / "docs" / "cost.md").read_text(encoding="utf-8").split())
    lines = (ROOT / "benchmarks" / "results" / "plan.jsonl").read_text(encoding="utf-8").splitlines()
    latest = {line["steps"]: line for line in map(json.loads, lines)}
    for steps, line in latest.items():
        figures = dict(line["figures"])
        alone, ddp = figures.pop("alone"), figures.pop("ddp", None)
        first = next(iter(line["forecast"]))
        run = Workload(PARAMETERS, SIZES["small"].depth, line["plan_step_s"], 2, bandwidth_bps=1e6 * line["megabits"])
        assert Rows(run, steps, 0.9).chosen[0].method.name == first
        assert min(figures, key=lambda name: figures[name]["final_loss"]) == first
        assert figures[first]["of_throughput_alone"] >= 0.9
        assert f"in {steps} steps `{first}` at {figures[first]['final_loss']}" in page
        assert f"a replica alone at {alone['final_loss']}" in page
        assert f"{1000 * line['batch'] * SIZES['small'].context / alone['tokens_per_s']:.0f} ms" in page
        assert str(figures[first]["of_throughput_alone"]) in page
        if ddp is not None:
            assert f"DDP at {ddp['final_loss']}" in page
            assert f"That of DDP was {ddp['of_throughput_alone']}" in page
    assert set(latest) == {120, 300}


def runs_on_a_gpu():
    lines = map(json.loads, (ROOT / "benchmarks" / "results" / "gpu.jsonl").read_text("utf-8").splitlines())
    return {line["method"]: line for line in lines if "method" in line}


def test_the_page_of_evidence_has_the_figures_of_a_larger_model_on_a_gpu():
    runs = runs_on_a_gpu()
    losses = {name: run["figures"]["held_out_loss"] for name, run in runs.items()}
    common = runs["alone"]["figures"]["bytes_sent"]  # one that is alone sends nothing after the common start
    sent = {name: run["figures"]["bytes_sent"] - common for name, run in runs.items()}
    for name, loss in losses.items():
        kept = (losses["alone"] - loss) / (losses["alone"] - losses["DDP"])
        fewer = f"{sent['DDP'] / sent[name]:.3g}" if sent[name] else "sends nothing"
        assert f"| `{name}` | {loss:.4f} | {100 * kept:.0f} % | {fewer} |" in EVIDENCE
    assert len({(run["steps"], run["parameters"], run["gpu"], run["lr"]) for run in runs.values()}) == 1
    assert f"{runs['DDP']['steps']} steps on an {runs['DDP']['gpu'].removesuffix(' HBM3')}" in EVIDENCE


def test_a_run_that_has_its_line_is_done_again_by_its_number(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    redo = importlib.import_module("evidence.redo")
    line = {"size": "34k", "method": "alone", "lr": 0.005, "seed": 0, "steps": 2, "replicas": 1, "text": "another"}
    said = redo.redo(7, {**line, "figures": {"held_out_loss": 5.5}})
    assert said.startswith("line 7: {'held_out_loss': 5.5} then, {'held_out_loss': ")
    assert said.endswith(f"; the text is another one: another, now {redo.checksum()}")
    assert redo.redo(7, {**line, "text": redo.checksum(), "figures": {}}).endswith("} now")
    assert "no checksum" in redo.redo(7, {**{name: line[name] for name in line if name != "text"}, "figures": {}})


def test_the_defaults_of_each_recipe_end_within_1_percent_of_what_was_tuned(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("evidence.tables")
    lines = [line.strip("| ").split(" | ") for line in tables.defaults_table(tables.Results())[2:]]
    assert {steps for _, steps, *_ in lines} == {"500", "2000", "4000"}
    for name, steps, _, _, above, seeds in lines:
        assert above == "-" or float(above.split()[0]) <= 1.0, (name, steps)
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


def row(name, figures):
    """The row of a method, from its figures by line: loss and bytes at 20 Mbit/s, and how each line compares."""
    cells = [f"`{name}`", figures[20][name]["final_loss"]]
    cells.append(None if name == "alone" else figures[20][name].get("fewer_bytes_than_ddp"))
    for key in ("faster_than_ddp", "of_throughput_alone"):
        cells += [found.get(name, {}).get(key) for found in figures.values()]
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def test_the_page_of_elastic_runs_has_how_long_replicas_stood_still_after_an_event(monkeypatch):
    page = (ROOT / "docs" / "elastic.md").read_text(encoding="utf-8")
    drill = benchmark("drill_elastic", monkeypatch)
    rows = drill.table()
    longer = drill.table(with_lines=True)
    assert all(row.removesuffix("|") in line for row, line in zip(rows, longer, strict=True) if "---" not in row)
    assert len(rows) > 2
    for row in rows:
        assert row in page, row
    assert drill.newest().keys() == drill.EVENTS.keys()
    assert all(one["silence_s"] < 60 for one in drill.newest().values())


def test_the_page_of_frameworks_has_the_verdicts_that_were_measured(monkeypatch):
    module = benchmark("frameworks/run", monkeypatch)
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    for line in module.table().splitlines():
        assert line in page, line
    assert set(module.kept()) <= set(module.PROGRAMS)


def test_the_page_of_evidence_has_what_auto_chose(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_auto")
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    lines = (ROOT / "benchmarks" / "results" / "auto.jsonl").read_text(encoding="utf-8").splitlines()
    latest = {(line["size"], line.get("megabits")): line for line in map(json.loads, lines)}
    for (_, megabits), line in latest.items():
        if megabits is None:  # the rate changed in mid-run
            first, second, third = line["figures"]["rounds_until_low"]
            assert f"after {first}, {second} and {third} rounds" in page
        else:
            assert bench.table_row(line) in page
