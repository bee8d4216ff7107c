# SPDX-License-Identifier: Apache-2.0
"""The outer loops of one Accelerator: those of its `outer` blocks, and those that a setting asks for.

The latter are attached by `prepare`, driven by the optimizer, and flushed after each epoch.
"""

from __future__ import annotations

import atexit
import copy
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from farflung.accelerator import lazy
from farflung.accelerator.settings import resolve_ema
from farflung.base.errors import ConfigError
from farflung.base.forward import Forward
from farflung.config import environ
from farflung.hosts.rounds import RoundFigures, RoundOutputs
from farflung.loop.state import ActiveLoader
from farflung.process.failure import OUTER_ASKED, OUTER_ATTACHED, leave_note
from farflung.process.log import get_logger
from farflung.process.mesh import replicas_here
from farflung.process.world import current_world
from farflung.resume.run import Run

if TYPE_CHECKING:
    from farflung.accelerator.outer import AttachedLoop
    from farflung.hosts.driver import EpochTracker
    from farflung.hosts.evaluation import EvaluatedModel, Lender
    from farflung.methods.arguments import OuterConfig
    from farflung.methods.recipe import Recipe
    from farflung.outer.engine import OuterLoop


class OuterController:
    """Attaches an outer loop to each model that is trained, if `config` says so, and knows all open loops, in order.

    `waiting` are loaded states of loops that are not open yet.
    """

    def __init__(self, config: OuterConfig | None, run: Run, ema: tuple[float, int] | None = None) -> None:
        self._config = config
        self._ema: tuple[float | None, int] = ema or (None, 1)
        self._averages = None if ema is None else lazy.ema.EMA(*ema, run)
        self._run = run
        self.attached: list[AttachedLoop] = []
        self.waiting: list[dict[str, Any]] = []
        self._last: OuterLoop | None = None  # that was opened
        self._figures: list[RoundFigures] = []
        if config is None:
            return
        self._recipe = lazy.arguments.recipe_of(config, self.replicas_here)
        leave_note(OUTER_ASKED)
        self._outputs = self._outputs_of(config)
        run.loop.observe(self)
        atexit.register(_at_exit, weakref.ref(self))

    def _outputs_of(self, config: OuterConfig) -> RoundOutputs:
        outputs = RoundOutputs(config, self._run.world.rank, self._run.world.place.member)
        self._run.loop.keeps_loss |= outputs.reports
        return outputs

    @property
    def replicas_here(self) -> int:
        return replicas_here(self._run.world.local_size, self._run.strategy.mesh.island.size)

    # ---- opening and ending

    def attach(self) -> None:
        """Open a loop over each prepared model that a prepared optimizer trains and that has none yet: a collective.

        Where replicas come and go, each at its own pace, they would wait for each other in rounds of several loops: the
        models have one together.
        """
        if self._averages is not None:
            self._averages.attach()
        for attached in self.attached:
            attached.follow_optimizers()
        if self._config is None:
            return
        new = []
        for model in self._run.models:
            owners = [optimizer for optimizer in self._run.optimizers if optimizer.owns(model.parameters())]
            trains = any(parameter.requires_grad for parameter in model.parameters())
            if owners and trains and not self.has(model):
                new.append(model)
        groups = [[model] for model in new]
        if new and self._run.world.place.member is not None:
            self._refuse_second()
            groups = [new]
        for models in groups:
            attached = self._open(models, self._recipe, each_step=True)
            leave_note(OUTER_ATTACHED)
            self._outputs.listen(attached.loop, len(self._epochs), attached.loss)
            attached.follow_epochs()
            attached.loop.open_end.is_silent = True  # `exit_report` has a line of its own

    def _refuse_second(self) -> None:
        """Raise ConfigError if a loop is open, where replicas come and go."""
        if self.attached:
            raise ConfigError(
                "Another model has an outer loop already. Where replicas come and go, the models of a script have one "
                "together: give all models and their optimizers to one call of `accelerator.prepare`."
            )

    def outer(
        self, model: nn.Module, recipe: Recipe | OuterConfig | str, each_step: bool
    ) -> AbstractContextManager[OuterLoop, bool | None]:
        """Return a context manager around an outer loop over `model`; see `OuterMethods.outer`."""
        chosen, outputs = lazy.arguments.chosen_recipe(recipe, self.replicas_here), None
        if isinstance(recipe, lazy.arguments.OuterConfig) and recipe.report is not None:
            outputs = self._outputs_of(recipe)
        resolve_ema(*self._ema, True)
        model = self._run.resolve(model)
        if self.has(model):
            raise ConfigError(
                "This model already has an outer loop: Accelerator(outer=), --outer or FARFLUNG_OUTER_RECIPE opened "
                "one when it was prepared, or a `with` block around this one has. Leave one of them out."
            )
        lazy.outer.driving(model, self._run.optimizers)
        if self._run.world.place.member is not None:
            self._refuse_second()
        return self._attached(model, chosen, each_step, outputs)

    @contextmanager
    def _attached(
        self, model: nn.Module, recipe: Recipe, each_step: bool, outputs: RoundOutputs | None
    ) -> Iterator[OuterLoop]:
        attached = self._open([model], recipe, each_step)
        if outputs is not None:
            outputs.listen(attached.loop, len(self.attached) - 1, attached.loss)
        try:
            yield attached.loop
        except BaseException as error:
            self.attached.remove(attached)
            attached.end(error)
            raise
        self.attached.remove(attached)
        attached.end()

    def _open(self, models: Sequence[nn.Module], recipe: Recipe, each_step: bool) -> AttachedLoop:
        """Open a loop; it continues from a loaded state, if one is waiting for it."""
        attached = lazy.outer.AttachedLoop(models, recipe, self._run)
        attached.each_step = each_step
        if self.waiting:
            attached.load_state_dict(self.waiting.pop(0))
        if each_step:  # Accelerate's LocalSGD tells trackers nothing
            self._figures.append(RoundFigures(attached.loop, len(self.attached)))
        self.attached.append(attached)
        self._last = attached.loop
        return attached

    def end(self) -> None:
        """End the loops that were asked for: a collective, unless the caller is leaving with an error."""
        error = sys.exc_info()[1]
        if self._averages is not None and error is None:
            self._averages.end()
        for attached in self._detach():
            attached.end(error)
            _advise(attached)

    def drop(self) -> None:
        """End the loops that were asked for as they are. Nothing is exchanged."""
        for attached in self._detach():
            attached.drop()
            _advise(attached)
        self._last = None  # which has a model, as the means have
        if self._averages is not None:
            self._averages.drop()

    def _detach(self) -> list[AttachedLoop]:
        ended = [attached for attached in self.attached if attached.epochs is not None]
        self.attached = [attached for attached in self.attached if attached.epochs is None]
        return ended

    def exit_report(self) -> None:
        """Print advice and warnings at the end of the process."""
        if current_world() is None or getattr(sys, "last_value", None) is not None:
            return
        for attached in self.attached:
            if attached.epochs is None:
                continue
            _advise(attached)
            unsent = attached.loop.steps_since_sync
            steps = "step was" if unsent == 1 else f"{unsent} steps were"
            if attached.epochs.is_behind and unsent and (self._run.world.size > 1 or self._run.slots is not None):
                get_logger(__name__).warning(
                    f"The last {steps} not averaged with any other replica, as the loop over the data was left early. "
                    "Call accelerator.wait_for_everyone() or accelerator.end_training() after it."
                )

    # ---- following the data

    @property
    def _epochs(self) -> list[EpochTracker]:
        return [attached.epochs for attached in self.attached if attached.epochs is not None]

    def iteration_starts(self, loader: Any) -> None:
        for epochs in self._epochs:
            epochs.iteration_starts(loader)

    def iteration_ended(self, iteration: ActiveLoader, at_end: bool) -> None:
        for epochs in self._epochs:
            epochs.iteration_ended(iteration, at_end)

    def flush_owed(self) -> None:
        """Flush the loops that are owed it: a collective of all ranks."""
        for epochs in self._epochs:
            epochs.flush_owed()

    # ---- questions

    @property
    def live(self) -> list[OuterLoop]:
        return [attached.loop for attached in self.attached]

    @property
    def leads(self) -> bool:
        """Whether this replica is the one to write what all replicas share: the first of those that come and go."""
        return self._run.slots is None or self._last is None or self._last.is_first

    @property
    def can_begin_here(self) -> bool:
        """Whether there are open loops, and none has done a step: they begin where the model is at the first one."""
        return bool(self.attached) and all(attached.loop.stats().attempts == 0 for attached in self.attached)

    def figures(self) -> dict[str, float]:
        """Return the figures of the rounds since the last call, by the names that trackers get."""
        values = {name: value for each in self._figures for name, value in each.take().items()}
        self._figures = [each for each in self._figures if each.is_open]
        return values

    def states(self) -> list[dict[str, Any]]:
        """Return the states of the open loops, in order, and loaded states that still wait for a loop."""
        return [*(attached.state_dict() for attached in self.attached), *self.waiting]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the open loops their states, in order; those that are left wait for loops that will be opened."""
        self.waiting = list(states)
        for attached in self.attached:
            if self.waiting:
                attached.load_state_dict(self.waiting.pop(0))

    def has(self, model: nn.Module) -> bool:
        """Return whether an open loop is over parameters of `model`."""
        return any(_share(one.model, model) for attached in self.attached for one in attached.models)

    @property
    def _lent(self) -> list[tuple[EvaluatedModel, Lender]]:
        """The models that may have other weights, and what lends these."""
        attached = [(one, attached) for attached in self.attached for one in attached.models]
        return [*attached, *(() if self._averages is None else ((one, one) for one in self._averages.models))]

    def end_evaluations(self) -> None:
        """Have the weights in the models that are trained, before a checkpoint is written or read."""
        for one, _ in self._lent:
            one.evaluation.end()

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a model, with the weights that all ranks agreed on, if there are any.

        Nothing is exchanged. Agreed weights come as copies, others as the model's own tensors, as torch gives them.
        """
        with ExitStack() as lent:
            lenders = [(one, by) for one, by in self._lent if by.lends and _share(one.model, module)]
            for one, by in lenders:
                lent.enter_context(by.agreed(one.bare))
            state: dict[str, Any] = module.state_dict()
            return copy.deepcopy(state) if lenders else state


class OuterMethods:
    """The methods of an Accelerator that open outer loops."""

    _controller: OuterController

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
        lazy.arguments.check_model(model)
        return self._controller.outer(model, recipe, each_step=True)

    outer_loops = Forward["list[OuterLoop]"](
        "_controller.live", "The outer loops that are open, in the order of their opening."
    )


def _share(one: nn.Module, other: nn.Module) -> bool:
    mine = {id(parameter) for parameter in one.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())


def _advise(attached: AttachedLoop) -> None:
    advice = attached.loop.advice(by_flags=bool(environ.text("FARFLUNG_OUTER_RECIPE")))
    if advice:
        get_logger(__name__).warning(advice)


def _at_exit(reference: weakref.ref[OuterController]) -> None:
    controller = reference()
    if controller is not None:
        controller.exit_report()
