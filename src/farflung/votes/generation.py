# SPDX-License-Identifier: Apache-2.0
"""Generations: the members of an outer loop between two changes of membership, and the groups that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias

from farflung.base.causes import Cause
from farflung.base.errors import RankFailure
from farflung.comm.group import Group
from farflung.votes.ballot import Ballot, Island, Voters


class OddMembers(RankFailure):
    """Members whose state is not that of the others; `why` has the difference of each, by its id."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__("; ".join(why.values()))
        self.why = dict(why)


Layout: TypeAlias = list[list[list[str]]]  # the names of what each fragment exchanges, by kind
Parts: TypeAlias = list[list[str]]  # of a description, in groups
Described: TypeAlias = tuple[str, Sequence[str]]
_OUTSIDE = "an average outside the rounds of "


@dataclass(frozen=True)
class Needs:
    """What an outer loop requires of its members."""

    levels: tuple[int, ...]  # the number of ranks in a group of each level but the last, which is all of them
    overlaps: bool  # rounds overlap with training
    is_sharded: bool  # the ranks of an island hold parts of some weights
    description: str  # see `Voters`, like the tensors
    tensors: Sequence[str]
    num_votes: int  # the number of this rank's next vote
    admits: bool  # it is between rounds, so newcomers may come in
    has_state: bool  # this rank has the state that members share; else it is a newcomer, unless nobody has it
    state: Callable[[bool], Mapping[str, Any]]  # returns copies of that state, in parts; False: the part `place` alone
    may_keep: bool = False  # if it comes back as a newcomer, its steps since the last round could still count
    is_shared: Callable[[], bool] = lambda: True  # whether `state` would now return what all shared after a round
    settings: Parts = field(default_factory=list)  # of the description: what does not depend on what is trained
    could: Sequence[str] = ()  # a line for each tensor that this rank could exchange
    layout: Callable[[], Layout] = list  # returns what it exchanges
    align: Callable[[Layout], Described] = lambda _: ("", ())  # exchanges that instead; returns description and tensors

    def aligned(self, layout: Layout) -> Needs:
        """Return the needs of this rank once it exchanges what others do."""
        description, tensors = self.align(layout)
        return replace(self, description=description, tensors=tensors)


@dataclass(frozen=True)
class Generation:
    """The current members, and all that depends on them. A round keeps the generation in which it was opened."""

    number: int  # 0 for the first one
    ids: tuple[int, ...]  # of the members, by rank: the same replica keeps its id
    beside: Voters  # all members, which vote on actions outside of rounds
    levels: tuple[Voters, ...]  # who votes in a round, by level; all members on the first
    island: Island  # the ranks that train this replica, as they meet outside of rounds
    in_round: Island  # and in them
    num_votes: int  # the number of the members' next vote
    newcomers: tuple[int, ...] = ()  # ranks that were not there before; they have got what all others share
    lost: Mapping[int, str] = field(default_factory=dict)  # why members of the generation before are not in it, by id
    may_lose: bool = False  # the others continue without a member that is late, though it lives
    given: Mapping[str, Any] = field(default_factory=dict)  # to this rank, if it is a newcomer: see `Needs.state`
    keeps: bool = False  # this rank comes back, and nobody has applied any of its steps since the last round

    @property
    def joins(self) -> bool:
        return self.group.rank in self.newcomers

    @property
    def group(self) -> Group:
        return self.beside.group

    @cached_property
    def background(self) -> Group | None:
        """All members, for a thread in which rounds run; None: they run where they are launched."""
        return None if self.levels[0].group is self.group else self.levels[0].group

    def describe(self, description: str, tensors: Sequence[str]) -> None:
        for voters in (*self.levels, self.island.voters, self.in_round.voters):
            voters.describe(description, tensors)
        self.beside.describe(_OUTSIDE + description, tensors)

    def leave(self, reason: str, cause: Cause = Cause.OWN) -> None:
        for group in (self.group, *(voters.group for voters in self.levels[1:])):
            group.leave(reason, cause=cause)

    def free(self, reusable: bool) -> None:
        """Give the groups back. They are `reusable` if nothing is under way on any rank."""
        voters = (self.beside, *self.levels, self.island.voters, self.in_round.voters)
        for group in {id(voter.group): voter.group for voter in voters}.values():
            group.free(reusable)


def open_generation(
    number: int,
    ids: Sequence[int],
    group: Group,
    island: Group,
    needs: Needs,
    newcomers: Sequence[int] = (),
    is_fresh: bool = False,
) -> Generation:
    """Make the groups of a generation, in orders of their own: a collective of all members.

    Args:
        group: the members that have the same values as this rank; it is not used up.
        island: the ranks that train this replica.
        newcomers: see `Generation`.
        is_fresh: no rank has any state: all exchange what the first of them would.

    Raises:
        CollectiveMismatch: they need different things.
    """
    noun = "rank" if island.size == 1 else "island"
    # Who meets on a thread of its own must not get into the order of what the training itself sends.
    overlaps = needs.overlaps and group.is_concurrent and group.size > 1
    beside = group.duplicate()  # nor may a round meet what the script or another loop sends
    background = group.duplicate(in_background=True) if overlaps else beside
    if is_fresh and group.size > 1:  # a rank that trains in turns may have begun in another one's turn
        needs = needs.aligned(beside.all_gather_json(needs.layout())[0])
    described = needs.description, needs.tensors
    alone = Island(island.duplicate(), needs.is_sharded, *described)
    in_round = Island(island.duplicate(in_background=True), needs.is_sharded, *described) if overlaps else alone
    voters = Voters(beside, *described, noun)
    # Before anything else is sent, as ranks that differ would differ in that too.
    tally = voters.begin(alone.ballot(Ballot(0, 1.0, position=needs.num_votes)))()
    levels = [background, *(group.split(size) for size in needs.levels)]
    by_level = tuple(Voters(level, *described, noun) for level in levels)
    voters.describe(_OUTSIDE + needs.description, needs.tensors)
    return Generation(number, tuple(ids), voters, by_level, alone, in_round, tally.position, tuple(newcomers))


ALL = 2**31  # buckets: a round that some have behind them


class Void(IntEnum):
    """How a round has ended without a result, in the place of a number of buckets."""

    EMPTY = -1
    LAST_EMPTY = -2  # no rank has any more data
    DROPPED = -3
    LAST_DROPPED = -4

    @property
    def is_last(self) -> bool:
        return self in (Void.LAST_EMPTY, Void.LAST_DROPPED)

    @property
    def is_dropped(self) -> bool:
        return self in (Void.DROPPED, Void.LAST_DROPPED)


@dataclass(frozen=True)
class Reached:
    """How far a member, or all of them, have come when a generation ends."""

    complete: Mapping[int, int] = field(default_factory=dict)  # buckets of open rounds that can be applied, by vote
    acts: int = 0  # how many acts outside of rounds have ended in this generation
    in_act: bool = False  # this member was in the next one
