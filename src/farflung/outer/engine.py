# SPDX-License-Identifier: Apache-2.0
"""The engine: counts steps, and launches and applies what is due after them.

delta_k = anchor - local_k;  mean = aggregate(codec(delta_k));  anchor <- outer_opt(anchor, mean);
local_k <- merge(local_k, anchor)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.base.causes import cause_of
from farflung.base.errors import ConfigError, StateError
from farflung.base.lazy import LazyModule
from farflung.base.sizes import num_buffers_among
from farflung.comm.group import Group
from farflung.comm.recording import unrecorded
from farflung.comm.shards import reshard
from farflung.comm.torch_group import explained
from farflung.exchanged.replica import Replica
from farflung.exchanged.structure import check_form, check_state, identity_of
from farflung.methods.inner import hooks_of
from farflung.methods.recipe import Recipe, unfit
from farflung.methods.schedule import Change, Launch, Schedule
from farflung.outer.checks import (
    check_arguments,
    check_attached,
    check_report,
    checked_items,
    default_bucket_bytes,
    groups_of,
)
from farflung.outer.chooser import Chooser
from farflung.outer.gradients import GradientWarmup, kept_local
from farflung.outer.membership import Leaving, Membership, fixed_membership
from farflung.outer.notices import Notices, OpenEnd, Twins
from farflung.outer.quorum import Quorum
from farflung.outer.rounds import Rounds
from farflung.outer.stats import Meter, Round, Stats
from farflung.outer.sync import Sync
from farflung.outer.timetable import Timetable

if TYPE_CHECKING:
    from farflung.methods import arguments as arguments
    from farflung.methods.arguments import OuterConfig
else:
    arguments = LazyModule("farflung.methods.arguments")  # recipes by name, and every published method


class OuterLoop:
    """Trains replicas of a model independently and synchronizes them every H steps, in any torch loop.

        with OuterLoop(model, diloco(every=32)) as outer:
            for batch in loader:
                loss(model(batch)).backward()
                optimizer.step(); optimizer.zero_grad()
                outer.step()                      # or once, before the loop: outer.attach(optimizer)

    Creating it, and leaving its block normally, are collectives: at the start every rank gets the trainable weights and
    buffers of rank 0; at the end ranks that have no more data stay in the rounds (with weight 0) until all ranks have
    arrived, and a last round leaves all replicas bitwise equal. Leaving the block through an exception sends nothing;
    the other ranks then get a `RankFailure` that names the rank. A loop that has ended raises `StateError`.

    In a round each rank is weighted by the steps that it has completed since the last one. If the weights of any rank
    are not finite, all ranks drop the round: they keep their own weights, and the round is counted, with a warning. A
    rank whose floating buffers are not finite gets those of the others. Floating buffers are averaged, integer buffers
    take the maximum; `.grad` is never touched.

    Nets may train in turns, in different ones on different ranks: what an optimizer of torch's steps on any rank is in
    the next round, and what none has trained for a whole round costs nothing. Steps of other optimizers count for all
    that requires gradients.

    The model may change between rounds, if it changes on all ranks in the same way: layers added or replaced, adapters,
    pruning, parametrizations, parameters untied, another dtype. The next round uses the changed model.
    The anchor of a new parameter starts at the mean over the ranks; the other anchors are kept.

    Args:
        model: the model to train, either plain or wrapped in a way that keeps its parameters in place. torch's DDP
            keeps its gradients and buffers on their rank until the loop ends; in a warm-up it averages them as usual.
        recipe: from `farflung.outer`, such as `local_sgd(8)`; or the name of one, which takes its defaults.
        group: the replicas. None: all ranks of `torch.distributed`, or this process alone if it is not initialized.
        island: the ranks that train one replica together: by `fully_shard`, `parallelize_module` or both over them, or
            by DDP among them. None: each rank has a replica of its own. `group` then has the ranks that hold the same
            values in each island.
        mesh, outer: a `DeviceMesh` and the name of its dimension along which replicas are, in place of `group` and
            `island`, which is all other dimensions: a collective, if these are several.
        membership: who takes part, where replicas come and go (`farflung.outer.membership`), in place of `group` and
            `island`. None: these ranks, in every round; one that is lost ends the loop.
        inner: the inner optimizer, for recipes that use its learning rate or synchronize its state.
        bucket_bytes: size of the buckets that are copied and sent. Two of them are kept in memory, four with more than
            two ranks, or a whole fragment if its exchange overlaps with training. None: the recipe's value, or else an
            eighth of the trainable parameters, at least 4 MB (small enough to stay in a cache) and at most 12.5 MB.
            Larger buckets pay off on links with high bandwidth and high latency, such as 1 Gbit/s at 50 ms.
        chooser: chooses the recipe for `auto`; an Accelerator and `farflung launch` have one.

    Attributes:
        listeners: functions that are called with each `Round` when it ends.
        open_end: prints a line where the process ends, or the loop is dropped, and nobody has ended the loop.

    Raises:
        ConfigError: the model has no shapes yet, its group can't send from its device, or the recipe does not fit it.
        CollectiveMismatch: the ranks have different models or recipes.
        RankFailure: a rank left or died.
    """

    @unrecorded()
    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | OuterConfig | str,
        group: Group | None = None,
        *,
        inner: Optimizer | None = None,
        island: Group | None = None,
        mesh: DeviceMesh | None = None,
        outer: str | None = None,
        membership: Membership | None = None,
        bucket_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        chooser: Chooser | None = None,
    ) -> None:
        if mesh is not None or outer is not None:
            group, island = groups_of(mesh, outer, is_alone=group is None and island is None and membership is None)
        check_arguments(model, group, inner, island, membership, bucket_bytes, clock)
        check_report(recipe)
        recipe = recipe if isinstance(recipe, Recipe) else arguments.chosen_recipe(recipe)
        cap_bytes = bucket_bytes or recipe.bucket_bytes or default_bucket_bytes(model)
        on_cpu = all(parameter.is_cpu for parameter in model.parameters())
        membership = membership or fixed_membership(group, island, on_cpu)
        island = membership.island
        if why := unfit(recipe, membership.most, membership.is_fixed):
            raise ConfigError(why)
        self._chooser = chooser = chooser or Chooser()
        recipe = chooser.first(recipe, membership)
        self._meter = Meter()
        self._hooks: list[RemovableHandle] = []
        self._open, self.is_driven = True, False  # by who counts the steps of prepared or attached optimizers
        self._timetable = timetable = Timetable(recipe, clock, inner)
        this = weakref.ref(self)
        self._ddp = kept_local(model, island, lambda: (loop := this()) is None or not loop._open or loop.is_warming)
        self._model = model = model if self._ddp is None else self._ddp.module
        replica_of = partial(_replica_of, model, cap_bytes, membership)
        replica = replica_of(recipe, None)
        self._quorum = quorum = Quorum(membership, recipe, replica, timetable, self._meter)
        twins = Twins(are_allowed=recipe.same_data)
        self.listeners: list[Callable[[Round], None]] = [Notices(quorum, timetable).round_ended]
        self._rounds = Rounds(replica, timetable, quorum, self._meter, self.listeners, twins)
        chooser.bind(model, quorum)
        quorum.under_way = weakref.proxy(self._rounds)  # or a loop that is dropped would keep its model
        by_ddp = self._ddp is not None and membership.is_fixed  # a replica that comes and goes is a world of its own
        self._warmup = GradientWarmup(model, timetable, quorum, self._meter, by_ddp)
        self._sync = Sync(timetable, quorum, self._rounds, self._warmup, self._meter, chooser, replica_of)
        self._sync.enter()
        self.open_end = OpenEnd(weakref.WeakMethod(self._sync.note_weights) if island.size == 1 else lambda: None)
        self._finalizer = weakref.finalize(self, self.open_end.report)
        self._leaving = membership.leaving()

    def count(self, done: bool = True, items: float = 0) -> None:
        """Count one attempted optimizer step, without communication.

        Args:
            done: False for a step that was skipped because fp16 gradients overflowed. It advances the schedule, so that
                the ranks stay aligned, but adds no weight.
            items: number of samples or tokens in the step, for recipes that weight replicas by them.

        Raises:
            ConfigError: the recipe weights replicas by items, and none are given.
        """
        self._check_open()
        items = checked_items(items, done, self._timetable.recipe)
        if self._hooks and not done:
            self._warmup.check_averaged()
        is_shared = self._warmup.makes_alike()
        self._timetable.position += 1
        self._quorum.welcome = None
        self._sync.note_step()
        self._meter.add("attempts")
        if done:
            if not is_shared:
                self._rounds.replica.count(self._timetable.recipe.work_of(items))
            self._meter.add("steps")
        self.open_end.steps += not is_shared and self._quorum.group.size > 1
        if self._timetable.position == self._timetable.recipe.warmup and self._warmup.are_alike:
            self.reset_anchor()

    def sync_if_due(self) -> None:
        """Run what the schedule has made due since the last call; a round that was due several times runs once."""
        self._check_open()
        self._warmup.end_if_due()
        for due in self._timetable.until_now(self._quorum.generation.island):
            if self._sync.choose() or not due:
                continue
            with self._meter.timed("exposed"), unrecorded():
                self._sync.run(due)
            launches = [action for action in due if isinstance(action, Launch)]
            if self._timetable.recipe.leaves_alike and any(launch.level == 0 for launch in launches):
                self.open_end.steps = 0
            if launches:
                self._timetable.begin_round()  # not before the wait for slower ranks, which would grow with each round
        if self._leaving is not None and self._leaving.is_due():
            self._leave_after_a_round(self._leaving)

    def _leave_after_a_round(self, leaving: Leaving) -> None:
        """Bring the steps since the last round into the next one, and end this process."""
        with unrecorded():
            if self.steps_since_sync > 0 and not self.is_warming:
                self._sync.run_next()  # else all have the same already
            self._rounds.apply_all()
        self._end(is_in_step=False, reason=leaving.reason)
        leaving.leave()

    def step(self, items: float = 0) -> None:
        """Count one completed optimizer step and run what is due; call it after each `optimizer.step()`.

        Raises:
            StateError: the recipe averages gradients in its first steps, but those of this step were not averaged: call
                `average_gradients` before `optimizer.step()`, or `attach` the optimizer. Or the steps are counted
                already, by `attach` or `Accelerator.outer`.
        """
        self._check_open()
        if self.is_driven:
            raise StateError("step: the optimizer's steps are counted already. Leave step() out, or each counts twice.")
        self._warmup.check_averaged()
        self.count(items=items)
        self.sync_if_due()

    def average_gradients(self) -> None:
        """In a warm-up, average the gradients of all ranks in place: a collective. Later do nothing.

        Call it once a step, after the last backward pass before an optimizer steps: if optimizers have backward passes
        of their own, as in a GAN, before the step of each.
        """
        self._check_open()
        self._warmup.average()

    def attach(self, optimizer: Optimizer, *others: Optimizer) -> OuterLoop:
        """Call `step` automatically after each step of `optimizer`, until the loop ends. Returns the loop.

        With `others`, which train the rest of the model, `step` is called once all of them have stepped; a recipe that
        uses the learning rate takes that of the first.

        A `GradScaler` does not call the optimizer when it skips a step; call `count(done=False)` and `sync_if_due()`
        yourself in that case. In a warm-up, also call `average_gradients()` before `scaler.step(optimizer)`, so that
        all ranks skip the same steps. With `others` call `step()` yourself instead of attaching them.

        Raises:
            ConfigError: an optimizer trains nothing of the model, the recipe weights replicas by items, or it
                synchronizes the state of the inner optimizer, and there are several.
            StateError: an optimizer is attached already.
            Unsupported: at a step of a warm-up that is given a closure, which computes gradients after the averaging.
        """
        self._check_open()
        optimizers = (optimizer, *others)
        if self._hooks:
            raise StateError("attach: an optimizer is attached already, and its steps would be counted twice.")
        check_attached(optimizers, self._model, self._timetable.recipe)
        self._timetable.know(optimizer)
        self._warmup.optimizers = optimizers

        def stepped() -> None:
            self._warmup.check_averaged()
            self.count()
            self.sync_if_due()

        self._hooks += hooks_of(optimizers, self._warmup.before_step, stepped)
        self.is_driven = True
        return self

    def change_schedule(self, every: int, delay: int | None = None) -> None:
        """Propose rounds of `every` steps for the rest of the run. It is enough if one rank does so; no collective.

        The proposal travels with the votes of this rank's next round. Once that was applied, H changes on all ranks
        after the same step: at the end of the next round, or of the next one of the last fragment. What is under way
        then is applied first. A learning rate and a momentum of the outer optimizer that follow from H by default
        change too. If several ranks propose at once, the lowest of them decides; of one, the latest proposal counts.

        Args:
            delay: the number of steps between sending a fragment and applying the result, if the recipe has a delay.
                None: as it is, at most `every`.

        Raises:
            ConfigError: the recipe's rounds do not follow from one H, or can't have this one.
            StateError: the recipe has changes of its own that are still to come.
        """
        self._check_open()
        self._timetable.propose(every, delay, self._quorum.needs.num_votes)

    def reset_anchor(self) -> None:
        """Take the current weights as the new anchor, for example after loading weights. No collective.

        Exchanges in flight are waited for and discarded, and so is what error feedback has kept back. All ranks must
        call it, and with the same weights: nothing compares them. Before the first step of a newcomer the weights that
        all share now take the place of its own instead.
        """
        self._check_open()
        with unrecorded():
            if self.is_newcomer:
                self._quorum.return_to_welcome()
            else:
                self._rounds.forget()
                self._rounds.replica.reset()

    def flush(self) -> None:
        """Stay in the rounds until every rank has called this; afterwards all replicas are bitwise equal.

        The last round averages the steps since the previous one; if no rank has made any, only votes and buffers are
        exchanged, and weights that a script has set since are the new common ones (their mean, if they differ), if
        a round leaves all alike. If it is dropped, replicas return to their anchor, or without one take the mean of
        those with finite weights. Afterwards the schedule continues on all ranks from the furthest step of any rank.
        """
        self._check_open()
        with unrecorded():
            if self._chooser.is_measuring:
                self._warmup.stay()
                self._sync.choose(is_early=True)
            self._sync.flush()
        self.open_end.steps = 0

    @contextmanager
    def synced(self, module: nn.Module | None = None) -> Iterator[None]:
        """Put the weights to evaluate into the model, or into its part `module`; afterwards restore this rank's own.

        They are the anchor, with the buffers of its round; under Nesterov momentum, the slow weights that the anchor is
        a step ahead of. With a common anchor nothing is sent, nor in a warm-up, when the weights themselves are common.
        Recipes without one, or with one per replica, average the weights of all ranks for this: a collective.
        """
        self._check_open()
        with self._sync.lent(None if module is self._model else module):
            yield

    def close(self) -> None:
        """Flush and end the loop, with the weights of `synced` in the model. Closing it again does nothing."""
        if self._open:
            self.flush()
            if self._timetable.recipe.optimizer is not None:  # else these are the weights of the flush
                self._sync.lend()
            self._sync.note_weights()
            self._end(is_in_step=True)

    def detach(self) -> None:
        """End the loop without communication: every rank keeps its current weights."""
        if self._open:
            self._end(is_in_step=False)

    @unrecorded()
    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume bitwise, also in the middle of a round or of an exchange.

        It holds the anchor and its optimizer, this rank's trainable weights and buffers, error feedback, the results of
        exchanges in flight (it waits for them), schedule position, weight and counters. Each rank must save its own.
        Within `synced`, or in an evaluation, the model has other weights than these: a StateError.
        """
        if self._sync.num_lent:
            raise StateError("state_dict() within synced() or eval(): the model has other weights. Call it after that.")
        return {
            **identity_of(self._rounds.replica.parts, self._quorum.generation.island.shard),
            "layout": self._rounds.replica.layout,
            **self._timetable.state_dict(),
            "are_alike": self._warmup.are_alike,
            "stats": self.stats().saved(),
            "rounds": self._rounds.state_dict(),
            **self._chooser.state_dict(),
        }

    @unrecorded()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`'s result, including the model's weights. No collective: each rank loads its own.

        A newcomer to a run of others stays where they are, with their weights, whatever the state is.

        Raises:
            ConfigError: it is no such state, or of another model or recipe.
        """
        self._check_open()
        check_form("load_state_dict", state)
        if not self.is_newcomer:
            self._sync.replace(self._chooser.resumed(state))
        replica, shard = self._rounds.replica, self._quorum.generation.island.shard
        self._rounds.align(state, lambda: check_state(state, identity_of(replica.parts, shard)))
        reshard(self._model.modules())
        if self.is_newcomer:
            self.reset_anchor()
            return
        self._rounds.load_state_dict(state["rounds"])
        self._timetable.load_state_dict(state)
        self._quorum.adopt_change()
        self._warmup.are_alike, self._warmup.is_over = state["are_alike"], False
        self._meter.load(state["stats"])

    def __enter__(self) -> OuterLoop:
        self._check_open()
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
            cause = error if self._quorum.generation.island.size == 1 else explained(error, self._quorum.group)
            self._leave(cause)
            if cause is not error:
                raise cause from error

    # ---- questions, which need no communication

    @property
    def is_warming(self) -> bool:
        """Whether the next step belongs to the warm-up, in which gradients are averaged and weights are not."""
        return self._timetable.is_warming

    @property
    def position(self) -> int:
        """Number of attempted steps since the loop began; a replica that came later counts those of the others."""
        return self._timetable.position

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step has, after a warm-up."""
        return self._timetable.schedule

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of H: the recipe's own, and those agreed on during the run."""
        return self._timetable.changes

    @property
    def steps_since_sync(self) -> int:
        """Number of attempted steps since the latest round was launched."""
        return self._timetable.position - self._timetable.began

    @property
    def is_newcomer(self) -> bool:
        """Whether this replica joined a run of others, and has made no step since."""
        return self._quorum.welcome is not None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the current replicas: the one to write what all of them share."""
        return self._quorum.group.rank == 0

    @property
    def has_anchor(self) -> bool:
        """Whether this rank holds the weights that all ranks last agreed on, in addition to those that it trains."""
        return self._timetable.recipe.has_anchor

    def stats(self) -> Stats:
        """Return the costs of the rounds so far: their number, bytes and seconds."""
        return self._meter.stats()

    def advice(self, by_flags: bool = False) -> str:
        """Return the changes that the statistics so far suggest, as `--outer-` flags or keywords; empty if none."""
        return self._meter.advice(by_flags, self._quorum.membership.is_fixed, is_auto=self._chooser.sets_options)

    def _check_open(self) -> None:
        if not self._open:
            raise StateError("This outer loop has ended. Build a new OuterLoop to continue.")

    def _leave(self, error: BaseException) -> None:
        self._quorum.generation.leave(f"{type(error).__name__}: {error}"[:500], cause_of(error))
        self._end(is_in_step=False)

    def _end(self, is_in_step: bool, reason: str = "") -> None:
        """End the loop. The ranks of an island come here together `is_in_step` with others, or if there is a reason."""
        self._open = False
        self._rounds.replica.trained.moves.end()
        self._finalizer.detach()
        if self._leaving is not None:
            self._leaving.stop()
        if self._ddp is not None:
            self._ddp.end()
        self._quorum.free(reusable=is_in_step)
        is_alone = not (is_in_step or reason)
        self._quorum.membership.end("its loop has ended" if is_alone else reason, is_alone)
        for hook in self._hooks:
            hook.remove()


def _replica_of(
    model: nn.Module, cap_bytes: int, membership: Membership, recipe: Recipe, before: Replica | None
) -> Replica:
    is_whole = recipe.is_whole or membership.island.size > 1
    num_buffers = None if is_whole else num_buffers_among(membership.most)
    with before.trained.as_exchanged(model) if before else nullcontext():
        return Replica(model, recipe, cap_bytes, num_buffers, membership.island.size)
