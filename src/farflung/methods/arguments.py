# SPDX-License-Identifier: Apache-2.0
"""Recipes by name and as settings: `OuterConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch

import farflung.methods.recipes as recipes
from farflung.base.checks import check_whole, check_word, wrong_type
from farflung.base.errors import ConfigError
from farflung.config.outer import AUTO, MACHINE, OuterSettings
from farflung.methods.inner import AverageState, Inner, KeepState, ResetState
from farflung.methods.recipe import Recipe, check_model as check_model, unfit as unfit
from farflung.methods.robustness import robust
from farflung.methods.schedule import TrialSchedule


def _undecided() -> Recipe:
    """Return the recipe of a trial: its anchor is what all share when the recipe that was chosen begins."""
    return Recipe(schedule=TrialSchedule(), optimizer=partial(torch.optim.SGD, lr=1.0))


MAKERS: Mapping[str, Callable[..., Recipe]] = {
    AUTO: _undecided,
    **{name: getattr(recipes, name) for name in recipes.__all__},
}
_INNER: Mapping[str, Callable[[], Inner]] = {"keep": KeepState, "reset": ResetState, "average": AverageState}


class OuterConfig(OuterSettings):
    """An outer loop by the names of its recipe and options: `Accelerator(outer=OuterConfig("diloco", every=32))`.

    Args:
        recipe: the name of a recipe: that of its function in `farflung.outer`.
        options: the arguments of that function as plain values, and those below. What is left out, or None, is left to
            the recipe. `codec` is one of `none` (as it is), `bf16`, `fp16`, `int8`, `int4`, `fp8`, `e3m0` and `topk`.
            `levels` of `hierarchical` may be a text, `4:machine,64:all`, and may say `machine` for the ranks of a
            machine: `{4: "machine", 64: None}`.
        weigh_by: weight replicas by their `steps`, by the `items` in them (those passed to `backward(num_items=)`, or
            else the samples of their batches), or by `items_squared`, the squares of each step's items.
        anchor_on_cpu: keep the anchor and the outer optimizer's state in host memory.
        inner: what a round does with the inner optimizer's state: `keep` (each rank its own), `reset`, `average`.
        bucket_bytes: bucket size; see `OuterLoop`. Larger buckets pay off on fast links with high latency.
        same_data: replicas may see the same batches. Otherwise the run stops if their changes are equal to the last bit
            in their first rounds.
        robust: keep a faulty replica from spoiling the weights: `trimmed` or `clip`, see `farflung.outer.robust`.
        steps: optimizer steps of the whole run, if known: fewer than one round are refused, and fewer than ten rounds
            get a warning.
        report: when the main process prints a line about the rounds on stderr: `round` (after each), a number of
            seconds, or `off`; `auto` is every 5 seconds on a terminal, else each round. It is the default of
            `Accelerator(outer=)`; for `accelerator.outer` that is `off`, and a plain `OuterLoop` prints none.

    An option can be read as an attribute, `config.every`; it is None if it is left to the recipe.

    Raises:
        ConfigError: an unknown recipe, a missing or unknown option, or what the recipe refuses.
    """

    def __init__(self, recipe: str, **options: Any) -> None:
        super().__init__(recipe, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the recipe warns when it is used
            recipe_of(self, local_size=2)


def named_outer(name: str, outer: OuterConfig | str) -> OuterConfig:
    """Return `outer`, or the settings of the recipe that it names; `name` is for the error."""
    if isinstance(outer, str):
        check_word(name, outer, MAKERS)
        return OuterConfig(outer)
    if not isinstance(outer, OuterConfig):
        called = getattr(outer, "__name__", None)
        example = called if called in MAKERS else "diloco"
        raise wrong_type(name, outer, f"an OuterConfig({example!r}, every=32) or a recipe's name, such as {example!r}")
    return outer


def chosen_recipe(recipe: Recipe | OuterConfig | str, local_size: int = 1) -> Recipe:
    """Return `recipe`, or the one that a name or settings stand for, on a machine with `local_size` ranks."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (OuterConfig, str)):
        return recipe_of(named_outer("recipe", recipe), local_size)
    called = getattr(recipe, "__name__", None)
    example = f"{called if called in MAKERS else 'diloco'}(every=32)"
    raise wrong_type("recipe", recipe, f"a recipe, such as {example}, or the name of one, such as 'diloco'")


def recipe_of(config: OuterSettings, local_size: int) -> Recipe:
    """Return the recipe that `config` names, with its options, on a machine with `local_size` ranks."""
    options = config.given()
    options.pop("report", None)
    steps, rule = options.pop("steps", None), options.pop("robust", None)
    if "levels" in options:
        # A machine with one rank has no level of its own.
        levels = {every: size for every, size in options["levels"].items() if (size, local_size) != (MACHINE, 1)}
        options["levels"] = {every: local_size if size == MACHINE else size for every, size in levels.items()}
    names = ("weigh_by", "anchor_on_cpu", "inner", "bucket_bytes", "same_data")
    parts = {name: options.pop(name) for name in names if name in options}
    if "inner" in parts:
        parts["inner"] = _INNER[parts["inner"]]()
    make = MAKERS[config.recipe]
    recipe = make(**options)
    if isinstance(recipe.schedule, TrialSchedule):
        parts["schedule"] = TrialSchedule(steps)
    elif steps is not None:
        rounds = _rounds_in(steps, recipe)
        if rounds is not None and "rounds" in signature(make).parameters:
            recipe = make(**{"rounds": rounds} | options)
    recipe = replace(recipe, **parts) if parts else recipe
    return recipe if rule is None else robust(recipe, rule)


def _rounds_in(steps: int, recipe: Recipe) -> int | None:
    """Return how many rounds so many steps are, None if that depends on a clock; warn if they are few, refuse none."""
    check_whole("steps", steps, least=1)
    every = recipe.every
    if every is None:
        return None
    if steps - recipe.warmup < every:
        warm = f" after a warm-up of {recipe.warmup}" if recipe.warmup else ""
        raise ConfigError(
            f"is {steps}, and the first round comes after {every}{warm}. Choose a smaller every.", "steps"
        )
    said = recipe.few_rounds(steps)
    if said:
        warnings.warn(said, stacklevel=4)
    return (steps - recipe.warmup) // every
