# SPDX-License-Identifier: Apache-2.0
"""Rounds: a vote, an exchange, and then all of it is applied or nothing.

Bucket after bucket is copied while others are on the wire, and the first ones travel with the votes: a rank scales its
values by its own weight, and all divide by the sum of the weights in the votes. A rank applies a bucket only when every
rank is known to have received it, so ranks that survive another one's death in the middle of a round have moved the
same buckets. If replicas are islands of several ranks, each bucket waits for all of them.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from farflung.base.errors import CollectiveMismatch, StateError
from farflung.comm.group import Group
from farflung.exchanged.bound import BoundFragment
from farflung.exchanged.replica import ModelChange
from farflung.exchanged.trained import TrainedProposal
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Launch
from farflung.methods.weighting import Decision, NormHistory, in_proportion
from farflung.outer.background import BackgroundJob, BackgroundWorker
from farflung.outer.pipeline import Pipeline
from farflung.outer.stats import Meter, Round
from farflung.votes.ballot import BALLOT_BYTES, Ballot, Seen, Tally, odd_among
from farflung.votes.generation import ALL, Generation, OddMembers, Void

_LAG = 2  # of two buckets that follow each other so, the second is sent only after the first has arrived


@dataclass(frozen=True)
class RoundRequest:
    """The parameters of a round: enough to open it again, in another generation."""

    action: Launch
    position: int  # this rank's, when the fragment was sent off
    finished: bool = False  # this rank has no more data
    change: ModelChange | None = None  # on which all have to agree: it brings nothing but a ballot
    in_act: bool = False  # of all members, which begins again after a loss


class Phase(IntEnum):
    """How far a round has come."""

    OPENED = 0  # nothing is on the wire
    BEGUN = 1  # a vote
    SENT = 2  # and the first buckets, perhaps together with the vote
    CONFIRMED = 3  # every rank has all of them
    LOADED = 4  # the same, out of a checkpoint


class OpenRound:
    """A round of one fragment that has not been applied yet.

    Args:
        ballot: of this rank; of its island, once that has met.
        claimed: the work done since the last round, by level.
        seen: the values that ranks of an island hold alike, to compare these.
        wish: what this rank has trained, in rounds that may change what is exchanged.

    Attributes:
        phase: how far it has come.
        job: its job, if it runs in the background.
        tally: the votes of all, once they are known, and the decision that follows.
    """

    def __init__(
        self,
        fragment: BoundFragment,
        generation: Generation,
        recipe: Recipe,
        ballot: Ballot,
        request: RoundRequest,
        claimed: list[float],
        seen: Seen | None = None,
        wish: TrainedProposal | None = None,
    ) -> None:
        self.ballot, self.request, self._claimed, self._seen, self.wish = ballot, request, claimed, seen, wish
        self.phase = Phase.OPENED
        self.job: BackgroundJob | None = None
        self.tally: Tally | None = None
        self._void: Void | None = None  # as others have seen it end
        self.decision = Decision((), 0.0)
        self._fragment, self._generation, self._recipe = fragment, generation, recipe
        self._pipeline = Pipeline(fragment, self.group, ballot.number, Meter())
        self._history: NormHistory | None = None  # of the fragment, once this round counts
        self._square: float | None = None  # of the norm of the whole island's aggregate

    @property
    def meter(self) -> Meter:
        return self._pipeline.meter

    @property
    def level(self) -> int:
        return self.request.action.level

    @property
    def group(self) -> Group:
        """The ranks that meet in it."""
        return self._generation.levels[self.level].group

    @property
    def is_dropped(self) -> bool:
        """Whether it is not applied, because some rank's values were unfit."""
        return bool(self.decision.unfit) or (self._void is not None and self._void.is_dropped)

    @property
    def is_last(self) -> bool:
        """Whether all ranks have said in it that they have no more data, as far as is known."""
        if self._void is not None:
            return self._void.is_last
        return self.tally is not None and self.tally.finished and self.level == 0

    @property
    def void(self) -> Void | None:
        """How it ends, if it is known that nothing of it is applied."""
        if self._void is not None or self.tally is None or not (self.is_dropped or self.is_empty):
            return self._void
        if self.is_dropped:
            return Void.LAST_DROPPED if self.is_last else Void.DROPPED
        return Void.LAST_EMPTY if self.is_last else Void.EMPTY

    @property
    def is_empty(self) -> bool:
        """Whether no rank had values to send."""
        return not self.is_dropped and self.decision.total == 0

    @property
    def norm(self) -> float:
        """The norm of what the replicas agreed to move by; 0 if weights have no anchor."""
        return math.sqrt(self._pipeline.square if self._square is None else self._square)

    def begin(self, worker: BackgroundWorker | None) -> None:
        """Start the exchange, or all of it in the background; do nothing if that has happened."""
        if self.phase > Phase.OPENED:
            return
        self.phase = Phase.BEGUN
        if worker is None:
            self._start()
        else:
            self.job = worker.submit(self._exchange)

    def _exchange(self) -> None:
        self._start()
        self._confirm()

    def _start(self) -> None:
        """Vote, and send the first buckets off.

        They travel with the votes, unless these decide what to send. A rank that has no more data first learns whether
        the others still have some, and then sends what they expect.
        """
        meter, pipeline, voters = self.meter, self._pipeline, self._generation.levels[self.level]
        if self._recipe.policy.norm == "sent" and math.isfinite(self.ballot.norm):
            with meter.timed("encoding"):
                self.ballot = replace(self.ballot, norm=pipeline.encode_weights())
        with meter.timed("voting"):
            self.ballot = self._generation.in_round.ballot(self.ballot)
            if self._seen and math.isfinite(self.ballot.norm):  # else the round is dropped
                self._generation.in_round.compare(self._seen)
            votes = voters.begin(self.ballot)
        meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        early = not (self._recipe.votes_first or self.group.size == 1)
        weight, of_buffers = self.ballot.weight, self.ballot.weight * self.ballot.sound
        if early and not self.ballot.finished:
            self._send(weight, of_buffers)
        with meter.timed("voting"):
            self.tally = votes()
        if early and not self.tally.finished and self.phase < Phase.SENT:
            self._send(weight, of_buffers)
        self._decide(self.tally)
        if self.is_dropped or self.is_empty:
            pipeline.discard()
        elif self.phase < Phase.SENT:
            self._send(self.decision.factors[self.group.rank], pipeline.of_buffers.factors[self.group.rank])
        if self.wish is not None:
            self._agree_on_trained(self.wish, self.tally)
        self._check_agreement(self.tally.digests)

    def _agree_on_trained(self, wish: TrainedProposal, tally: Tally) -> None:
        """Exchange in this round too what comes into it; a collective, if ranks have trained anything else."""
        names = wish.agreed(tally, self._generation.in_round.voters.group, self.group)
        if names is None or self.is_dropped or self.is_empty:
            return
        wish.accept(names, self._fragment.weights.buckets.cap_bytes)
        if self.group.size > 1:
            self._pipeline.extend(wish.coming, self.decision.factors[self.group.rank])

    def _send(self, weight: float, of_buffers: float) -> None:
        self.phase = Phase.SENT
        self._pipeline.send(weight, of_buffers)

    def _decide(self, tally: Tally) -> None:
        policy, limit = self._recipe.policy, self._recipe.codec.limit
        self._history = deepcopy(self._fragment.history)  # survivors of a loss may not all have come this far
        norms = tally.usable_norms(limit) if policy.screens else tally.norms
        decision = policy(tally.weights, norms, self._history)
        of_buffers = in_proportion(
            [0.0 if rank in decision.left_out else weight for rank, weight in enumerate(tally.sound_weights)]
        )
        if self.phase is Phase.SENT:  # before weights could be compared
            decision = replace(decision, factors=tally.weights, total=sum(tally.weights))
            of_buffers = Decision(tally.sound_weights, sum(tally.sound_weights))
        too_large = tally.too_large(decision.factors, limit)
        self.decision = replace(decision, unfit=too_large) if too_large and not decision.unfit else decision
        self._pipeline.of_buffers, self._pipeline.of_others = of_buffers, self.decision

    def _check_agreement(self, digests: tuple[int, ...]) -> None:
        """Compare the weights that all agreed on before; if others can continue without the odd ones, name these."""
        generation, fragment = self._generation, self._fragment
        why = fragment.comparison.difference(fragment.weights, digests, generation.levels[self.level])
        if why and generation.may_lose:
            raise OddMembers({generation.ids[rank]: why for rank in odd_among(digests)})
        if why:
            raise CollectiveMismatch(f"{why}. Something has written to it, or the machines compute differently.")

    def _confirm(self) -> None:
        """Wait for all buckets, and for every rank to have all of them. The model is not touched.

        In a grid of islands that takes two steps: first those that have the same values tell each other, then those of
        an island. A rank that has heard from its island's last rank has heard from all.
        """
        pipeline, island, may_lose = self._pipeline, self._generation.in_round, self._generation.may_lose
        while pipeline.under_way:
            pipeline.receive()
            pipeline.fill()
        if self.phase >= Phase.CONFIRMED or self.is_dropped or self.is_empty:
            return
        pipeline.lengthen(island, self.decision)
        # Whoever has to apply it without the others must know the norm before anyone applies.
        if self._recipe.changes_norm:
            (self._square,) = island.squares([pipeline.square])
        if pipeline.arrived and self.group.size > (1 if may_lose or island.size > 1 else 2):
            mark = torch.zeros(1)
            self.group.all_gather_small(mark)
            self.meter.add("bytes_voting", (self.group.size - 1) * mark.nbytes)
        if island.size > 1:
            (self._square,) = island.squares([pipeline.square])
        self.phase = Phase.CONFIRMED

    def apply(self) -> None:
        pipeline = self._pipeline
        with self.meter.timed("landing"):
            while pipeline.under_way and not self._fragment.is_whole:
                pipeline.receive()
                # If one of two ranks dies the other one has nobody to differ from; one that is late lives.
                is_safe = self.group.size == 2 and not self._generation.may_lose
                if is_safe or len(pipeline.arrived) > _LAG:
                    pipeline.land(pipeline.num_landed + 1)
                pipeline.fill()
            self._confirm()
            self._land()

    def _land(self) -> None:
        max_norm = self._recipe.policy.max_norm
        if max_norm < math.inf and self.norm > max_norm:
            self._pipeline.scale(max_norm / self.norm)
        self._pipeline.land()
        self._fragment.num_landed = 0

    def settle(self) -> None:
        """Keep what the policy has learned: called once the round has ended alike on all members."""
        if self._history is not None:
            self._fragment.history = self._history

    def give_back(self) -> None:
        """End without a result: the work done counts as not sent. (An eager anchor has already moved by it.)"""
        if self.wish is not None:
            self.wish.trained.count_again(self.wish.names)
        if not self._recipe.eager:
            self._fragment.give_back(self._claimed)

    @property
    def num_complete(self) -> int:
        """How many buckets could be applied, if others have them too: of a whole fragment all or none."""
        if self.tally is not None and (self.is_dropped or self.is_empty):
            return ALL
        has_all = self.tally is not None and self.phase in (Phase.SENT, Phase.CONFIRMED) and self._pipeline.is_empty
        if has_all and (self._square is not None or not self._recipe.changes_norm):
            return ALL
        return 0 if self._fragment.is_whole or self._recipe.eager else self._pipeline.num_arrived

    def abort(self, common: int) -> bool:
        """End in the same state as all others that are left, as ranks were lost.

        Args:
            common: how many buckets all of them apply; or how it was `Void`, if one has closed it.

        Returns:
            whether that completes it. Otherwise the work done counts as not sent, and the next try leaves out the
            buckets that were applied.

        Raises:
            StateError: this rank doesn't have so many.
        """
        if common < 0:
            self._void = Void(common)
            self.give_back()
            return True
        if self.num_complete == common == ALL:
            if self.is_dropped:
                self.give_back()
            elif not self.is_empty:
                with torch.no_grad():
                    self._land()
            self._fragment.num_landed = 0
            self.settle()
            return True
        if common > self.num_complete:
            raise StateError(f"Others have applied {common} buckets of a round; only {self.num_complete} are here.")
        with torch.no_grad():
            self._pipeline.land(common)
        self.give_back()
        self._fragment.num_landed = self._pipeline.num_landed
        return False

    def state_dict(self) -> dict[str, Any]:
        return {
            "ballot": _kept(self.ballot),
            "step": self.request.position,
            "level": self.level,
            "claimed_weight": list(self._claimed),
            "tally": None if self.tally is None else _kept(self.tally),
            "decision": asdict(self.decision),
            "history": self._history,
            "square": self._square,
            "stats": replace(self.meter.stats(), seconds_total=0.0).saved(),
            "arrived": self._pipeline.state_dict(),
            **({} if self.wish is None else {"wish": self.wish.state_dict()}),
            **({} if self._pipeline.mean_square is None else {"mean_square": self._pipeline.mean_square}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decision = Decision(**state["decision"])
        self.tally = None if state["tally"] is None else Tally(**state["tally"])
        self.meter.load(state["stats"])
        self._square, self._history = state.get("square"), state.get("history")
        coming = None
        if self.wish is not None and (accepted := state["wish"]["accepted"]) is not None:
            self.wish.accept(set(accepted), self._fragment.weights.buckets.cap_bytes)
            coming = self.wish.coming
        self._pipeline.load_state_dict(state["arrived"], state.get("mean_square"), coming)
        self.phase = Phase.LOADED

    def record(self, number: int, **changes: Any) -> Round:
        """Return a record of it, with what has changed since the one before."""
        assert self.tally is not None
        decision, stats, mean_square = self.decision, self.meter.stats(), self._pipeline.mean_square
        plain_norm = self.norm if mean_square is None else math.sqrt(mean_square)  # before it was lengthened
        busy = stats.seconds_voting + stats.seconds_encoding + stats.seconds_landing
        return Round(
            number=self.ballot.number,
            members=self._generation.ids,
            step=self.request.position,
            fragment=number,
            dropped=self.is_dropped,
            weights=tuple(factor / decision.total for factor in decision.factors) if decision.total else (),
            norms=self.tally.norms,
            norm=self.norm,
            cosine=_cosine(plain_norm, decision, self.tally.norms),
            left_out={self._generation.ids[rank]: why for rank, why in decision.left_out.items()},
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            seconds_exposed=busy if self.job is None else self.job.waited,
            seconds_hidden=0.0 if self.job is None else self.job.hidden_s,
            seconds_voting=stats.seconds_voting,
            seconds_encoding=stats.seconds_encoding,
            seconds_landing=stats.seconds_landing,
            **changes,
        )


def _cosine(norm: float, decision: Decision, norms: tuple[float, ...]) -> float:
    """From |sum f_i d_i|^2 = sum f_i^2 |d_i|^2 + the products of different replicas."""
    ways = [factor * norm for factor, norm in zip(decision.factors, norms, strict=True) if factor]
    squares = sum(way * way for way in ways)
    between = sum(ways) ** 2 - squares
    cosine = ((norm * decision.total) ** 2 - squares) / between if between > 0 else 0.0
    return max(-1.0, min(1.0, cosine))  # but for rounding


def _kept(said: Ballot | Tally) -> dict[str, Any]:
    """Return the fields that a checkpoint keeps: all but those that are of this run alone."""
    return {name: value for name, value in asdict(said).items() if name not in ("awaited", "mark", "marks", "trained")}
