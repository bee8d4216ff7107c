# SPDX-License-Identifier: Apache-2.0
"""The command `farflung report`: one or several runs as a page that opens offline, a picture, figures or a trace."""

from __future__ import annotations

import json
import math
import re
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
    round_spans,
    spans,
    writers,
)
from farflung.observe.folder import named_run
from farflung.observe.logged import MOST_POINTS, Curve
from farflung.observe.records import RoundLine
from farflung.observe.run import KINDS, ObservedRun, Rank

_MOST_CELLS = 2000  # of a replica's row, in the page
_PICTURES = ("png", "svg", "pdf")
_SECRET = re.compile(r"(?i)(^|[-_])(token|secret|passw(or)?d|credentials?|(api|access|private|secret)[-_]?key)$")
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


def data_of(run: ObservedRun, cost: Figures) -> dict[str, Any]:
    """Return what a page shows of a run."""
    own = max((run.rounds_of(one.row.get("member")) for one in writers(run)), key=len, default=[])
    sent = list(accumulate(row.bytes_sent for row in own))
    each = None if own else ddp_bytes_per_step(run, len(run.ranks))
    curves = {curve.name: _curve(run, curve, own, sent, each) for curve in run.curves.drawn}
    places = _round_curves(run, own, curves)
    loss, shown = run.curves.loss, run.voted
    per = max(1, -(-len(shown) // _MOST_CELLS))
    grid = {name: _condensed(cells, per) for name, cells in run.timeline(shown).items()}
    told = [event for event in run.events if event.kind is not Kind.PROCESS]
    events = [(event.time - run.first_begun, run.described(event)) for event in told]
    return {
        "name": run.label,
        "state": run.state,
        "summary": _summary(run, cost),
        "facts": {name: run.facts[name] for name in ("script", "host", "settings", "versions", "git")}
        | {"arguments": without_secrets(run.facts["arguments"])},
        "curves": curves,
        "loss": None if loss is None else loss.name,
        "rounds": places,
        "grid": grid,
        "rounds_a_cell": per,
        "events": events,
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a script's arguments as others may see them: without the values of `--hf_token`, `--api-key=` etc."""
    shown, is_secret = list[str](), False
    for word in arguments:
        name, sign, _ = word.partition("=")
        shown.append("***" if is_secret else f"{name}=***" if sign and _SECRET.search(name) else word)
        is_secret = word.startswith("-") and not sign and bool(_SECRET.search(name))
    return shown


def _summary(run: ObservedRun, cost: Figures) -> str:
    number, loss = run.attempts.latest.number, run.curves.loss
    attempt = f"attempt {number} in this folder" if number > 1 else ""
    return "; ".join(filter(None, [attempt, str(cost), "" if loss is None else loss.not_finite, run.unread]))


def _condensed(cells: Sequence[str], per: int) -> list[str]:
    """Return the most notable of so many rounds in one cell."""
    return [min(cells[k : k + per], key=KINDS.index) for k in range(0, len(cells), per)]


def _round_curves(
    run: ObservedRun, own: Sequence[RoundLine], curves: dict[str, dict[str, list[Any]]]
) -> dict[str, Any]:
    """Add the curves of a replica's rounds, several of them in a point; return where the points lie."""
    if not own:
        return {}
    per = -(-len(own) // MOST_POINTS)
    waited, rates, sent, step, at = list[float](), list[float](), 0, 0, run.begun
    places: dict[str, list[float]] = {"seconds": [], "step": [], "bytes": []}
    for k in range(0, len(own), per):
        rounds = own[k : k + per]
        num_bytes, last = sum(row.bytes_sent for row in rounds), rounds[-1]
        waited.append(min(1.0, sum(row.seconds_exposed for row in rounds) / max(last.time - at, 1e-9)))
        rates.append(num_bytes / max(last.step - step, 1))
        sent, step, at = sent + num_bytes, last.step, last.time
        for place, x in (("seconds", at - run.first_begun), ("step", step), ("bytes", sent)):
            places[place].append(x)
    curves["share of time waiting"] = {**places, "values": waited}
    curves["bytes a step"] = {**places, "values": rates}
    return places


def _curve(
    run: ObservedRun, curve: Curve, own: Sequence[RoundLine], sent: Sequence[int], each: float | None
) -> dict[str, list[Any]]:
    """Return a metric over seconds, steps and the bytes that one replica had sent by then.

    They are not known (None) of earlier attempts.
    """
    k, sent_by = 0, list[float | None]()
    sizes = accumulate(point.size for point in curve.points)  # of points that stand for several
    steps = [size - 1 if point.step is None else point.step for size, point in zip(sizes, curve.points, strict=True)]
    for point, step in zip(curve.points, steps, strict=True):
        while k < len(own) and own[k].time <= point.time:
            k += 1
        by_rounds = sent[k - 1] if k else 0
        sent_by.append(None if point.time < run.begun else by_rounds if each is None else step * each)
    return {
        "seconds": [point.time - run.first_begun for point in curve.points],
        "step": steps,
        "bytes": sent_by,
        "values": [point.value if math.isfinite(point.value) else None for point in curve.points],  # None: a gap
    }


def trace(runs: Sequence[ObservedRun]) -> dict[str, Any]:
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


def _round_tracks(run: ObservedRun, one: Rank) -> list[list[Span]]:
    """Return the spans of a rank's rounds: each round is in the first row in which all before it have ended."""
    tracks: list[list[Span]] = [[]]
    for whole, *parts in sorted(
        map(round_spans, run.rounds_of(one.row.get("member"))), key=lambda found: found[0].begin
    ):
        ends = (track for track in tracks if not track or track[-1].end <= whole.begin)
        if (free := next(ends, None)) is None:
            tracks.append(free := [])
        free += [whole, *parts]
    return tracks


def draw(runs: Sequence[ObservedRun], costs: Sequence[Figures], target: Path) -> None:
    """Draw the curves of runs into a picture: the loss over time, steps and bytes, and the time waiting.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("A picture needs matplotlib. Install farflung[plot].") from None
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = [*figure.subplots(2, 2).flat]
    for run, cost in zip(runs, costs, strict=True):
        data = data_of(run, cost)
        loss, waited = run.curves.loss, data["curves"].get("share of time waiting")
        curve = None if loss is None else data["curves"][loss.name]
        for axis, place in zip(axes, ("seconds", "step", "bytes"), strict=False):
            axis.set(xlabel=place, ylabel="no loss was logged" if loss is None else loss.name)
            if loss is not None and curve is not None:
                pairs = zip(curve[place], curve["values"], strict=True)
                known = [(x, math.nan if value is None else value) for x, value in pairs if x is not None]
                label = " ".join(filter(None, [run.label, loss.not_finite]))
                axis.plot([x for x, _ in known], [value for _, value in known], label=label)
        axes[3].set(xlabel="seconds", ylabel="share of time waiting")
        if waited is not None:
            axes[3].plot(waited["seconds"], waited["values"], label=run.label)
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
    given = [flag for flag, value in {"--out": out, "--trace": trace_file, "--json": as_json}.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given, and a report is one of them. Give one.")
    runs = [ObservedRun(named_run(one)) for one in run or (None,)]
    costs = [figures(one, price_hour, price_gb) for one in runs]
    if as_json:
        rows = [
            {"run": str(one.path), "attempt": one.attempts.latest.number, "state": one.state, "unread": one.unread}
            | asdict(cost)
            for one, cost in zip(runs, costs, strict=True)
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
        click.echo(f"{one.path.name}: {_summary(one, cost)}")
    click.echo(f"written to {target}")
