# SPDX-License-Identifier: Apache-2.0
"""The command `farflung report`: one or several runs as a page that opens offline, a picture, figures or a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import ConfigError
from farflung.base.events import Kind
from farflung.base.files import atomic_file
from farflung.observe.figures import (
    Figures,
    Span,
    ddp_bytes_per_step,
    figures,
    own_rounds,
    round_spans,
    spans,
    writers,
)
from farflung.observe.folder import named_run
from farflung.observe.history import cell, described, rows_of
from farflung.observe.run import Rank, Run

_MOST_POINTS = 4000  # of a curve, in the page
_PICTURES = ("png", "svg", "pdf")
_TRACKS = 1000  # most replicas of a trace whose tracks have different numbers


def page(data: Sequence[Mapping[str, Any]]) -> str:
    """Return a page that needs no other file: curves with one cursor, who was there, and events.

    Args:
        data: of each run what `data_of` returns.
    """
    from importlib.resources import files  # late, as `installed_version` is

    here = files("farflung.observe")
    text = here.joinpath("page.html").read_text(encoding="utf-8")
    vendored = here.joinpath("vendor").joinpath("uplot")
    parts = {
        "/*STYLE*/": vendored.joinpath("uPlot.min.css").read_text(encoding="utf-8"),
        "/*UPLOT*/": vendored.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8"),
        "/*DATA*/": json.dumps(list(data)).replace(
            "<", "\\u003c"
        ),  # a script element ends, or begins another, at such signs
    }
    for mark, content in parts.items():
        text = text.replace(mark, content)
    return text


def data_of(run: Run, cost: Figures) -> dict[str, Any]:
    """Return what a page shows of a run."""
    first = writers(run)[:1]
    own = own_rounds(run, first[0]) if first else []
    sent = list(accumulate(row["bytes_sent"] for row in own))
    steps = [0, *(row["step"] for row in own)]
    each = None if own else ddp_bytes_per_step(run, len(run.ranks))
    curves = {name: _curve(run, name, own, sent, each) for name in _curves(run)}
    seconds = [row["time"] - run.begun for row in own]
    gaps = [max(at - before, 1e-9) for at, before in zip(seconds, [0.0, *seconds], strict=False)]
    places = {"seconds": seconds, "step": steps[1:], "bytes": sent}
    if own:
        waited = [min(1.0, row["seconds_exposed"] / gap) for row, gap in zip(own, gaps, strict=True)]
        per_step = [row["bytes_sent"] / max(a - b, 1) for row, a, b in zip(own, steps[1:], steps, strict=False)]
        curves["share of time waiting"] = {**places, "values": waited}
        curves["bytes a step"] = {**places, "values": per_step}
    shown = run.voted
    grid = {
        name: [cell(lines[0], ids, shown[k + 1][0] if k + 1 < len(shown) else None) for k, lines in enumerate(shown)]
        for name, ids in (rows_of(run, shown) if shown else {}).items()
    }
    events = [(event.time - run.begun, described(run, event)) for event in run.events if event.kind is not Kind.PROCESS]
    return {
        "name": run.path.name,
        "state": run.state,
        "summary": "; ".join(filter(None, [str(cost), run.not_finite, run.unread])),
        "facts": {name: run.facts[name] for name in ("script", "arguments", "host", "settings", "versions", "git")},
        "curves": curves,
        "loss": run.loss_name,
        "rounds": places if own else {},
        "grid": grid,
        "events": events,
    }


def _curves(run: Run) -> list[str]:
    """Return the metrics that are curves: the loss, and what has a rate in its name."""
    names = {name for row in run.metrics for name in row["values"]}
    rates = sorted(name for name in names if name.split("/")[-1] in ("lr", "learning_rate"))
    return [*filter(None, [run.loss_name]), *rates]


def _curve(run: Run, name: str, own: Sequence[Any], sent: Sequence[int], each: float | None) -> dict[str, list[Any]]:
    """Return a metric over seconds, steps and the bytes that one replica had sent by then."""
    points = list(run.series(name))
    points = points[:: max(1, -(-len(points) // _MOST_POINTS))]
    at, k, sent_by = [row["time"] for row in own], 0, []
    for number, (when, step, _) in enumerate(points):
        while k < len(at) and at[k] <= when:
            k += 1
        done = number if step is None else step
        sent_by.append(done * each if each is not None else sent[k - 1] if k else 0)
    return {
        "seconds": [when - run.begun for when, _, _ in points],
        "step": [number if step is None else step for number, (_, step, _) in enumerate(points)],
        "bytes": sent_by,
        "values": [value if math.isfinite(value) else None for _, _, value in points],  # None: a gap
    }


def trace(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the runs in Chrome's trace format, which Perfetto opens: a process for each replica, times in us.

    Perfetto drops a span that begins in another one of its track and ends after it, be it by a nanosecond, and what
    begins before 0. So times are whole numbers, and rounds that are under way at the same time have a track each.
    """
    events: list[dict[str, Any]] = []
    number = 0
    for run in runs:
        zero = min([run.begun, *(one.row["begun"] for one in writers(run))])  # clocks of machines differ
        for one in writers(run):
            number += 1
            name = one.name if len(runs) == 1 else f"{run.path.name}: {one.name}"
            events.append({"ph": "M", "name": "process_name", "pid": number, "tid": number, "args": {"name": name}})
            rows = [("training", spans(run, one)), *(("rounds", track) for track in _round_tracks(run, one))]
            for place, (what, found) in enumerate(rows):
                track = {"pid": number, "tid": number + _TRACKS * place}  # the first one is the main thread's
                events.append({"ph": "M", "name": "thread_name", **track, "args": {"name": what}})
                for span in found:
                    begin, end = (round((when - zero) * 1e6) for when in (span.begin, span.end))
                    if end > begin:
                        row = {"ph": "X", "name": span.name, "cat": what, **track, "ts": begin, "dur": end - begin}
                        events.append(row)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _round_tracks(run: Run, one: Rank) -> list[list[Span]]:
    """Return the spans of a rank's rounds: each round is in the first row in which all before it have ended."""
    tracks: list[list[Span]] = [[]]
    for whole, *parts in sorted(map(round_spans, own_rounds(run, one)), key=lambda found: found[0].begin):
        ends = (track for track in tracks if not track or track[-1].end <= whole.begin)
        if (free := next(ends, None)) is None:
            tracks.append(free := [])
        free += [whole, *parts]
    return tracks


