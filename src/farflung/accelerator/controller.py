# SPDX-License-Identifier: Apache-2.0
"""Outer loops that a setting asks for: attached by `prepare`, driven by the optimizer, flushed after each epoch."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import TYPE_CHECKING, Any

from farflung.accelerator import lazy
from farflung.accelerator.epoch_tracker import EpochTracker
from farflung.accelerator.outer import AttachedLoop, OpenLoops
from farflung.accelerator.prepare import Registry
from farflung.config import environ
from farflung.integrations.rounds import RoundOutputs
from farflung.loop.state import ActiveLoader, LoopState
from farflung.process import world as slot
from farflung.process.failure import OUTER_ASKED, OUTER_ATTACHED, leave_note
from farflung.process.log import get_logger
from farflung.process.mesh import replicas_here
from farflung.process.world import World
from farflung.strategy.base import Strategy

if TYPE_CHECKING:
    from farflung.outer.arguments import OuterConfig


class OuterController:
    """Attaches an outer loop to each model that is trained, as `config` says, and follows them to their end."""

    def __init__(
        self,
        config: OuterConfig | None,
        world: World,
        strategy: Strategy,
        loop: LoopState,
        registry: Registry,
        open_loops: OpenLoops,
    ) -> None:
        self._config = config
        self._world = world
        self._strategy = strategy
        self._registry = registry
        self._open_loops = open_loops
        self._attached: dict[AttachedLoop, EpochTracker] = {}
        if config is None:
            return
        self._recipe = lazy.recipe_of(config, replicas_here(world.local_size, strategy.mesh.island.size))
        leave_note(OUTER_ASKED)
        self._outputs = RoundOutputs(config, world.rank)
        loop.keeps_loss = loop.keeps_loss or self._outputs.reports
        loop.observe(self)
        atexit.register(_at_exit, weakref.ref(self))

    def attach(self) -> None:
        """Open a loop over each prepared model that a prepared optimizer trains and that has none yet: a collective."""
        if self._config is None:
            return
        for model in self._registry.models:
            owners = [one for one in self._registry.optimizers if one.owns(model.parameters())]
            trains = any(parameter.requires_grad for parameter in model.parameters())
            if not owners or not trains or self._open_loops.has(model):
                continue
            attached = AttachedLoop(model, self._recipe, self._strategy, self._registry, each_step=True)
            self._open_loops.opened(attached)
            leave_note(OUTER_ATTACHED)
            self._outputs.listen(attached.loop, len(self._attached), attached.loss)
            attached.epochs = self._attached[attached] = EpochTracker(attached.loop)

    def iteration_starts(self, loader: Any) -> None:
        """Called when an iteration of a prepared loader starts."""
        for epochs in self._attached.values():
            epochs.iteration_starts(loader)

    def iteration_ended(self, iteration: ActiveLoader, at_end: bool) -> None:
        """Called when an iteration of a prepared loader is over."""
        for epochs in self._attached.values():
            epochs.iteration_ended(iteration, at_end)

    def flush_owed(self) -> None:
        """Flush the loops that are owed it: a collective of all ranks."""
        for epochs in self._attached.values():
            epochs.flush_owed()

    def end(self) -> None:
        """End all loops: a collective, unless the caller is leaving with an error."""
        error = sys.exc_info()
        for attached in self._detach():
            attached.end(*error)
            _advise(attached)

    def drop(self) -> None:
        """End all loops where they stand. Nothing is exchanged."""
        for attached in self._detach():
            attached.drop()
            _advise(attached)

    def exit_report(self) -> None:
        """Say at the end of the process what is left to say."""
        if slot.current() is None or getattr(sys, "last_value", None) is not None:
            return
        for attached, epochs in self._attached.items():
            _advise(attached)
            unsent = attached.loop.steps_since_sync
            steps = "step was" if unsent == 1 else f"{unsent} steps were"
            if epochs.is_behind and unsent and (self._world.size > 1 or environ.is_elastic()):
                get_logger(__name__).warning(
                    f"The last {steps} averaged with nobody, as the loop over the data was left early. "
                    "Call accelerator.wait_for_everyone() or accelerator.end_training() after it."
                )

    def _detach(self) -> list[AttachedLoop]:
        ended, self._attached = list(self._attached), {}
        for attached in ended:
            self._open_loops.closed(attached)
        return ended


def _advise(attached: AttachedLoop) -> None:
    advice = attached.loop.advice()
    if advice:
        get_logger(__name__).warning(advice)


def _at_exit(reference: weakref.ref[OuterController]) -> None:
    controller = reference()
    if controller is not None:
        controller.exit_report()
