# SPDX-License-Identifier: Apache-2.0
"""Figures, pages, pictures and traces of runs, from their folders alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.cost.methods import efficiency
from farflung.observe.figures import SHARES, figures, round_spans, spans, writers
from farflung.observe.report import data_of, page, report, trace
from farflung.observe.run import ObservedRun
from farflung.testing.patience import patience
from tests.observe.made import T0, a_round, add_lines, sign, write_lines, write_run

TRAINS = """
import torch
from farflung import Accelerator
torch.set_num_threads(1)
layers = [torch.nn.Linear(50, width, bias=False) for width in (50, 30)]
accelerator, model = Accelerator(), torch.nn.Sequential(*layers)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(48):
    loss = model(torch.randn(8, 50)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
"""
CHROMIUM = shutil.which("chromium")


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "one", [sign(1, 1280, 201, ended=0), sign(2, 1280, 201, ended=0), sign(4, 600, 201, ended=0)])
    return ObservedRun(tmp_path / "one")


@pytest.fixture
def ddp(tmp_path):
    """A run without rounds: two ranks, 100 steps, a million parameters."""
    path = tmp_path / "ddp"
    write_run(path, [])
    for name in ("rounds.jsonl", "steps.jsonl"):
        (path / name).unlink()
    model = {"event": "model", "parameters": 1_000_000, "bytes": 4_000_000, "strategy": "MULTI_CPU", "island": 1}
    write_lines(path / "events.jsonl", [{"time": T0 + 5, "rank": 0, "ranks": 2, **model}])
    for rank in (0, 1):
        row = sign(0, 100, 101, ended=0) | {"rank": rank}
        del row["member"]
        (path / "ranks" / f"rank{rank}.json").write_text(json.dumps(row) + "\n")
    values = [{"time": T0 + 10 + k, "rank": 0, "step": k, "values": {"loss": 1 / (k + 1)}} for k in range(90)]
    write_lines(path / "metrics.jsonl", values)
    return ObservedRun(path)


def test_figures_are_the_sums_of_what_the_files_say(run):
    found = figures(run)
    assert (found.steps, found.rounds, found.lost, found.joined, found.dropped) == (1280, 40, 1, 1, 0)
    assert found.seconds["waiting"] == pytest.approx(0.5 * (40 + 40 + 15))
    assert found.seconds["recovering"] == pytest.approx(2 * 0.25)
    assert sum(found.seconds.values()) == pytest.approx(3 * 200)
    assert found.replica_hours == pytest.approx(3 * 200 / 3600)
    assert found.bytes_sent == 1e6 * (40 + 40 + 15 + 15)
    many = (15 * 3 + 10 * 2 + 15 * 3) / 40
    assert found.bytes_ddp == pytest.approx(2 * (many - 1) / many * 4e6 * (1280 + 1280 + 600))
    shares = r"computing \d+%, waiting 8%"
    assert re.fullmatch(f"{shares}; 0.167 replica-hours; sent 110 MB, DDP would have sent 16.1 GB", str(found))


def test_bytes_are_those_of_all_ranks_of_an_island(run):
    each = figures(run).bytes_sent
    events = run.path / "events.jsonl"
    events.write_text(events.read_text().replace('"island": 1', '"island": 4'))
    assert figures(ObservedRun(run.path)).bytes_sent == 4 * each


def test_a_replica_that_was_started_again_counts_with_its_earlier_life(tmp_path):
    signs = [sign(1, 1280, 201, ended=0), sign(3, 480, 85), sign(4, 600, 201, ended=0)]
    write_run(tmp_path / "one", signs)
    run = ObservedRun(tmp_path / "one", clock=lambda: T0 + 300)
    assert [one.row["member"] for one in run.ranks] == [1, 4]
    found = figures(run)
    assert sum(found.seconds.values()) == found.replica_hours * 3600 == pytest.approx(2 * 200 + 84)
    many = (15 * 3 + 10 * 2 + 15 * 3) / 40
    assert found.bytes_ddp == pytest.approx(2 * (many - 1) / many * 4e6 * (1280 + 480 + 600))


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"recipe": "diloco", "codec": "e3m0", "every": "8"}, [], ("diloco e3m0", 8)),
        ({"recipe": "auto"}, [{"recipe": "streaming_diloco", "options": {"every": 8}}], ("streaming_diloco e3m0", 8)),
        (
            {"recipe": "auto"},
            [{"recipe": "diloco", "options": {"every": 8, "codec": "e3m0"}}, {"options": {"every": 16, "delay": 0}}],
            ("diloco e3m0", 16),
        ),
        (
            {"recipe": "auto"},
            [
                {"recipe": "diloco", "options": {"every": 8, "codec": "e3m0"}},
                {"recipe": "streaming_diloco", "options": {"every": 16}},  # a loop that was resumed
            ],
            ("streaming_diloco e3m0", 16),
        ),
        ({"recipe": "diloco"}, [], None),  # how often isn't known
        ({"recipe": "diloco", "every": "8x"}, [{"options": {"every": None, "delay": []}}], None),
        ({"recipe": "slowmo", "every": "8"}, [], None),  # no evidence
    ],
)
def test_the_goodput_is_that_of_the_recipe_that_the_run_has_now(run, settings, options, said):
    folder = run.path
    launched = json.loads((folder / "run.json").read_text())
    launched["settings"] |= {f"outer_{name}": {"value": value, "place": "here"} for name, value in settings.items()}
    (folder / "run.json").write_text(json.dumps(launched))
    for number, one in enumerate(options):
        add_lines(folder / "events.jsonl", {"time": T0 + 7 + number, "event": "chosen", "message": "auto", **one})
    found = figures(ObservedRun(folder))
    assert found.efficiency == (said and efficiency(*said, 3))
    shown = found.efficiency and f"; {found.efficiency.said(found.share('computing'))}; 0.167 replica-hours"
    assert shown is None or shown in str(found)
    assert ("of DDP on a free line" in str(found)) == bool(said)


def test_a_run_of_ddp_has_sent_its_gradients_and_prices_are_applied(ddp):
    found = figures(ddp, price_hour=2.0, price_gb=0.1)
    assert found.bytes_sent == found.bytes_ddp == 2 * 100 * 4e6
    assert found.usd == pytest.approx(2 * 2.0 * 100 / 3600 + 0.8 * 0.1)
    assert "DDP would" not in str(found)
    assert str(found).endswith("USD")


def test_two_models_have_the_bytes_of_both_also_where_ranks_were_restarted(ddp):
    (one,) = [json.loads(line) for line in (ddp.path / "events.jsonl").read_text().splitlines()]
    other = one | {"parameters": 500_000, "bytes": 2_000_000}
    again = [row | {"time": T0 + 50, "restart": 1} for row in (one, other)]
    write_lines(ddp.path / "events.jsonl", [one, other, *again])
    found = figures(ObservedRun(ddp.path))
    assert found.bytes_ddp == 2 * 100 * 6e6


def test_hours_of_ranks_that_were_restarted_in_place_count_from_the_start_of_the_launcher(ddp):
    add_lines(ddp.path / "events.jsonl", {"time": T0 + 1, "event": "started", "processes": 2})
    for file in (ddp.path / "ranks").iterdir():
        row = json.loads(file.read_text()) | {"restart": 1, "begun": T0 + 51}
        file.write_text(json.dumps(row) + "\n")
    found = figures(ObservedRun(ddp.path), price_hour=2.0)
    assert found.replica_hours == pytest.approx(2 * 100 / 3600)
    assert found.usd == pytest.approx(2.0 * found.replica_hours)


@pytest.mark.usefixtures("warm")
def test_of_two_launched_runs_the_folders_alone_tell_what_an_outer_loop_saves(farflung, home):
    (home / "train.py").write_text(TRAINS)
    ways = {"ddp": [], "streaming": ["--outer", "streaming_diloco", "--outer-every", "8", "--outer-fragments", "2"]}
    for name, flags in ways.items():
        done = farflung("launch", "--cpu", "--num_processes", "2", "--run-dir", name, *flags, "train.py")
        assert done.returncode == 0, done.stderr
    ddp, streaming = (ObservedRun(home / name) for name in ways)
    theirs, ours = figures(ddp), figures(streaming)
    gradients = 2 * 48 * 4 * 4_000  # both ranks' in each step, in fp32
    assert theirs.bytes_sent == theirs.bytes_ddp == ours.bytes_ddp == gradients
    assert theirs.rounds == 0
    assert ours.rounds >= 6
    assert ours.bytes_sent < gradients / 20
    assert min(len(run.curves.loss.points) for run in (ddp, streaming)) == 48
    said = CliRunner().invoke(report, ["ddp", "streaming", "--out", "both.html"]).output
    assert re.search(r"^streaming: .* sent [\d.]+ kB, DDP would have sent 1.54 MB", said, re.MULTILINE), said
    assert (home / "both.html").stat().st_size > 50_000


def test_a_legend_names_the_recipe_that_the_launcher_was_given(tmp_path):
    write_run(tmp_path / "one", [sign(1, 1280, 200)])
    assert data_of(run := ObservedRun(tmp_path / "one"), figures(run))["name"] == "one"
    facts = json.loads((tmp_path / "one" / "run.json").read_text())
    facts["settings"] = {"outer_recipe": {"value": "diloco", "from": "flag --outer"}}
    (tmp_path / "one" / "run.json").write_text(json.dumps(facts))
    assert data_of(run := ObservedRun(tmp_path / "one"), figures(run))["name"] == "one (diloco)"


def test_a_replica_starts_until_it_has_its_model(tmp_path):
    write_run(tmp_path / "one", [sign(1, 1280, 200)])
    (tmp_path / "one" / "steps.jsonl").unlink(missing_ok=True)
    run = ObservedRun(tmp_path / "one")
    first, second, *_ = spans(run, writers(run)[0])
    assert (first.name, first.end - T0, second.name) == ("starting", 5, "computing")


def test_spans_follow_each_other_and_those_of_a_round_lie_within_it(run):
    for one in writers(run):
        found = spans(run, one)
        assert {span.name for span in found} <= set(SHARES)
        assert (found[0].begin, found[-1].end) == (one.row["begun"], one.row["time"])
        assert all(a.end == b.begin for a, b in pairwise(found))
    for row in run.rounds:
        whole, *parts = round_spans(row)
        assert (parts[0].begin, parts[-1].end) == (whole.begin, whole.end)
        assert all(a.end == pytest.approx(b.begin) for a, b in pairwise(parts))
        assert all(part.end >= part.begin for part in parts)


def test_a_trace_is_in_chromes_format_and_sums_up_to_the_reports_line(run):
    found = json.loads(json.dumps(trace([run])))
    assert found.keys() == {"traceEvents", "displayTimeUnit"}
    shapes = {"M": {"ph", "name", "pid", "tid", "args"}, "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"}}
    assert all(one.keys() == shapes[one["ph"]] for one in found["traceEvents"])
    whole = [one for one in found["traceEvents"] if one["ph"] == "X"]
    assert all(one["dur"] > 0 for one in whole)
    for name, seconds in figures(run).seconds.items():
        shown = [one["dur"] for one in whole if (one["name"], one["cat"]) == (name, "training")]
        assert sum(shown) / 1e6 == pytest.approx(seconds, abs=1e-6 * len(shown))
    assert len(kept_by_perfetto(whole)) == len(whole)


def kept_by_perfetto(events):
    """The spans that its trace processor keeps: whole us from 0 on, each within the one that it begins in, or after."""
    kept, open_ends = [], {}
    assert all(type(one["ts"]) is type(one["dur"]) is int for one in events)  # others are truncated to ns
    for one in sorted(events, key=lambda one: one["ts"]):  # stable
        ends = open_ends.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        if one["ts"] >= 0 and all(one["ts"] + one["dur"] <= end for end in ends):
            ends.append(one["ts"] + one["dur"])
            kept.append(one)
    return kept


def test_perfetto_drops_no_span_of_rounds_that_overlap_or_of_a_machine_whose_clock_is_late(run):
    hidden_s, more = [0.7, 1.1, 0.2, 0.7] * 50, {"seconds_exposed": 0.1, "seconds_landing": 0.0}
    rounds = [a_round(k, 1, [1, 2], 10 + k / 3, seconds_hidden=s, **more) for k, s in enumerate(hidden_s)]
    write_lines(run.path / "rounds.jsonl", rounds)
    late = sign(1, 1280, 190) | {"begun": run.begun - 3.3}
    (run.path / "ranks" / "replica1.json").write_text(json.dumps(late))
    found = [one for one in trace([ObservedRun(run.path)])["traceEvents"] if one["ph"] == "X"]
    assert len(kept_by_perfetto(found)) == len(found)
    mine = [one for one in found if one["pid"] == 1 and one["cat"] == "rounds"]
    assert [one["name"] for one in mine].count("round") == 200
    assert len({one["tid"] for one in mine}) == 4  # as many as are under way at a time


def told(*words):
    return CliRunner().invoke(report, [*map(str, words)], catch_exceptions=False)


def test_the_command_writes_a_page_a_picture_a_trace_or_figures(run, ddp, tmp_path):
    done = told(run.path, ddp.path)
    assert done.output.splitlines()[-1] == f"written to {run.path / 'report.html'}"
    assert f"one: {figures(run)}" in done.output
    for name in ("a.png", "a.svg", "a.pdf"):
        told(run.path, ddp.path, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    told(run.path, "--trace", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace([run])
    rows = json.loads(told(run.path, ddp.path, "--json", "--price-hour", 1).output)
    assert [row["run"] for row in rows] == [str(run.path), str(ddp.path)]
    assert rows[1]["bytes_sent"] == 8e8
    with pytest.raises(ConfigError, match=r"--out and --json were given, and a report is one of them\. Give one\."):
        told("no such run", "--json", "--out", tmp_path / "b.html")
    for out, why in (
        ("x.doc", "--out is x.doc; use a name that ends with .html, .png"),
        (tmp_path / "nowhere" / "x.html", r"x.html can't be written: No such file"),
    ):
        with pytest.raises(ConfigError, match=why):
            told(run.path, "--out", out)


def test_what_a_run_says_of_itself_can_not_end_the_pages_script(run):
    run.facts["arguments"].append("</script><script>alert(1)</script>")
    text = page([data_of(run, figures(run))])
    assert "alert(1)" in text
    assert "</script><script>alert" not in text
    run.facts["arguments"].append("<!-- <script>")
    assert "<!-- <script>" not in page([data_of(run, figures(run))])
    asks_for_files = re.search(r"(src|href)=", text.replace("xlink:href=", "").replace("link.href=", ""))
    assert not asks_for_files


def test_a_page_that_others_may_get_shows_no_token_among_a_scripts_arguments(run):
    words = "--hf_token hf_x1 --api-key=k2 --max_tokens 512 WANDB_API_KEY=k3 --password k4 --lr=0.1 --tokenizer gpt2"
    run.facts["arguments"] += words.split()
    text = page([data_of(run, figures(run))])
    assert not re.search("hf_x1|k2|k3|k4", text)
    assert all(one in text for one in ("--hf_token", "512", "--lr=0.1", "gpt2"))


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_draws_the_curves_with_one_cursor_and_has_nothing_to_complain_of(run, ddp, tmp_path):
    probe = """
    <script>
    addEventListener("load", () => {
      window.charts[0].setCursor({ left: 100, top: 50 }, true, true);  // as a mouse does: the others are told
      const lefts = window.charts.map(chart => chart.cursor.left);
      const drawn = window.charts.map(chart => {
        const { width, height } = chart.ctx.canvas;
        return chart.ctx.getImageData(0, 0, width, height).data.some(x => x > 0);
      });
      const out = document.createElement("pre"); out.id = "probe";
      out.textContent = JSON.stringify({ lefts, drawn, grid: document.querySelectorAll(".grid i").length });
      document.body.append(out);
    });
    </script>"""
    file = tmp_path / "page.html"
    file.write_text(page([data_of(one, figures(one)) for one in (run, ddp)]).replace("</html>", probe + "</html>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    words = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience(120))
    assert ":CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)[1])
    assert found["drawn"] == [True] * 4  # loss, lr, share of time waiting, bytes a step
    first, *others = found["lefts"]
    assert (first, min(others) > 0, found["grid"]) == (100, True, 3 * 40)
