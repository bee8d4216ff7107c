# SPDX-License-Identifier: Apache-2.0
"""Drives an outer loop for a host: an Accelerator, or `--outer` around torch's DDP.

The host reports attempted steps of the model's optimizers and where passes over the training data begin and end. A loop
that follows the data is flushed once for each pass, where every rank arrives: in the optimizer's step on the last
batch, or where the pass ends if there was none. After a pass that was left early the flush is owed, and happens at the
next call that all ranks must make. Passes of fewer steps than a round that follow each other, as in scripts that take
each batch by `next(iter(loader))`, are no epochs, and owe none; nor does a short pass that is begun again and again
during a longer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from farflung.auto.trial import RecipeTrial
from farflung.auto.tuner import LineTuner
from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.words import counted
from farflung.comm.group import Group
from farflung.hosts.evaluation import evaluates
from farflung.members.elastic import Elastic
from farflung.methods.inner import IterationTracker
from farflung.methods.recipe import Recipe, unfit
from farflung.methods.schedule import TrialSchedule
from farflung.outer.engine import OuterLoop


class DataPass(Protocol):
    """A pass over data that is under way."""

    num_batches: int  # handed out so far
    end_of_dataloader: bool  # the latest batch was the last one
    is_beside: bool  # a longer pass, which began before it, continues meanwhile

    @property
    def loader(self) -> Any:
        """Its `base_dataloader` identifies the data; its `share` is an elastic replica's part of them, or None.

        Its length is the number of batches; TypeError: unknown.
        """


@dataclass(frozen=True)
class LoopMembers:
    """The replicas of a loop: a fixed `group` of islands, or a `membership`.

    Attributes:
        slots: the data that elastic replicas share, a `farflung.data.slots.Slots`; None: they share none.
    """

    group: Group | None = None
    island: Group | None = None
    membership: Elastic | None = None
    slots: Any = None


class Driver:
    """An outer loop, and what it hears from its host. Making one is a collective.

    Args:
        inner: the optimizer whose learning rate and state the recipe may use.
        planned: returns the steps for which the learning rate schedule is made, None if unknown.
        warn: called with advice for a run that is too short for its recipe.
        items: returns the samples or tokens of the current step, for recipes that weight replicas by them.

    Attributes:
        iteration: determines which attempted steps are counted; the host adds the optimizers that it expects.
        each_step: rounds run inside `optimizer.step()`; False leaves them to calls of `sync_if_due`.
        attempts: iterations counted.
        epochs: flushes the loop after each pass over the training data; None: nothing does.
        models: the models of the loop, each with an `evaluation`; the host sets them.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        members: LoopMembers,
        inner: Optimizer,
        planned: Callable[[], int | None],
        warn: Callable[[str], None],
        items: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.recipe, self._model = recipe, model
        self.models: Sequence[Any] = ()
        self._planned, self._warn, self._items = planned, warn, items
        self.iteration = IterationTracker(())
        self.each_step = True
        self.attempts = 0
        self.epochs: EpochTracker | None = None
        self._pass: Callable[[], DataPass | None] = lambda: None  # of the latest step, as long as it exists
        self._before_pass = 0  # attempts
        membership = members.membership
        if membership is not None and (why := unfit(recipe, membership.most, is_fixed=False, by_ddp=True)):
            raise ConfigError(why)
        tuner = None
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._is_adapter = 2 * trained < sum(parameter.numel() for parameter in model.parameters())
        if recipe.is_undecided:
            tuner = LineTuner(
                planned, self.pass_steps, lambda: tuple(float(group["lr"]) for group in inner.param_groups)
            )
        chooser = None if tuner is None else RecipeTrial(tuner)
        self.loop = OuterLoop(
            model, recipe, members.group, island=members.island, membership=membership, inner=inner, chooser=chooser
        )
        self.loop.is_driven = True
        if tuner is not None:
            tuner.follow(self.loop)
        self.has_own_evaluation = evaluates(inner)
        self._data: Any = None  # the batches that rounds bring into the common weights
        if members.slots is not None:
            self._data = members.slots.follow(membership)
            self.loop.listeners.append(self._data.round_ended)

    def step_attempted(self, optimizer: Optimizer, done: bool, around: DataPass | None) -> None:
        """Count an attempted step of one of the optimizers, run the rounds that are due, and flush on the last batch.

        Args:
            done: False for a step that was skipped because fp16 gradients overflowed.
            around: the pass whose loop the step is in, if it is known.
        """
        if around is not self._pass():
            self._pass = (lambda: None) if around is None else weakref.ref(around)
            self._before_pass = self.attempts
        self._count(self.iteration.step_attempted(optimizer, done), around)
        if not self.iteration.is_open and self.each_step:
            self.loop.sync_if_due()
        if self.epochs is not None:
            self.epochs.step_attempted(around, self.iteration.is_open, getattr(self.loop.schedule, "every", 1))

    def flush(self) -> None:
        """Count an iteration that some optimizers have not ended, and flush the loop: a collective."""
        lent = [one.evaluation for one in self.models if one.evaluation.is_on]  # it may call what the flush was owed to
        self.end_evaluations()
        self._count(self.iteration.close())
        self.loop.flush()
        for evaluation in lent:
            evaluation.change(False, self)

    def end_evaluations(self) -> None:
        """Put this rank's own weights back into all models, as rounds take them."""
        for one in self.models:
            one.evaluation.end()

    def pass_steps(self) -> int | None:
        """Return how many steps the pass over the data has that is under way; None: unknown."""
        now, steps = self._pass(), self.attempts - self._before_pass
        if now is not None and steps:
            with suppress(TypeError):  # a stream has no length
                return round(len(now.loader) * steps / now.num_batches)
        return None

    @property
    def timetable(self) -> str:
        """When there are rounds, for people."""
        after = f"a recipe is chosen after {TrialSchedule.every} steps"
        return after if self.recipe.is_undecided else str(self.loop.schedule)

    @property
    def lends(self) -> bool:
        """Whether `agreed` changes the model's weights."""
        return self.loop.has_anchor and not self.loop.is_warming

    def agreed(self, module: nn.Module | None = None) -> AbstractContextManager[None]:
        """Put the weights that all ranks last agreed on into the model, if the recipe keeps them; nothing is sent.

        `module`: the only one of several models that is to have them.
        """
        return self.loop.synced(module) if self.lends else nullcontext()

    def end(self, error: BaseException | None = None) -> None:
        """End the loop as the end of its `with` block would: a collective, unless there is an error."""
        try:
            if error is None:
                self._count(self.iteration.close())
            self.loop.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        finally:
            self._forget_data()

    def drop(self) -> None:
        """End the loop as it is. Nothing is exchanged."""
        self.loop.detach()
        self._forget_data()

    def _forget_data(self) -> None:
        if self._data is not None:
            self._data.end()
            self._data = None

    def _count(self, iterations: Iterable[bool], around: DataPass | None = None) -> None:
        """Count iterations that are over, without communication: True for each in which an optimizer has stepped."""
        for done in iterations:
            self.loop.count(done, self._items() if self.recipe.weighs_items else 0)
            self.attempts += 1
            if self._data is not None:
                if around is not None and around.loader.share is not None:
                    around.loader.share.check_trains()
                self._data.step_attempted(self.loop.position, self.loop.schedule.fragments)
            if self.attempts == 2:  # schedulers have followed the first step by now
                steps = self._planned()
                if steps is not None and (advice := self.recipe.few_rounds(steps)):
                    self._warn(advice)
                if self._is_adapter and self.loop.is_first and (advice := self.recipe.advice_for_adapters):
                    record(Kind.WARNING, message=advice)
                if steps is not None and self._data is not None and self.loop.is_first and (each := self.pass_steps()):
                    members = counted(self._data.claims.num_members, "replica")
                    updates = counted(steps, "update")
                    self._warn(f"training ends after {updates} of each of {members}: {steps / each:.3g} epochs.")


