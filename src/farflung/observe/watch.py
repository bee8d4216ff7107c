# SPDX-License-Identifier: Apache-2.0
"""The command `farflung watch`: a run on one screen, from its folder alone, live or long over."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import inf, isfinite

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from farflung.base.events import Kind
from farflung.base.words import counted, in_bytes, in_seconds
from farflung.observe.figures import figures
from farflung.observe.folder import named_run
from farflung.observe.problems import problems
from farflung.observe.run import ObservedRun

_LOOK_S = 0.5  # between two looks
READ_S = 0.5  # that a look may take: of the folder of a long run, later ones read the rest
_SIGN_S = 2.5  # within which a rank that is alive, which gives a sign each second, has given one
_CELLS = {  # of the timeline, with their styles
    "ran": ("■", "green"),
    "dropped": ("x", "yellow"),
    "lost": ("✗", "red"),
    "joined": ("+", "cyan"),
    "away": ("·", "dim"),
}
_BARS = "▁▂▃▄▅▆▇█"
_NUM_EVENTS = 5
_STYLES = {"training": "green", "finished": "green", "starting": "dim"}


def screen(run: ObservedRun, width: int = 80, back: int = 0, chosen: int | None = None) -> RenderableType:
    """Return what there is to see of a run.

    Args:
        width: of the terminal, in characters.
        back: how many of the newest rounds are out of sight, to the right.
        chosen: the row of the replica whose stack is shown.
    """
    parts: list[RenderableType] = [_head(run)]
    if not run.reading:  # what is not read yet may explain them
        parts += [Text(f"! {line}", style="bold red") for line in problems(run)]
    parts += [Text(f"! {line}", style="yellow") for line in (run.reading, run.unread) if line]
    parts += [_ranks(run, width, chosen)]
    if run.rounds:
        parts += [_rounds(run, width, back)]
    curve = _curve(run, width)
    if curve is not None:
        parts += [curve]
    if chosen is not None and chosen < len(run.ranks):
        one = run.ranks[chosen]
        calls = one.row.get("stack") or ["(it moves on: no stack was written)"]
        parts += [
            Panel(Text("\n".join(calls), overflow="ellipsis", no_wrap=True), title=Text(one.name), title_align="left")
        ]
    parts += [_events(run, width)]
    return Group(*parts)


def _head(run: ObservedRun) -> Text:
    facts, lasted = run.facts, run.lasted_s
    said = Text(f"{facts['script']}  ", style="bold")
    said.append(run.state, style="green" if run.state in ("running", "finished", "saved at a signal") else "bold red")
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.begun))
    attempt = run.attempts.latest.number
    number = f", attempt {attempt} in this folder" if attempt > 1 else ""
    said.append(f"  {in_seconds(lasted)} since {begun} on {facts['host']}{number}", style="dim")
    return said


def _ranks(run: ObservedRun, width: int, chosen: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, side in (("", "left"), ("host", "left"), ("step", "right"), ("steps/s", "right"), ("sign", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("state", no_wrap=True, overflow="ellipsis", max_width=max(20, width - 50))
    for number, one in enumerate(run.ranks):
        style = "red" if one.is_lost or one.ended else _STYLES.get(one.state, "yellow")
        is_over = one.ended is not None
        row = Text(one.name), Text(one.row["host"]), f"{one.step:,}", "" if is_over else f"{one.rate:.1f}"
        sign = "" if is_over else f"{one.silent_s:.0f} s"
        table.add_row(*row, sign, Text(one.state, style=style), style="reverse" if number == chosen else "")
    if not run.ranks:
        table.add_row("", "no rank has given a sign yet")
    return table


def _rounds(run: ObservedRun, width: int, back: int) -> Table:
    """Return a row of cells for each replica, one for each round."""
    rounds = run.voted
    end = max(len(rounds) - back, min(len(rounds), 1))
    shown = rounds[max(0, end - max(10, width - 16)) : end]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, kinds in run.timeline(shown).items():
        cells = Text()
        for kind in kinds:
            cells.append(*_CELLS[kind])
        table.add_row(Text(name), cells)
    lines = run.longest
    sent = in_bytes(sum(row.bytes_sent for row in lines))
    legend = f"{counted(len(rounds), 'round')}: " + "  ".join(f"{sign} {name}" for name, (sign, _) in _CELLS.items())
    found = figures(run)
    said = "; ".join([f"{found.share('waiting'):.0%} of the time waiting, {sent} sent by each", *found.goodput])
    table.add_row("", Text(f"{legend}; {said}", style="dim", overflow="fold"))
    return table


def _curve(run: ObservedRun, width: int) -> Text | None:
    loss = run.curves.loss
    values = [] if loss is None else [point.value for point in loss.points]
    if loss is None or len(values) < 2:
        return None
    wide = min(len(values), max(10, width - 34))
    cuts = [len(values) * k // wide for k in range(wide + 1)]
    means = [sum(part) / len(part) for a, b in pairwise(cuts) if (part := values[a:b])]
    finite = [value for value in means if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    said = Text(f"{loss.name} ", style="dim")
    for value in means:
        if isfinite(value):
            said.append(_BARS[int((value - low) / max(high - low, 1e-30) * (len(_BARS) - 1))], style="cyan")
        else:
            said.append("!", style="bold red")
    said.append(f" {loss.first:.4g} to {loss.last:.4g}", style="dim")
    return said.append(f"\n! {loss.not_finite}", style="bold red") if loss.not_finite else said


def _events(run: ObservedRun, width: int) -> Text:
    said = Text()
    for event in [event for event in run.events if event.kind is not Kind.PROCESS][-_NUM_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        said.append(f"{when} ", style="dim").append(f"{run.described(event)}\n")
    said.rstrip()
    return said


# ---- on a terminal


@contextmanager
def _keys(are_wanted: bool) -> Iterator[bool]:
    """Have keys read one by one for a block; False if they are not, as there is no keyboard."""
    if not (are_wanted and sys.stdin.isatty()):
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(has_keys: bool, wait_s: float) -> str:
    """Wait so long for a key, and return it: an arrow as its last letter."""
    if not has_keys:
        time.sleep(wait_s)
        return ""
    if not select.select([sys.stdin], [], [], wait_s)[0]:
        return ""
    # An arrow has three bytes. `sys.stdin` would keep those after them where `select` doesn't see them.
    return os.read(sys.stdin.fileno(), 3).decode(errors="replace")[-1:]


def follow(run: ObservedRun, console: Console) -> None:
    """Show a run until it has ended and is read, or somebody presses q; of one that has ended before, all is shown."""
    back, chosen, is_paused = 0, None, False
    help_line = Text("q quit  p pause  arrows: rounds, stacks", style="dim")
    with _keys(run.state == "running") as has_keys, Live(console=console, auto_refresh=False, screen=has_keys) as live:
        while True:
            if not is_paused:
                run.look()
            shown = screen(run, console.width, back, chosen)
            live.update(Group(shown, help_line) if has_keys else shown, refresh=True)
            if run.state != "running" and not run.reading and not has_keys:
                return
            key = _pressed(has_keys, 0.0 if run.reading and not is_paused else _LOOK_S)
            if key == "q":
                break
            is_paused ^= key == "p"
            back = max(0, back + {"D": 10, "C": -10}.get(key, 0))
            if key in ("A", "B"):
                rows = len(run.ranks)
                chosen = ((-1 if chosen is None else chosen) + (1 if key == "B" else -1)) % max(rows, 1)
    console.print(screen(run, console.width))


@click.command()
@click.argument("run", required=False)
@click.option("--once", is_flag=True, help="Print the screen once, as into a pipe.")
def watch(run: str | None, once: bool) -> None:
    """Show a run while it trains, or after: replicas, rounds, waiting, loss, events, and what is wrong.

    RUN is a folder of a run, or its name in farflung-runs. [the newest]
    """
    console = Console()
    is_live = sys.stdout.isatty() and not once  # rich's own answer follows FORCE_COLOR
    found = ObservedRun(named_run(run), look_s=READ_S if is_live else inf)
    if found.state == "dead":  # by the clocks of two machines, unless nothing changes while one looks
        time.sleep(_SIGN_S)
        found.look()
    if is_live:
        with suppress(KeyboardInterrupt):
            follow(found, console)
    else:
        console.print(screen(found, console.width))
