# SPDX-License-Identifier: Apache-2.0
"""What may replace a loop's recipe at a boundary: by default nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from farflung.base.errors import ConfigError
from farflung.methods.recipe import Recipe
from farflung.outer.membership import Membership
from farflung.outer.quorum import Quorum


class Chooser:
    """Keeps the recipe that the loop was given. A host passes a subclass, which measures and then chooses one.

    All members must choose the same at the same boundary.

    Attributes:
        is_measuring: `note_step` is to be called after each step.
        sets_options: the recipe's options are chosen, so no advice names them.
    """

    is_measuring = sets_options = False

    def first(self, recipe: Recipe, membership: Membership) -> Recipe:
        """Return the recipe to begin with, before the members have met."""
        if recipe.is_undecided:
            raise ConfigError(
                "auto chooses a recipe for an Accelerator, or for a script under `farflung launch --outer auto`. In a "
                "plain loop name one: `farflung plan` compares them for a line."
            )
        return recipe

    def bind(self, model: nn.Module, quorum: Quorum) -> None:
        """Called before the members meet, with what is trained and with whom."""

    def refused(self) -> Recipe | None:
        """Called where members refuse this replica, or a state at the run's address does: return the recipe that they
        may have instead; None: there is none."""
        return None

    def met(self) -> Recipe | None:
        """Called once the members have met: a collective. None: keep the recipe, here and below."""
        return None

    def note_step(self, waited_s: float, waits_in_steps: bool) -> None:
        """Record that a step has ended.

        Args:
            waited_s: how many seconds this process has waited for others since its loop began.
            waits_in_steps: an exchange of gradients is not part of those.
        """

    def is_due(self, step: int, is_early: bool = False) -> bool:
        """Return whether all members call `choose` after this step; `is_early`: in a flush."""
        return False

    def choose(self, is_early: bool, are_alike: bool) -> Recipe | None:
        """Choose: a collective of fixed members.

        Args:
            is_early: this rank flushes; others may train on.
            are_alike: all ranks have made all steps of a warm-up so far.
        """
        return None

    def landed(self) -> Recipe | None:
        """Choose after a round of all members in an elastic run: a collective."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def resumed(self, state: Mapping[str, Any]) -> Recipe | None:
        """Continue as the loop did whose state this is."""
        return None
