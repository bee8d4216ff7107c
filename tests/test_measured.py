# SPDX-License-Identifier: Apache-2.0
"""What pages say was measured is what lies in benchmarks/results."""

import json
import math
import re
import runpy
from dataclasses import replace

import pytest

from benchmarks.layout_cost import ModelSize, RankLayout, estimate
from farflung.address.reader import Reader
from farflung.base.words import in_bytes, in_rate, in_seconds
from farflung.cost.model import Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.demo.gpt import GPT
from farflung.demo.report import verdicts
from farflung.demo.settings import ALONE, SIZES, Point, Result
from farflung.demo.train import DDP, seconds_on_line
from farflung.methods.momentum import rate_of
from farflung.outer import diloco, local_sgd, streaming_diloco
from tests.docs.test_pages import ROOT, TEXTS, results, words

README, PAGE, EVIDENCE = (TEXTS[name] for name in ("README.md", "docs/recipes.md", "docs/evidence.md"))
DEMO_PAGE = TEXTS["docs/concepts/demo.md"]


def size_of(name):
    return sum(parameter.numel() for parameter in GPT(SIZES[name]).parameters())


PARAMETERS = size_of("small")


@pytest.fixture
def tables(benchmark):
    return benchmark("evidence.tables")


def test_the_page_of_recipes_has_the_losses_that_were_measured(benchmark):
    heading, *lines = benchmark("bench_convergence").summary().splitlines()
    shown = PAGE.partition(heading)[2].partition("\n\n")[0].strip().splitlines()
    assert len(shown) > 5
    assert set(shown) <= set(lines)


def test_the_momentum_that_grows_ends_lower_than_constant_ones_and_the_default_within_1_percent_of_the_best(benchmark):
    module = benchmark("bench_outer_momentum")
    by_run = {}
    for run in module.read():
        steps, schedule, rate, seed, momentum = module.place(run)
        by_run.setdefault((steps, schedule, seed), {})[momentum, rate] = run["figures"]["validation_loss"]
    assert {steps for steps, _, _ in by_run} == {200, 500, 2000}
    for losses in by_run.values():
        at_one_rate = {momentum: loss for (momentum, rate), loss in losses.items() if rate == 0.7}
        assert min(at_one_rate, key=at_one_rate.get) == module.GROWS
    for losses in (found for (_, schedule, _), found in by_run.items() if schedule == "falling"):
        assert losses[module.GROWS, rate_of(module.EVERY)] <= 1.01 * min(losses.values())


LINES = {5: 0.9, 20: 0.95, 100: 0.95, 200: 0.9}  # Mbit/s, and the throughput that streaming keeps at least
SHOWN = (20, 200)  # on the page of evidence, too


def test_the_page_of_recipes_has_the_times_over_a_slow_line():
    runs = {megabits: over_a_line(megabits) for megabits in LINES}
    assert all(run["batch"] == 8 for run in runs.values())
    figures = {megabits: run["figures"] for megabits, run in runs.items()}
    for name in figures[20]:
        assert row(name, figures) in PAGE, row(name, figures)
    medians = [found["ddp"]["seconds_to_loss"] for found in figures.values()]
    assert "{}, {}, {} and {} s (medians)".format(*medians) in words("recipes")
    for megabits, share in LINES.items():
        best = figures[megabits]["streaming_diloco(24, 3)"]
        assert megabits not in SHOWN or sooner(best) in words("evidence")
        assert best["of_throughput_alone"] >= share


def sooner(one):
    compared = f"{one['faster_than_ddp']:.1f} times sooner than DDP with 1/{one['fewer_bytes_than_ddp']:.0f}"
    return f"{compared} of its bytes, at {one['of_throughput_alone']} of the throughput"


def over_a_line_sentences():
    return [sooner(over_a_line(megabits)["figures"]["streaming_diloco(24, 3)"]) for megabits in LINES]


def test_the_page_of_evidence_has_the_throughput_of_a_larger_model_over_a_line():
    share = over_a_line(100, "large")["figures"]["streaming_diloco(24, 3)"]["of_throughput_alone"]
    assert f"14M parameters, over 100 Mbit/s, it is {share} of that throughput" in words("evidence")
    assert share >= 0.95


