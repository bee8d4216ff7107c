# SPDX-License-Identifier: Apache-2.0
"""Rounds of the fragments of one model: sent off, brought in, dropped, or carried over into a saved state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import CollectiveMismatch, RankFailure, StateError
from farflung.base.words import numbered
from farflung.comm.group import Group
from farflung.comm.shards import local
from farflung.outer.aggregate import Shares
from farflung.outer.average import average
from farflung.outer.courier import Courier, Errand
from farflung.outer.flight import Flight
from farflung.outer.inner import Keep
from farflung.outer.lanes import Corrected
from farflung.outer.membership import BALLOT_BYTES, Ballot, Static, Tally
from farflung.outer.part import Part
from farflung.outer.recipe import Recipe
from farflung.outer.report import Meter, Round
from farflung.outer.structure import Change, Structure, change_of, describe
from farflung.outer.weigh import alike_as_one

_BESIDE = "an average beside rounds of "
_DIGEST_EVERY = 50  # rounds of a fragment between two checks that the ranks still agree


@dataclass
class _Trip:
    """A flight, and what has to be known of the rank that sent it."""

    flight: Flight
    step: int
    level: int
    taken: list[float]
    errand: Errand | None = None


class Rounds:
    """All fragments of a model, and those of them that are under way. Building it is a collective.

    Args:
        meter: counts what the rounds cost.
        record: is called with every round that has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        group: Group,
        bucket_bytes: int,
        meter: Meter,
        record: Callable[[Round], None],
    ) -> None:
        self._model = model
        self._structure = Structure(model)
        self._recipe = recipe
        self._meter = meter
        self._record = record
        self.inner: Optimizer | None = None
        self._warned = False
        self._trips: dict[int, _Trip] = {}
        fragments = recipe.fragments(model, recipe.schedule.fragments)
        self.description, tensors = describe(recipe, fragments, bucket_bytes)
        # Who meets on a thread of its own must not get into the order of what the training itself sends.
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        overlaps = recipe.schedule.delay > 0 and group.is_concurrent and group.size > 1
        # Nor may a round meet what the script or another loop sends.
        self.group = group.duplicate()
        travels_in = group.duplicate(in_background=True) if overlaps else None
        self._courier = Courier(device, travels_in) if recipe.schedule.delay else None
        self._cap_bytes = bucket_bytes
        # Before anything else is sent, as ranks that differ would differ in that too.
        Static(self.group, self.description, tensors).begin(Ballot(0, 0.0))()
        self._members = [Static(travels_in or self.group, self.description, tensors)]
        self._members += [Static(group.split(size), self.description, tensors) for size in recipe.levels]
        self._beside = Static(self.group, _BESIDE + self.description, tensors)
        self._fragments = fragments
        self.votes = 1
        meter.add("bytes_voting", (group.size - 1) * BALLOT_BYTES)
        self.parts = [Part(fragment, recipe, self._structure, self.group, bucket_bytes) for fragment in fragments]
        self._digests = [-1] * len(self.parts)
        self._counts = [0] * len(self.parts)

    def work(self, amount: float) -> None:
        """Count what was done since the last round of each fragment."""
        for part in self.parts:
            part.work(amount)

    def launch(self, number: int, level: int, position: int, finished: bool) -> None:
        """Send a fragment off, as it is now.

        Raises:
            CollectiveMismatch: the model has changed since the last round, and not on all ranks alike.
        """
        assert number not in self._trips, "a fragment flies once at a time"
        if self._structure.has_changed():
            changed = self._changed()
            if changed.must_agree:
                # Ranks whose model has not changed know nothing of this, so it goes the way of any other round.
                self._describe(changed.vote, changed.tensors)
                self._send(number, level, position, finished, is_empty=True)
                waited = self._await(number)
                self._close(self._trips.pop(number), number, waited)
            self._follow(changed)
        self._send(number, level, position, finished)

    def _send(self, number: int, level: int, position: int, finished: bool, is_empty: bool = False) -> None:
        """Let a fragment depart; an empty one brings nothing but a ballot."""
        part, members = self.parts[number], self._members[level]
        norm, largest, sound, looks = 0.0, 0.0, True, False
        taken = [0.0] * len(part.fresh)
        if not is_empty:
            with self._meter.timed("encoding"):
                part.rebind()
                looks = part.fresh[level] > 0 or self._recipe.is_whole or not self._recipe.aggregator.agrees
                if looks:
                    norm, largest, sound = part.look_over()
            taken = part.begin(level)
        ballot = Ballot(
            self.votes,
            taken[level],
            norm,
            largest,
            sound,
            finished,
            position,
            self._digests[number] if level == 0 else -1,
        )
        self.votes += 1
        flight = Flight(part.cargo, members, ballot, self._recipe.rule, part.memory, looks, part.is_idle)
        trip = self._trips[number] = _Trip(flight, position, level, taken)

        def depart() -> None:
            flight.depart()
            assert flight.tally is not None
            if level == 0 and not is_empty:
                self._compare(flight.tally, part, members.group)

        if self._courier is None:
            try:
                depart()
            except RankFailure:
                self._give_up(number)
                raise
        else:

            def travel() -> None:
                depart()
                flight.arrive()

            trip.errand = self._courier.send(travel)

    def is_finished(self, number: int) -> Tally | None:
        """Wait for the vote of a fragment under way; return it if all ranks said in it that they have no more data."""
        trip = self._trips[number]
        self._await(number)
        tally = trip.flight.tally
        return tally if tally is not None and tally.finished and trip.level == 0 else None

    def apply(self, number: int) -> None:
        """Bring a fragment in, if it is under way."""
        part = self.parts[number]
        if isinstance(part.weights, Corrected):
            self._correct(number, part.weights)
            return
        trip = self._trips.get(number)
        if trip is None:
            return
        waited = self._await(number)
        flight = trip.flight
        if flight.is_dropped:
            self._drop(number)
            return
        if flight.has_cargo:
            try:
                if self._courier is not None:  # weights may have been put elsewhere while it was under way
                    part.rebind_known()
                flight.land()
            except RankFailure:
                self._give_up(number)
                raise
            self._tend(trip, number)
        del self._trips[number]
        self._close(trip, number, waited)

    def apply_all(self) -> None:
        """Bring in all that is under way, in the order in which it was sent."""
        for number in list(self._trips):
            self.apply(number)

    def average(self) -> None:
        """local <- the mean of all ranks, weights and floating buffers: a collective beside all that is under way.

        All ranks count alike, but those with a value that is not finite: these get the mean of the others. Where none
        is left nothing happens.

        Raises:
            CollectiveMismatch: the model has changed since the last round, and not on all ranks alike.
        """
        self.agree_on_changes()
        tensors = [local(tensor) for part in self.parts for tensor in (*part.parameters(), *part.averages())]
        self._average(tensors)

    def agree_on_changes(self) -> None:
        """Go on with what the model is made of now, as a round would: a collective beside all that is under way."""
        if self._structure.has_changed():
            changed = self._changed()
            if changed.must_agree:
                self._describe(changed.vote, changed.tensors)
                self._vote_beside(0.0)
            self._follow(changed)

    def _average(self, tensors: list[Tensor]) -> None:
        sound = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        shares = Shares(*alike_as_one(self._vote_beside(float(sound)).weights), self.group.rank)
        if shares.total:
            sent = average(tensors, self.group, shares, self._cap_bytes)
            self._meter.add("bytes_sent", sent)
            self._meter.add("bytes_received", sent)

    def _vote_beside(self, weight: float) -> Tally:
        self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        return self._beside.begin(Ballot(0, weight))()

    def _describe(self, description: str, tensors: list[str]) -> None:
        for members in self._members:
            members.describe(description, tensors)
        self._beside.describe(_BESIDE + description, tensors)

    def _changed(self) -> Change:
        kept = {name for part in self.parts for name in part.names}
        known = {place.name: place.name in kept for one in self._fragments for place in one.averages}
        trained = [tensor for part in self.parts for tensor in part.trained]
        change = change_of(self._model, self._recipe, self._cap_bytes, known, trained)
        must_agree = change.description != self.description or bool(change.new and self._recipe.optimizer)
        return replace(change, must_agree=must_agree)

    def _follow(self, changed: Change) -> None:
        """Go on with what the model is made of now, on all ranks; what is under way comes in before."""
        self.apply_all()
        self._structure.note()
        kept: dict[str, dict[int, Tensor]] = {}
        for part in self.parts:
            for name, rows in part.kept().items():
                kept.setdefault(name, {}).update(rows)
        self.description, self._fragments = changed.description, changed.fragments
        self._describe(self.description, changed.tensors)
        if changed.new and self._recipe.optimizer is not None and self.group.size > 1:
            self._average([local(place.get()) for place in changed.new])  # so that anchors begin at the same point
        for number, fragment in enumerate(changed.fit):
            part = Part(fragment, self._recipe, self._structure, self.group, self._cap_bytes, is_new=False)
            part.go_on_like(self.parts[number], kept)
            self.parts[number] = part
        if changed.must_agree:
            self._digests = [-1] * len(self.parts)

    def leave(self, reason: str) -> None:
        """End, and tell the ranks that wait in any of the groups that this one will not come."""
        self.stop()
        for group in (self.group, *(members.group for members in self._members[1:])):
            group.leave(reason)

    def free(self) -> None:
        """Give the groups back, as nothing is under way on any rank."""
        self.stop()
        for group in {id(one): one for one in (self.group, *(members.group for members in self._members))}.values():
            group.free()

    def stop(self) -> None:
        """End the thread that rounds travel on."""
        if self._courier is not None:
            self._courier.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parts, and of what is under way, once it has arrived.

        Raises:
            StateError: the model has changed since the last round, so that the ranks have not agreed on it yet.
        """
        if self._structure.has_changed():
            changed = self._changed()
            if changed.must_agree:
                names = [place.name for place in changed.new][:3]
                raise StateError(
                    f"The model has changed since the last round of its outer loop (new: {names}), and the ranks have "
                    "not agreed on that yet. Save after the next round, or call flush() first."
                )
            self._follow(changed)
        air = {}
        for number in list(self._trips):
            trip = self._trips[number]
            try:
                self._await(number)
            except RankFailure:  # it will never arrive, and what was sent with it counts as not sent
                continue
            air[number] = {
                "flight": trip.flight.state_dict(),
                "step": trip.step,
                "level": trip.level,
                "taken": list(trip.taken),
            }
        return {
            "votes": self.votes,
            "digests": list(self._digests),
            "counts": list(self._counts),
            "air": air,
            "parts": [part.state_dict() for part in self.parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; what is under way here is waited for and forgotten."""
        for number in list(self._trips):
            self._await(number)
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.votes = state["votes"]
        self._digests, self._counts = list(state["digests"]), list(state["counts"])
        self._trips = {}
        for number, saved in state["air"].items():
            part, members = self.parts[number], self._members[saved["level"]]
            flight = Flight(part.cargo, members, Ballot(0, 0.0), self._recipe.rule, part.memory, True, part.is_idle)
            flight.load_state_dict(saved["flight"])
            self._trips[number] = _Trip(flight, saved["step"], saved["level"], saved["taken"])

    def _await(self, number: int) -> float:
        """Wait for a flight that is on the thread; return the seconds."""
        trip = self._trips[number]
        if trip.errand is None:
            return 0.0
        try:
            return trip.errand.wait()
        except RankFailure:
            self._give_up(number)
            raise

    def _correct(self, number: int, lane: Corrected) -> None:
        """Bring in what is under way with this rank's own part of it renewed; without a flight, that part alone."""
        part, trip = self.parts[number], self._trips.get(number)
        waited, fraction = 0.0, lane.fraction or 1 / self.group.size
        results: list[tuple[Tensor, float]] = []
        part.rebind_known()
        if trip is not None:
            waited = self._await(number)
            del self._trips[number]
            if trip.flight.is_dropped:
                self._warn(trip.flight)
            elif trip.flight.has_cargo:
                results, shares = trip.flight.results(), trip.flight.shares
                fraction = shares.mine / shares.total
                trip.flight.land()  # what is left: the buffers
        # With nothing new, of this rank or of others, momentum alone would move the anchor.
        if part.fresh[0] or (results and self.group.size > 1):
            lane.correct(results, fraction)
        else:
            lane.rest()
        if trip is not None:
            self._close(trip, number, waited)

    def _tend(self, trip: _Trip, number: int) -> None:
        """See to what depends on a round that has landed."""
        part = self.parts[number]
        self._counts[number] += trip.level == 0
        if self._recipe.inner != Keep():
            parameters, group = part.parameters(), self._members[trip.level].group
            sent = self._recipe.inner(self.inner, parameters, self._counts[number], group, trip.flight.shares)
            self._meter.add("bytes_sent", sent)
            self._meter.add("bytes_received", sent)
        if self._recipe.agrees and trip.level == 0:
            due = self._counts[number] % _DIGEST_EVERY == 1 and self.group.size > 1
            self._digests[number] = part.digest() if due else -1

    def _compare(self, tally: Tally, part: Part, group: Group) -> None:
        if len(set(tally.digests)) == 1:
            return
        names, mine = zip(*part.checksums(), strict=True)
        everyone = group.meet(torch.tensor(mine, dtype=torch.float64))
        for column, name in enumerate(names):
            values = everyone[:, column].tolist()
            usual = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != usual]
            if odd:
                where = numbered("rank", odd)
                raise CollectiveMismatch(
                    f"The replicas no longer agree on {name}: its value on {where} is not that of the others. "
                    "Something has written to it, or their machines compute differently."
                )
        raise CollectiveMismatch(
            f"The replicas no longer agreed at the end of their last round (digests {list(tally.digests)}), though the "
            "tensors are equal now: something wrote to them in between."
        )

    def _drop(self, number: int) -> None:
        trip = self._trips.pop(number)
        self.parts[number].take_back(trip.taken)
        self._warn(trip.flight)
        self._close(trip, number, 0.0)

    def _give_up(self, number: int) -> None:
        """A rank has died: end in the same state as the others that live."""
        trip = self._trips.pop(number)
        if isinstance(self.parts[number].weights, Corrected):  # each has its own state, which holds its steps already
            return
        with torch.no_grad():
            landed = trip.flight.land_what_all_have()
        if not landed:
            self.parts[number].take_back(trip.taken)

    def _close(self, trip: _Trip, number: int, waited: float) -> None:
        """Count what a flight has cost, and record it."""
        costs, flight = trip.flight.costs, trip.flight
        for name in ("bytes_sent", "bytes_received", "bytes_voting"):
            self._meter.add(name, getattr(costs, name))
        for name, seconds in costs.seconds.items():
            self._meter.add(f"seconds_{name}", seconds)
        hidden = 0.0 if trip.errand is None else max(0.0, trip.errand.seconds - waited)
        self._meter.add("seconds_hidden", hidden)
        if flight.tally is None or flight.is_empty:
            return
        verdict = flight.verdict
        this = Round(
            number=flight.ballot.number,
            step=trip.step,
            fragment=number,
            dropped=flight.is_dropped,
            weights=tuple(factor / verdict.total for factor in verdict.factors) if verdict.total else (),
            norms=flight.tally.norms,
            norm=flight.norm,
            cosine=_cosine(flight),
            bytes_sent=costs.bytes_sent,
            bytes_received=costs.bytes_received,
            seconds_exposed=waited if trip.errand is not None else sum(costs.seconds.values()),
            seconds_hidden=hidden,
        )
        self._meter.note(this, self._members[trip.level].group.rank)
        self._record(this)

    def _warn(self, flight: Flight) -> None:
        if not self._warned:
            self._warned = True
            where = numbered("rank", flight.verdict.unfit)
            warnings.warn(
                f"Rank {self.group.rank}: a round was dropped, as the weights of {where} "
                f"are not finite, too large for {self._recipe.codec}, or all unusual. All ranks go on with their own "
                "weights. Further dropped rounds are only counted, in stats().dropped_rounds.",
                RuntimeWarning,
                stacklevel=6,
            )


def _cosine(flight: Flight) -> float:
    """From |sum f_i d_i|^2 = sum f_i^2 |d_i|^2 + the products of different replicas."""
    assert flight.tally is not None
    factors, norms = flight.verdict.factors, flight.tally.norms
    ways = [factor * norm for factor, norm in zip(factors, norms, strict=True) if factor]
    squares = sum(way * way for way in ways)
    between = sum(ways) ** 2 - squares
    return ((flight.norm * flight.verdict.total) ** 2 - squares) / between if between > 0 else 0.0