def draw(runs: Sequence[Run], costs: Sequence[Figures], target: Path) -> None:
    """Draw the curves of runs into a picture: the loss over time, steps and bytes, and the time waiting.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("A picture needs matplotlib. Install farflung[plot].") from None
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for run, cost in zip(runs, costs, strict=True):
        data = data_of(run, cost)
        curve, waited = data["curves"].get(run.loss_name), data["curves"].get("share of time waiting")
        for axis, place in zip(axes, ("seconds", "step", "bytes"), strict=False):
            axis.set(xlabel=place, ylabel=run.loss_name or "no loss was logged")
            if curve is not None:
                values = [math.nan if value is None else value for value in curve["values"]]
                axis.plot(curve[place], values, label=" ".join(filter(None, [run.path.name, run.not_finite])))
        axes[3].set(xlabel="seconds", ylabel="share of time waiting")
        if waited is not None:
            axes[3].plot(waited["seconds"], waited["values"], label=run.path.name)
    axes[0].legend(fontsize="small")
    with atomic_file(target) as part:
        figure.savefig(part, format=target.suffix[1:])


@click.command()
@click.argument("run", nargs=-1)
@click.option(
    "--out",
    metavar="FILE",
    help="Where to write the page (.html) or the picture (.png, .svg, .pdf). [report.html in the first run's folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, and write nothing.")
@click.option("--trace", "trace_file", metavar="FILE", help="Write a trace that Perfetto and Chrome open instead.")
@click.option("--price-hour", type=float, help="US dollars for an hour of one replica.")
@click.option("--price-gb", type=float, help="US dollars for a GB that is sent.")
def report(
    run: tuple[str, ...],
    out: str | None,
    as_json: bool,
    trace_file: str | None,
    price_hour: float | None,
    price_gb: float | None,
) -> None:
    """Write a page about one or several runs: loss over time, steps and bytes, waiting, who was there, what happened.

    RUN is a folder of a run, or its name in farflung-runs. [the newest]
    """
    runs = [Run(named_run(one)) for one in run or (None,)]
    costs = [figures(one, price_hour, price_gb) for one in runs]
    if as_json:
        rows = [
            {"run": str(one.path), "state": one.state, **asdict(cost)} for one, cost in zip(runs, costs, strict=True)
        ]
        strict = json.loads(json.dumps(rows), parse_constant=str)  # JSON has no word for NaN and infinities
        click.echo(json.dumps(strict, indent=1))
        return
    target = Path(trace_file or out or runs[0].path / "report.html")
    kind = target.suffix[1:]
    if trace_file is None and kind not in ("html", *_PICTURES):
        raise ConfigError(f"--out is {target}; use a name that ends with .html, .{', .'.join(_PICTURES)}.")
    try:
        if trace_file is None and kind in _PICTURES:
            draw(runs, costs, target)
        else:
            text = (
                json.dumps(trace(runs))
                if trace_file
                else page([data_of(*one) for one in zip(runs, costs, strict=True)])
            )
            with atomic_file(target) as part:
                part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror}.") from None
    for one, cost in zip(runs, costs, strict=True):
        click.echo(f"{one.path.name}: {'; '.join(filter(None, [str(cost), one.not_finite, one.unread]))}")
    click.echo(f"written to {target}")
