# SPDX-License-Identifier: Apache-2.0
"""The rounds and events of a run as the screen and the page show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farflung.base.words import counted, in_seconds
from farflung.observe.run import Row, Run

_WAYS = {"NO": "in one process", "FSDP": "by FSDP"}


def rows_of(run: Run, rounds: Sequence[Sequence[Row]]) -> dict[str, list[int]]:
    """Return the replicas that took part in rounds, by name: one that was started again is a new member."""
    rows: dict[str, list[int]] = {}
    for member in sorted({member for lines in rounds for member in lines[0]["members"]}):
        rows.setdefault(run.title({"member" if "member" in run.rounds[0] else "rank": member}), []).append(member)
    return rows


def cell(this: Row, members: Sequence[int], following: Row | None) -> str:
    """Return what a round was for a replica: `ran`, `dropped`, `lost`, `joined` or `away`."""
    here = [member for member in members if member in this["members"]]
    if not here:
        return "away"
    if following is not None and str(here[0]) in following["lost"]:
        return "lost"
    return "joined" if here[0] in this["joined"] else "dropped" if this["dropped"] else "ran"


def described(run: Run, event: Row) -> str:
    """Return what happened, in words."""
    kind = event["event"]
    which = run.title(event)
    sizes = [counted(event[f"{name}s"], name) for name in ("replica", "machine") if f"{name}s" in event]
    sizes += [counted(event["processes"], "process")] if "processes" in event else []
    words: dict[str, Callable[[], str]] = {
        "started": lambda: f"started: {', '.join(sizes)}",
        "model": lambda: f"{which} trains {event['parameters']:,} parameters {_WAYS.get(event['strategy'], 'by DDP')}",
        "saving": lambda: f"{which} has trained on after {in_seconds(event['seconds'])} for a checkpoint",
        "checkpoint": lambda: f"checkpoint {event['folder']}",
        "failed": lambda: f"{which} failed: {event['why'].splitlines()[0]}",
        "lost": lambda: f"{which} is lost: {event['why']}",
        "ended": lambda: f"ended with exit code {event['code']}",
    }
    return event["message"] if "message" in event else str(words[kind]()) if kind in words else kind
