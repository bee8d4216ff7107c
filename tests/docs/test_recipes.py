# SPDX-License-Identifier: Apache-2.0
"""The table of recipes in docs/concepts/outer.md is what the recipes' functions put together."""

import re
from pathlib import Path

from farflung.config.recipes import RECIPES
from farflung.outer import ByWork, ErrorFeedback, Recipe, Warmup, recipes
from farflung.outer.named import OuterConfig, recipe_of
from tests.accelerator.test_outer_recipes import EVERY_RECIPE

PAGE = Path(__file__).parent.parent.parent / "docs" / "concepts" / "outer.md"


def named(*parts) -> str:
    return ", ".join(f"`{type(part).__name__}`" for part in parts)


def schedule(recipe: Recipe) -> str:
    if isinstance(recipe.schedule, Warmup):
        return named(recipe.schedule, recipe.schedule.then)
    every = getattr(recipe.schedule, "every", None)
    return named(recipe.schedule) + (" with a delay of H" if recipe.schedule.delay == every else "")


def codec(recipe: Recipe) -> str:
    inside = recipe.codec
    if isinstance(inside, ErrorFeedback):
        return f"`ErrorFeedback({type(inside.codec).__name__})`"
    return named(inside)


def optimizer(recipe: Recipe) -> str:
    if recipe.optimizer is None:
        return "none"
    settings = recipe.optimizer.keywords
    kind = "Nesterov SGD" if settings["nesterov"] else "SGD with momentum" if settings["momentum"] else "SGD"
    return kind if recipe.agrees else f"{kind}, per replica"


def row(name: str) -> str:
    """What the page must say of a recipe, with the options that it needs and the defaults of all others."""
    needed = {each.name: EVERY_RECIPE[name][each.name] for each in RECIPES[name] if each.is_needed}
    recipe = recipe_of(OuterConfig(name, **needed), 2)
    paper = re.search(r"arXiv:([\d.]+)", getattr(recipes, name).__doc__)[1]
    policy = () if isinstance(recipe.policy, ByWork) else (recipe.policy,)
    merge = "takes the mean" if recipe.optimizer is None else named(recipe.merge) + ", `eager`" * recipe.eager
    cells = (schedule(recipe), codec(recipe), named(recipe.aggregator, *policy), optimizer(recipe), merge)
    return f"| `{name}` ([{paper}](https://arxiv.org/abs/{paper})) | {' | '.join(cells)} |"


def test_the_table_of_recipes_has_the_parts_of_each():
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    shown = [line for line in shown if line.count("|") == 7]
    assert shown == [row(name) for name in RECIPES]
