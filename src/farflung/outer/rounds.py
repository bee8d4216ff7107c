# SPDX-License-Identifier: Apache-2.0
"""The rounds of all fragments of a model: launched, then applied, dropped or aborted; or saved in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import CollectiveMismatch, RankFailure, StateError
from farflung.base.sizes import num_buffers_among
from farflung.base.words import numbered
from farflung.comm.bucket import broadcast_values
from farflung.comm.collectives import broadcast_object_list
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.comm.shards import local, model_has_dtensor
from farflung.outer.agreement import average, take_largest
from farflung.outer.background import BackgroundWorker
from farflung.outer.ballot import BALLOT_BYTES, Ballot, Tally
from farflung.outer.eager import Eager
from farflung.outer.inner import KeepState
from farflung.outer.membership import Membership, Needs, OddMembers, open_generation
from farflung.outer.recipe import Recipe
from farflung.outer.replica import BoundFragment, Change, Replica
from farflung.outer.round import OpenRound
from farflung.outer.schedule import Launch
from farflung.outer.stats import Meter, Round
from farflung.outer.twins import Twins
from farflung.outer.unexchanged import FINGERPRINT_BYTES
from farflung.outer.weighting import Decision, in_proportion


class Rounds:
    """The rounds of all fragments of a model. Building it is a collective.

    Args:
        membership: who takes part.
        meter: counts what the rounds cost.
        listeners: called with every round that has ended.

    Attributes:
        place: the loop's in its schedule, as the engine says it, or as the members told a newcomer.
        has_joined: this rank came in as a newcomer, and has not taken that place yet.
        given: what a newcomer got of the others, and what rounds have made of it since, until its first step.
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
        num_buffers = None if is_whole else num_buffers_among(membership.most)
        self.replica = Replica(model, recipe, bucket_bytes, num_buffers)
        self._recipe = recipe
        self.membership = membership
        self._meter = meter
        self._listeners = listeners
        self._cap_bytes = bucket_bytes
        self._warned = False
        self._open: dict[int, OpenRound] = {}  # by fragment
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._is_sharded = model_has_dtensor(model)
        self._num_votes = 1
        self._is_awaited = False  # as the votes said
        self._lost: dict[int, str] = {}  # members, since the latest round
        self._joined: tuple[int, ...] = ()
        self._has_state = False  # what all members have in common
        self._worker: BackgroundWorker | None = None
        self._twins = Twins(are_allowed=recipe.same_data)
        self.place = {"position": 0, "began": 0}
        self.has_joined = False
        self.given: list[dict[str, Any]] | None = None
        self.generation = open_generation(-1, (), SoloGroup(), SoloGroup(), self._needs(admits=False))  # nobody yet
        self._meet(admits=True)

    def _needs(self, admits: bool) -> Needs:
        levels, overlaps = self._recipe.levels, self._recipe.schedule.delay > 0
        said = (self.replica.description, self.replica.tensors)
        return Needs(levels, overlaps, self._is_sharded, *said, self._num_votes, admits, self._has_state)

    def _meet(self, admits: bool) -> None:
        """Enter the current generation; where it `admits`, between rounds, newcomers may join."""
        while True:
            try:
                before, had_state = self.generation, self._has_state
                generation = self.membership.enter(self._needs(admits))
                if generation is before:
                    return
                if admits and before.ids:
                    self.free(reusable=True)
                self.generation, self._num_votes = generation, generation.num_votes
                if had_state and before.ids:
                    self._lost |= {one: generation.lost.get(one, "") for one in before.ids if one not in generation.ids}
                    self._joined += (
                        () if generation.joins else tuple(generation.ids[rank] for rank in generation.newcomers)
                    )
                self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
                has_delay = self._recipe.schedule.delay > 0
                self._worker = BackgroundWorker(self._device, generation.background) if has_delay else None
                self._has_state = had_state and not generation.joins  # which a newcomer gets, also one that comes back
                if not self.replica.fragments:
                    self.replica.bind(SoloGroup() if generation.joins else generation.group)
                self.replica.enter(generation.group, before.ids if had_state else generation.ids, generation.ids)
                given = None
                if generation.newcomers:
                    given = self._hand_over()
                elif not had_state:
                    self._make_alike(giver=0, takes=True)
                if (
                    generation.may_lose
                ):  # each rank of an island has met a column of its own, and may have lost it alone
                    generation.island.meet()
                if given is not None:
                    self._take(given)
                self._has_state = True
                return
            except RankFailure as failure:
                if self.membership.is_fixed:
                    raise
                if not self._has_state:
                    self.replica.fragments = []  # it may have the values of some, and not of others
                self._lose(failure)
                admits = not self._has_state

    def admit(self) -> None:
        """Let newcomers in who wait, as the votes have said: a collective, between rounds."""
        if self._is_awaited:
            self.apply_all()
            self._is_awaited = False
            self._meet(admits=True)

    def _hand_over(self) -> dict[str, Any]:
        """Give newcomers what all have in common between rounds, and return it: a collective."""
        generation, fragments = self.generation, self.replica.fragments
        giver = next(rank for rank in range(generation.group.size) if rank not in generation.newcomers)
        self._make_alike(giver, takes=generation.joins)
        said: list[Any] = [None]
        if not generation.joins:
            said = [{"place": self.place, "fragments": [one.replicated() for one in fragments]}]
        (given,) = broadcast_object_list(Exchange(generation.group), said, giver, "outer loop")
        return given  # type: ignore[no-any-return]

    def _take(self, given: dict[str, Any]) -> None:
        """Go on from what newcomers were given, if this is one."""
        if self.generation.joins:
            self._meter.add("steps_lost", self.replica.fragments[0].pending_weight[0])
            self.place, self.has_joined, self.given = given["place"], True, given["fragments"]
            self.join()
        for fragment in self.replica.fragments:
            fragment.note_newcomers(self._recipe.has_anchor)

    def note_landing(self, number: int, *kinds: str) -> None:
        """Keep what all share now of a fragment, if this is a newcomer: nothing that it was given outlives a round.

        Args:
            kinds: of values that have landed, as in `BoundFragment.agreements`; none: all of them.
        """
        if self.given is not None:
            now, before = self.replica.fragments[number].replicated(), self.given[number]["agreed"]
            self.given[number] = {**now, "agreed": before | {k: now["agreed"][k] for k in kinds or now["agreed"]}}

    def _make_alike(self, giver: int, takes: bool) -> None:
        """Take over what no round exchanges from a rank, where it differs: a collective."""
        self.replica.make_alike(giver, takes)
        self._meter.add("bytes_voting", (self.group.size - 1) * FINGERPRINT_BYTES)

    def join(self) -> None:
        for fragment, replicated in zip(self.replica.fragments, self.given or (), strict=True):
            fragment.join(replicated)

    def _lose(self, failure: RankFailure) -> None:
        """Leave a generation in which ranks were lost."""
        self.generation.leave(f"it goes on without lost ranks: {failure}")
        try:
            self.membership.lost(failure)
        finally:  # not before the other ranks of an island know why its connections close
            self.free(reusable=False)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Go on without ranks that are lost in this block: what was under way begins again among those that are left.

        Where a lost rank ends the loop, all that is under way ends in the same state on all ranks.
        """
        try:
            yield
        except RankFailure as failure:
            if self.membership.is_fixed:
                self._end_all({})
                raise
            self.generation.leave(
                f"it goes on without lost ranks: {failure}"
            )  # which ends others' waits, and jobs here
            with self._meter.timed("recovering"):
                again = self._end_all(failure.why if isinstance(failure, OddMembers) else {})
                self._lose(failure)
                self._meet(admits=False)
            for start in again if not self.generation.joins else ():
                start()

    def _end_all(self, odd: Mapping[int, str]) -> list[Callable[[], None]]:
        """End all that is under way in the same state on all ranks that are left; return what starts the rest again.

        Args:
            odd: members to exclude, and why.
        """
        for this in self._open.values():
            if this.job is not None:
                with suppress(RankFailure, CollectiveMismatch):
                    this.job.wait()
        complete = {this.ballot.number: this.num_complete for this in self._open.values() if this.level == 0}
        common, again = self.membership.agree(self._num_votes, complete, odd), []
        for number, this in list(self._open.items()):
            if this.abort(common.get(this.ballot.number, 0)):
                if this.level == 0 and not this.is_dropped and not this.is_empty:
                    self.replica.fragments[number].note_round(self._recipe.agrees and self.group.size > 1)
                    self.note_landing(number)
                self._close(number, this, None)
            else:
                again.append(this.start_again)
        self._open.clear()
        return again

    def retry_after_losses(self, act: Callable[[], object]) -> None:
        """Do something that all members do together, again where some are lost meanwhile."""
        while True:
            with self.surviving():
                act()
                return

    def launch(self, action: Launch, position: int, finished: bool) -> None:
        """Send a fragment off, as it is now; CollectiveMismatch where the model has changed, not alike on all ranks."""
        number = action.fragment
        assert number not in self._open, "a fragment is in one round at a time"
        change = self.replica.change()
        if change is not None:
            if change.must_agree:
                # Ranks whose model has not changed know nothing of this, so it goes the way of any other round.
                self.generation.describe(change.vote, change.tensors)
                self._start(action, position, finished, is_empty=True)
                waited = self._wait(number)
                if number in self._open:
                    self._close(number, self._open.pop(number), waited)
            self._follow(change)
        self._start(action, position, finished)

    def _start(self, action: Launch, position: int, finished: bool, is_empty: bool = False) -> None:
        """Open a round; an empty one brings nothing but a ballot."""
        number, level = action.fragment, action.level
        fragment, generation = self.replica.fragments[number], self.generation
        norm, largest, sound, mark, claimed = 0.0, 0.0, True, 0, [0.0] * len(fragment.pending_weight)
        if not is_empty:
            with self._meter.timed("encoding"):
                fragment.rebind()
                must_look = fragment.is_whole or not self._recipe.aggregator.agrees
                norm, largest, sound = fragment.load(fragment.pending_weight[level] > 0 or must_look)
                if level == 0 and fragment.pending_weight[0] and self._twins.are_looked_for(generation.ids):
                    mark = fragment.fingerprint()
            claimed = fragment.claim(level)
        weight = torch.tensor(claimed[level] / action.steps, dtype=torch.float32).item()  # as it goes on the wire
        digest = fragment.digest if level == 0 and not is_empty else -1
        is_awaited = self.membership.is_awaited(self._needs(admits=False))
        ballot = Ballot(self._num_votes, weight, norm, largest, sound, finished, position, digest, is_awaited, mark)
        self._num_votes += 1
        this = self._open[number] = OpenRound(fragment, generation, self._recipe, ballot, position, level, claimed)
        this.start_again = partial(self._start, action, position, finished, is_empty)

        def exchange() -> None:
            this.start()
            this.wait()

        if self._worker is not None:
            this.job = self._worker.submit(exchange)
        else:
            with self.surviving():
                this.start()

    def finished_tally(self, number: int) -> Tally | None:
        """Wait for the vote of an open round; return it if all ranks said in it that they have no more data."""
        self._wait(number)
        this = self._open.get(number)
        tally = None if this is None or this.level > 0 else this.tally
        return tally if tally is not None and tally.finished else None

    def apply(self, number: int) -> bool:
        """Apply or drop a fragment's round; eager anchors advance either way. Return whether it was dropped."""
        fragment, waited = self.replica.fragments[number], self._wait(number)
        while (this := self._open.get(number)) is not None and not (this.is_dropped or this.is_empty):
            if self._worker is not None:  # weights may have been put elsewhere while it was under way
                self.replica.rebind(number)
            with self.surviving():
                this.apply()
                break
            waited += self._wait(number)
        if this is not None:
            del self._open[number]  # it has ended here, whatever is lost from now on
            if this.is_dropped:
                this.give_back()
                self._warn(this)
            elif not this.is_empty:
                self._after(number, this)
            elif this.tally is not None and this.tally.finished and this.level == 0:
                self.retry_after_losses(lambda: self._average_buffers(fragment))
                self.note_landing(number, "buffers", "counters")
        if isinstance(fragment.weights, Eager):
            self.replica.rebind(number)
            has_arrived = this is not None and not this.is_dropped and not this.is_empty
            fragment.weights.finish(fragment.pending_weight[0] > 0, has_arrived, self.generation.island)
        if this is None:
            return False
        self._close(number, this, waited)
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
                self.generation.describe(change.vote, change.tensors)
                self._vote_beside()
            self._follow(change)

    def _average(self, tensors: list[Tensor]) -> None:
        sound = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        decision = in_proportion(self._vote_beside(sound).sound_weights)
        if decision.total:
            self._meter.add_exchanged(average(tensors, self.group, decision, self._cap_bytes))

    def _average_buffers(self, fragment: BoundFragment) -> None:
        """Bring a fragment's buffers together though no rank made a step: a forward pass is enough to move them."""
        floats, counters = fragment.buffer_tensors()
        if floats:
            self._average(floats)
        if counters:
            everyone = Decision((1.0,) * self.group.size, float(self.group.size))
            self._meter.add_exchanged(take_largest(counters, self.group, everyone, self._cap_bytes))

    def average_moved(self) -> None:
        """Give frozen weights that the script has moved by itself their mean: a collective, outside of rounds."""
        moved = self.replica.moved()
        self._meter.add("bytes_voting", (self.group.size - 1) * FINGERPRINT_BYTES)
        if any(count for (count,) in self.generation.island.gathered(len(moved))):
            self._average(moved)

    def share_buffers(self) -> None:
        """Give all ranks of the island the buffers of its first one: each has averaged its own with its column."""
        if self.generation.island.size > 1:
            kinds = [kind for fragment in self.replica.fragments for kind in fragment.buffer_tensors()]
            broadcast_values([tensor for kind in kinds for tensor in kind], self.generation.island.voters.group)

    def _vote_beside(self, sound: bool = True) -> Tally:
        self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        return self.generation.beside.begin(self.generation.island.ballot(Ballot(0, 1.0, sound=sound)))()

    def _follow(self, change: Change) -> None:
        """Go on with what the model is made of now, on all ranks; what is under way comes in before."""
        self.apply_all()
        self.generation.describe(change.description, change.tensors)
        if change.new and self._recipe.optimizer is not None and self.group.size > 1:
            self._average([local(place.get()) for place in change.new])  # so that anchors begin at the same point
        self.replica.follow(change)

    def free(self, reusable: bool) -> None:
        if self._worker is not None:
            self._worker.stop()
        self.generation.free(reusable)

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
            with suppress(RankFailure):  # what will never arrive, and was sent with it, counts as not sent
                self._wait(number)
        return {
            "num_votes": self._num_votes,
            "open": {number: this.state_dict() for number, this in self._open.items()},
            "fragments": [fragment.state_dict() for fragment in self.replica.fragments],
        }

    def reset(self) -> None:
        self._forget()
        self.replica.reset()

    def _forget(self) -> None:
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
            self._open[number] = OpenRound(fragment, self.generation, self._recipe, *row)
            self._open[number].load_state_dict(saved)

    def _wait(self, number: int) -> float:
        """Wait for a round that goes on in the background; return the seconds."""
        waited = 0.0
        while (this := self._open.get(number)) is not None and this.job is not None:
            with self.surviving():
                try:
                    waited += this.job.wait()
                    break
                except RankFailure:
                    this.job = None  # it has ended
                    raise
        return waited

    @property
    def group(self) -> Group:
        """All who are there now."""
        return self.generation.group

    def _after(self, number: int, this: OpenRound) -> None:
        fragment, group = self.replica.fragments[number], this.group
        if this.level == 0:
            fragment.note_round(self._recipe.agrees and self.group.size > 1)
            assert this.tally is not None
            self._twins.look(number, self.generation.ids, this.tally.marks)
            self.note_landing(number)
        if self._recipe.inner != KeepState():
            parameters = fragment.parameters()
            with self.surviving():  # not tried again, as others may be done with it
                self._meter.add_exchanged(
                    self._recipe.inner(self.inner, parameters, fragment.num_rounds, group, this.decision)
                )

    def _warn(self, this: OpenRound) -> None:
        if not self._warned:
            self._warned = True
            noun = self.generation.beside.noun
            where = numbered(noun, this.decision.unfit)
            warnings.warn(
                f"{noun.capitalize()} {self.group.rank}: a round was dropped, as the weights of {where} "
                f"are not finite, too large for {self._recipe.codec}, or all unusual. All ranks go on with their own "
                "weights. Further dropped rounds are only counted, in stats().dropped_rounds.",
                RuntimeWarning,
                stacklevel=6,
            )

    def _close(self, number: int, this: OpenRound, waited: float | None) -> None:
        """Count what a round has cost, and tell the listeners of it."""
        self._is_awaited |= this.level == 0 and this.tally is not None and this.tally.awaited
        self._meter.absorb(this.meter)
        hidden = 0.0 if this.job is None else max(0.0, this.job.seconds - (waited or 0.0))
        self._meter.add("seconds_hidden", hidden)
        if this.tally is None or this.is_empty:
            return
        record = this.record(number, None if this.job is None else waited, hidden, self._lost, self._joined)
        self._lost, self._joined = {}, ()
        self._meter.note(record, this.group.rank)
        for listener in self._listeners:
            listener(record)