def test_the_page_of_checkpoints_has_the_times_of_loading():
    run, page = results("load")[-1], words("concepts/checkpoint")
    assert f"Loading {run['bytes'] / 1e9:.2f} GB" in page
    for kind, said in (("cold", " times as long as"), ("warm", " times from the file cache")):
        seconds = dict(run["figures"][kind])
        assert f"{seconds.pop('farflung') / min(seconds.values()):.2f}{said}" in page


def test_the_page_of_the_demo_says_how_real_lines_compare_with_what_the_demo_computes():
    run = over_a_line(20)
    recipes = {"local_sgd(8)": local_sgd(8), "diloco(32)": diloco(32)}
    recipes["streaming_diloco(24, 3)"] = streaming_diloco(24, 3)
    methods = {name: method_of(recipe, PARAMETERS, name=name) for name, recipe in recipes.items()}
    tokens = run["batch"] * SIZES["small"].context
    alone_s = tokens / run["figures"]["alone"]["tokens_per_s"]
    computed = Workload(PARAMETERS, SIZES["small"].depth, alone_s, replicas=2, bandwidth_bps=1e6 * run["megabits"])
    for name, method in {"ddp": DDP, **methods}.items():
        sent = cost_of(computed, method).bytes_sent_per_step
        real_s = tokens / run["figures"][name]["tokens_per_s"]
        ratio = real_s / seconds_on_line(method, computed, 1, sent)
        assert f"{ratio:.2f} (`{name}`)" in words("concepts/demo")
        assert 0.9 < ratio < 1.15


def test_the_page_of_evidence_has_the_figures_of_its_runs(tables):
    runs = tables.Results()
    shown = "\n".join("\n".join(lines) for lines in tables.all_tables(runs).values())
    for title, lines in tables.page_tables(runs).items():
        assert "\n".join(lines) in EVIDENCE, title
    text = " ".join(word for line in EVIDENCE.splitlines() if not line.startswith("|") for word in line.split())
    for said in headlines(tables, runs) + tables.phrases(runs):
        assert said in text, said
        text = text.replace(said, "")
    lines = "\n".join(over_a_line_sentences())
    for share in re.findall(r"-?[\d.]+ % \(-?[\d.]+ to -?[\d.]+\)", text):
        assert share in shown, share
        text = text.replace(share, "")
    fewer = [float(cell.replace(",", "")) for cell in re.findall(r"\| ([\d.,]+) \| \d \|", shown)]
    for part in re.findall(r"1/[\d.,]*\d", text):
        assert part in {f"1/{ratio:,.0f}" for ratio in fewer} or f"{part} of its bytes" in lines, part
    assert set(re.findall(r"[\d.]+ %", text)) <= SETTINGS_IN_PERCENT


def test_the_page_of_evidence_has_what_fine_tuning_came_to(benchmark):
    module = benchmark("evidence.fine_tuning")
    for title, lines in module.tables().items():
        assert "\n".join(lines) in EVIDENCE, title
    for said in module.phrases():
        assert said in words("evidence"), said


def test_the_page_of_evidence_has_what_was_tried_on_four_bits(benchmark):
    module = benchmark("evidence.frontier")
    runs = module.Results()
    assert "\n".join(module.table(runs, module.SHOWN)) in EVIDENCE
    assert module.helpful(runs) == [module.HELPS]
    for size in module.SIZES:
        short, usual = (
            sum(runs.loss(module.rows(runs, size, seed)[name]) for seed in (0, 1, 2)) for name in (module.HELPS, "H=8")
        )
        assert short > usual


def test_the_page_of_evidence_has_what_runs_of_other_lengths_keep(benchmark):
    module = benchmark("evidence.rounds")
    by_power = {power: module.misses(module.Results(), power) for power in (0, 0.25, 0.5, 0.75, 1)}
    assert min(by_power, key=by_power.get) == 0.5
    said = f"what half the steps keep by {by_power[0.5]:.3f}, and rounds that count as they are by {by_power[0]:.3f}."
    assert said in words("evidence")


