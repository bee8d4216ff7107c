# SPDX-License-Identifier: Apache-2.0
"""The rounds of all fragments of a model: launched, then applied, dropped or aborted; or saved in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import RankFailure, StateError
from farflung.base.words import numbered
from farflung.comm.group import Group
from farflung.comm.lost import explained
from farflung.comm.shards import local, model_has_dtensor
from farflung.outer.agreement import average, take_largest
from farflung.outer.background import BackgroundWorker
from farflung.outer.inner import KeepState
from farflung.outer.recipe import Recipe
from farflung.outer.replica import BoundFragment, Replica
from farflung.outer.round import OpenRound
from farflung.outer.schedule import Launch
from farflung.outer.stats import Meter, Round
from farflung.outer.structure import Change
from farflung.outer.vote import BALLOT_BYTES, Ballot, Decision, FixedMembership, Island, Tally, in_proportion

_BESIDE = "an average beside rounds of "


class Rounds:
    """The rounds of all fragments of a model. Building it is a collective.

    Args:
        island: the ranks that train this replica, of which each is in a group with those that have the same values.
        meter: counts what the rounds cost.
        listeners: called with every round that has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        group: Group,
        island: Group,
        bucket_bytes: int,
        meter: Meter,
        listeners: list[Callable[[Round], None]],
    ) -> None:
        self.inner: Optimizer | None = None
        self.replica = Replica(model, recipe, bucket_bytes, recipe.is_whole or island.size > 1)
        self._recipe = recipe
        self._meter = meter
        self._listeners = listeners
        self._cap_bytes = bucket_bytes
        self._warned = False
        self._open: dict[int, OpenRound] = {}  # by fragment
        # Who meets on a thread of its own must not get into the order of what the training itself sends.
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        overlaps = recipe.schedule.delay > 0 and group.is_concurrent and group.size > 1
        # Nor may a round meet what the script or another loop sends.
        self.group = group.duplicate()
        background = group.duplicate(in_background=True) if overlaps else None
        self._worker = BackgroundWorker(device, background) if recipe.schedule.delay else None
        said, is_sharded = (self.replica.description, self.replica.tensors), model_has_dtensor(model)
        self.island = Island(island.duplicate(), is_sharded, *said)
        self._in_round = Island(island.duplicate(in_background=True), is_sharded, *said) if overlaps else self.island
        # Before anything else is sent, as ranks that differ would differ in that too.
        noun = "rank" if island.size == 1 else "island"
        self._beside = FixedMembership(self.group, *said, noun)
        self._vote_beside()
        groups = [background or self.group, *(group.split(size) for size in recipe.levels)]
        self._members = [FixedMembership(one, *said, noun) for one in groups]
        self._beside.describe(_BESIDE + self.replica.description, self.replica.tensors)
        self._num_votes = 1
        self.replica.bind(self.group)

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
                self._describe(change.vote, change.tensors)
                self._start(action, position, finished, is_empty=True)
                waited = self._wait(number)
                self._close(number, waited)
            self._follow(change)
        self._start(action, position, finished)

    def _start(self, action: Launch, position: int, finished: bool, is_empty: bool = False) -> None:
        """Open a round; an empty one brings nothing but a ballot."""
        number, level = action.fragment, action.level
        fragment, members = self.replica.fragments[number], self._members[level]
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
        row = (fragment, members, self._in_round, self._recipe)
        this = self._open[number] = OpenRound(*row, ballot, position, level, claimed)

        def start() -> None:
            this.start()
            if level == 0 and not is_empty and this.tally is not None:
                fragment.check_agreement(this.tally.digests, members)

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
            fragment.weights.finish(fragment.pending_weight[0] > 0, has_arrived, self.island.agrees)
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
                self._describe(change.vote, change.tensors)
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

    def _count_bytes(self, sent: int) -> None:
        self._meter.add("bytes_sent", sent)
        self._meter.add("bytes_received", sent)

    def _vote_beside(self, sound: bool = True) -> Tally:
        self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        return self._beside.begin(self.island.ballot(Ballot(0, 1.0, sound=sound)))()

    def _describe(self, description: str, tensors: list[str]) -> None:
        for members in (*self._members, self.island.members, self._in_round.members):
            members.describe(description, tensors)
        self._beside.describe(_BESIDE + description, tensors)

    def _follow(self, change: Change) -> None:
        """Go on with what the model is made of now, on all ranks; what is under way comes in before."""
        self.apply_all()
        self._describe(change.description, change.tensors)
        if change.new and self._recipe.optimizer is not None and self.group.size > 1:
            self._average([local(place.get()) for place in change.new])  # so that anchors begin at the same point
        self.replica.follow(change)

    def explained(self, error: BaseException) -> BaseException:
        """Return what is known of the rank that was lost, if `error` is of a collective of an island's own."""
        return error if self.island.size == 1 else explained(error, self.group)

    def leave(self, reason: str) -> None:
        """Tell the ranks that wait in any of the groups that this one will not come."""
        for group in (self.group, *(members.group for members in self._members[1:])):
            group.leave(reason)

    def free(self, reusable: bool) -> None:
        """Give the groups back. They are `reusable` if nothing is under way on any rank."""
        self.stop()
        members = (self._beside, *self._members, self.island.members, self._in_round.members)
        for group in {id(one.group): one.group for one in members}.values():
            group.free(reusable)

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
        for number in list(self._open):
            try:
                self._wait(number)
            except RankFailure:  # it will never arrive, and what was sent with it counts as not sent
                continue
        return {
            "num_votes": self._num_votes,
            "open": {number: this.state_dict() for number, this in self._open.items()},
            "fragments": [fragment.state_dict() for fragment in self.replica.fragments],
        }

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
            fragment, members, ballot = self.replica.fragments[number], self._members[saved["level"]], saved["ballot"]
            row = (Ballot(**ballot), saved["step"], saved["level"], saved["claimed_weight"])
            self._open[number] = OpenRound(fragment, members, self._in_round, self._recipe, *row)
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

    def _after(self, number: int, this: OpenRound) -> None:
        """See to what depends on a round that was applied."""
        fragment, group = self.replica.fragments[number], self._members[this.level].group
        if this.level == 0:
            fragment.note_round(self._recipe.agrees and self.group.size > 1)
        if self._recipe.inner != KeepState():
            parameters = fragment.parameters()
            self._count_bytes(self._recipe.inner(self.inner, parameters, fragment.num_rounds, group, this.decision))

    def _warn(self, this: OpenRound) -> None:
        if not self._warned:
            self._warned = True
            where = numbered(self._beside.noun, this.decision.unfit)
            warnings.warn(
                f"{self._beside.noun.capitalize()} {self.group.rank}: a round was dropped, as the weights of {where} "
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
        self._meter.note(record, self._members[this.level].group.rank)
        for listener in self._listeners:
            listener(record)
