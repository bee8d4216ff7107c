# SPDX-License-Identifier: Apache-2.0
"""The members of a run, and the one place that continues without lost ones.

After a loss all survivors end the rounds under way alike, enter the next generation, launch the rounds that were due
again, and repeat the interrupted action. With a fixed membership a loss ends the loop instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import Kind, record
from farflung.comm.group import Group
from farflung.comm.shards import local
from farflung.exchanged.bound import BoundFragment
from farflung.exchanged.comparison import FINGERPRINT_BYTES, compare_frozen
from farflung.exchanged.replica import Replica
from farflung.exchanged.structure import settings_of
from farflung.methods.agreement import average
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Action, Apply, Change, Launch
from farflung.methods.weighting import Decision, in_proportion
from farflung.outer.background import BackgroundWorker
from farflung.outer.membership import Membership
from farflung.outer.stats import Meter
from farflung.outer.timetable import Timetable
from farflung.votes.ballot import BALLOT_BYTES, Ballot, Tally
from farflung.votes.generation import Generation, Needs, OddMembers, Reached

_T = TypeVar("_T")


@dataclass(frozen=True)
class Welcome:
    """What members give a newcomer: their position in the schedule, and the state that all share between rounds."""

    position: int
    began: int  # the step at which the latest round was launched
    due: tuple[Action, ...]  # what members do next, this newcomer among them
    fragments: tuple[dict[str, Any], ...]  # as `BoundFragment.replicated` returns them
    changes: Mapping[str, Any]  # as `Timetable.changes_dict` returns them

    def after_landing(self, number: int, now: dict[str, Any], kinds: tuple[str, ...]) -> Welcome:
        """Return it with the state of a fragment that all share `now`: of these kinds of values, or of all of them."""
        agreed = self.fragments[number]["agreed"] | {kind: now["agreed"][kind] for kind in kinds or now["agreed"]}
        fragments = (*self.fragments[:number], {**now, "agreed": agreed}, *self.fragments[number + 1 :])
        return replace(self, fragments=fragments)


def _needs_of(recipe: Recipe, replica: Replica) -> dict[str, Any]:
    """Return what a model, as this recipe exchanges it, requires of the members."""
    return {
        "overlaps": recipe.schedule.delay > 0 or recipe.is_undecided,
        "description": replica.description,
        "tensors": replica.tensors,
        "is_shared": replica.is_shared,
        "settings": [settings_of(recipe), [f"buckets of {replica.cap_bytes} bytes"]],
        "could": replica.could,
        "layout": lambda: replica.layout,
        "align": replica.align,
    }


def _parts(replica: Replica, numbers: Iterable[int]) -> dict[str, Any]:
    found = {number: replica.fragments[number] for number in numbers}
    return {str(number): {**one.replicated(), "names": one.names()} for number, one in found.items()}


def _welcome(given: Mapping[str, Any]) -> Welcome:
    """Read what `Quorum._shared_state` has returned on another rank."""
    parts, kinds = dict(given), {kind.__name__: kind for kind in (Launch, Apply, Change)}
    place = parts.pop("place")
    due = tuple(kinds[kind](**fields) for kind, fields in place["due"])
    fragments = tuple(parts[str(number)] for number in range(len(parts)))
    return Welcome(place["position"], place["began"], due, fragments, place)


@dataclass
class Acts:
    """What members do together outside of rounds, one act after the other."""

    num_ended: int = 0  # in this generation
    is_under_way: bool = False  # one is, or begins again
    is_in_one: bool = False  # which a loss ends as a whole
    is_over: bool = False  # the one that the latest loss has interrupted here had ended on another member
    end: Callable[[], object] = lambda: None  # what is done once the current one has ended


class _State(Enum):
    ENTERING = auto()  # the current generation
    TOGETHER = auto()  # with its members
    SETTLING = auto()  # after a loss: what runs in the background comes to its end
    LOST = auto()  # nothing can continue, unless the survivors agree on the loss


def _no_changes() -> dict[str, Any]:
    return {"lost": {}, "joined": (), "seconds_recovering": 0.0}


class Quorum:
    """The current members, and this rank's way into their generation.

    Args:
        timetable: this rank's position in its schedule; a newcomer continues at that of the members.

    Attributes:
        generation: this rank's.
        needs: what it requires of the members, and the number of its next vote.
        welcome: the state that this rank got as a newcomer, updated by each round; None after its first step.
        joined_in: the number of the latest generation that this rank has entered as a newcomer, or -1.
        worker: runs rounds in the background, if they overlap with training.
        under_way: the work that a loss ends.
        ask_otherwise: called where the members refuse this replica; it may ask once more, as another recipe, if True.
    """

    generation: Generation  # once it has met the others
    group: Group  # of all its members
    under_way: Any  # the loop's `Rounds`
    ask_otherwise: Callable[[], bool]

    def __init__(
        self, membership: Membership, recipe: Recipe, replica: Replica, timetable: Timetable, meter: Meter
    ) -> None:
        self.membership = membership
        self.needs = Needs(
            recipe.levels,
            is_sharded=replica.is_sharded,
            num_votes=1,
            admits=True,
            has_state=False,
            state=partial(self._shared_state, (), None),
            **_needs_of(recipe, replica),
        )
        self.welcome: Welcome | None = None
        self.joined_in = -1
        self.worker: BackgroundWorker | None = None
        self.replica, self._timetable, self._meter = replica, timetable, meter
        self.acts = Acts()
        self._state = _State.ENTERING
        self._noticed_at: float | None = None  # the time of a loss
        self._changes = _no_changes()  # since the latest round

    # ---- one after the other, whatever is lost

    def run(self, *actions: Callable[[], object], again: bool = True, raises: bool = True) -> None:
        """Do one action after the other; after a loss, survivors resume at the action that it interrupted.

        Args:
            again: repeat the interrupted action; otherwise survivors may be done with it.
            raises: False: a loss that ends the loop is not raised. Rounds under way have ended nevertheless.

        Raises:
            RankFailure: nothing can continue; or this is a part of an act, which begins again.
        """
        with self._keeping():
            if not self.acts.is_in_one:
                return self._run(deque(actions), again, raises)
            for action in actions:
                action()

    def together(self, act: Callable[[], _T], then: Callable[[_T], object] = lambda result: None) -> _T | None:
        """Do with all members what is no round: after a loss they begin it again, unless it had ended on one of them.

        A mark follows it, which a member sends once it has all values: whoever has the marks of all knows that nobody
        needs to repeat it. An act within another one is a part of that.

        Args:
            then: called with the result of `act` before anything else, once it has ended on some member; sends nothing.

        Returns:
            what `act` has returned; None on a member that was left out meanwhile, and has joined the others again.
        """
        if self.acts.is_in_one:
            result = act()
            then(result)
            return result
        found, joined_in = list[_T](), self.joined_in

        def once() -> None:
            if self.joined_in > joined_in:
                return
            self.acts.is_in_one = True
            try:
                found[:] = [act()]
                if not self.membership.is_fixed:
                    mark = torch.zeros(1)
                    self.group.all_gather_small(mark)
                    self._meter.add("bytes_voting", (self.group.size - 1) * mark.nbytes)
                    self.generation.island.gathered(0.0)
            finally:
                self.acts.is_in_one = False
            self.acts.num_ended += 1
            then(found[0])

        self.acts.end = lambda: then(found[0])
        self.acts.is_under_way = True
        try:
            self.run(once)
        finally:
            self.acts.is_under_way = False
        return found[0] if found and self.joined_in == joined_in else None

    def agree(self, complete: Mapping[int, int], odd: Mapping[int, str]) -> Mapping[int, int]:
        """Agree with the survivors of a loss on the buckets of open rounds to apply, by vote."""
        acts = self.acts
        common = self.membership.agree(self.needs.num_votes, Reached(complete, acts.num_ended, acts.is_under_way), odd)
        acts.is_over = common.acts > acts.num_ended
        return common.complete

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep what was trained, wherever the store was needed and is gone."""
        try:
            yield
        except Unreachable as error:
            self._state = _State.LOST
            raise self.membership.stranded(error) from None

    def _run(self, left: deque[Callable[[], object]], again: bool, raises: bool) -> None:
        while left:
            try:
                left[0]()
                left.popleft()
            except RankFailure as failure:
                if self._state is _State.SETTLING:
                    continue
                is_over = self.membership.is_fixed or self._state is _State.LOST
                if self._state is _State.TOGETHER:
                    self._end(failure)
                    if self.acts.is_over:
                        self.acts.end()
                    if self.acts.is_over or not again:
                        left.popleft()
                    left.extendleft((self.under_way.relaunch, self._enter))
                if is_over:
                    self._state = _State.LOST
                    if raises:
                        raise  # not by its name, whose frame it would keep, and the connections that this knows
                    return
                self._lose(failure)

    def _end(self, failure: RankFailure) -> None:
        """End everything under way alike on all survivors."""
        self._state, self._noticed_at = _State.SETTLING, time.perf_counter()
        self.acts.is_over = False
        if not self.membership.is_fixed:
            self._leave(failure)  # which ends others' waits, and jobs here
        self.run(self.under_way.settle)
        self._state = _State.LOST
        self.under_way.end_alike(failure.why if isinstance(failure, OddMembers) else {})

    def _leave(self, failure: RankFailure) -> None:
        if hasattr(self, "generation"):
            self.generation.leave(f"it continues without lost ranks: {failure}")

    def _lose(self, failure: RankFailure) -> None:
        """Leave a generation in which ranks were lost, for the next one."""
        if self._state is _State.ENTERING:
            self._leave(failure)
        self._state = _State.LOST
        if not self.needs.has_state:
            self.replica.fragments = []  # it may have the values of some, and not of others
        try:
            self.membership.lost(failure)
        finally:  # not before the other ranks of an island know why its connections close
            self.free(reusable=False)
        self._state = _State.ENTERING
        has_state = self.needs.has_state
        self.needs = replace(self.needs, admits=not has_state, may_keep=has_state and self.replica.may_keep())

    # ---- generations

    def enter(self, due: Sequence[Action] = (), step: int | None = None) -> None:
        """Enter the current generation, into which newcomers may come: a collective, while no round is under way.

        Args:
            due: what members do next.
            step: at which it is due, if this rank has reached that without training.
        """
        self._state = _State.ENTERING
        self.needs = replace(self.needs, admits=True, state=partial(self._shared_state, due, step))
        self.run(self._enter)

    def _enter(self) -> None:
        before, had_state = getattr(self, "generation", None), self.needs.has_state
        try:
            generation = self.membership.enter(self.needs_now())
        except ConfigError:  # the members may have another recipe by now
            if not self.ask_otherwise():
                raise
            generation = self.membership.enter(self.needs_now())
        if generation is not before:
            ids = () if before is None else before.ids
            if self.needs.admits and before is not None:
                self.free(reusable=True)
            self.generation, self.group, self.acts.num_ended = generation, generation.group, 0
            if had_state:
                self._changes["lost"] |= {one: generation.lost.get(one, "") for one in ids if one not in generation.ids}
                newcomers = () if generation.joins else generation.newcomers
                self._changes["joined"] += tuple(generation.ids[rank] for rank in newcomers)
            self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
            self.worker = self._new_worker()
            # A newcomer gets it, also one that comes back.
            has_state = had_state and not generation.joins
            self.needs = replace(self.needs, num_votes=generation.num_votes, has_state=has_state)
            self.replica.enter(generation, ids if had_state else generation.ids)
            self._share(had_state)
            self.adopt_change()
        self.needs = replace(self.needs, has_state=True)
        self._state = _State.TOGETHER
        if self._noticed_at is not None:
            took_s, self._noticed_at = time.perf_counter() - self._noticed_at, None
            self._meter.add("seconds_recovering", took_s)
            self._changes["seconds_recovering"] += took_s

    def _new_worker(self) -> BackgroundWorker | None:
        return (
            BackgroundWorker(self.replica.device, self.generation.background)
            if self._timetable.recipe.schedule.delay > 0
            else None
        )

    def restart(self, recipe: Recipe, replica: Replica) -> None:
        """Continue with a model as another recipe exchanges it; nothing is sent."""
        self.replica = replica
        self.needs = replace(self.needs, **_needs_of(recipe, replica))
        if hasattr(self, "generation"):
            self.describe(replica.description, replica.tensors)
            self.worker = self._new_worker()

    def _share(self, had_state: bool) -> None:
        """Take the state that members share, as a newcomer; at the start all get that of the first member."""
        generation, joins = self.generation, self.generation.joins
        if generation.newcomers or not had_state:
            there = range(generation.group.size)  # all are newcomers if a run continues from a state at its address
            giver = next((rank for rank in there if rank not in generation.newcomers), 0)
            self.replica.synchronize(giver, takes=joins or not generation.newcomers)
            self._meter.add("bytes_voting", (self.group.size - 1) * FINGERPRINT_BYTES)
        if generation.may_lose:  # each rank of an island has met a column of its own, and may have lost it alone
            generation.island.gathered(0.0)
        if joins:
            if not generation.keeps:
                self._meter.add("steps_lost", self.replica.fragments[0].pending_weight[0])
            self.welcome, self.joined_in = _welcome(generation.given), generation.number
            self._timetable.take(self.welcome.position, self.welcome.began)
            self._timetable.flushes = generation.given["place"]["flushes"]
            self._timetable.load_changes(self.welcome.changes, self.welcome.due)
            self.return_to_welcome(generation.keeps)
            if rest := generation.given["place"].get("rest"):
                values = zip(rest["names"]["rest"], rest["agreed"]["rest"][0], strict=True)
                self.replica.trained.load_resting({name: value for (name, *_), value in values})
            if len(generation.newcomers) == generation.group.size:
                compare_frozen(self.replica.frozen(), generation.given["place"])
        if generation.newcomers:
            self.replica.note_newcomers()

    def _shared_state(self, due: Sequence[Action], step: int | None, is_whole: bool) -> dict[str, Any]:
        """Return the place in the schedule, and copies of all else that a newcomer needs, fragment by fragment."""
        actions = [(type(one).__name__, asdict(one)) for one in due]
        timetable = self._timetable
        position = min(timetable.position, timetable.synced)  # of several steps that were not synced yet, the one now
        position = max(position, step or 0)
        place = {"position": position, "began": timetable.began, "due": actions, **timetable.changes_dict()}
        place["flushes"] = timetable.flushes
        place["layout"] = self.replica.layout
        if is_whole:
            trained = self.replica.trained
            place |= {"frozen": self.replica.frozen(), "rest": trained.shared(), "adapter": trained.adapter}
        return {"place": place} | _parts(self.replica, range(len(self.replica.fragments) * is_whole))

    def offer(self, *numbers: int) -> None:
        """Give fragments that may have changed to replicas that wait for admission."""
        self.membership.offer(lambda: _parts(self.replica, numbers))

    def free(self, reusable: bool) -> None:
        """Give back the groups of this generation, which are `reusable` if nothing is under way on any rank."""
        if self.worker is not None:
            self.worker.stop()
        if hasattr(self, "generation"):
            self.generation.free(reusable)

    # ---- a newcomer, until its first step

    def note_landing(self, number: int, *kinds: str) -> None:
        """On a newcomer, keep the state of a fragment that all share now: its welcome never outlives a round.

        Args:
            kinds: of values that have landed, as in `BoundFragment.agreements`; none: all of them.
        """
        if self.welcome is not None:
            self.welcome = self.welcome.after_landing(number, self.replica.fragments[number].replicated(), kinds)

    def return_to_welcome(self, keeps: bool = False) -> None:
        """Take the weights that all share in place of this newcomer's own, with its own steps if it `keeps` these."""
        assert self.welcome is not None
        if not keeps:
            self.replica.trained.forget_moves()
        for fragment, shared in zip(self.replica.fragments, self.welcome.fragments, strict=True):
            fragment.join(shared, keeps)

    # ---- changes of H

    def follow(self, change: Change) -> None:
        """Continue with another H, as the schedule says: all that was under way has landed."""
        self._timetable.last = change
        self.adopt_change()
        for number, fragment in enumerate(self.replica.fragments):
            fragment.history = {}  # norms grow with H
            self.note_landing(number)
        self.offer(*range(len(self.replica.fragments)))
        if self.group.rank == self.generation.island.voters.group.rank == 0:
            record(Kind.CHANGED, **asdict(change))

    def adopt_change(self) -> None:
        """Give the outer optimizers and the votes the latest change of H."""
        last = self._timetable.last
        self.replica.tune(None if last is None else last.every)
        self.describe(self.replica.description, self.replica.tensors)

    def describe(self, description: str, tensors: Sequence[str]) -> None:
        """Describe what all members must have alike, in the next votes."""
        last = self._timetable.last
        self.generation.describe(description if last is None else f"{description}, {last}", tensors)

    # ---- what all members do together, outside of rounds

    def needs_now(self) -> Needs:
        replica = self.replica
        return replace(self.needs, description=replica.description, tensors=replica.tensors, could=replica.could)

    def is_awaited(self) -> bool:
        """Return whether a replica is known to wait for admission; see `Membership`."""
        with self._keeping():
            return self.membership.is_awaited(self.needs_now())

    def next_vote(self) -> int:
        """Return the number of this rank's next vote, which it casts now."""
        number = self.needs.num_votes
        self.needs = replace(self.needs, num_votes=number + 1)
        return number

    def vote(self, **said: Any) -> Tally:
        """Vote outside of rounds, with other fields of a ballot than its number and weight: a collective."""
        self._meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        return self.generation.beside.begin(self.generation.island.ballot(Ballot(0, 1.0, **said)))()

    def average(self, tensors: list[Tensor]) -> None:
        """Give tensors their mean, of the ranks on which all of them are finite, or nothing: a collective."""
        sound = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        decision = in_proportion(self.vote(sound=sound).sound_weights)
        if decision.total:
            self._average(tensors, decision)

    def average_buffers(self, fragment: BoundFragment) -> None:
        """Average a fragment's buffers though no rank made a step: a forward pass is enough to change them."""
        floats, counters = ([local(place.get()) for place in places] for places in fragment.cut.kinds[1:])
        if floats:
            self.average(floats)
        if counters:
            everyone = Decision((1.0,) * self.group.size, float(self.group.size))
            self._average(counters, everyone)

    def _average(self, tensors: list[Tensor], decision: Decision) -> None:
        how = self._timetable.recipe.beside
        self._meter.add_exchanged(average(tensors, self.group, decision, self.replica.cap_bytes, how))

    def take_changes(self) -> dict[str, Any]:
        """Return what has changed since the last call, by the names of a `Round`'s fields."""
        changes, self._changes = self._changes, _no_changes()
        return changes
