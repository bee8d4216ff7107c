# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: from a name, or an `OuterConfig` of names and plain values, to the recipe that is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from farflung.base.checks import check_word, wrong_type
from farflung.config.outer import MACHINE, OuterConfig
from farflung.outer.inner import Average, Inner, Keep, Reset
from farflung.outer.recipe import Recipe
from farflung.outer.recipes import (
    diloco,
    eager_diloco,
    edit,
    gossip,
    hierarchical,
    local_sgd,
    noloco,
    post_local_sgd,
    quadratic,
    slowmo,
    sparse_loco,
    streaming_diloco,
)

MAKERS: Mapping[str, Callable[..., Recipe]] = {
    "local_sgd": local_sgd,
    "post_local_sgd": post_local_sgd,
    "hierarchical": hierarchical,
    "quadratic": quadratic,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "eager_diloco": eager_diloco,
    "sparse_loco": sparse_loco,
    "edit": edit,
    "gossip": gossip,
    "noloco": noloco,
}
_INNER: Mapping[str, Callable[[], Inner]] = {"keep": Keep, "reset": Reset, "average": Average}


def named_outer(name: str, outer: OuterConfig | str) -> OuterConfig:
    """Return the settings that `outer` is, or those of the recipe that it names, with all its defaults.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigError: it is neither, or there is no such recipe.
    """
    if isinstance(outer, str):
        check_word(name, outer, MAKERS)
        return OuterConfig(outer)
    if not isinstance(outer, OuterConfig):
        called = getattr(outer, "__name__", None)
        example = called if called in MAKERS else "diloco"
        raise wrong_type(name, outer, f"an OuterConfig({example!r}, every=32) or a recipe's name, such as {example!r}")
    return outer


def chosen_recipe(recipe: Recipe | OuterConfig | str, local_size: int = 1) -> Recipe:
    """Return `recipe`, or the one that a name or settings mean.

    Args:
        local_size: ranks on this machine.

    Raises:
        ConfigError: it is none of the three, or there is no such recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (OuterConfig, str)):
        return recipe_of(named_outer("recipe", recipe), local_size)
    called = getattr(recipe, "__name__", None)
    example = f"{called if called in MAKERS else 'diloco'}(every=32)"
    raise wrong_type("recipe", recipe, f"a recipe, such as {example}, or the name of one, such as 'diloco'")


def recipe_of(config: OuterConfig, local_size: int) -> Recipe:
    """Return the recipe that `config` names, with its options.

    Args:
        local_size: ranks on this machine.

    Raises:
        ConfigError: parts that do not go together.
    """
    options = config.given()
    options.pop("log", None)
    if "levels" in options:
        options["levels"] = _resolved(options["levels"], local_size)
    names = ("weigh_by", "anchor_on_cpu", "inner", "bucket_bytes")
    parts = {name: options.pop(name) for name in names if name in options}
    if "inner" in parts:
        parts["inner"] = _INNER[parts["inner"]]()
    recipe = MAKERS[config.recipe](**options)
    return replace(recipe, **parts) if parts else recipe


def _resolved(levels: Mapping[int, Any], local_size: int) -> dict[int, int | None]:
    """Put numbers for `machine`; where a machine has one rank alone there is nobody to average with, and no level."""
    sizes = {every: local_size if size == MACHINE else size for every, size in levels.items()}
    return {every: size for every, size in sizes.items() if size is None or size > 1}