def test_the_page_of_evidence_has_the_times_of_rounds_in_one_hop_and_in_two():
    figures = results("hops")[-1]["figures"]
    for replicas, named in ((4, "four"), (8, "eight")):
        one, two = (figures[f"{replicas} replicas, {way}"]["seconds"] for way in ("gather", "reduce_scatter"))
        assert f"{two:.1f} s and not {one:.1f} among {named}" in words("evidence")


# Parts of the run that are DDP, its schedule, weights, and what is said to be missing or rounded up on the page.
SETTINGS_IN_PERCENT = {"1 %", "2 %", "5 %", "30 %", "80 %"}
FROM_SCRATCH = (
    *((size, f"diloco({every}) e3m0") for size in ("100k", "34k") for every in (8, 32)),
    ("100k", "sparse_loco(8)"),
    ("385k", "diloco(8) e3m0"),
)
AFTER_A_START = (("100k", "diloco(8) e3m0"), ("100k", "diloco(32)"))


def headlines(tables, runs):
    """What the page of evidence says in its first sentences."""
    later = [tables.with_common_start(runs, size, name) for size, name in AFTER_A_START]
    return [tables.headline(runs, size, name) for size, name in FROM_SCRATCH] + later + [tables.in_two_hops(runs)]


MEASURE = r"1/\d+|\d[\d.,]*[ -]?(?:%|times|s\b|ms|[kMG]?B\b|[MG]bit|[kM]\b)"


def demo_runs():
    for run in results("demo"):
        figures = run["figures"].values()
        yield run, [Result(**{**one, "curve": [Point(**point) for point in one["curve"]]}) for one in figures]


def computed_times(results):
    """When each way of the demo, and DDP, reach the loss at which the worse of the two ends."""
    base, *others = results
    for way in others:
        loss = max(way.loss, base.loss)
        own, ddp = (in_seconds(one.reaches(loss)[1]) for one in (way, base))
        if way.way != ALONE:
            yield f"{loss:.3f} in {own} ({'DDP needs ' * (way.way == 'DiLoCo')}{ddp})"


