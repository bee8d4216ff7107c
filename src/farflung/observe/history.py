# SPDX-License-Identifier: Apache-2.0
"""The rounds and events of a run as the screen and the page show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from farflung.base.events import Event, words
from farflung.observe.records import Row
from farflung.observe.run import Run


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


def described(run: Run, event: Event) -> str:
    """Return what happened, in words."""
    return words(event if event.who else replace(event, who=run.title(event.facts)))
