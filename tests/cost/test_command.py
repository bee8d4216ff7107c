# SPDX-License-Identifier: Apache-2.0
"""`farflung plan`: units are read as people write them, and what is shown is what the cost model says."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from farflung.base.errors import ConfigError
from farflung.base.sizes import num_bytes
from farflung.base.words import in_bytes, in_rate, in_seconds
from farflung.config.outer import OuterSettings
from farflung.cost import forecast
from farflung.cost.evidence import EFFICIENCY, STEPS
from farflung.cost.methods import Rows, efficiency, name_of
from farflung.cost.model import Method, Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.cost.units import parse_count, parse_rate, parse_seconds
from farflung.methods.arguments import recipe_of
from tests.python import run_python

FLAGS = "--steps 20k --parameters 124M --step_seconds 0.5 --bandwidth 1Gbit --replicas 4"
AT_AN_ADDRESS = FLAGS.split()
USUAL = [*AT_AN_ADDRESS, "--latency", "1ms"]
RUN = Workload(124_000_000, 24, 0.5, replicas=4, bandwidth_bps=1e9, latency_s=0.001)


def planned(*arguments):
    return CliRunner().invoke(forecast.plan, arguments, catch_exceptions=False)


def usual(more):
    return AT_AN_ADDRESS if "--meet" in more else USUAL


def methods(*arguments):
    """The rows of the usual plan with some more arguments, by method, as JSON has them."""
    found = json.loads(planned(*usual(arguments), *arguments, "--json").output)
    return {row["method"]: row for row in found["methods"]}


COUNTS = {"366k": 366e3, "124M": 124e6, "1.1B": 1.1e9, "7e9": 7e9, "1_000": 1e3, "2 T": 2e12}
# A capital B means bytes.
RATES = {"100Mbit": 1e8, "1 Gbit/s": 1e9, "20 mbit/s": 2e7, "20Mbps": 2e7, "1.5 GBit/s": 1.5e9, "100Mb": 1e8}
RATES |= {"10 MB/s": 8e7, "10MBps": 8e7, "2.5 kbytes/s": 2e4, "56000bit/s": 56e3, ".5Gbit": 5e8}
TIMES = {"50ms": 0.05, "0": 0, "0ms": 0, "200us": 2e-4, "1.5 s": 1.5, "2min": 120}
AMOUNTS = {"25MiB": 25 * 2**20, "4 MB": 4e6, "512B": 512, "1GB": 1e9, "8Gb": 1e9}


PARSERS = {parse_count: COUNTS, parse_rate: RATES, parse_seconds: TIMES, num_bytes: AMOUNTS}


@pytest.mark.parametrize(("parse", "numbers"), PARSERS.items())
def test_numbers_with_their_units_are_read(parse, numbers):
    assert {text: parse(text, "--flag") for text in numbers} == pytest.approx(numbers, rel=1e-12)
    assert parse_seconds("0.5", "--step_seconds", bare=True) == 0.5


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_count, ["", "many", "0", "-5", "0.5", "1.5", "1.1X", "1__0", "nan", "inf", "1k5"]),
        (parse_rate, ["", "fast", "100", "100M", "1 GB", "0Mbit", "-1Mbit", "1Xbit", "1Mbit/h", "nan Mbit"]),
        (parse_seconds, ["", "soon", "50", "-1ms", "1h", "50 m", "nan"]),
        (num_bytes, ["", "25", "25M", "0MB", "1 Mbit"]),
    ],
)
def test_what_is_no_number_with_its_unit_is_refused_by_name(parse, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=r"^--flag is '.*'; it must be a.*such as"):
            parse(text, "--flag")


@settings(max_examples=50)
@given(st.floats(1e-3, 1e15))
def test_what_is_written_is_read_as_the_same_to_three_digits(amount):
    assert parse_rate(in_rate(amount).replace(",", ""), "x") == pytest.approx(amount, rel=6e-3)
    assert parse_seconds(in_seconds(amount * 1e-9).replace(",", ""), "x") == pytest.approx(amount * 1e-9, rel=6e-3)
    if amount >= 1:
        assert num_bytes(in_bytes(amount).replace(",", ""), "x") == pytest.approx(amount, rel=6e-3, abs=1)


def test_bytes_are_written_with_three_digits():
    texts = {0: "0 B", 999: "999 B", 1000: "1 kB", 98_304: "98.3 kB", 1.54e6: "1.54 MB", 2e10: "20 GB"}
    texts[4e15] = "4,000 TB"
    assert {count: in_bytes(count) for count in texts} == texts


def test_json_is_what_the_model_says():
    found = json.loads(planned(*USUAL, "--json", "--bucket", "1MiB").output)
    assert Workload(**found["run"]) == RUN
    rows = Rows(RUN, 20_000, bucket_bytes=2**20).chosen
    costs = [cost_of(RUN, row.method) for row in rows]
    shown = [(row["method"], row["flags"], row["goodput"]) for row in found["methods"]]
    assert shown == [(row.method.name, row.flags, row.goodput) for row in rows]
    assert found["take"] == found["methods"][0]["method"]
    for row, cost in zip(found["methods"], costs, strict=True):
        assert row["seconds_per_step"] == cost.seconds_per_step
        assert row["utilization"] == cost.utilization == pytest.approx(1 - row["exposed_share"])
        assert row["bytes_sent_per_step"] == pytest.approx(row["bytes_sent_per_round"] / row["every"])
        assert row["memory"]["total"] == cost.memory.total
        assert row["goodput"] == row["efficiency"] * cost.utilization
        assert row["seconds_to_loss_of_ddp"] * row["goodput"] == pytest.approx(20_000 * 0.5)
        if row["bandwidth_needed_bps"] is not None:
            assert (cost.utilization >= 0.9) == (row["bandwidth_needed_bps"] <= 1e9)
    assert methods("--latency", "1s")["DDP"]["bandwidth_needed_bps"] is None  # none is enough


def test_the_table_fits_80_columns_and_has_the_goodput_of_each_row_with_its_error():
    lines = planned(*USUAL).output.split("\nFlags")[0].splitlines()
    assert max(map(len, lines)) <= 80
    for row in Rows(RUN, 20_000).chosen:
        (line,) = [line for line in lines if line.strip().startswith(f"{row.method.name}  ")]
        spread = row.efficiency.error * cost_of(RUN, row.method).utilization
        assert f"{row.goodput:.2f}±{spread:.2f}" in line
        assert ("~" in line) == row.efficiency.is_extrapolated
        assert f" {row.cost.utilization:.1%} " in line


def test_each_row_has_its_flags_and_the_last_lines_say_which_row_to_take_and_run_it():
    for arguments, advice in [
        ([], "Use "),
        (["--bandwidth", "1Tbit"], "Use DDP: 0.99 of DDP on a free line, by our tests of "),
        (["--latency", "1min"], "No method gets far on this line: a replica that trains alone has 0."),
    ]:
        *lines, said, command = planned(*USUAL, *arguments).output.splitlines()
        first, *_ = rows = [*methods(*arguments).values()]
        assert said.startswith(advice)
        assert f" {first['method']}" in said
        assert command == " ".join(filter(None, ["farflung launch --num_processes 4", first["flags"], "train.py"]))
        start = lines.index("Flags of `farflung launch`:") + 1
        for row, line in zip(rows, lines[start:], strict=False):
            assert line.startswith(f" {row['method']} ")
            assert line.endswith(row["flags"] or row["script"] or "none")
    assert "1 replica, " in planned(*USUAL, "--replicas", "1").output


def test_a_row_that_needs_a_line_of_the_script_shows_it_above_the_command():
    for rate in range(10, 60):
        *_, script, command = planned(*USUAL, "--bandwidth", f"{rate}Gbit").output.splitlines()
        if script.startswith("In the script: "):
            assert "comm_hook=DDPCommunicationHookType.BF16" in script
            assert "--outer" not in command
            return
    raise AssertionError("no rate is enough for 16 bits and not for 32")


# The model, step and line, and the steps of the run: short and long ones, slow and fast lines.
QUESTIONS = [
    (Workload(390_000, 3, 0.076, replicas=2, bandwidth_bps=20e6), 120),
    (Workload(390_000, 3, 0.076, replicas=2, bandwidth_bps=20e6), 300),
    (Workload(1_000_000, 4, 0.05, replicas=2, bandwidth_bps=100e6), 1000),
    (Workload(124_000_000, 12, 0.5, replicas=2, bandwidth_bps=1e9), 20_000),
    (Workload(14_000_000, 8, 2.0, replicas=2, bandwidth_bps=5e6), 1000),
    (Workload(14_000_000, 8, 2.0, replicas=4, bandwidth_bps=1e11, latency_s=1e-5), 1000),
]


@pytest.mark.parametrize(("run", "steps"), QUESTIONS)
def test_the_first_row_has_the_most_goodput_of_the_evidence(run, steps):
    first = Rows(run, steps).chosen[0]
    for name in {name for by_name in EFFICIENCY.values() for name in by_name} - {"alone"}:
        for every in (1,) if name.startswith("DDP") else (8, 16, 32, 64, 128):
            if name.startswith("DDP") or steps >= 10 * every:
                goodput = efficiency(name, every, run.replicas, steps).mean
                goodput *= cost_of(run, measured(run, name, every)).utilization
                assert first.goodput >= goodput - 0.01, (name, every)


def test_blocking_rounds_that_wait_a_little_come_before_hidden_ones_that_keep_less():
    rows = {row.method.name.split("(")[0]: row for row in Rows(QUESTIONS[1][0], 1000).chosen[::-1]}
    blocking, hidden = rows["diloco"], rows["streaming_diloco"]
    assert blocking.cost.utilization < 0.97 < hidden.cost.utilization
    assert blocking.goodput > hidden.goodput


def measured(run, name, every):
    """The method of a row of the evidence, from its recipe."""
    if name.startswith("DDP"):
        return Method(name, during_backward=True, bits=16 if "bf16" in name else 32, bucket_bytes=25 * 2**20)
    recipe, _, codec = name.removesuffix(", late").partition(" ")
    options = {"codec": codec} if (recipe, codec) == ("diloco", "e3m0") else {}
    if recipe == "streaming_diloco":
        options = {"fragments": 2, "delay": every // 4 if name.endswith("late") else 1}
    made = recipe_of(OuterSettings(recipe, every=every, **options), local_size=1)
    return method_of(made, run.parameters, name=name)


RUNS = st.builds(
    Workload,
    parameters=st.integers(10_000, 10**9),
    layers=st.integers(1, 60),
    step_s=st.floats(0.01, 2),
    replicas=st.integers(2, 8),
    bandwidth_bps=st.floats(1e6, 1e11),
    latency_s=st.floats(0, 0.2),
)


@given(RUNS, st.integers(1, 20_000))
def test_rounds_are_ten_at_least_and_late_by_a_quarter_of_their_interval_at_most(run, steps):
    rows = Rows(run, steps).chosen
    goodput = [round(row.goodput, 2) for row in rows]
    assert goodput == sorted(goodput, reverse=True)
    for row in rows:
        assert 0 < row.goodput <= row.efficiency.mean <= 1
        if row.outer is not None:
            assert 10 * row.method.every <= steps
            if row.outer.recipe == "streaming_diloco":
                assert row.method.delay <= max(1, row.method.every // 4)
                # No sooner one hides as much.
                assert row.method.delay <= 2 or sooner(run, row).cost.utilization < row.cost.utilization


def sooner(run, row):
    return replace(row, cost=cost_of(run, replace(row.method, delay=row.method.delay - 1)))


def test_the_delay_is_chosen_for_the_line():
    """14M values over 100, 20 and 5 Mbit/s: on a slower line fragments land later, and rounds are rarer."""
    chosen = []
    for megabits in (100, 20, 5):
        run = Workload(14_000_000, 8, 0.22, replicas=2, bandwidth_bps=megabits * 1e6)
        (row,) = [row for row in Rows(run, 2000).chosen if row.method.fragments > 1]
        chosen.append((row.method.delay, row.method.every))
    assert chosen == sorted(chosen)
    assert len({delay for delay, _ in chosen}) == 3


def test_what_a_run_has_too_few_steps_for_is_left_out_and_never_advised():
    short = [*USUAL, "--steps", "70"]
    found = json.loads(planned(*short, "--json").output)
    assert {row["method"] for row in found["methods"]} == {"DDP", "DDP bf16", "diloco(7) e3m0"}
    assert {"local_sgd", "diloco", "sparse_loco"} < set(found["left_out"])
    said = "Left out, as 70 steps would be fewer than 10 rounds of the shortest interval in our tests: "
    assert f"{said}{', '.join(found['left_out'])}." in planned(*short).output


@pytest.mark.parametrize("parameters", ["366k", "124M"])
def test_the_table_says_what_its_signs_mean_and_how_far_its_evidence_is(parameters):
    line = ("--step_seconds", "0.5", "--bandwidth", "20Mbit", "--steps", "20k")
    rows, said = planned("--parameters", parameters, *line).output.split("Goodput: ")
    assert ("~: extrapolated, from shorter rounds" in " ".join(said.split())) == ("~" in rows)
    assert ("Far larger models may lose less" in " ".join(said.split())) == (parameters == "124M")


@pytest.mark.parametrize(
    ("replicas", "name"), [(replicas, name) for replicas in EFFICIENCY for name in EFFICIENCY[replicas]]
)
def test_what_lies_between_intervals_is_between_their_figures_and_beyond_it_is_said_to_be_extrapolated(replicas, name):
    measured = EFFICIENCY[replicas][name]
    for below, above in pairwise(sorted(measured)):
        ends = sorted((measured[below][0], measured[above][0]))
        for every in range(below, above + 1):
            found = efficiency(name, every, replicas)
            assert ends[0] - 1e-9 <= found.mean <= ends[1] + 1e-9
            assert not found.is_extrapolated
    longest, alone = max(measured), EFFICIENCY[replicas]["alone"][1][0]
    beyond = [efficiency(name, every, replicas) for every in (longest, longest + 1, 2 * longest, 500 * longest)]
    assert [one.is_extrapolated for one in beyond] == [False, True, True, True]
    means = [one.mean for one in beyond]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(min(means[0], alone), abs=0.005)


@pytest.mark.parametrize("name", ["diloco e3m0", "local_sgd"])
def test_a_run_of_a_quarter_of_the_steps_wants_rounds_of_half_the_length_and_a_longer_one_those_of_our_tests(name):
    for every in (16, 32, 100):
        whole = efficiency(name, every, 2)
        assert efficiency(name, every // 2, 2, STEPS // 4) == whole
        assert efficiency(name, every, 2, 50 * STEPS) == whole
        assert efficiency(name, every, 2, STEPS // 4).mean < whole.mean


@pytest.mark.parametrize(("replicas", "measured"), [(1, 2), (2, 2), (3, 4), (4, 4), (100, 4)])
def test_the_evidence_with_the_nearest_number_of_replicas_that_has_a_row_counts(replicas, measured):
    found = efficiency("diloco e3m0", 8, replicas)
    assert (found.replicas, found.mean) == (measured, EFFICIENCY[measured]["diloco e3m0"][8][0])
    assert found.is_extrapolated == (replicas != measured)
    assert efficiency("eager_diloco int8", 8, replicas).replicas == 4


def test_each_row_of_the_plan_has_evidence_of_its_own():
    for row in Rows(RUN, 20_000).chosen:
        if row.outer is not None:
            assert name_of(row.outer.recipe, row.outer.codec, row.outer.delay or 0) in EFFICIENCY[4]
    assert name_of("slowmo", None) is None


@pytest.mark.parametrize(("layers", "fragments"), [(1, None), (2, 2), (4, 3), (5, 3), (6, 2), (24, 8)])
def test_streaming_is_shown_with_fragments_that_were_tried(layers, fragments):
    rows = Rows(Workload(1_000_000, layers, 0.5, replicas=2, bandwidth_bps=1e9), 20_000).chosen
    assert [row.method.fragments for row in rows if row.method.fragments > 1] == ([fragments] if fragments else [])


def test_all_missing_options_are_named_at_once():
    said = planned("--steps", "20k", "--layers", "12").output
    assert "Missing --parameters, --step_seconds, --bandwidth. For example: farflung plan --parameters " in said
    example = said.split("For example: farflung plan ")[1].split()
    assert planned(*example).exit_code == 0


def test_both_spellings_are_one_flag_and_more_utilization_needs_more_bandwidth():
    dashes = [word.replace("_", "-") for word in USUAL]
    assert planned(*dashes).output == planned(*USUAL).output
    less, more = (methods("--utilization", share)["DDP"]["bandwidth_needed_bps"] for share in ("0.5", "0.9"))
    assert less < more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "100"], "--bandwidth is '100'"),
        (["--latency", "50"], "--latency is '50'"),
        (["--step_seconds", "0"], r"step_s is 0\.0"),
        (["--utilization", "90"], r"--utilization is 90\.0"),
        (["--table", "--json"], "--json and --table exclude each other"),
        (["--meet", "ftp"], "--meet"),
        (["--meet", "ftp://there"], "--meet"),
        (["--meet", "s3", "--prices", "1", "-1", "0", "0"], "--prices: reads"),
        (["--meet", "s3", "--request", "soon"], "--request"),
        (["--request", "10ms"], "give --meet too"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, home):
    with pytest.raises(ConfigError, match=message):
        planned(*usual(arguments), *arguments)


def test_the_plan_needs_no_torch(tmp_path):
    """It is arithmetic: where torch can't be imported the output is the same."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('it is not there')\n")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from farflung.launch.main import main; main()"
    done = run_python("-c", code, tmp_path, "plan", *USUAL, code=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == planned(*USUAL).output


def test_a_method_that_gets_less_far_than_a_replica_alone_is_not_praised():
    short = (*USUAL, "--steps", "20", "--bandwidth", "1Gbit")
    (*_, said, _, _) = planned(*short).output.splitlines()
    assert said.startswith("No method gets far on this line: a replica that trains alone has 0.")
    assert "the closest is DDP bf16, with 0.15 of DDP on a free line" in said
    assert json.loads(planned(*short, "--json").output)["take"] is None


@pytest.mark.parametrize("more", [(), ("--meet", "s3", "--prices", "0.005", "0.0004", "0.09", "0.023")])
def test_the_rows_for_scripts_are_those_of_json(more):
    heading, *lines = planned(*usual(more), *more, "--table").output.splitlines()
    rows = methods(*more).values()
    assert len(lines) == len(rows) > 3
    for line, row in zip(lines, rows, strict=True):
        cells = dict(zip(heading.split("\t"), line.split("\t"), strict=True))
        assert (cells["method"], cells["flags"]) == (row["method"], row["flags"])
        assert float(cells["utilization"]) == row["utilization"]
        assert float(cells["memory"]) == row["memory"]["total"]
        assert cells["bandwidth_needed_bps"] == str(row["bandwidth_needed_bps"] or "")
        assert (float(cells["usd"]) if more else None) == (row["meet"] and row["meet"]["usd"])


def test_buffers_slow_ddp_alone():
    without, buffered = methods(), methods("--buffers", "50MB")
    more = {name: buffered[name]["seconds_per_step"] - row["seconds_per_step"] for name, row in without.items()}
    assert {name for name in more if more[name]} == {"DDP", "DDP bf16"}
    assert more["DDP"] == pytest.approx(50e6 * 8 / 1e9)
