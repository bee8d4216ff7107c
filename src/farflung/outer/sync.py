# SPDX-License-Identifier: Apache-2.0
"""The actions of all members along the schedule: rounds that are due, and a flush, which makes them equal."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from farflung.comm import tensor_memory
from farflung.comm.bucket import broadcast_values
from farflung.comm.recording import unrecorded
from farflung.comm.shards import local, num_parts, reshard
from farflung.exchanged.comparison import FINGERPRINT_BYTES
from farflung.exchanged.replica import Replica
from farflung.methods.fragments import TensorPlace
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Action, Change, Launch
from farflung.outer.chooser import Chooser
from farflung.outer.gradients import GradientWarmup
from farflung.outer.quorum import Quorum
from farflung.outer.rounds import Rounds
from farflung.outer.stats import Meter
from farflung.outer.timetable import Timetable
from farflung.votes.ballot import digest_of
from farflung.votes.generation import Void

_T = TypeVar("_T")


@dataclass(eq=False)
class Sync:
    """Goes along the schedule, with the other members.

    Args:
        warmup: the steps in which gradients are averaged, and no rounds are due.
        chooser: may replace the recipe.
        replica_of: binds what is exchanged of the model as another recipe does.

    Attributes:
        num_flushes: how many this rank has come to; those that had ended before it met the others count.
        joined_in: the latest generation that it has entered as a newcomer, and done what was due then.
        flushed_at: the position of the last flush, or of the start; until the next step the model has the anchor.
        num_lent: how many blocks are under way in which the model has the values to evaluate.
    """

    timetable: Timetable
    quorum: Quorum
    rounds: Rounds
    warmup: GradientWarmup
    meter: Meter
    chooser: Chooser
    replica_of: Callable[[Recipe, Replica], Replica]
    num_flushes: int = 0
    joined_in: int = -1
    flushed_at: int = 0
    num_lent: int = 0

    @property
    def replica(self) -> Replica:
        return self.rounds.replica

    # ---- the recipe, and another one from a boundary on

    def enter(self) -> None:
        """Meet the other members: a collective."""
        quorum, this = self.quorum, weakref.proxy(self)  # or a loop that is dropped would keep its model
        quorum.ask_otherwise = lambda: this._ask_otherwise()
        quorum.enter()
        self.num_flushes = self.timetable.flushes
        self.run(())
        self.replace(self.chooser.met())
        self.note_step()  # from here on the first one counts

    def _ask_otherwise(self) -> bool:
        """Continue as others do now, with another recipe or a changed model; return whether that can be."""
        if (change := self.replica.change()) is not None:
            self.replica.follow(change)
            return True
        recipe = self.chooser.refused()
        if recipe is not None:
            self._follow(recipe, self.replica_of(recipe, self.replica))
        return recipe is not None

    def note_step(self) -> None:
        """Tell the chooser that a step has ended, if it measures."""
        if self.chooser.is_measuring:
            self.chooser.note_step(self.meter.stats().seconds_exposed, waits_in_steps=not self.warmup.is_timed)

    def choose(self, is_early: bool = False) -> bool:
        """Replace the recipe, if the chooser wants to at this step. Return whether it did."""
        are_alike = self.warmup.are_alike
        # A rank that stays without data expects gradients alone.
        if self.timetable.is_warming and not (is_early or are_alike):
            return False
        if not self.chooser.is_due(self.timetable.synced, is_early):
            return False
        with self.meter.timed("exposed"), torch.no_grad():
            return self.replace(self.chooser.choose(is_early, are_alike))

    def replace(self, recipe: Recipe | None) -> bool:
        """Continue as another recipe does, from what all members share, with this rank's steps since; sends nothing.

        The recipe so far has an anchor, and no round is under way. None: nothing changes; return whether it did.
        """
        if recipe is None:
            return False
        replica = self.replica_of(recipe, self.replica)
        self._share_warmup()
        replica.continue_from(self.replica, self.quorum.generation)
        self._follow(recipe, replica)
        return True

    def _follow(self, recipe: Recipe, replica: Replica) -> None:
        self.rounds.replica = replica
        self.timetable.follow(recipe)
        self.warmup.is_over = not self.timetable.is_warming
        self.quorum.restart(recipe, replica)

    # ---- rounds

    def _do(self, action: Action, finished: bool) -> None:
        """Launch and apply the rounds that are due; `finished`: this rank has no more data."""
        if isinstance(action, Launch):
            self.rounds.launch(action, self.timetable.position, finished)
        elif isinstance(action, Change):
            self.quorum.follow(action)
        else:
            num_landed = self.rounds.num_landed
            self.rounds.apply(action.fragment)
            if self.rounds.num_landed > num_landed:
                self.replace(self.chooser.landed())

    def run(self, due: Sequence[Action], step: int | None = None) -> None:
        """Launch and apply the rounds that are due; first admit replicas that wait, which take part in them.

        `step` is that of `Quorum.enter`.
        """
        left = deque(due)
        self._admit(due, step)
        while left or self._has_joined:
            if self._has_joined:
                left = self._due_to_newcomers()
            else:
                self._do(left.popleft(), finished=False)

    def _admit(self, due: Sequence[Action], step: int | None = None, finished: bool = False) -> None:
        """Admit replicas that wait, if rounds of all are to be launched now and some rank has data; see `Quorum.enter`.

        All meet before: a generation breaks if one is missing, and newcomers would be out with it.
        """
        if self.rounds.is_awaited and any(isinstance(action, Launch) and action.level == 0 for action in due):
            self.rounds.apply_all()
            if self._has_joined:
                return
            self.rounds.is_awaited = False
            tally = self.quorum.together(partial(self.quorum.vote, finished=finished))
            if tally is not None and not tally.finished:
                self.quorum.enter(due, step)

    @property
    def _has_joined(self) -> bool:
        return self.quorum.joined_in > self.joined_in

    def _due_to_newcomers(self) -> deque[Action]:
        """Return what the members, which this rank has just joined, do next."""
        welcome = self.quorum.welcome  # None after its first step: nothing is due in a warm-up
        self.joined_in = self.quorum.joined_in
        self.rounds.is_awaited = False
        return deque(() if welcome is None else welcome.due)

    def together(self, act: Callable[[], _T]) -> _T | None:
        """Do something with all members, see `Quorum.together`, and what is due to one that has joined meanwhile."""
        result = self.quorum.together(act)
        self.run(())
        return result

    def run_next(self) -> None:
        """Advance along the schedule without training until it launches a round, and run that."""
        timetable, due = self.timetable, list[Action]()
        while not any(isinstance(action, Launch) for action in due):
            timetable.synced += 1
            due = timetable.due(timetable.synced, math.inf)
            timetable.began = min(timetable.began, timetable.position)  # it is launched now
            self.run(due, timetable.synced)

    def flush(self) -> None:
        """Stay in the rounds until every rank has come here; see `OuterLoop.flush`."""
        timetable = self.timetable
        self.warmup.stay()
        with self.meter.timed("exposed"):
            self._share_warmup()
            self.num_flushes += 1
            while timetable.flushes < self.num_flushes:
                last = self._walk_on()
                if last is not None:
                    self.quorum.together(partial(self._make_equal, last), timetable.end_flush)
            self.run(())  # what the others do next, if they have ended it without this rank
        self.flushed_at = timetable.position
        self.warmup.is_over = not timetable.is_warming  # the others' steps may have ended it

    def _make_equal(self, last: int) -> int:
        """Make all replicas equal, once none has any more data: an act of all members, which may begin again.

        Args:
            last: the fragment whose round has shown that.

        Returns:
            the furthest step of any of them.
        """
        replica, rounds, recipe = self.replica, self.rounds, self.timetable.recipe
        rounds.apply_all()
        is_set, mark = False, 0
        if recipe.leaves_alike and rounds.void(last) is Void.LAST_EMPTY:
            if recipe.has_anchor:
                is_set = not self._is_adopted()
            else:
                mark = _digest_of(replica)
        tally = self.quorum.vote(sound=not is_set, mark=mark, position=self.timetable.position)
        everything = range(len(replica.fragments))
        for number in everything:
            if number != last:
                rounds.launch(Launch(number), tally.position, finished=True)
                rounds.apply(number)
        voids = [rounds.void(number) for number in everything]
        for number, void in enumerate(voids):
            if void is Void.LAST_EMPTY:
                self.quorum.average_buffers(replica.fragments[number])
                replica.fragments[number].keep("buffers", "counters")
                self.quorum.note_landing(number, "buffers", "counters")
        is_set = not all(tally.sound) or len(set(tally.marks)) > 1  # by a script, since all were equal, without a step
        if recipe.agrees and not is_set:
            replica.adopt()
        if is_set or not recipe.agrees or any(void is not None and void.is_dropped for void in voids):
            self.average()
            replica.reset(is_set)
            for number in everything:
                self.quorum.note_landing(number)
            self.quorum.offer(*everything)
        self._share_buffers()
        self._average_moved()
        return tally.position

    def _is_adopted(self) -> bool:
        return all(fragment.weights.is_adopted() for fragment in self.replica.fragments)

    def _share_warmup(self) -> None:
        """Take the weights for common ones while a warm-up makes them alike."""
        if 0 < self.timetable.position <= self.timetable.recipe.warmup and self.warmup.are_alike:
            self.replica.reset_anchor()

    def _walk_on(self) -> int | None:
        """Advance along the schedule without training until all ranks do so.

        Ranks vote in the order of the schedule. One that has no more data may not skip votes that others still reach.

        Returns:
            The fragment then under way; None if the others have ended this flush without this rank.
        """
        timetable, rounds = self.timetable, self.rounds
        step = max(timetable.synced, timetable.recipe.warmup)  # nothing is due in a warm-up, which may never end
        left = deque[Action]()
        while timetable.flushes < self.num_flushes:
            if self._has_joined:
                left, step = self._due_to_newcomers(), timetable.synced
            while not left:
                step += 1
                left.extend(timetable.due(step, math.inf))
                self._admit([*left], step, finished=True)
            if self._has_joined:
                continue
            action = left.popleft()
            self._do(action, finished=True)
            if not isinstance(action, Launch) or action.level:
                continue
            if rounds.is_last(action.fragment) and not self._has_joined:
                return action.fragment
        return None

    def average(self, coming: Sequence[TensorPlace] | None = None) -> None:
        """local <- the mean of all ranks, weights and floating buffers: a collective outside of rounds.

        All ranks count alike, but those with a value that is not finite: these get the mean of the others. If none
        is left nothing happens.

        Args:
            coming: what `agree` has returned.

        Raises:
            CollectiveMismatch: the model has changed since the last round, and not on all ranks alike.
        """
        coming = self.agree() if coming is None else coming
        bound = [place for one in self.replica.fragments for place in (*one.cut.parameters, *one.cut.averages)]
        self.quorum.average([local(place.get()) for place in (*bound, *coming)])

    def agree(self) -> list[TensorPlace]:
        """Agree on what is averaged outside of rounds: a collective.

        Returns:
            What any rank has trained, in addition to what is exchanged.
        """
        if (change := self.replica.change()) is not None:  # adopted as by a round
            if change.must_agree:
                self.rounds.wait_all()  # they vote by the old description
                self.quorum.describe(change.vote, change.tensors)
                self.quorum.vote()
            self.rounds.follow(change)
        wish, generation = self.replica.trained.wish(), self.quorum.generation
        tally = self.quorum.vote(trained=wish.digest)
        return self.replica.trained.coming(wish.agreed(tally, generation.island.voters.group, self.quorum.group) or ())

    def _average_moved(self) -> None:
        """Give what no round sends and the script has changed its mean: a collective, outside of rounds."""
        self.meter.add("bytes_voting", (self.quorum.group.size - 1) * FINGERPRINT_BYTES)
        for moved in self.replica.moved():
            if any(count for (count,) in self.quorum.generation.island.gathered(len(moved))):
                self.quorum.average(moved)

    def note_weights(self) -> None:
        """Leave a digest of the weights that this replica ends with, where replicas come and go, for launchers."""
        quorum = self.quorum
        if not quorum.membership.is_fixed:
            marks = quorum.generation.island.gathered(float(_digest_of(self.replica)))
            quorum.membership.note_weights(digest_of(str(marks)))

    def _share_buffers(self) -> None:
        """Give all ranks of the island the buffers of the first one: each has averaged its own with its column."""
        island = self.quorum.generation.island
        if island.size > 1:
            buffers = [
                one.get() for bound in self.replica.fragments for one in (*bound.cut.averages, *bound.cut.counters)
            ]
            broadcast_values([buffer for buffer in buffers if num_parts(buffer) == 1], island.voters.group)
            for bound in self.replica.fragments:
                bound.keep("buffers", "counters")

    # ---- evaluation

    @contextmanager
    def lent(self, module: nn.Module | None = None) -> Iterator[None]:
        """Have the values to evaluate in the model within the block, or in one part of it; see `OuterLoop.synced`."""
        self.num_lent += 1
        try:
            with self._lent() if module is None else _lent_to(module, self._lent):
                yield
        finally:
            self.num_lent -= 1

    @contextmanager
    def _lent(self) -> Iterator[None]:
        replica = self.replica
        is_common, has_anchor = self.warmup.makes_alike(), self.timetable.recipe.has_anchor
        must_average = not (is_common or has_anchor) and self.quorum.group.size > 1
        with unrecorded():
            coming = (self.together(self.agree) or []) if must_average else replica.trained.moved()
        is_set = has_anchor and self.flushed_at == self.timetable.position and not self._is_adopted()

        def lend(own: Sequence[tuple[Tensor, Tensor]]) -> None:
            if not (is_common or is_set):
                self.lend(coming, own)

        with replica.kept(coming, lend):
            yield

    @unrecorded()
    def lend(self, coming: Sequence[TensorPlace] = (), own: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Put the values to evaluate into the model: a collective if the ranks don't have the same anchor.

        Args:
            coming: see `average`.
            own: tensors of this rank, and their values before.
        """
        if self.timetable.recipe.has_anchor or self.quorum.group.size == 1:
            return self.replica.lend()

        def average() -> None:
            for tensor, value in own:
                tensor.copy_(value)
            self.replica.lend()
            self.average(coming)

        self.together(average)


@contextmanager
def _lent_to(module: nn.Module, lent: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Have the values that a model has in `lent()` in one part of it within a block, and in no other one."""

    def named() -> dict[str, Tensor]:
        reshard(module.modules())
        return dict([*module.named_parameters(), *module.named_buffers()])

    found = named()

    def tensors() -> list[Tensor]:
        now = named()
        return [local(now.get(name, one)) for name, one in found.items()]

    def lend(own: list[tuple[Tensor, Tensor]]) -> None:
        with lent():
            theirs = [one.clone() for one, _ in own]
        for (tensor, _), value in zip(own, theirs, strict=True):
            tensor.copy_(value)

    with tensor_memory.lent(module, tensors, lend):
        yield


def _digest_of(replica: Replica) -> int:
    return digest_of(str([one.fingerprint() for one in replica.fragments]))
