# SPDX-License-Identifier: Apache-2.0
"""The bridge between prepared objects and the outer loop: who drives it, and what must stay silent meanwhile."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from farflung.accelerator import lazy
from farflung.accelerator.epoch_tracker import EpochTracker
from farflung.accelerator.prepare import Registry
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.integrations.rounds import RoundFigures
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import planned_updates
from farflung.loop.state import ActiveLoader, Trace
from farflung.process.log import get_logger
from farflung.process.mesh import replicas_here, require_replicas
from farflung.process.world import World
from farflung.strategy.base import Strategy

if TYPE_CHECKING:
    from farflung.comm.exchange import Exchange
    from farflung.data.slots import FollowedLoop, Slots
    from farflung.outer.arguments import OuterConfig
    from farflung.outer.engine import OuterLoop
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

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        strategy: Strategy,
        registry: Registry,
        each_step: bool,
    ) -> None:
        self.model = model
        optimizers, self._schedulers = registry.optimizers, registry.schedulers
        self.recipe = recipe
        self.optimizer = driver(model, optimizers)
        self._strategy = strategy
        self._owners = [one for one in optimizers if one.owns(model.parameters())]
        self.each_step = each_step
        self._trace = Trace()
        self._counted: ActiveLoader | None = None  # the iteration whose samples were counted last, and how many
        self._samples = self._items = 0
        self._backwards = self.optimizer.loop_state.backwards  # at the end of the latest step
        self._alone: ExitStack | None = None
        bare, mesh = self.optimizer.optimizer, strategy.mesh
        require_replicas(mesh)
        whole = strategy.unwrap(model)
        membership = lazy.launched_membership(mesh.island)
        group, island = (None, None) if membership else (mesh.replicas, mesh.island)
        self.loop = lazy.OuterLoop(whole, recipe, group, island=island, membership=membership, inner=bare)
        self.epochs: EpochTracker | None = None
        self._slots = registry.slots
        self._followed: FollowedLoop | None = None
        if self._slots is not None and membership is not None:
            self._followed = self._slots.follow(membership, recipe.schedule.fragments)
            self.loop.listeners.append(self._followed.round_ended)
        self._attempts = 0
        self._has_begun = False
        self._hooks: list[RemovableHandle] = [
            one.optimizer.register_step_pre_hook(lambda *_: self._begin_where_it_is()) for one in self._owners
        ]
        self.optimizer.attached.append(self)
        if recipe.weighs_items:
            self.optimizer.loop_state.counts_samples = True
        self._choose_who_averages()

    def around(self) -> ActiveLoader | None:
        """Return the iteration of a prepared loader that is under way, if any."""
        return self.optimizer.loop_state.around(self._trace)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state of another run's loop."""
        self.loop.load_state_dict(state)
        self._choose_who_averages()

    def end(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End the loop as the end of its `with` block would: a collective, unless there is an error."""
        self._detach()
        try:
            self.loop.__exit__(kind, error, trace)
        finally:
            self._stop_following()
            self._join()

    def drop(self) -> None:
        """End the loop where it stands. Nothing is exchanged."""
        self._detach()
        self.loop.detach()
        self._stop_following()
        self._join()

    def step_attempted(self, done: bool) -> None:
        """After an attempted step: count it, run the rounds that are due, and flush on the last batch of the data."""
        if not done:
            self._begin_where_it_is()  # as those do whose first step is not skipped
        items = self._items_of_step() if self.recipe.weighs_items else 0
        self.loop.count(done, items)
        self._attempts += 1
        if self._followed is not None:
            around = self.around()
            if around is not None:
                around.loader.check_trains()
            self._followed.step_attempted(self.loop.position)
        if self._attempts == 2:  # schedulers have followed the first step by now
            self._say_if_short()
        if self.each_step:
            self.loop.sync_if_due()
        self._choose_who_averages()
        if self.epochs is not None:
            self.epochs.step_attempted(self.around())
        self._backwards = self.optimizer.loop_state.backwards

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
        """Warn if the run is short for this recipe, by its learning rate schedule."""
        steps = planned_updates(one.scheduler for one in self._schedulers if self.optimizer in one.optimizers)
        said = "" if steps is None else self.recipe.few_rounds(steps)
        if said:
            get_logger(__name__).warning(f"As the learning rate schedule has it, {said}")

    def _items_of_step(self) -> float:
        """Return what `backward(num_items=)` said of this step's window, else how many samples came since the last."""
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
            self._join()
        elif self._alone is None:
            self._alone = ExitStack()
            self._alone.enter_context(self._strategy.local(self.model))
            for optimizer in self._owners:
                optimizer.in_lockstep = optimizer.is_own = True

    def _join(self) -> None:
        if self._alone is not None:
            for optimizer in self._owners:
                optimizer.in_lockstep = False
            self._alone.close()
            self._alone = None

    def _stop_following(self) -> None:
        if self._slots is not None and self._followed is not None:
            self._slots.leave(self._followed)
            self._followed = None

    def _detach(self) -> None:
        if self in self.optimizer.attached:
            self.optimizer.attached.remove(self)
        for hook in self._hooks:
            hook.remove()


class OpenLoops:
    """The open outer loops of one Accelerator, in order; `waiting` are loaded states of loops that are not open yet."""

    def __init__(self) -> None:
        self.attached: list[AttachedLoop] = []
        self.waiting: list[dict[str, Any]] = []
        self._last: OuterLoop | None = None  # that was opened
        self._figures: list[RoundFigures] = []

    @property
    def live(self) -> list[OuterLoop]:
        """The loops alone."""
        return [attached.loop for attached in self.attached]

    @property
    def leads(self) -> bool:
        """Whether this replica writes what all have in common, as the first one of those that come and go."""
        return not environ.is_elastic() or self._last is None or self._last.is_first

    @property
    def member(self) -> int:
        """This replica's id, where replicas come and go; else 0."""
        return int(environ.text(environ.MEMBER_VARIABLES[1]) or 0)

    @property
    def can_begin_here(self) -> bool:
        """Whether there are open loops, and none has done a step: they begin where the model is at the first one."""
        return bool(self.attached) and all(attached.loop.stats().attempts == 0 for attached in self.attached)

    def opened(self, attached: AttachedLoop) -> None:
        """Take in a loop, which goes on from the state that waits for it, if one does."""
        if self.waiting:
            attached.load_state_dict(self.waiting.pop(0))
        if attached.each_step:  # Accelerate's LocalSGD tells trackers nothing
            self._figures.append(RoundFigures(attached.loop, len(self.attached)))
        self.attached.append(attached)
        self._last = attached.loop

    def closed(self, attached: AttachedLoop) -> None:
        """Forget a loop."""
        self.attached = [other for other in self.attached if other is not attached]

    def figures(self) -> dict[str, float]:
        """Return the figures of the rounds since the last call, by the names that trackers get."""
        values = {name: value for each in self._figures for name, value in each.take().items()}
        self._figures = [each for each in self._figures if each.is_open]
        return values

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the open loops their states, in order; those that are left wait for loops that will be opened."""
        self.waiting = list(states)
        for attached in self.attached:
            if self.waiting:
                attached.load_state_dict(self.waiting.pop(0))

    def has(self, model: nn.Module) -> bool:
        """Say whether an open loop is over parameters of `model`."""
        return any(_share(attached.model, model) for attached in self.attached)

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a model with the weights that all ranks agreed on, where there are such.

        Nothing is exchanged. Agreed weights come as copies, others as the model's own tensors, as torch gives them.
        """
        with ExitStack() as lent:
            loops = [attached.loop for attached in self.attached if _share(attached.model, module)]
            lenders = [loop for loop in loops if loop.has_anchor and not loop.is_warming]
            for loop in lenders:
                lent.enter_context(loop.synced())
            state: dict[str, Any] = module.state_dict()
            return copy.deepcopy(state) if lenders else state


class OuterMethods:
    """The methods of an Accelerator that open outer loops."""

    _world: World
    _strategy: Strategy
    _registry: Registry
    _open_loops: OpenLoops

    def outer(
        self, model: nn.Module, recipe: Recipe | OuterConfig | str
    ) -> AbstractContextManager[OuterLoop, bool | None]:
        """Return a context manager in which replicas of `model` train independently, synchronized by `recipe`.

        The prepared optimizer that owns the model's parameters drives the rounds: there is nothing to call. Gradients
        and buffers are not synchronized. Leaving the block normally is a collective: ranks that have no more data stay
        in the rounds until all have arrived, and average a last time. An exception leaves without a collective, and
        the other ranks get an error.

        Args:
            model: a prepared model, which a prepared optimizer trains.
            recipe: from `farflung.outer`, such as `diloco(every=32)`; or an `OuterConfig`, or a recipe's name, such as
                `"diloco"`, which takes its defaults.

        Raises:
            ConfigError: no optimizer has parameters of the model, or the model already has an outer loop.
        """
        lazy.check_model(model)
        here = replicas_here(self._world.local_size, self._strategy.mesh.island.size)
        return self._outer(model, lazy.chosen_recipe(recipe, here), each_step=True)

    def _outer(
        self, model: nn.Module, recipe: Recipe, each_step: bool
    ) -> AbstractContextManager[OuterLoop, bool | None]:
        model = self._registry.resolve(model)
        if self._open_loops.has(model):
            raise ConfigError(
                "This model already has an outer loop: Accelerator(outer=), --outer or FARFLUNG_OUTER_RECIPE opened "
                "one when it was prepared, or a `with` block around this one has. Leave one of them out."
            )
        driver(model, self._registry.optimizers)
        return self._attached(model, recipe, each_step)

    @contextmanager
    def _attached(self, model: nn.Module, recipe: Recipe, each_step: bool) -> Iterator[OuterLoop]:
        attached = AttachedLoop(model, recipe, self._strategy, self._registry, each_step)
        self._open_loops.opened(attached)
        try:
            yield attached.loop
        except BaseException:
            self._open_loops.closed(attached)
            attached.end(*sys.exc_info())
            raise
        self._open_loops.closed(attached)
        attached.end()

    @property
    def outer_loops(self) -> list[OuterLoop]:
        """The outer loops that are open, in the order of their opening."""
        return self._open_loops.live


def driver(model: nn.Module, optimizers: Sequence[AcceleratedOptimizer]) -> AcceleratedOptimizer:
    """Return the optimizer that owns most of the model's parameters; raise ConfigError if none owns any."""
    mine = {id(parameter) for parameter in model.parameters()}

    def owned(optimizer: AcceleratedOptimizer) -> int:
        return sum(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    best = max(optimizers, key=owned, default=None)
    if best is None or owned(best) == 0:
        raise ConfigError(
            "An outer loop counts the steps of the optimizer that trains its model, and no prepared optimizer has "
            "parameters of this one. Give `accelerator.prepare` the model and its optimizer first."
        )
    return best


def launched_slots(exchange: Exchange, registry: Registry) -> Slots:
    """Return the shares that this replica of `farflung launch --elastic` has of the data."""
    store, member, run = lazy.launched_run()
    bounds = {name: run[name] for name in ("most", "expected")}
    return lazy.Slots(store, member, exchange, **bounds, is_training=lambda: registry.is_training)


def _share(one: nn.Module, other: nn.Module) -> bool:
    mine = {id(parameter) for parameter in one.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())
