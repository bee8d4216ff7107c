# SPDX-License-Identifier: Apache-2.0
"""The bridge between prepared objects and one outer loop: its driver, and the objects that must not send meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from farflung.base.errors import ConfigError
from farflung.comm.recording import uncompiled
from farflung.hosts.driver import Driver, EpochTracker, together
from farflung.hosts.elastic import members_of
from farflung.hosts.evaluation import MODE_LISTENERS, EvaluatedModel, follow_modes
from farflung.loop.optimizer import AcceleratedOptimizer, parameters_of
from farflung.loop.scheduler import planned_updates
from farflung.loop.state import ActiveLoader, Trace
from farflung.methods.recipe import Recipe
from farflung.outer.checks import check_inner
from farflung.process.log import get_logger
from farflung.resume.run import Run


class AttachedLoop(Driver):
    """An outer loop that is attached to prepared models and to the optimizer whose steps it counts: a collective.

    In the first steps of a recipe that begins with averaged gradients the model's strategy averages them as usual.
    After that gradients and buffers stay within their island: on their process, where each is one.

    Attributes:
        optimizer: the one that has most of the models' parameters; ConfigError if there is none.
    """

    def __init__(self, models: Sequence[nn.Module], recipe: Recipe, run: Run) -> None:
        self._run = run
        self.optimizer = optimizer = driving(nn.ModuleList(models), run.optimizers)
        self._owners: list[AcceleratedOptimizer] = []
        self._listeners: list[tuple[AcceleratedOptimizer, Callable[[bool], None]]] = []
        self._hooks: list[RemovableHandle] = []
        self._trace = Trace()
        self._counted: ActiveLoader | None = None  # the pass whose samples were counted last, and how many
        self._num_samples = self._num_items = 0
        self._backwards = optimizer.loop_state.backwards  # at the end of the latest step
        self._alone: ExitStack | None = None
        self._epochs_state: dict[str, Any] | None = None
        self._has_begun = False
        members = members_of(run.world.place, run.strategy.mesh, run.slots)
        if members.membership is not None and run.slots is not None:
            members.membership.data = run.slots.described()
        super().__init__(
            together([run.strategy.unwrap(model) for model in models]),
            recipe,
            members,
            optimizer.optimizer,
            lambda: planned_updates(
                (scheduler.scheduler for scheduler in run.schedulers if optimizer in scheduler.optimizers),
                1 if run.slots is None else run.slots.num_members,
            ),
            lambda advice: get_logger(__name__).warning(f"As the learning rate schedule has it, {advice}"),
            self._items_of_step,
        )
        self.models = [EvaluatedModel(model, run.strategy.unwrap(model), self._about_to_train) for model in models]
        self.follow_optimizers()
        if recipe.weighs_items:
            optimizer.loop_state.under_way.counts_samples = True
        self._choose_who_averages()

    def mode_changed(self, module: nn.Module, was_training: bool) -> None:
        """Put the agreed weights, which are saved too, into a model for an evaluation of a run by flags."""
        lends = was_training and self.attempts > 0 and self.epochs is not None
        for one in self.models:
            if one.holds(module):
                one.evaluation.change(module.training, self if lends else None)

    def follow_optimizers(self) -> None:
        """Follow the prepared optimizers that train the models, also those prepared after them.

        Raises:
            ConfigError: there are several, and the recipe synchronizes the state of one.
        """
        parameters = [parameter for one in self.models for parameter in one.model.parameters()]
        for optimizer in self._run.optimizers:
            if any(optimizer is owner for owner in self._owners) or not optimizer.owns(parameters):
                continue
            self._owners.append(optimizer)
            self.iteration.expect(optimizer)
            self._hooks.append(
                optimizer.optimizer.register_step_pre_hook(uncompiled(lambda *_: self._begin_where_it_is()))
            )
            self._listeners.append((optimizer, partial(self._stepped, optimizer)))
            optimizer.attached.append(self._listeners[-1][1])
            if self._alone is not None:
                optimizer.in_lockstep = optimizer.is_own = True
        check_inner("An outer loop", self.recipe, len(self._owners))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop, and where it stands in an iteration and in the passes over the data."""
        epochs = None if self.epochs is None else self.epochs.state_dict(self._bases)
        return {**self.loop.state_dict(), "epochs": epochs, "iteration": self.iteration.state_dict(self._owners)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.load_state_dict(state)
        self._choose_who_averages()
        if "iteration" in state:
            self.iteration.load_state_dict(state["iteration"], self._owners)
        self._epochs_state = state.get("epochs")
        if self.epochs is not None:
            self.follow_epochs()

    def follow_epochs(self) -> None:
        """Flush the loop after each pass over the training data, from where a loaded state stands."""
        self.epochs = EpochTracker(self.flush)
        follow_modes(self)
        if self._epochs_state is not None:
            self.epochs.load_state_dict(self._epochs_state, self._bases)

    @property
    def _bases(self) -> list[Any]:
        """What identifies the data of each prepared loader."""
        return [loader.base_dataloader for loader in self._run.loaders]

    def end(self, error: BaseException | None = None) -> None:
        self._detach()
        try:
            super().end(error)
        finally:
            self._average_everywhere()

    def drop(self) -> None:
        self._detach()
        super().drop()
        self._average_everywhere()

    def _detach(self) -> None:
        self.end_evaluations()
        MODE_LISTENERS.discard(self)
        for optimizer, listener in self._listeners:
            if listener in optimizer.attached:
                optimizer.attached.remove(listener)
        for hook in [*self._hooks, *(hook for one in self.models for hook in one.hooks)]:
            hook.remove()

    def _stepped(self, optimizer: AcceleratedOptimizer, done: bool) -> None:
        if not done:
            self._begin_where_it_is()  # as those do whose first step is not skipped
        self.step_attempted(optimizer, done, optimizer.loop_state.around(self._trace))
        if not self.iteration.is_open:
            self._choose_who_averages()
            self._backwards = self.optimizer.loop_state.backwards

    def loss(self) -> float | None:
        """Return the loss of this step's last micro-batch; None if it is not known.

        If a step has other backward passes than one for each micro-batch, a loss may be a part of the whole.
        """
        state = self.optimizer.loop_state
        if state.loss is None or state.backwards - self._backwards != max(1, state.window.size):
            return None
        loss, items = state.loss
        return float(loss) / float(items) if items > 0 else None

    def _items_of_step(self) -> float:
        """Return the items that `backward(num_items=)` got in this step's window, else the samples since the last."""
        if self.optimizer.window_items:
            return self.optimizer.window_items
        around = self.optimizer.loop_state.around(self._trace)
        if around is not None:
            total = self.optimizer.loop_state.samples_of(around)
            fresh = total - self._num_samples if around is self._counted else total
            self._counted, self._num_samples = around, total
            self._num_items = fresh or self._num_items  # a second step on the same batch
        if not self._num_items:
            raise ConfigError(
                f"weigh_by={self.recipe.weigh_by!r}: the number of items in this step is unknown. Pass it to "
                "accelerator.backward(loss_sum, num_items=n), or train from a prepared loader of batches with tensors."
            )
        return self._num_items

    def _about_to_train(self) -> None:
        """Begin as a newcomer before its first forward pass, whose statistics then stay in the buffers."""
        if self.loop.is_newcomer and not self._has_begun:
            self._begin_where_it_is()

    def _begin_where_it_is(self) -> None:
        """Train this rank's own weights. Reset the anchor before the first step of any optimizer.

        Weights may have been loaded after `prepare`.
        """
        self.end_evaluations()
        begins, self._has_begun = not self._has_begun, True
        is_here = self.loop.position == 0 or self.loop.is_newcomer
        if begins and is_here and self.attempts == self.loop.stats().attempts == 0:
            self.loop.reset_anchor()

    def _choose_who_averages(self) -> None:
        """Average gradients between islands while the recipe warms up, and within them from then on."""
        if self.loop.is_warming:
            self._average_everywhere()
        elif self._alone is None:
            self._alone = ExitStack()
            for one in self.models:
                self._alone.enter_context(self._run.strategy.local(one.model))
            for optimizer in self._owners:
                optimizer.in_lockstep = optimizer.is_own = True

    def _average_everywhere(self) -> None:
        """Restore averaging of gradients over all ranks, by the models' strategy."""
        if self._alone is not None:
            for optimizer in self._owners:
                optimizer.in_lockstep = False
            self._alone.close()
            self._alone = None


def driving(model: nn.Module, optimizers: Sequence[AcceleratedOptimizer]) -> AcceleratedOptimizer:
    """Return the optimizer that owns most of the model's parameters; raise ConfigError if none owns any."""
    ids = {id(parameter) for parameter in model.parameters()}

    def owned(optimizer: AcceleratedOptimizer) -> int:
        return sum(id(p) in ids for p in parameters_of(optimizer))

    best = max(optimizers, key=owned, default=None)
    if best is None or owned(best) == 0:
        raise ConfigError(
            "An outer loop counts the steps of the optimizer that trains its model, and no prepared optimizer has "
            "parameters of this one. Give `accelerator.prepare` the model and its optimizer first."
        )
    return best
