# SPDX-License-Identifier: Apache-2.0
"""Says in words what is wrong with a run: who is late, stopped or gone, and who waits for it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from farflung.base.events import Kind
from farflung.base.signals import REQUEUE
from farflung.base.words import numbered
from farflung.observe.records import RoundLine
from farflung.observe.run import ObservedRun, Rank

_LATE_S = 10.0  # in one call, before it is called late if nobody waits for it


def problems(run: ObservedRun) -> list[str]:
    """Return a line for each problem that the run's folder shows now; none for a run that has ended well."""
    ranks = run.ranks
    lost = [one for one in ranks if one.is_lost]
    waiting = [one for one in ranks if not one.is_lost and one.stuck_s and one.row.get("call")]
    if run.state == "dead":
        who = _list(lost) if lost else "its ranks"
        return [f"nobody gives a sign any more: {who} ended without a word, and so did the launcher"]
    if run.code is not None:
        failed = [event for event in run.current if event.kind in (Kind.LOST, Kind.FAILED)]
        return (
            []
            if run.code in (0, REQUEUE) or failed
            else [f"it ended with exit code {run.code}; see {run.path / 'logs'}"]
        )
    left = _left_out(run.rounds) if lost else set()
    said = [f"{one.name} on {one.row['host']} {_fate(one)}{_waits(waiting)}" for one in lost if not _is_out(one, left)]
    if lost:
        return said
    late = [one for one in ranks if one.stuck_s and one not in waiting]
    behind = min((one.step for one in ranks if one.ended is None), default=0)
    late = late or ([one for one in waiting if one.step == behind] if any(one.step > behind for one in waiting) else [])
    waiting = [one for one in waiting if one not in late]
    for one in late:
        if waiting or one.stuck_s > _LATE_S:
            said.append(
                f"{one.name} on {one.row['host']} has been in {_place(one)} for {one.stuck_s:.0f} s{_waits(waiting)}"
            )
    if not late and waiting and min(one.stuck_s for one in waiting) > _LATE_S:
        said.append(f"all have been in {waiting[0].where} for {min(one.stuck_s for one in waiting):.0f} s")
    return said


def _left_out(rounds: Sequence[RoundLine]) -> Set[str]:
    """Return the ids of replicas that rounds lost, and that have taken part in none since."""
    left = set[str]()
    for this in sorted(rounds, key=lambda one: one.number):  # a slow replica writes its lines later
        left = (left | this.lost.keys()) - {str(member) for member in this.members}
    return left


def _is_out(one: Rank, left: Set[str]) -> bool:
    """Return whether the others continue without a replica that is gone; `left` is what `_left_out` returns."""
    return one.status == "gone" and str(one.row.get("member")) in left


def _fate(one: Rank) -> str:
    if one.status == "stopped":
        return f"is stopped (its process {one.row['pid']} has a signal to stop; `kill -CONT {one.row['pid']}`)"
    if one.status == "gone":
        return f"is gone: process {one.row['pid']} ended without a word"
    return f"has given no sign for {one.silent_s:.0f} s"


def _waits(waiting: Sequence[Rank]) -> str:
    if not waiting:
        return ""
    return (
        f"; {_list(waiting)} wait{'s' if len(waiting) == 1 else ''} in {waiting[0].where} at step {waiting[0].step:,}"
    )


def _place(one: Rank) -> str:
    at = one.row.get("at")
    call = one.row.get("call")
    return f"`{call}` ({at})" if call and at else one.where


def _list(ranks: Sequence[Rank]) -> str:
    """Return `ranks 0 and 2`, or the names of replicas."""
    if all("member" not in one.row for one in ranks):
        return numbered("rank", [one.row.get("rank", 0) for one in ranks])
    return " and ".join(one.name for one in ranks)
