# SPDX-License-Identifier: Apache-2.0
"""The rounds of all fragments of a model: launched, then applied, dropped or aborted; or saved in between."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from farflung.base.errors import CollectiveMismatch, ConfigError, StateError
from farflung.base.words import numbered
from farflung.comm.shards import local
from farflung.exchanged.bound import BoundFragment
from farflung.exchanged.replica import ModelChange, Replica
from farflung.exchanged.trained import TrainedProposal
from farflung.methods.eager import Eager
from farflung.methods.inner import KeepState
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Launch
from farflung.methods.weighting import Decision
from farflung.outer.notices import Twins
from farflung.outer.quorum import Quorum
from farflung.outer.round import OpenRound, Phase, RoundRequest
from farflung.outer.stats import ROUNDS, Meter, Round
from farflung.outer.timetable import Timetable
from farflung.votes.ballot import Ballot, Seen
from farflung.votes.generation import Generation, Void


class RoundEnd(NamedTuple):
    """What stays known of a round of all members."""

    vote: int
    is_last: bool  # no rank had any more data
    void: Void | None


@dataclass(eq=False)
class Rounds:
    """The rounds of all fragments of a model.

    Args:
        listeners: called with every round that has ended.

    Attributes:
        is_awaited: newcomers wait, as the votes have said.
        num_landed: the number of rounds that all replicas have applied; one that a loss interrupted does not count.
    """

    replica: Replica
    timetable: Timetable
    quorum: Quorum
    meter: Meter
    listeners: list[Callable[[Round], None]]
    twins: Twins
    is_awaited: bool = False
    num_landed: int = 0
    _open: dict[int, OpenRound] = field(default_factory=dict)  # by fragment
    _lost: list[RoundRequest] = field(default_factory=list)  # rounds that failed, as ranks were lost in them
    _ends: dict[int, RoundEnd] = field(default_factory=dict)  # of the latest round of all members, by fragment
    _wish: TrainedProposal | None = None  # agreed on, and to be followed once no round is under way
    _has_warned: bool = False

    @property
    def recipe(self) -> Recipe:
        return self.timetable.recipe

    # ---- launch

    def launch(self, action: Launch, position: int, finished: bool) -> None:
        """Send a fragment off, as it is now; CollectiveMismatch if the model has changed, not alike on all ranks."""
        number, joined_in = action.fragment, self.quorum.joined_in
        assert number not in self._open, "a fragment is in one round at a time"
        change = self.replica.change()
        if change is not None:
            if change.must_agree:
                self.wait_all()  # they vote by the old description
                if self.quorum.joined_in > joined_in:
                    return
                # Ranks whose model has not changed know nothing of this, so it goes the way of any other round.
                self._launch(RoundRequest(action, position, finished, change))
                self.quorum.run(partial(self._wait, number))
                if number in self._open:
                    self._close(number, self._open.pop(number))
            self.follow(change)
            if self.quorum.joined_in > joined_in:  # it does next what is due to newcomers
                return
        self._launch(RoundRequest(action, position, finished, in_act=self.quorum.acts.is_in_one))

    def _launch(self, request: RoundRequest) -> None:
        self._open_round(request)
        self.quorum.run(partial(self._begin, request.action.fragment))

    def _open_round(self, request: RoundRequest) -> None:
        """Claim the work that this rank has to send, and fill in its ballot."""
        number, level = request.action.fragment, request.action.level
        fragment, quorum = self.replica.fragments[number], self.quorum
        norm, largest, sound, mark, claimed = 0.0, 0.0, True, 0, [0.0] * len(fragment.pending_weight)
        seen: Seen | None = None
        wish: TrainedProposal | None = None
        if request.change is not None:
            quorum.describe(request.change.vote, request.change.tensors)
        else:
            with self.meter.timed("encoding"):
                fragment.rebind()
                must_look = fragment.is_whole or not self.recipe.aggregator.agrees
                norm, largest, sound = fragment.load(fragment.pending_weight[level] > 0 or must_look)
                if level == 0 and fragment.pending_weight[0] and self.twins.are_looked_for(quorum.generation.ids):
                    mark = fragment.fingerprint()
                if quorum.generation.island.size > 1 and fragment.comparison.is_unseen:
                    seen = fragment.held_by_several()
            claimed = fragment.claim(level)
            if number == level == 0:
                wish = self.replica.trained.take()
                norm = norm if wish.is_finite else math.nan
        weight = claimed[level] / request.action.steps
        digest = fragment.comparison.digest if level == 0 and request.change is None else -1
        is_awaited = quorum.is_awaited()
        said = (weight, norm, largest, sound, request.finished, request.position, digest, is_awaited, mark)
        proposal = self.timetable.proposal if level == 0 else (0, 0)
        ballot = Ballot(quorum.next_vote(), *said, proposal=proposal, trained=0 if wish is None else wish.digest)
        self._open[number] = OpenRound(fragment, quorum.generation, self.recipe, ballot, request, claimed, seen, wish)

    def _begin(self, number: int) -> None:
        if number in self._open:
            self._open[number].begin(self.quorum.worker)

    def is_last(self, number: int) -> bool:
        """Wait for the vote of the round just launched; return whether no rank has any more data, as all said in it."""
        self.quorum.run(partial(self._wait, number))
        this = self._open.get(number)
        return this.is_last if this is not None else number in self._ends and self._ends[number].is_last

    def void(self, number: int) -> Void | None:
        """Return how a fragment's latest round of all members has ended, if nothing of it was applied."""
        return self._ends[number].void

    # ---- apply

    def apply(self, number: int) -> bool:
        """Apply or drop a fragment's round; eager anchors advance either way. Return whether it was dropped."""
        fragment = self.replica.fragments[number]
        self.quorum.run(partial(self._land, number))
        this = self._open.pop(number, None)  # it has ended here, whatever is lost from now on
        if this is not None:
            this.settle()
            if this.is_dropped:
                this.give_back()
                self._count_again(number)
                if not self._has_warned:
                    self._has_warned = True
                    _warn(self.quorum.generation, this.decision, self.recipe)
            elif not this.is_empty:
                if this.level == 0:
                    self.num_landed += 1
                    self._note_round(number, this)
                    assert this.tally is not None
                    self.twins.look(number, self.quorum.generation.ids, this.tally.marks)
                self._adopt_if_left_out(this)
        if isinstance(fragment.weights, Eager):
            self.replica.rebind(number)
            fragment.weights.finish(fragment.pending_weight[0] > 0, self.quorum.generation.island)
        self.quorum.offer(number)
        if this is None:
            return False
        try:
            self._follow_trained(this)
        finally:
            self._close(number, this)
        if this.level == 0:
            self.quorum.membership.landed(self.quorum.needs_now(), this.ballot.number)
        if not (this.is_dropped or this.is_empty or self.recipe.inner == KeepState()):
            self.quorum.run(partial(self._share_state, fragment, this), again=False)
        return this.is_dropped

    def _follow_trained(self, this: OpenRound) -> None:
        """Exchange from now on what this round has agreed on."""
        if this.wish is not None and this.wish.accepted is not None:
            self._wish = this.wish
            self.apply_all()
            self._retrain()

    def _retrain(self) -> None:
        wish, self._wish = self._wish, None
        if wish is None or wish.accepted is None:
            return
        replica, quorum = self.replica, self.quorum
        replica.retrain(wish.accepted, wish.anchors())
        quorum.describe(replica.description, replica.tensors)
        for number in range(len(replica.fragments)):
            quorum.note_landing(number)
        quorum.offer(*range(len(replica.fragments)))

    def apply_all(self) -> list[int]:
        """Apply all rounds under way, in the order in which they were launched; return the dropped fragments."""
        return [number for number in list(self._open) if self.apply(number)]

    def _land(self, number: int) -> None:
        """Wait for a round, and apply it to the model, unless it has ended without a result."""
        self._wait(number)
        this = self._open.get(number)
        if this is not None and not (this.is_dropped or this.is_empty):
            if self.quorum.worker is not None:  # weights may have been put elsewhere while it was under way
                self.replica.rebind(number)
            this.apply()

    def _wait(self, number: int) -> None:
        this = self._open.get(number)
        if this is not None and this.job is not None:
            this.job.wait()

    def _count_again(self, number: int) -> None:
        """Take a fragment's parameters for trained since its latest round, which was dropped."""
        places = self.replica.fragments[number].cut.parameters
        self.replica.trained.count_again([place.name for place in places])

    def _adopt_if_left_out(self, this: OpenRound) -> None:
        if this.group.rank in this.decision.left_out:
            self.replica.adopt()  # also where weights are blended, and in fragments that this one would spoil again

    def _share_state(self, fragment: BoundFragment, this: OpenRound) -> None:
        """Share the inner optimizer's state of what was in a round, as the recipe says: a collective of its ranks."""
        parameters, num_rounds = fragment.parameters(), fragment.num_rounds
        sent = self.recipe.inner(self.timetable.inner, parameters, num_rounds, this.group, this.decision)
        self.meter.add_exchanged(sent)

    def _note_round(self, number: int, this: OpenRound) -> None:
        assert this.tally is not None
        self.timetable.agree(this.tally.proposal, this.ballot.number)
        self.replica.fragments[number].note_round(self.recipe.agrees and self.quorum.group.size > 1)
        self.quorum.note_landing(number)

    def _close(self, number: int, this: OpenRound) -> None:
        """Count the cost of a round, and notify the listeners."""
        if this.level == 0:
            self._ends[number] = RoundEnd(this.ballot.number, this.is_last, this.void)
        if this.level == 0 and this.void is None and this.tally is not None:  # all have the votes of an applied round
            self.is_awaited |= this.tally.awaited
        self.meter.absorb(this.meter)
        self.meter.add("seconds_hidden", 0.0 if this.job is None else this.job.hidden_s)
        if this.tally is None or this.is_empty:
            return
        record = this.record(number, **self.quorum.take_changes())
        self.meter.note(record, this.group.rank)
        for listener in self.listeners:
            listener(record)
        ROUNDS.debug("round %d, step %d", record.number, record.step, extra={"round": record, "rounds": self})

    # ---- after a loss

    def settle(self) -> None:
        """Wait for rounds that run in the background; like what follows, it may be called again after another loss."""
        for this in self._open.values():
            if this.job is not None:
                with suppress(CollectiveMismatch):
                    this.job.wait()

    def end_alike(self, odd: Mapping[int, str]) -> None:
        """End everything in the same state on all survivors; `odd` members are excluded, and why."""
        voids: dict[int, int] = {one.vote: one.void for one in self._ends.values() if one.void is not None}
        open_ones = {this.ballot.number: this.num_complete for this in self._open.values() if this.level == 0}
        common = self.quorum.agree(voids | open_ones, odd)
        landed: list[OpenRound] = []
        for number, this in list(self._open.items()):
            if this.abort(common.get(this.ballot.number, 0)):
                if this.is_dropped:
                    self._count_again(number)
                elif not this.is_empty:
                    if this.level == 0:
                        self._note_round(number, this)
                    self._adopt_if_left_out(this)
                self._close(number, this)
                landed.append(this)
            elif this.phase is not Phase.LOADED and not this.request.in_act:
                self._lost.append(this.request)
        self.quorum.offer(*self._open)
        self._open.clear()
        self._retrain()
        for this in landed:
            self._follow_trained(this)

    def relaunch(self) -> None:
        """Launch again, in the current generation, the rounds that ended without a result in the one before."""
        lost, self._lost = self._lost, []
        for request in lost if not self.quorum.generation.joins else ():
            self._open_round(request)
        for number in list(self._open):
            self._begin(number)

    # ---- changes of the model

    def follow(self, change: ModelChange) -> None:
        """Adopt the model's structure after the rounds under way: on all ranks together, if they must agree."""
        self.apply_all()
        change = self.replica.change() or change  # one of them may have changed what is exchanged
        if not change.must_agree:  # it may have happened on this rank alone
            return self.replica.follow(change)
        new = [local(place.get()) for place in change.new]

        def begin_alike() -> None:
            self.quorum.describe(change.description, change.tensors)
            if new and self.recipe.optimizer is not None and self.quorum.group.size > 1:
                self.quorum.average(new)  # so that anchors begin at the same point

        self.quorum.together(begin_alike, lambda _: self.replica.follow(change))

    # ---- save and load

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fragments, and of the rounds under way, once they have arrived.

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
            self.follow(change)
        # What will never arrive, and was sent with it, counts as not sent.
        waits = [partial(self._wait, number) for number in self._open]
        self.quorum.run(partial(self.quorum.run, *waits), raises=False)
        coming = {name for one in self._open.values() if one.wish is not None for name in one.wish.accepted or ()}
        return {
            "num_votes": self.quorum.needs.num_votes,
            "trained": self.replica.trained.state_dict(coming),
            "open": {number: this.state_dict() for number, this in self._open.items()},
            "fragments": [fragment.state_dict() for fragment in self.replica.fragments],
        }

    def align(self, state: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Exchange what a saved loop did, if `check` finds nothing else in which it differs."""
        self.wait_all()  # by what is exchanged now
        before = self.replica.layout
        try:
            self.replica.align(state.get("layout", before))
            check()
        except ConfigError:
            self.replica.align(before)
            raise
        if self.quorum.welcome is not None:  # a newcomer continues with what the members exchange
            self.replica.align(before)
        self.quorum.describe(self.replica.description, self.replica.tensors)

    def forget(self) -> None:
        """Wait for everything under way, and discard it."""
        self.wait_all()
        self._open.clear()

    def wait_all(self) -> None:
        """Wait until everything under way has arrived."""
        self.quorum.run(*(partial(self._wait, number) for number in self._open))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned; first wait for the rounds under way here, and discard them."""
        self.forget()
        for fragment, saved in zip(self.replica.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self.quorum.needs = replace(self.quorum.needs, num_votes=state["num_votes"])
        if "trained" in state:
            self.replica.trained.load_state_dict(state["trained"])
        for number, saved in state["open"].items():
            request = RoundRequest(Launch(number, saved["level"]), saved["step"])
            fragment, ballot = self.replica.fragments[number], Ballot(**saved["ballot"])
            wish = TrainedProposal(self.replica.trained, set(saved["wish"]["names"])) if "wish" in saved else None
            weight = list(saved["claimed_weight"])
            this = OpenRound(fragment, self.quorum.generation, self.recipe, ballot, request, weight, wish=wish)
            this.load_state_dict(saved)
            self._open[number] = this


def _warn(generation: Generation, decision: Decision, recipe: Recipe) -> None:
    noun = generation.beside.noun
    where = numbered(noun, decision.unfit)
    warnings.warn(
        f"{noun.capitalize()} {generation.group.rank}: a round was dropped, as the weights of {where} are not finite, "
        f"too large for {recipe.codec}, or all unusual. All ranks continue with their own weights. Further dropped "
        "rounds are only counted, in stats().dropped_rounds.",
        RuntimeWarning,
        stacklevel=7,  # the call of OuterLoop.step
    )
