# SPDX-License-Identifier: Apache-2.0
"""The bridge between prepared objects and one outer loop: its driver, and the objects that must not send meanwhile.

A loop that follows the data is flushed once for each pass over them, where every rank arrives: in the optimizer's step
on the last batch, or where the pass ends if there was none. After a pass that was left early the flush is owed, and
happens at the next call that all ranks must make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from farflung.accelerator import lazy
from farflung.base.errors import ConfigError
from farflung.loop.optimizer import AcceleratedOptimizer, parameters_of
from farflung.loop.scheduler import planned_updates
from farflung.loop.state import ActiveLoader, Trace
from farflung.process.log import get_logger
from farflung.process.mesh import require_replicas
from farflung.resume.run import Run

if TYPE_CHECKING:
    from farflung.data.claims import Followed
    from farflung.outer.recipe import Recipe


class AttachedLoop:
    """An outer loop that is attached to a prepared model and to the optimizer whose steps it counts: a collective.

    In the first steps of a recipe that begins with averaged gradients the model's strategy averages them as usual.
    After that gradients and buffers stay within their island: on their process, where each is one.

    Attributes:
        each_step: rounds happen inside `optimizer.step()`; False leaves them to calls of `sync_if_due`.
        optimizer: the one that has most of the model's parameters; ConfigError if there is none.
        epochs: flushes the loop after each pass over the training data; None: nothing does.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, run: Run, each_step: bool) -> None:
        self.model = model
        self._run = run
        self.recipe = recipe
        self.optimizer = driver(model, run.optimizers)
        self._owners: list[AcceleratedOptimizer] = []
        self._iteration = lazy.Iteration(())
        self._listeners: list[tuple[AcceleratedOptimizer, Callable[[bool], None]]] = []
        self._hooks: list[RemovableHandle] = []
        self.each_step = each_step
        self._trace = Trace()
        self._counted: ActiveLoader | None = None  # the iteration whose samples were counted last, and how many
        self._samples = self._items = 0
        self._backwards = self.optimizer.loop_state.backwards  # at the end of the latest step
        self._alone: ExitStack | None = None
        bare, mesh = self.optimizer.optimizer, run.strategy.mesh
        require_replicas(mesh, run.world.place)
        whole = run.strategy.unwrap(model)
        membership = lazy.membership_of(run.world.place, mesh.island)
        group, island = (None, None) if membership else (mesh.replicas, mesh.island)
        if run.slots is not None and membership is not None:
            membership.data = run.slots.described()
            membership.keep_logs(run.slots.log_names)
        self.loop = lazy.OuterLoop(whole, recipe, group, island=island, membership=membership, inner=bare)
        self.epochs: EpochTracker | None = None
        self._followed: Followed | None = None
        if self._run.slots is not None and membership is not None:
            self._followed = self._run.slots.follow(membership, recipe.schedule.fragments)
            self.loop.listeners.append(self._followed.round_ended)
        self._attempts = 0
        self._has_begun = False
        self.follow_optimizers()
        if recipe.weighs_items:
            self.optimizer.loop_state.counts_samples = True
        self._choose_who_averages()

    def follow_optimizers(self) -> None:
        """Follow the prepared optimizers that train the model, also those prepared after it.

        Raises:
            ConfigError: there are several, and the recipe synchronizes the state of one.
        """
        parameters = list(self.model.parameters())
        for optimizer in self._run.optimizers:
            if any(optimizer is owner for owner in self._owners) or not optimizer.owns(parameters):
                continue
            self._owners.append(optimizer)
            self._iteration.expect(optimizer)
            self._hooks.append(optimizer.optimizer.register_step_pre_hook(lambda *_: self._begin_where_it_is()))
            self._listeners.append((optimizer, partial(self.step_attempted, optimizer)))
            optimizer.attached.append(self._listeners[-1][1])
            if self._alone is not None:
                optimizer.in_lockstep = optimizer.is_own = True
        lazy.check_inner("An outer loop", self.recipe, len(self._owners))

    def around(self) -> ActiveLoader | None:
        """Return the iteration of a prepared loader that is under way, if any."""
        return self.optimizer.loop_state.around(self._trace)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.load_state_dict(state)
        self._choose_who_averages()

    def end(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        """End the loop as the end of its `with` block would: a collective, unless there is an error."""
        if error is None:
            self._count(self._iteration.close())
        self._end(lambda: self.loop.__exit__(kind, error, trace))

    def drop(self) -> None:
        """End the loop as it is. Nothing is exchanged."""
        self._end(self.loop.detach)

    def _end(self, end_loop: Callable[[], object]) -> None:
        for optimizer, listener in self._listeners:
            if listener in optimizer.attached:
                optimizer.attached.remove(listener)
        for hook in self._hooks:
            hook.remove()
        try:
            end_loop()
        finally:
            if self._followed is not None:
                self._followed.end()
                self._followed = None
            self._average_everywhere()

    def step_attempted(self, optimizer: AcceleratedOptimizer, done: bool) -> None:
        """Called after an attempted step: counts iterations, runs rounds that are due, flushes on the last batch."""
        if not done:
            self._begin_where_it_is()  # as those do whose first step is not skipped
        self._count(self._iteration.step_attempted(optimizer, done))
        if not self._iteration.is_open:
            if self.each_step:
                self.loop.sync_if_due()
            self._choose_who_averages()
        if self.epochs is not None:
            self.epochs.step_attempted(self.around(), self._iteration.is_open)
        if not self._iteration.is_open:
            self._backwards = self.optimizer.loop_state.backwards

    def flush(self) -> None:
        """Count an iteration that some optimizers have not ended, and flush the loop: a collective."""
        self._count(self._iteration.close())
        if not self.loop.is_warming:  # while gradients are averaged the replicas are equal
            self.loop.flush()

    def _count(self, iterations: Iterable[bool]) -> None:
        """Count iterations that are over, without communication: True for each in which an optimizer has stepped."""
        for done in iterations:
            items = self._items_of_step() if self.recipe.weighs_items else 0
            self.loop.count(done, items)
            self._attempts += 1
            if self._followed is not None:
                around = self.around()
                if around is not None and around.loader.share is not None:
                    around.loader.share.check_trains()
                self._followed.step_attempted(self.loop.position)
            if self._attempts == 2:  # schedulers have followed the first step by now
                self._say_if_short()

    def loss(self) -> float | None:
        """Return the loss of this step's last micro-batch; None if it is not known.

        Where a step has other backward passes than one for each micro-batch, a loss may be a part of the whole.
        """
        state = self.optimizer.loop_state
        if state.loss is None or state.backwards - self._backwards != max(1, state.window.size):
            return None
        loss, items = state.loss
        return float(loss) / float(items) if items > 0 else None

    def _say_if_short(self) -> None:
        steps = planned_updates(one.scheduler for one in self._run.schedulers if self.optimizer in one.optimizers)
        said = "" if steps is None else self.recipe.few_rounds(steps)
        if said:
            get_logger(__name__).warning(f"As the learning rate schedule has it, {said}")

    def _items_of_step(self) -> float:
        """Return the items that `backward(num_items=)` got in this step's window, else the samples since the last."""
        if self.optimizer.window_items:
            return self.optimizer.window_items
        iteration = self.around()
        if iteration is not None:
            total = self.optimizer.loop_state.samples_of(iteration)
            fresh = total - self._samples if iteration is self._counted else total
            self._counted, self._samples = iteration, total
            self._items = fresh or self._items  # a second step on the same batch
        if not self._items:
            raise ConfigError(
                f"weigh_by={self.recipe.weigh_by!r}: the number of items in this step is unknown. Pass it to "
                "accelerator.backward(loss_sum, num_items=n), or train from a prepared loader of batches with tensors."
            )
        return self._items

    def _begin_where_it_is(self) -> None:
        """Reset the anchor before the first step of any optimizer: weights may have been loaded after `prepare`."""
        begins, self._has_begun = not self._has_begun, True
        is_here = self.loop.position == 0 or self.loop.is_newcomer
        if begins and is_here and self._attempts == self.loop.stats().attempts == 0:
            self.loop.reset_anchor()

    def _choose_who_averages(self) -> None:
        """Average gradients between islands while the recipe warms up, and within them from then on."""
        if self.loop.is_warming:
            self._average_everywhere()
        elif self._alone is None:
            self._alone = ExitStack()
            self._alone.enter_context(self._run.strategy.local(self.model))
            for optimizer in self._owners:
                optimizer.in_lockstep = optimizer.is_own = True

    def _average_everywhere(self) -> None:
        """Restore averaging of gradients over all ranks, by the model's strategy."""
        if self._alone is not None:
            for optimizer in self._owners:
                optimizer.in_lockstep = False
            self._alone.close()
            self._alone = None


class EpochTracker:
    """Flushes one outer loop after each pass over the training data.

    The training data are those of the loop around the optimizer's steps; other loaders, such as those of an evaluation,
    come and go without any exchange. A rank that gets no batch of a pass takes it for training when an earlier pass
    over that loader was, or when it has not trained at all yet.

    Attributes:
        is_owed: a pass was left early, and the replicas have not been synchronized since.
        is_behind: there have been steps since they were synchronized.
    """

    def __init__(self, attached: AttachedLoop) -> None:
        self._attached = attached
        self.is_owed = self.is_behind = False
        self._iteration: ActiveLoader | None = None  # the pass under way
        self._is_flushed = False  # in this pass
        self._batch = self._steps = 0  # of this pass; attempts on it
        self._usual = 0  # attempts on the batch before
        self._data: list[Any] = []  # the loaders that were trained from

    def iteration_starts(self, loader: Any) -> None:
        if self._knows(loader):
            self.flush_owed()

    def iteration_ended(self, iteration: ActiveLoader, at_end: bool) -> None:
        if iteration is self._iteration:
            self._iteration = None
            if not self._is_flushed and at_end:
                self._flush(iteration)
            self.is_owed = not self._is_flushed
        elif at_end and iteration.num_batches == 0 and (not self._data or self._knows(iteration.loader)):
            self._flush(iteration)

    def step_attempted(self, iteration: ActiveLoader | None, is_open: bool) -> None:
        """Called after an attempted step, with the iteration whose loop stands around it.

        `is_open`: other optimizers are still to step on this batch.
        """
        self.is_behind = True
        if iteration is not self._iteration:
            self._iteration, self._is_flushed, self._batch, self._steps = iteration, False, 0, 0
        if iteration is None:
            return
        if not self._knows(iteration.loader):
            self._data.append(iteration.loader.base_dataloader)
        if iteration.num_batches != self._batch:
            self._usual = self._steps or self._usual
            self._batch, self._steps = iteration.num_batches, 0
        self._steps += 1
        # Not later, as many loops are left by `break` on their last batch.
        if iteration.end_of_dataloader and self._steps == self._usual and not (is_open or self._is_flushed):
            self._flush(iteration)

    def flush_owed(self) -> None:
        """Flush the loop if that is owed: a collective of all ranks."""
        if self.is_owed:
            self._flush()

    def _knows(self, loader: Any) -> bool:
        return any(loader.base_dataloader is other for other in self._data)

    def _flush(self, after: ActiveLoader | None = None) -> None:
        self.is_owed = self.is_behind = False
        self._is_flushed = True
        share = None if after is None else after.loader.share
        if share is not None and share.is_past:  # the others are in the middle of a later epoch
            return
        self._attached.flush()
        if share is not None:
            share.synchronized()


def driver(model: nn.Module, optimizers: Sequence[AcceleratedOptimizer]) -> AcceleratedOptimizer:
    """Return the optimizer that owns most of the model's parameters; raise ConfigError if none owns any."""
    mine = {id(parameter) for parameter in model.parameters()}

    def owned(optimizer: AcceleratedOptimizer) -> int:
        return sum(id(p) in mine for p in parameters_of(optimizer))

    best = max(optimizers, key=owned, default=None)
    if best is None or owned(best) == 0:
        raise ConfigError(
            "An outer loop counts the steps of the optimizer that trains its model, and no prepared optimizer has "
            "parameters of this one. Give `accelerator.prepare` the model and its optimizer first."
        )
    return best
