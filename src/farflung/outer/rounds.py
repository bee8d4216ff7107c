# SPDX-License-Identifier: Apache-2.0
"""The rounds of all fragments of a model: launched, then applied, dropped or aborted; or saved in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import RankFailure, StateError
from farflung.base.words import numbered
from farflung.comm.bucket import broadcast_values
from farflung.comm.collectives import broadcast_object_list
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.comm.lost import explained
from farflung.comm.shards import local, model_has_dtensor
from farflung.outer.agreement import average, take_largest
from farflung.outer.background import BackgroundWorker
from farflung.outer.ballot import BALLOT_BYTES, Ballot, Tally
from farflung.outer.inner import KeepState
from farflung.outer.membership import Epoch, Membership, Needs
from farflung.outer.recipe import Recipe
from farflung.outer.replica import BoundFragment, Replica
from farflung.outer.round import OpenRound
from farflung.outer.schedule import Launch
from farflung.outer.stats import Meter, Round
from farflung.outer.structure import Change
from farflung.outer.weighting import Decision, in_proportion


class Rounds:
    """The rounds of all fragments of a model. Building it is a collective.

    Args:
        membership: who takes part.
        meter: counts what the rounds cost.
        listeners: called with every round that has ended.

    Attributes:
        joined: what the members told this rank of the loop when it came in; None: it was there from the beginning.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        membership: Membership,
        bucket_bytes: int,
        meter: Meter,
        listeners: list[Callable[[Round], None]],
    ) -> None:
        self.inner: Optimizer | None = None
        is_whole = recipe.is_whole or membership.island.size > 1
        self.replica = Replica(model, recipe, bucket_bytes, is_whole, membership.most)
        self._recipe = recipe
        self._membership = membership
        self._meter = meter
        self._listeners = listeners
        self._cap_bytes = bucket_bytes
        self._warned = False
        self._open: dict[int, OpenRound] = {}  # by fragment
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._is_sharded = model_has_dtensor(model)
        self._num_votes = 1
        self.epoch = epoch = membership.enter(self._needs(admits=True))
        self._begin()
        self.replica.bind(SoloGroup() if epoch.joins else epoch.group)
        self.joined: dict[str, Any] | None = None
        if epoch.joins:
            self.replica.enter(epoch.group, epoch.ids, epoch.ids)
            self.joined = self._hand_over({})

    @property
    def is_fixed(self) -> bool:
        """Whether a lost rank ends the loop."""
        return self._membership.is_fixed

    def _needs(self, admits: bool) -> Needs:
        levels, overlaps = self._recipe.levels, self._recipe.schedule.delay > 0
        said = (self.replica.description, self.replica.tensors)
        return Needs(levels, overlaps, self._is_sharded, *said, self._num_votes, admits)

    def _begin(self) -> None:
        """Begin to meet the members of a new epoch."""
        self._count_votes()
        self._num_votes = self.epoch.num_votes
        has_delay = self._recipe.schedule.delay > 0
        self._worker = BackgroundWorker(self._device, self.epoch.background) if has_delay else None

    def enter(self, common: dict[str, Any]) -> None:
        """Meet those who are there now: a collective where that has changed, between rounds.

        Args:
            common: what newcomers have to know of the loop.
        """
        epoch = self._membership.enter(self._needs(admits=True))
        if epoch is not self.epoch:
            self.apply_all()  # among those who began it
            self.free(reusable=True)
            self._go_over(epoch)
            if epoch.newcomers:
                self._hand_over(common)

    def _go_over(self, epoch: Epoch) -> None:
        before, self.epoch = self.epoch, epoch
        self._begin()
        self.replica.enter(epoch.group, before.ids, epoch.ids)

    def _hand_over(self, common: dict[str, Any]) -> dict[str, Any]:
        """Give newcomers what all have in common between rounds: a collective. Returns `common` of a member."""
        epoch, fragments = self.epoch, self.replica.fragments
        giver = next(rank for rank in range(epoch.group.size) if rank not in epoch.newcomers)
        said = [{"common": common, "fragments": [one.replicated() for one in fragments]}] if not epoch.joins else [None]
        (given,) = broadcast_object_list(Exchange(epoch.group), said, giver)
        for fragment, replicated in zip(fragments, given["fragments"], strict=True) if epoch.joins else ():
            fragment.join(replicated)
        found: dict[str, Any] = given["common"]
        return found

    def survive(self, failure: RankFailure) -> None:
        """Go on without ranks that were lost. What was under way and can't arrive any more counts as not sent.

        Raises:
            RankFailure: the same, where more is wrong than that.
        """
        self._settle()
        self.leave(f"it goes on without lost ranks: {failure}")
        self.free(reusable=False)
        while True:
            self._membership.lost(failure)
            try:
                self._go_over(self._membership.enter(self._needs(admits=False)))
                return
            except RankFailure as another:  # the next one is lost while those that are left meet
                failure = another

    def retry_after_losses(self, act: Callable[[], object]) -> None:
        """Do something that all members do together, again where some are lost meanwhile."""
        while True:
            try:
                act()
                return
            except RankFailure as failure:
                if self.is_fixed:
                    raise  # not by name: it would hold the frame that holds it, and so all groups
                self.survive(failure)

    def launch(self, action: Launch, position: int, finished: bool) -> None:
        """Send a fragment off, as it is now.

        Raises:
            CollectiveMismatch: the model has changed since the last round, and not on all ranks alike.
        """
        number = action.fragment
        assert number not in self._open, "a fragment is in one round at a time"
        change = self.replica.change()
        if change is not None:
            if change.must_agree:
                # Ranks whose model has not changed know nothing of this, so it goes the way of any other round.
                self.epoch.describe(change.vote, change.tensors)
                self._start(action, position, finished, is_empty=True)
                waited = self._wait(number)
                self._close(number, waited)
            self._follow(change)
        self._start(action, position, finished)

    def _start(self, action: Launch, position: int, finished: bool, is_empty: bool = False) -> None:
        """Open a round; an empty one brings nothing but a ballot."""
        number, level = action.fragment, action.level
        fragment, epoch = self.replica.fragments[number], self.epoch
        norm, largest, sound, claimed = 0.0, 0.0, True, [0.0] * len(fragment.pending_weight)
        if not is_empty:
            with self._meter.timed("encoding"):
                fragment.rebind()
                must_look = fragment.is_whole or not self._recipe.aggregator.agrees
                norm, largest, sound = fragment.load(fragment.pending_weight[level] > 0 or must_look)
            claimed = fragment.claim(level)
        weight = torch.tensor(claimed[level] / action.steps, dtype=torch.float32).item()  # as it goes on the wire
        digest = fragment.digest if level == 0 else -1
        ballot = Ballot(self._num_votes, weight, norm, largest, sound, finished, position, digest)
        self._num_votes += 1
        this = self._open[number] = OpenRound(fragment, epoch, self._recipe, ballot, position, level, claimed)

        def start() -> None:
            this.start()
            if level == 0 and not is_empty and this.tally is not None:
                fragment.check_agreement(this.tally.digests, epoch.levels[level])

        def exchange() -> None:
            start()
            this.wait()

        if self._worker is not None:
            this.job = self._worker.submit(exchange)
        else:
            with self._aborted_by_failure(number):
                start()

    def finished_tally(self, number: int) -> Tally | None:
        """Wait for the vote of an open round; return it if all ranks said in it that they have no more data."""
        self._wait(number)
        this = self._open[number]
        return this.tally if this.tally is not None and this.tally.finished and this.level == 0 else None

    def apply(self, number: int) -> bool:
        """Bring a fragment's round in, if one is open, or drop it; eager updates move on without one, too.

        Returns:
            Whether it was dropped.
        """
        fragment, this = self.replica.fragments[number], self._open.get(number)
        waited = 0.0
        if this is not None:
            waited = self._wait(number)
            if this.is_dropped:
                this.give_back()
                self._warn(this)
            elif not this.is_empty:
                with self._aborted_by_failure(number):
                    if self._worker is not None:  # weights may have been put elsewhere while it was under way
                        self.replica.rebind(number)
                    this.apply()
                self._after(number, this)
            elif this.tally is not None and this.tally.finished and this.level == 0:
                self._average_buffers(fragment)
        if fragment.weights.is_eager:
            self.replica.rebind(number)
            has_arrived = this is not None and not this.is_dropped and not this.is_empty
            fragment.weights.finish(fragment.pending_weight[0] > 0, has_arrived, self.epoch.island.agrees)
        if this is None:
            return False
        self._close(number, waited)
        return this.is_dropped

    def apply_all(self) -> list[int]:
        """Bring in all that is under way, in the order in which it was sent; return the fragments that were dropped."""
        return [number for number in list(self._open) if self.apply(number)]

    def average(self) -> None:
        """local <- the mean of all ranks, weights and floating buffers: a collective beside all that is under way.

        All ranks count alike, but those with a value that is not finite: these get the mean of the others. Where none
        is left nothing happens.

        Raises:
            CollectiveMismatch: the model has changed since the last round, and not on all ranks alike.
        """
        self.agree_on_changes()
        self._average([tensor for fragment in self.replica.fragments for tensor in fragment.floats()])

    def agree_on_changes(self) -> None:
        """Go on with what the model is made of now, as a round would: a collective beside all that is under way."""
        change = self.replica.change()
        if change is not None:
            if change.must_agree:
                self.epoch.describe(change.vote, change.tensors)
                self._vote_beside()
            self._follow(change)

    def _average(self, tensors: list[Tensor]) -> None:
        sound = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        decision = in_proportion(self._vote_beside(sound).sound_weights)
        if decision.total:
            self._count_bytes(average(tensors, self.group, decision, self._cap_bytes))

    def _average_buffers(self, fragment: BoundFragment) -> None:
        """Bring a fragment's buffers together though no rank made a step: a forward pass is enough to move them."""
        floats, counters = fragment.buffer_tensors()
        if floats:
            self._average(floats)
        if counters:
            everyone = Decision((1.0,) * self.group.size, float(self.group.size))
            self._count_bytes(take_largest(counters, self.group, everyone, self._cap_bytes))

    def share_buffers(self) -> None:
        """Give all ranks of the island the buffers of its first one: each has averaged its own with its column."""
        if self.epoch.island.size > 1:
            kinds = [kind for fragment in self.replica.fragments for kind in fragment.buffer_tensors()]
            broadcast_values([tensor for kind in kinds for tensor in kind], self.epoch.island.voters.group)

    def _count_bytes(self, sent: int) -> None:
        self._meter.add("bytes_sent", sent)
        self._meter.add("bytes_received", sent)

    def _count_votes(self) -> None:
        self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)

    def _vote_beside(self, sound: bool = True) -> Tally:
        self._count_votes()
        return self.epoch.beside.begin(self.epoch.island.ballot(Ballot(0, 1.0, sound=sound)))()

    def _follow(self, change: Change) -> None:
        """Go on with what the model is made of now, on all ranks; what is under way comes in before."""
        self.apply_all()
        self.epoch.describe(change.description, change.tensors)
        if change.new and self._recipe.optimizer is not None and self.group.size > 1:
            self._average([local(place.get()) for place in change.new])  # so that anchors begin at the same point
        self.replica.follow(change)

    def explained(self, error: BaseException) -> BaseException:
        """Return what is known of the rank that was lost, if `error` is of a collective of an island's own."""
        return error if self.epoch.island.size == 1 else explained(error, self.group)

    def leave(self, reason: str) -> None:
        """Tell the ranks that wait in any of the groups that this one will not come."""
        self.epoch.leave(reason)

    def free(self, reusable: bool) -> None:
        """Give the groups back. They are `reusable` if nothing is under way on any rank."""
        self.stop()
        self.epoch.free(reusable)

    def stop(self) -> None:
        """End the thread that rounds go on in."""
        if self._worker is not None:
            self._worker.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fragments, and of what is under way, once it has arrived.

        Raises:
            StateError: the model has changed since the last round, so that the ranks have not agreed on it yet.
        """
        change = self.replica.change()
        if change is not None:
            if change.must_agree:
                names = [place.name for place in change.new][:3]
                raise StateError(
                    f"The model has changed since the last round of its outer loop (new: {names}), and the ranks have "
                    "not agreed on that yet. Save after the next round, or call flush() first."
                )
            self._follow(change)
        self._settle()
        return {
            "num_votes": self._num_votes,
            "open": {number: this.state_dict() for number, this in self._open.items()},
            "fragments": [fragment.state_dict() for fragment in self.replica.fragments],
        }

    def _settle(self) -> None:
        """Wait for all that is under way; what will never arrive, and was sent with it, counts as not sent."""
        for number in list(self._open):
            with suppress(RankFailure):
                self._wait(number)

    def reset(self) -> None:
        """Begin anew with the local weights."""
        self._forget()
        self.replica.reset()

    def _forget(self) -> None:
        """Wait for what is under way, and make nothing of it."""
        for number in list(self._open):
            self._wait(number)
        self._open.clear()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; what is under way here is waited for and forgotten."""
        self._forget()
        for fragment, saved in zip(self.replica.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._num_votes = state["num_votes"]
        for number, saved in state["open"].items():
            fragment, ballot = self.replica.fragments[number], Ballot(**saved["ballot"])
            row = (ballot, saved["step"], saved["level"], saved["claimed_weight"])
            self._open[number] = OpenRound(fragment, self.epoch, self._recipe, *row)
            self._open[number].load_state_dict(saved)

    def _wait(self, number: int) -> float:
        """Wait for a round that goes on in the background; return the seconds."""
        job = self._open[number].job
        if job is None:
            return 0.0
        with self._aborted_by_failure(number):
            return job.wait()

    @contextmanager
    def _aborted_by_failure(self, number: int) -> Iterator[None]:
        try:
            yield
        except RankFailure:
            self._open.pop(number).abort()
            raise

    @property
    def group(self) -> Group:
        """All who are there now."""
        return self.epoch.group

    def _after(self, number: int, this: OpenRound) -> None:
        """See to what depends on a round that was applied."""
        fragment, group = self.replica.fragments[number], this.group
        if this.level == 0:
            fragment.note_round(self._recipe.agrees and self.group.size > 1)
        if self._recipe.inner != KeepState():
            parameters = fragment.parameters()
            self._count_bytes(self._recipe.inner(self.inner, parameters, fragment.num_rounds, group, this.decision))

    def _warn(self, this: OpenRound) -> None:
        if not self._warned:
            self._warned = True
            noun = self.epoch.beside.noun
            where = numbered(noun, this.decision.unfit)
            warnings.warn(
                f"{noun.capitalize()} {self.group.rank}: a round was dropped, as the weights of {where} "
                f"are not finite, too large for {self._recipe.codec}, or all unusual. All ranks go on with their own "
                "weights. Further dropped rounds are only counted, in stats().dropped_rounds.",
                RuntimeWarning,
                stacklevel=6,
            )

    def _close(self, number: int, waited: float) -> None:
        """Count what a round has cost, and tell the listeners of it."""
        this = self._open.pop(number)
        self._meter.absorb(this.meter)
        hidden = 0.0 if this.job is None else max(0.0, this.job.seconds - waited)
        self._meter.add("seconds_hidden", hidden)
        if this.tally is None or this.is_empty:
            return
        record = this.record(number, None if this.job is None else waited, hidden)
        self._meter.note(record, this.group.rank)
        for listener in self._listeners:
            listener(record)