def together(models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that a loop is over, or a module of all of them."""
    return models[0] if len(models) == 1 else nn.ModuleDict({str(n): one for n, one in enumerate(models)})


class EpochTracker:
    """Flushes one outer loop after each pass over the training data.

    The training data are those of the loop around the optimizer's steps; other loaders, such as those of an evaluation,
    come and go without any exchange. A rank that gets no batch of a pass takes it for training when an earlier pass
    over that loader was, or when it has not trained at all yet.

    Args:
        flush: flushes the loop: a collective.

    Attributes:
        is_owed: a pass was left early, and the replicas have not been synchronized since.
        is_behind: there have been steps since they were synchronized.
        is_ahead: a pass has ended before its last batch was trained on, so the host flushes later.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush_loop = flush
        self.is_owed = self.is_behind = self.is_ahead = False
        self._pass: DataPass | None = None  # the one under way
        self._resumed: Any = None  # the data of the one that was under way in a loaded state, until the next step
        self._is_flushed = False  # in this pass
        self._made = 0  # attempts in this pass
        self._is_part = self._has_next = False  # this pass has fewer of them than a round; the next one has begun
        self._batch = self._steps = 0  # of this pass; attempts on it
        self._usual = 0  # attempts on the batch before
        self._data: list[Any] = []  # the loaders that were trained from
        self._share: Any = None  # of the latest pass

    def iteration_starts(self, loader: Any) -> None:
        if self._knows(loader):
            self._has_next = True
            self.is_owed = self.is_owed and not self._is_part
            self.flush_owed()

    def state_dict(self, data: Sequence[Any]) -> dict[str, Any]:
        """Return it as plain data, with places among what identifies the data of loaders."""
        now = self._resumed if self._pass is None else self._pass.loader.base_dataloader
        return {
            "data": [place for place, one in enumerate(data) if any(one is other for other in self._data)],
            "now": next((place for place, one in enumerate(data) if one is now), None),
            "is_owed": self.is_owed,
            "is_behind": self.is_behind,
            "is_flushed": self._is_flushed,
            "usual": self._steps or self._usual,
            "part": (self._made, self._is_part, self._has_next),
        }

    def load_state_dict(self, state: dict[str, Any], data: Sequence[Any]) -> None:
        here = dict(enumerate(data))
        self._data = [here[place] for place in state["data"] if place in here]
        self._resumed, self._usual = here.get(state["now"]), state["usual"]
        self._made, self._is_part, self._has_next = state.get("part", (0, False, False))
        self.is_owed, self.is_behind, self._is_flushed = state["is_owed"], state["is_behind"], state["is_flushed"]

    def iteration_ended(
        self, ended: DataPass, at_end: bool, may_train: bool | None = None, is_ahead: bool = False
    ) -> None:
        """Called after a pass.

        Args:
            may_train: whether it trains, though this rank made no step in it; None: unknown, so only if it was empty.
            is_ahead: the host reads ahead: it still trains on the last batch, and calls `flush_owed` after that.
        """
        self.is_ahead = is_ahead
        is_known = self._knows(ended.loader)
        is_resumed = self._resumed is not None and ended.loader.base_dataloader is self._resumed
        if ended is self._pass or is_resumed:
            self._pass, self._resumed, self._share = None, None, ended.loader.share
            if ended.is_beside and self._share is None:  # which each rank begins again when it has come to its end
                return
            if not self._is_flushed and at_end and not is_ahead:
                self.flush()
            self._is_part = self._is_part and not at_end and self._share is None
            self.is_owed = not self._is_flushed and not (self._is_part and self._has_next)
        elif at_end and (ended.num_batches == 0 if may_train is None else may_train):
            if is_known or (ended.num_batches == 0 and not self._data):
                self._share, self.is_owed = ended.loader.share, True
                if not is_ahead:
                    self.flush()
            elif not self._data:  # perhaps an evaluation by this rank alone, before it trains
                self.is_owed = True

    def step_attempted(self, around: DataPass | None, is_open: bool, every: int = 1) -> None:
        """Called after an attempted step, with the pass whose loop stands around it.

        `is_open`: other optimizers are still to step on this batch; `every`: the steps of a round.
        """
        self.is_behind = True
        if around is not self._pass:
            if around is None or self._resumed is None or around.loader.base_dataloader is not self._resumed:
                self._is_flushed, self._made = False, 0
            self._pass, self._resumed, self._batch, self._steps = around, None, 0, 0
            self._has_next = False
        self._made += 1
        self._is_part = self._made < every
        if around is None:
            return
        self._share = around.loader.share
        if not self._knows(around.loader):
            self._data.append(around.loader.base_dataloader)
        if around.num_batches != self._batch:
            self._usual = self._steps or self._usual
            self._batch, self._steps = around.num_batches, 0
        self._steps += 1
        # Not later, as many loops are left by `break` on their last batch.
        is_last = around.end_of_dataloader and (self._share is not None or not around.is_beside)
        if is_last and self._steps == self._usual and not (is_open or self._is_flushed):
            self.flush()

    def flush_owed(self) -> None:
        """Flush the loop if that is owed: a collective of all ranks."""
        if self.is_owed:
            self.flush()

    def flush(self) -> None:
        """Flush the loop, unless the others are in the middle of a later epoch than the latest pass."""
        self.is_owed = self.is_behind = self.is_ahead = False
        self._is_flushed = True
        share = self._share
        if share is not None and share.is_past:
            return
        self._flush_loop()
        if share is not None:
            share.synchronized()

    def _knows(self, loader: Any) -> bool:
        return any(loader.base_dataloader is other for other in self._data)
