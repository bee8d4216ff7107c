# SPDX-License-Identifier: Apache-2.0
"""The engine: asks the schedule what is due, launches it, applies it.

    delta_k = anchor - local_k;  mean = aggregate(codec(delta_k));  anchor <- outer_opt(anchor, mean);
    local_k <- merge(local_k, anchor)

A round is a vote, a reduction, and the writing back. The vote comes first, as it decides what is reduced: with which
weights, and whether at all. After it all ranks know the same, so that no rank waits for one that drops the round.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.base.errors import ConfigError, StateError
from laconic.comm.bucket import CAP_BYTES
from laconic.comm.group import Group, SoloGroup, TorchGroup
from laconic.outer.exchange import Flight
from laconic.outer.membership import BALLOT_BYTES, Ballot, Static, Tally
from laconic.outer.part import Part, describe
from laconic.outer.recipes import Recipe
from laconic.outer.report import Meter, Stats
from laconic.outer.schedule import Apply, Launch

_CPU_BUCKET_BYTES = 4 * 2**20


class OuterLoop:
    """Lets the replicas of a model train alone and agree now and then, in any torch loop.

        with OuterLoop(model, diloco(every=32)) as outer:
            for batch in loader:
                loss(model(batch)).backward()
                optimizer.step(); optimizer.zero_grad()
                outer.step()                      # or once, before the loop: outer.attach(optimizer)

    Building one, and leaving its block normally, are collectives: at the start every rank gets the trainable weights
    and buffers of rank 0, at the end ranks that have no more data stay in the rounds (with weight 0) until all have
    come, and a last round leaves all replicas with the same bits. An exception leaves the block without a collective;
    the other ranks then get a `RankFailure` that names the one that left.

    In a round each rank counts by the optimizer steps it has really done since the last one. Weights that are not
    finite on any rank make all ranks drop the round: they keep their own weights, and it is counted and warned of. A
    rank whose floating buffers are not finite gets those of the others. Parameters that are frozen when the loop is
    built cost nothing and must stay so; floating buffers are averaged, integer ones take the maximum; `.grad` is never
    touched.

    Args:
        model: what is trained; plain, or wrapped in a way that keeps its parameters in place.
        recipe: from `laconic.outer`, such as `local_sgd(8)`.
        group: the replicas. None: all ranks of `torch.distributed`, or this process alone where that is not in use.
        bucket_bytes: how much is copied and sent at a time; twice this is kept in memory. None: 4 MB on the CPU, which
            stay in its cache between copy and wire, and 25 MB elsewhere. More pays on a line that is both fast and
            long, such as 1 Gbit/s over 50 ms.

    Raises:
        ConfigError: the model has no shapes yet, or is where its group can't send from.
        CollectiveMismatch: the ranks have different models or recipes.
        RankFailure: a rank left or died.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, group: Group | None = None, *, bucket_bytes: int | None = None
    ) -> None:
        if group is None:
            group = TorchGroup() if dist.is_available() and dist.is_initialized() else SoloGroup()
        fragments = recipe.fragments(model)
        on_cpu = all(parameter.is_cpu for parameter in model.parameters())
        if on_cpu and not group.speaks("cpu"):
            raise ConfigError(
                "The model is on the CPU, and its group can't send from there (NCCL alone can't). Move the model to "
                'the GPU, or initialize torch.distributed with the backend "cpu:gloo,cuda:nccl".'
            )
        if bucket_bytes is None:
            bucket_bytes = _CPU_BUCKET_BYTES if on_cpu else CAP_BYTES
        self._group = group
        self._recipe = recipe
        self._members = Static(group, describe(recipe, fragments, bucket_bytes))
        self._meter = Meter()
        self._votes = 0
        self._position = 0  # attempts since the schedule began
        self._synced = 0  # the position up to which all that was due has been done
        self._fresh = 0  # steps done since this rank's values were last agreed on
        self._flights: dict[int, Flight] = {}
        self._hooks: list[RemovableHandle] = []
        self._open = True
        self._warned = False
        self._model = model
        with torch.no_grad():
            self._vote(Ballot(0, 0, 0.0, True, False))
            self._parts = [Part(fragment, recipe, group, bucket_bytes) for fragment in fragments]

    def count(self, done: bool = True) -> None:
        """Count one attempted optimizer step without exchanging anything.

        Args:
            done: False for a step that was skipped, as fp16 gradients overflowed. It moves the schedule on, so that
                the ranks stay aligned, but adds no weight.

        Raises:
            StateError: the loop has ended.
        """
        self._check_open()
        self._position += 1
        self._meter.add("attempts")
        if done:
            self._fresh += 1
            self._meter.add("steps")

    def sync_if_due(self) -> None:
        """Do what the schedule has asked for since the last call, once however often it asked."""
        due = dict.fromkeys(
            word for step in range(self._synced + 1, self._position + 1) for word in self._recipe.schedule(step)
        )
        self._synced = self._position
        if due:
            with self._meter.timed("exposed"), torch.no_grad():
                for word in due:
                    self._obey(word)

    def step(self) -> None:
        """Count one completed optimizer step, and exchange what is due: call it after `optimizer.step()`."""
        self.count()
        self.sync_if_due()

    def attach(self, optimizer: Optimizer) -> OuterLoop:
        """Call `step` by itself after each step of `optimizer`, until the loop ends. Returns the loop.

        A `GradScaler` does not call the optimizer when it skips a step, so say `count(done=False)` and `sync_if_due()`
        yourself then.

        Raises:
            ConfigError: the optimizer trains nothing of the model.
        """
        mine = {id(parameter) for parameter in self._model.parameters()}
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError("attach: this optimizer has no parameter of the outer loop's model.")
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.step()))
        return self

    def flush(self) -> None:
        """Stay in the rounds until every rank has come here; then all replicas have the same bits.

        The last round averages what was done since the one before; where no one has done anything only votes are
        exchanged. The schedule begins afresh afterwards.

        Raises:
            StateError: the loop has ended.
        """
        self._check_open()
        with self._meter.timed("exposed"), torch.no_grad():
            finished = False
            while not finished:
                votes = [self._launch(number, finished=True) for number in range(len(self._parts))]
                finished = all(votes)
                for number in list(self._flights):
                    self._apply(number)
        self._position = self._synced = 0

    def close(self) -> None:
        """Flush, and end the loop. It can't be used afterwards; closing it again does nothing."""
        if self._open:
            self.flush()
            self._end()

    def stats(self) -> Stats:
        """Return what the rounds have cost so far."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to go on bit by bit where this rank stands, also in the middle of a round.

        It holds the anchor and its optimizer, this rank's own trainable weights and buffers, the schedule's position,
        the weight and the counters: each rank must save its own.
        """
        return {
            "description": self._members.description,
            "votes": self._votes,
            "position": self._position,
            "synced": self._synced,
            "fresh": self._fresh,
            "stats": asdict(self.stats()),
            "parts": [part.state_dict() for part in self._parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood, with the model's weights too. No collective: each rank loads its own.

        Raises:
            ConfigError: the state is of another model or recipe.
        """
        if state["description"] != self._members.description:
            raise ConfigError(
                "This state was saved by another outer loop.\n"
                f"  saved: {state['description']}\n  here:  {self._members.description}"
            )
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self._votes, self._fresh = state["votes"], state["fresh"]
        self._position, self._synced = state["position"], state["synced"]
        self._meter.load(state["stats"])

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.close()
            except BaseException as failure:
                self._leave(failure)
                raise
        elif self._open:
            self._leave(error)

    def _check_open(self) -> None:
        if not self._open:
            raise StateError("This outer loop has ended. Build a new OuterLoop to go on.")

    def _leave(self, error: BaseException) -> None:
        self._end()
        self._group.leave(f"{type(error).__name__}: {error}"[:500])

    def _end(self) -> None:
        self._open = False
        for hook in self._hooks:
            hook.remove()

    def _obey(self, word: Launch | Apply) -> None:
        if isinstance(word, Launch):
            self._launch(word.fragment, finished=False)
        else:
            self._apply(word.fragment)

    def _launch(self, number: int, finished: bool) -> bool:
        """Vote, and send a fragment off if the vote says so; return whether all ranks are finished."""
        part = self._parts[number]
        with self._meter.timed("packing"):
            part.rebind()
            largest, sound = part.look_over() if self._fresh else (0.0, True)
        tally = self._vote(Ballot(self._votes, self._fresh, largest, sound, finished))
        unfit = tally.unfit(self._recipe.codec.limit)
        if unfit:
            self._drop(unfit)
        elif any(tally.weights):
            lanes = part.lanes(tally, self._group)
            self._flights[number] = Flight(lanes, self._fresh > 0, self._group, self._meter)
        return tally.finished

    def _apply(self, number: int) -> None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            flight.land()
            self._fresh = 0
            self._meter.add("rounds")

    def _vote(self, ballot: Ballot) -> Tally:
        with self._meter.timed("voting"):
            tally = self._members.open(ballot)
        self._votes += 1
        self._meter.add("bytes_voting", (self._group.size - 1) * BALLOT_BYTES)
        return tally

    def _drop(self, unfit: list[int]) -> None:
        self._meter.add("dropped_rounds")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Rank {self._group.rank}: a round was dropped, as the weights of ranks {unfit} are not finite, or too "
                f"large for {self._recipe.codec}. All ranks go on with their own weights. Further dropped rounds are "
                "only counted, in stats().dropped_rounds.",
                RuntimeWarning,
                stacklevel=5,
            )