def test_each_figure_of_the_readme_has_its_line(tables):
    """What is left when all that lines say is taken out measures nothing."""
    text = " ".join(re.sub(r"^```(sh|python)\n.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL).split())
    *_, (line, last) = demo_runs()
    rate = in_rate(line["bandwidth_bps"])
    assert "\n".join(verdicts(last, rate)) in DEMO_PAGE
    times = {name: one["seconds_to_loss"] for name, one in over_a_line(20)["figures"].items()}
    said = [
        f"a GPT with {PARAMETERS / 1e3:.0f}k parameters reach the loss that DDP ends with in",
        f"{times['diloco(32)']:.1f} s by DiLoCo",
        f"{times['streaming_diloco(24, 3)']:.1f} s by streaming DiLoCo",
        f"DDP takes {times['ddp']:.0f} s",
        f"A replica alone takes {times['alone']:.1f} s, but ends at a higher loss",
        f"Over a line of {rate}",
        f"time over a line of {rate}",
        *computed_times(last),
        "models of up to 14M parameters",
        f"also with {runs_on_a_gpu()['DDP']['parameters'] / 1e6:.0f}M on one NVIDIA H100",
    ]
    assert over_a_line(100, "large")
    assert round(size_of("large") / 1e6) == 14
    headline = f"keep {tables.in_two_hops(tables.Results())}"
    said += [headline, "with 100k parameters"]
    share = re.search(r"[\d]+ % \(\d+ to \d+\)", headline)
    assert all(share and share.group() in (ROOT / page).read_text() for page in ("docs/why.md", "docs/faq.md"))
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


def test_the_plan_has_the_efficiencies_that_were_measured(benchmark):
    plan = benchmark("evidence.plan")
    assert plan.TARGET.read_text(encoding="utf-8") == plan.source(plan.Results())


def runs_on_a_gpu():
    return {line["method"]: line for line in results("gpu") if "method" in line}


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


def test_the_defaults_of_each_recipe_end_within_1_percent_of_what_was_tuned(tables):
    lines = [line.strip("| ").split(" | ") for line in tables.defaults_table(tables.Results())[2:]]
    assert {steps for _, steps, *_ in lines} == {"500", "2000", "4000"}
    for name, steps, _, _, above, seeds in lines:
        assert above == "-" or float(above.split()[0]) <= 1.0, (name, steps)
        assert seeds == "3", (name, steps)


def test_diloco_over_muon_ends_at_a_lower_loss_than_over_adamw(tables):
    for size, name in (("34k", "Muon"), ("34k", "Muon at half its rates"), ("100k", "Muon")):
        found = tables.collect(tables.Results(), "4", size)
        mean, error = tables.mean_and_error(tables.saved_by(found[name], found["AdamW"]))
        assert mean > 2 * error
    assert "ended at a lower loss than over AdamW" in words("recipes")


def over_a_line(megabits, size="small"):
    """Return the last run of bench_slow_network at this rate, with the demo's model of this size."""
    lines = [line for line in results("slow_network") if line["megabits"] == megabits]
    return [line for line in lines if f"({size})" in line["model"]][-1]


def row(name, figures):
    """The row of a method, from its figures by line: loss and bytes at 20 Mbit/s, and how each line compares."""
    cells = [f"`{name}`", figures[20][name]["final_loss"]]
    cells.append(None if name == "alone" else figures[20][name].get("fewer_bytes_than_ddp"))
    for key in ("faster_than_ddp", "of_throughput_alone"):
        cells += [found.get(name, {}).get(key) for found in figures.values()]
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def test_the_page_of_elastic_runs_has_how_long_replicas_stood_still_after_an_event(benchmark):
    drill = benchmark("drill_elastic")
    rows, longer = drill.table(), drill.table(with_lines=True)
    assert all(row.removesuffix("|") in line for row, line in zip(rows, longer, strict=True) if "---" not in row)
    assert len(rows) > 2
    for row in rows:
        assert row in TEXTS["docs/elastic.md"], row
    assert drill.newest().keys() == drill.EVENTS.keys()
    assert all(one["silence_s"] < 60 for one in drill.newest().values())


def test_the_page_of_frameworks_has_the_verdicts_that_were_measured(benchmark):
    module = benchmark("frameworks.run")
    for line in module.table().splitlines():
        assert line in TEXTS["docs/frameworks.md"], line
    assert set(module.kept()) <= set(module.PROGRAMS)


def test_the_page_of_frameworks_has_what_became_of_public_scripts(benchmark):
    module = benchmark("public.run")
    for line in module.table().splitlines():
        assert line in TEXTS["docs/frameworks.md"], line


def test_the_page_of_evidence_has_what_auto_chose(benchmark):
    for size in ("small", "large"):
        rows = benchmark("bench_auto").table([line for line in results("auto") if line["size"] == size])
        assert len(rows) == 4
        assert "\n".join(rows) in EVIDENCE
        for line, _, forecast, one, _, _, best, _ in (row.strip("| ").split(" | ") for row in rows):
            assert float(one) >= 0.95 * float(best)
            assert math.isclose(float(forecast), float(one), rel_tol=0.1) or (size, line) == ("large", "5 Mbit/s")
    changes = {
        tuple(run["figures"]["megabits"]): run["figures"] for run in results("auto") if "megabits" in run["figures"]
    }
    assert "after {}, {} and {} rounds".format(*changes[100, 10, 100]["rounds_until_low"]) in EVIDENCE
    (_, after_it), (from_it,) = changes[100, 10]["goodput"], changes[10,]["goodput"]
    assert f"{after_it} of DDP on a free line" in words("evidence")
    assert f"from the start, to {from_it}" in words("evidence")
    assert after_it > 0.9 * from_it


def test_the_page_of_elastic_runs_has_the_waits_and_losses_that_were_measured():
    page = words("elastic")
    for run in [one for one in results("recovery") if "torchft" in one["figures"]]:
        peer, own = (run["figures"][name] for name in ("torchft", "farflung"))
        size = {2: "two", 3: "three"}[run["replicas"]]
        said = rf"one of {size} is killed: [^|]+ \(torchft: {peer['median_s']} s, {peer['worst_s']} s\)"
        assert re.search(rf"{said} \| {own['median_s']} s \| {own['worst_s']} s \|", page)
    at_addresses = [run for run in results("recovery") if run.get("events") and "torchft" not in run["figures"]]
    waits = {name: found["median_s"] for name, found in at_addresses[-1]["figures"].items()}
    over = waits["farflung"], waits["farflung in a folder"], waits["farflung in a bucket"]
    assert "| {} s, as its connections close | {} s | {} s |".format(*over) in TEXTS["docs/meet.md"]
    soak = results("elastic_soak")[-1]
    assert (soak["events"], soak["figures"]["steps_lost_or_counted_twice"]) == (200, 0)
    for median, worst in soak["figures"]["waited_s"].values():
        assert f"| {median} s | {worst} s |" in page
    early, last = soak["figures"]["held_at_event_20_and_last"]
    assert last["rss_mb"] < 1.02 * early["rss_mb"]
    assert all(last[name] <= early[name] for name in ("descriptors", "threads", "keys"))
    many = results("elastic_many")[-1]["figures"]["rounds"]
    shares = (100 * many[f"a fault in {seconds} s"]["share_of_rounds"] for seconds in (30, 3))
    said = (
        "{:.0f} % of their rounds if one is killed, stopped, late, new or refused every 30 s, and {:.0f} % if every 3 s"
    )
    assert said.format(*shares) in " ".join(page.split())
    few, many = (results("hops_at_address")[-1]["figures"][f"{size} replicas, two hops"] for size in (4, 32))
    assert f"{few} s among 4 replicas and {many} s among 32" in TEXTS["docs/meet.md"]
    storms = {run["storm"]: run["figures"] for run in results("elastic_storms")}
    assert not any(one["fresh_weights"] or one.get("steps_lost_or_counted_twice") for one in storms.values())
    assert not storms["recipes"]["unlike_at_the_end"]
    kills = storms["alternate"]["events"], storms["admission"]["events"], 12 * storms["recipes"]["kills_each"]
    said = "{:,} kills of two replicas in turn, {} kills and stops of newcomers on their way in, {} kills under twelve"
    assert said.format(*kills) in page
    assert f"and {storms['launcher']['events']} of a launcher that had joined" in page
    cost = {(run["ranks"], run["numel"]): run["figures"]["of_fixed"] for run in results("elastic_cost")}
    assert set(cost) == {(ranks, numel) for ranks in (2, 4) for numel in (100_000, 10_000_000)}
    assert f"{min(cost.values()):.2f} to {max(cost.values()):.2f} times as long" in page
    for run in results("newcomer"):
        stop, usual = (run["figures"][name] for name in ("longest stop until it takes part, s", "a round of three, s"))
        assert f"{run['figures']['numel'] // 10**6}M parameters" in page
        said = f"longest stop of the others until it took part was {stop} s, a round of three then took {usual} s"
        assert said in page
    shorter, longer = results("elastic_loss")
    assert (shorter["steps"], longer["steps"], f"{longer['work']:,} steps") == (1200, 3600, "14,400 steps")
    assert "14,400 steps of any replica" in page
    lost, three = (longer["figures"]["next_to_4"][name] for name in ("4, one dies twice", "3"))
    assert f"ended {-lost:.1%} below".replace("%", " %") in page
    assert f"three undisturbed ones {three:.1%} above".replace("%", " %") in page
    assert f"it was {-shorter['figures']['next_to_4']['4, one dies twice']:.1%} below".replace("%", " %") in page


def test_the_picture_of_elastic_runs_shows_the_run_that_was_kept(tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "images" / "elastic.py"))
    run = json.loads(script["RUN"].read_text(encoding="utf-8").splitlines()[-1])["figures"]
    assert [event["signal"] for event in run["events"] if "signal" in event] == ["SIGKILL", "SIGSTOP", "SIGCONT"]
    stays = script["stays"](run)
    numbers = {"replica 0": 1, "replica 1": 2, "replica 2": 2, "replica 0 of another launcher": 1}
    assert {name: len(parts) for name, parts in stays.items()} == numbers
    script["draw"](tmp_path / "elastic.png")
    assert (tmp_path / "elastic.png").read_bytes()[:4] == b"\x89PNG"


# ---- docs/islands.md: its numbers are the estimate's, and its picture shows the layouts of its tables
ISLANDS = TEXTS["docs/islands.md"]
SIZE = ModelSize((132_000_000, *[44_000_000] * 22))
HALF = {"param_bytes": 2, "reduce_bytes": 4}


def rows(heading):
    table = ISLANDS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.+\|$", table, re.M)]
    return cells[2:]


@pytest.mark.parametrize("row", rows("What a rank needs"), ids=lambda row: row[0])
def test_what_a_rank_needs_is_what_the_estimate_says(row):
    name, grid, *shown = row
    rank_rows, columns = map(int, grid.split(" x "))
    sharded = name.startswith(("FSDP", "HSDP"))
    held = SIZE.parameters // (columns if sharded else 1)
    outer = method_of(diloco(every=32), parameters=held, name="diloco") if "outer loop" in name else None
    options = {"sharded": True, **HALF} if sharded else {}
    cost = estimate(SIZE, RankLayout(rank_rows, columns, outer=outer, **options))
    assert shown == [in_bytes(number) for number in (cost.peak, cost.row_bytes, cost.column_bytes)]


def test_bytes_for_each_parameter_are_those_of_the_estimate():
    alone, replicated = (estimate(SIZE, RankLayout(ranks)).peak / SIZE.parameters for ranks in (1, 8))
    assert f"needs {alone:g} bytes for each parameter, {replicated:g} under DDP" in ISLANDS


def test_what_fsdp_needs_without_wrapping_and_with_accumulation_is_what_the_estimate_says():
    sharded = RankLayout(1, 8, sharded=True, **HALF)
    at_once = estimate(ModelSize((SIZE.parameters,)), sharded)
    accumulated = estimate(SIZE, replace(sharded, micro_batches=4))
    assert f"the whole model at once, for {in_bytes(at_once.peak)} here" in ISLANDS
    assert f"until the last batch of a step, for {in_bytes(accumulated.peak)};" in words("islands")


@pytest.mark.parametrize("name", ["round", "layouts"])
def test_a_picture_can_be_drawn_and_that_of_layouts_shows_each(name, tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "images" / f"{name}.py"))
    titles = [drawing.title.replace("\n", " ") for drawing in script.get("LAYOUTS", ())]
    named = [[row[0] for row in rows(heading)] for heading in ("The flags", "What a rank needs")]
    assert [titles] * 2 == (named if name == "layouts" else [[], []])
    script["draw"](tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"


def test_a_reader_of_differences_takes_the_bytes_that_were_measured():
    runs = [run for run in results("reader") if run["question"] == "reader"]
    found = {(run["dtype"], run["rate"], run["steps"]): run["figures"] for run in runs}
    for dtype in ("bfloat16", "float32"):
        cells = [
            ", ".join(f"{found[dtype, rate, steps]['kilobytes'] / 1e3:.1f}" for steps in (8, 160))
            for rate in (1e-6, 1e-5, 1e-3)
        ]
        assert f"| `{dtype}` | {' | '.join(cells)} |" in TEXTS["docs/meet.md"]
    versions = {run["rate"]: run["versions"] for run in runs if run["dtype"] == "bfloat16" and run["steps"] == 8}
    assert set(versions.values()) == {1000}
    low, high = ([found[dtype, rate, 8]["times_fewer"] for dtype in ("bfloat16", "float32")] for rate in (1e-6, 1e-3))
    said = f"1/{low[0]:.0f} of their bytes in bfloat16 and 1/{low[1]:.1f} in float32 at a learning rate of 1e-6"
    assert f"{said}, and 1/{high[0]:.1f} and 1/{high[1]:.1f} at 1e-3" in " ".join(Reader.__doc__.split())
    lags = {(run["dtype"], run["rate"]): run["figures"] for run in results("reader") if run["question"] == "reader_lag"}
    assert {figures["mb"] for (dtype, _), figures in lags.items() if dtype is None} == {112.0}
