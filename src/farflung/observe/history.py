# SPDX-License-Identifier: Apache-2.0
"""The rounds and events of a run as the screen and the page show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from farflung.base.events import Event, words
from farflung.observe.records import RoundLine
from farflung.observe.run import ObservedRun

KINDS = ("lost", "dropped", "joined", "ran", "away")  # what a round was for a replica, the most notable first


def timeline(run: ObservedRun, rounds: Sequence[RoundLine]) -> dict[str, list[str]]:
    """Return what each round was for each replica that took part in one, by name: one of `KINDS`.

    A replica that was started again is a new member of its name.
    """
    members = sorted({member for this in rounds for member in this.members})
    noun = "rank" if rounds and rounds[0].member is None else "member"
    names = {member: run.title({noun: member}) for member in members}
    rows = {name: ["away"] * len(rounds) for name in names.values()}
    for k, this in enumerate(rounds):
        lost = rounds[k + 1].lost if k + 1 < len(rounds) else {}
        for member in sorted(this.members, reverse=True):
            kind = "joined" if member in this.joined else "dropped" if this.dropped else "ran"
            rows[names[member]][k] = "lost" if str(member) in lost else kind
    return rows


def described(run: ObservedRun, event: Event) -> str:
    """Return what happened, in words."""
    return words(event if event.who else replace(event, who=run.title(event.facts)))
