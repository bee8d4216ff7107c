# SPDX-License-Identifier: Apache-2.0
"""The work of a report and of a look grows with what is new, not with its square: counted in lines of Python."""

import io
import json
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from farflung.observe import records, run
from farflung.observe.figures import figures
from farflung.observe.logged import MOST_POINTS
from farflung.observe.report import data_of, trace
from farflung.observe.run import ObservedRun
from farflung.observe.watch import follow, screen
from tests.observe.made import T0, a_round, add_lines, sign, write_lines, write_run


def lines_of_python(act):
    """How many lines of Python the call of `act` takes."""
    count = 0

    def trace_line(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace_line)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def churning(path, number):
    """A run of which a replica is lost and started again in each round: as many events, rounds, signs and names."""
    write_run(path, [sign(member, 8, 190, ended=0 if member % 2 else None) for member in range(1, number)])
    members = [[1, k + 2] for k in range(number)]
    rounds = [a_round(k, m, pair, k, {str(k + 1): "gone"}, [k + 2]) for k, pair in enumerate(members) for m in pair]
    write_lines(path / "rounds.jsonl", rounds)
    names = [{"event": "process", "time": T0, "member": k, "name": f"replica {k % 2}"} for k in range(number)]
    saving = [{"event": "saving", "time": T0 + k, "member": k, "rank": 0, "seconds": 0.1} for k in range(number)]
    write_lines(path / "events.jsonl", names + saving)
    steps = [{"time": T0 + k, "member": k, "rank": 0, "step": 8} for k in range(number)]
    write_lines(path / "steps.jsonl", steps)
    return ObservedRun(path, lambda: T0 + 200)


@pytest.mark.parametrize(
    "act",
    [
        lambda run: data_of(run, figures(run)),
        lambda run: trace([run]),
        lambda run: Console(file=io.StringIO(), width=100).print(screen(run, 100)),
        lambda run: ObservedRun(run.path),
    ],
    ids=["page", "trace", "screen", "reading"],
)
def test_twice_as_much_of_all_takes_no_more_than_twice_as_long(tmp_path, act):
    few, many = (churning(tmp_path / str(number), number) for number in (100, 200))
    act(few)  # what is loaded late
    assert lines_of_python(lambda: act(many)) < 2.5 * lines_of_python(lambda: act(few))


def test_a_look_reads_what_is_new_alone(tmp_path, monkeypatch):
    write_run(tmp_path / "run", [sign(member, 1280, 190, ended=0) for member in (1, 2, 4)])
    run, read = ObservedRun(tmp_path / "run"), []
    for name in ("_rows", "json_of"):
        real = getattr(records, name)
        monkeypatch.setattr(records, name, lambda held, real=real: read.append(held) or real(held))
    run.look()
    assert read == []
    row = {"time": T0 + 300, "member": 1, "step": 2000, "values": {"loss": 0.25}}
    add_lines(tmp_path / "run" / "metrics.jsonl", row)
    run.look()
    assert [held.count(b"\n") for held in read] == [1]
    assert run.curves.loss.last == 0.25


def printed(act, *arguments):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    act(*arguments, console) if act is follow else console.print(act(*arguments, console.width))
    return console.file.getvalue()


def read_in_pieces(monkeypatch, path, now):
    """Return a run of which a look reads two KiB: its clock goes on by one second for each."""
    clock = SimpleNamespace(monotonic=count().__next__)
    for module in (records, run):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(records, "_CHUNK_BYTES", 1 << 10)
    return ObservedRun(path, lambda: now, look_s=2.5)


def test_looks_that_reach_a_part_of_a_long_folder_say_so_and_come_to_the_same(tmp_path, monkeypatch):
    """Until then nothing is called wrong that a later line explains, as the loss of a replica is by its round."""
    lost = [sign(member, 1280, 190, ended=None if member == 3 else 0) for member in (1, 2, 3, 4)]
    now = write_run(tmp_path / "run", lost)
    whole = ObservedRun(tmp_path / "run", lambda: now)
    seen = read_in_pieces(monkeypatch, tmp_path / "run", now)
    looks = [seen.reading]
    while seen.reading:
        text = " ".join(printed(screen, seen).split())
        assert f"! {seen.reading}" in text
        assert "has given no sign" not in text
        seen.look()
        looks.append(seen.reading)
    assert looks[0].startswith("still reading; shown so far: ")
    assert looks[0].endswith("0% of steps.jsonl, 0% of rounds.jsonl, 0% of metrics.jsonl")
    assert len(set(looks)) == len(looks) > 10
    assert printed(screen, seen) == printed(screen, whole)
    assert data_of(seen, figures(seen)) == data_of(whole, figures(whole))


def test_what_a_terminal_shows_of_a_run_that_is_over_ends_with_all_of_it(tmp_path, monkeypatch):
    now = write_run(tmp_path / "run", [sign(1, 1280, 190, ended=0)])
    write_lines(tmp_path / "run" / "events.jsonl", [{"time": T0 + 200, "event": "ended", "code": 0}])
    whole = ObservedRun(tmp_path / "run", lambda: now)
    text = printed(follow, read_in_pieces(monkeypatch, tmp_path / "run", now))
    assert "still reading" in text
    assert text.removesuffix("\x1b[?25h").endswith(printed(screen, whole))


def test_a_curve_has_a_bounded_number_of_points_and_loses_no_value_that_is_not_finite(tmp_path):
    write_run(tmp_path / "run", [sign(1, 8, 190)])
    values = [float("nan") if k == 777 else 1.0 if k % 2 else 3.0 for k in range(9 * MOST_POINTS // 2)]
    rows = [{"time": T0 + k, "member": 1, "rank": 0, "step": k, "values": {"loss": v}} for k, v in enumerate(values)]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    loss = ObservedRun(tmp_path / "run").curves.loss
    assert MOST_POINTS // 2 <= len(loss.points) <= MOST_POINTS
    assert sum(point.size for point in loss.points) == len(values)
    assert {point.value for point in loss.points if not point.num_odd} == {2.0}
    assert (loss.first, loss.last, loss.points[-1].step) == (3.0, 1.0, len(values) - 1)
    assert loss.not_finite == f"loss is not finite in 1 of {len(values):,} values, first at step 777"


@pytest.mark.parametrize("cut", [1, 7, 60, 1 << 18])
def test_a_file_is_read_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, cut):
    """A chunk may end within a line; one that is torn, no JSON or two halves of a row costs itself alone."""
    good = [{"time": T0 + k, "number": k} for k in range(9)]
    texts, rows = [json.dumps(row) for row in good], []
    lines = [*texts[:3], "[1", "2]", "1, 2", texts[3], '{"time": 1', "", "\x00\x00", *texts[4:]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + '\n{"time": 5')
    monkeypatch.setattr(records, "_CHUNK_BYTES", cut)

    def take(row):
        rows.append({"time": row["time"], "number": row["number"]})
        return row["time"]

    file = records.Lines(tmp_path / "a.jsonl", take)
    file.look()
    file.look()
    assert (rows, file.num_unread, file.last) == (good, 5, T0 + 8)
