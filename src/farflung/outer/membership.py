# SPDX-License-Identifier: Apache-2.0
"""The replicas that take part in rounds: generations, between which they come and go, and the fixed membership."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import Kind, record
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.votes.generation import Generation, Needs, Reached, open_generation


class Leaving(Protocol):
    """Ends this process on request, after one more round.

    Attributes:
        reason: why the others continue without it.
    """

    reason: str

    def is_due(self) -> bool:
        """Return whether this replica leaves now; called after each step. Its ranks all get the same answer."""

    def leave(self) -> None:
        """End this process; in the main thread."""

    def stop(self) -> None:
        """Called when the loop has ended: from now on signals act as usual."""


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

    def agree(self, num_votes: int, here: Reached, odd: Mapping[int, str]) -> Reached:
        """Agree, after a loss, on how far all have come.

        Args:
            num_votes: the number of this rank's next vote; what is neither open nor `Void` of those before it has been
                applied here.
            here: how far this rank has come.
            odd: members to exclude, as their state is not that of the others: why, by id.

        Returns:
            the same on all survivors: of each round as many buckets as all of them could apply, `ALL` if one has
            applied all already, or how it was `Void`; and the acts that any of them has ended.
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

    def agreed(self, text: str, waits: bool = True) -> str:
        """Return the first text, not an empty one, that a replica of this run has given for this loop, ever.

        The same members give the same text, at the same time. Unreachable where the store is gone, at once unless the
        caller `waits` for it.
        """
        return text

    def note(self, kind: Kind, member: int, **facts: Any) -> None:
        """Report an event of a member to whoever watches the run. Called on the first member, by all of its ranks."""

    def note_weights(self, digest: int) -> None:
        """Report a digest of the weights with which this replica's loop ends. Called on all of its ranks."""
        return None

    def leaving(self) -> Leaving | None:
        """Return what ends this process after one more round, on request; None: signals end it at once."""
        return None

    def end(self, reason: str, is_alone: bool = False) -> None:
        """Stop taking part; the loop has ended, and not as planned if there is a `reason`.

        Args:
            is_alone: the other ranks of this replica may end otherwise, as after an error.
        """
        return None


class FixedMembership(Membership):
    """The same ranks in every round."""

    is_fixed = True

    def __init__(self, group: Group, island: Group) -> None:
        self.most, self.island = group.size, island
        self._group = group
        self._generation: Generation | None = None

    def enter(self, needs: Needs) -> Generation:
        if self._generation is None:
            self._generation = open_generation(0, range(self.most), self._group, self.island, needs, is_fresh=True)
        return self._generation

    def agree(self, num_votes: int, here: Reached, odd: Mapping[int, str]) -> Reached:
        assert self._generation is not None
        group, under_way = self._generation.group, {vote: one for vote, one in here.complete.items() if one >= 0}
        return Reached({vote: group.agree_min(number, f"round {vote}") for vote, number in under_way.items()})

    def lost(self, failure: RankFailure) -> None:
        raise failure

    def note(self, kind: Kind, member: int, **facts: Any) -> None:
        if self.island.rank == 0:
            noun = "rank" if self.island.size == 1 else "island"
            record(kind, f"{noun} {member}", **facts)


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
