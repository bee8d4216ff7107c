# SPDX-License-Identifier: Apache-2.0
"""The replicas that take part in rounds: generations, between which they come and go, and the fixed membership."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import EVENTS, Event, Kind, tell
from farflung.comm.collectives import gather_json
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.outer.ballot import Ballot, Island, Voters
from farflung.outer.leaving import Leaving
from farflung.outer.structure import Layout, Parts


class OddMembers(RankFailure):
    """Members whose state is not that of the others; `why` has the difference of each, by its id."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__("; ".join(why.values()))
        self.why = dict(why)


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
        needs = needs.aligned(gather_json(Exchange(beside), needs.layout(), "outer loop")[0])
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


class Membership(Protocol):
    """Decides which replicas take part, from generation to generation.

    Attributes:
        is_fixed: a lost rank ends the loop.
        most: how many there will be at most.
        island: the ranks that train this replica.
    """

    is_fixed: bool
    most: int
    island: Group

    def enter(self, needs: Needs) -> Generation:
        """Return the current generation: a collective of its members if it is new. Called when a round is about to
        be launched, so newcomers take part in that one."""

    def is_awaited(self, needs: Needs) -> bool:
        """Return whether a replica that meets `needs` is known to wait for admission. Called when a round begins."""
        return False

    def landed(self, needs: Needs, vote: int) -> None:
        """Called after a round of all members was applied and its listeners were: what they share is consistent.

        Args:
            vote: the number of the round's vote.
        """
        return None

    def offer(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Send parts of the shared state, which a round may have changed, to replicas that wait for admission."""
        return None

    def agree(self, num_votes: int, complete: Mapping[int, int], odd: Mapping[int, str]) -> dict[int, int]:
        """Agree, after a loss, on the buckets of open rounds to apply.

        Args:
            num_votes: the number of this rank's next vote; what is not open of those before it has ended here.
            complete: how many buckets of each open round this rank could apply, by the number of its vote.
            odd: members to exclude, as their state is not that of the others: why, by id.

        Returns:
            the same on all survivors, by vote: as many as all of them could apply; `ALL` if one has applied all
            already.
        """

    def lost(self, failure: RankFailure) -> None:
        """End the generation; the next one excludes the lost ranks.

        Raises:
            RankFailure: the same one, if nothing can continue.
        """

    def stranded(self, error: Unreachable) -> Exception:
        """Keep what the members share, as the store where they would agree is gone; return the error that says so."""
        return error

    def expect_round(self, seconds: float) -> None:
        """Called before the first round, with how long a round should take: nobody is late before that."""
        return None

    def agreed(self, text: str) -> str:
        """Return the first text, not an empty one, that a replica of this run has given for this loop, ever.

        The same members give the same text, at the same time.
        """
        return text

    def note(self, kind: Kind, member: int, **facts: Any) -> None:
        """Report an event of a member to whoever watches the run. Called on the first member, by all of its ranks."""

    def leaving(self) -> Leaving | None:
        """Return what hears that this process is to end after one more round; None: signals end it at once."""
        return None

    def end(self, reason: str, is_alone: bool = False) -> None:
        """Stop taking part; the loop has ended, and not as planned if there is a `reason`.

        Args:
            is_alone: the other ranks of this replica may end otherwise, as after an error.
        """
        return None


class FixedMembership(Membership):
    """The same ranks in every round.

    Args:
        group, island: see `OuterLoop`.
    """

    is_fixed = True

    def __init__(self, group: Group, island: Group) -> None:
        self.most, self.island = group.size, island
        self._group = group
        self._generation: Generation | None = None

    def enter(self, needs: Needs) -> Generation:
        if self._generation is None:
            self._generation = open_generation(0, range(self.most), self._group, self.island, needs, is_fresh=True)
        return self._generation

    def agree(self, num_votes: int, complete: Mapping[int, int], odd: Mapping[int, str]) -> dict[int, int]:
        assert self._generation is not None
        return {vote: self._generation.group.agree_min(number, f"round {vote}") for vote, number in complete.items()}

    def lost(self, failure: RankFailure) -> None:
        raise failure

    def note(self, kind: Kind, member: int, **facts: Any) -> None:
        if self.island.rank == 0:
            noun = "rank" if self.island.size == 1 else "island"
            event = Event.now(kind, f"{noun} {member}", **facts)
            tell(f"farflung: {event}")
            EVENTS.info(event)


def fixed_membership(group: Group | None, island: Group | None, on_cpu: bool) -> FixedMembership:
    """Return the membership of the given ranks, by default all ranks of `torch.distributed`."""
    group = group or (TorchGroup() if dist.is_available() and dist.is_initialized() else SoloGroup())
    island = island or SoloGroup()
    if island.size > 1 and isinstance(group, TorchGroup) and isinstance(island, TorchGroup):
        everyone = TorchGroup()
        group, island = everyone.within(group.pg), everyone.within(island.pg)  # a rank that leaves one leaves both
    if on_cpu and not group.supports("cpu"):
        raise ConfigError(
            "The model is on the CPU, but its group can't send CPU tensors (NCCL alone can't). Move the model to "
            'the GPU, or initialize torch.distributed with the backend "cpu:gloo,cuda:nccl".'
        )
    return FixedMembership(group, island)
