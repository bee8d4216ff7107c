# SPDX-License-Identifier: Apache-2.0
"""What the pages say of recipes is what the recipes' functions say: parts, arguments, defaults and papers."""

import inspect
import re
from pathlib import Path

import pytest

from farflung.codec.named import CODECS
from farflung.config.recipes import RECIPES
from farflung.methods import recipes
from farflung.methods.arguments import OuterConfig, recipe_of
from farflung.outer import ByWork, ErrorFeedback, Recipe, Warmup
from tests.recipes import OPTIONS, needed

DOCS = Path(__file__).parent.parent.parent / "docs"
CONCEPTS, GUIDE = ((DOCS / name).read_text(encoding="utf-8") for name in ("concepts/methods.md", "recipes.md"))


def named(*parts) -> str:
    return ", ".join(f"`{type(part).__name__}`" for part in parts)


def schedule(recipe: Recipe) -> str:
    if isinstance(recipe.schedule, Warmup):
        return named(recipe.schedule, recipe.schedule.then)
    every = getattr(recipe.schedule, "every", None)
    return named(recipe.schedule) + (" with a delay of H" if recipe.schedule.delay == every else "")


def codec(recipe: Recipe) -> str:
    if isinstance(recipe.codec, ErrorFeedback):
        return f"`ErrorFeedback({type(recipe.codec.codec).__name__})`"
    return named(recipe.codec)


def optimizer(recipe: Recipe) -> str:
    if recipe.optimizer is None:
        return "none"
    settings = recipe.optimizer.keywords
    is_known = settings.get("nesterov") or {"nesterov", "momentum"} <= settings.keys()
    assert is_known, f"{recipe}: say how this table names its outer optimizer"
    kind = "Nesterov SGD" if settings["nesterov"] else "SGD with momentum" if settings["momentum"] else "SGD"
    return kind if recipe.agrees else f"{kind}, per replica"


def paper_of(name: str) -> str:
    found = re.search(r"arXiv:([\d.]+)", getattr(recipes, name).__doc__ or "")
    assert found, f"the docstring of {name} in src/farflung/methods/recipes.py names no paper, as arXiv:2311.08105"
    return found[1]


def row(name: str) -> str:
    """What the page must say of a recipe, with the options that it needs and the defaults of all others."""
    recipe = recipe_of(OuterConfig(name, **needed(name)), 2)
    paper = paper_of(name)
    policy = () if isinstance(recipe.policy, ByWork) else (recipe.policy,)
    merge = "takes the mean" if recipe.optimizer is None else named(recipe.merge) + ", `eager`" * recipe.eager
    cells = (schedule(recipe), codec(recipe), named(recipe.aggregator, *policy), optimizer(recipe), merge)
    return f"| `{name}` ([{paper}](https://arxiv.org/abs/{paper})) | {' | '.join(cells)} |"


def test_the_table_of_recipes_has_the_parts_of_each():
    shown = [line for line in CONCEPTS.splitlines() if line.startswith("| `")]
    shown = [line for line in shown if line.count("|") == 7]
    rows = [row(name) for name in RECIPES]
    odd = "\n".join(line for line in (*rows, *shown) if (line in rows) != (line in shown))
    assert not odd, f"docs/concepts/methods.md must have these rows if they are of a recipe, and no others:\n{odd}"
    assert shown == rows, "the rows come in the order of the functions"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_section_shows_its_arguments_their_defaults_and_its_paper(name):
    """As in `diloco(every, rounds=, lr=0.7, momentum=)`: a number after an argument is its default."""
    section = next((text for text in GUIDE.split("\n## ") if name in text.partition("\n")[0].split()), "")
    assert section, f"docs/recipes.md has no section on {name}; CONTRIBUTING.md says what it holds"
    parameters = inspect.signature(getattr(recipes, name)).parameters
    shown = re.search(rf"`{name}\(([^`]*)\)`", section)
    assert shown, f"the section on {name} in docs/recipes.md does not show a call, as `{name}(every)`"
    for argument, default in re.findall(r"\b([a-z]\w*)(?:=([\d.]+))?", shown[1]):
        assert argument in parameters, argument
        assert not default or float(default) == parameters[argument].default, argument
    assert f"arXiv:{paper_of(name)}" in section


def test_the_guide_names_the_recipes_that_need_options_and_the_default_intervals():
    guide = " ".join(GUIDE.split())
    needing = [name for name, arguments in RECIPES.items() if any(each.is_needed for each in arguments)]
    (sentence,) = re.findall(r"([^.]*) have required options", guide)
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(needing)
    intervals = r"H is (\d+) if the weights themselves are averaged, else (\d+) \(`sparse_loco`: (\d+)\)"
    averaged, anchored, sparse = map(int, re.search(intervals, guide).groups())
    for name in set(RECIPES) - set(needing):
        made = recipe_of(OuterConfig(name), 2)
        interval = sparse if name == "sparse_loco" else averaged if made.optimizer is None else anchored
        assert made.schedule.every == interval, name


def test_each_recipe_is_a_row_of_the_table_of_tests():
    odd = {name.split()[0] for name in OPTIONS} ^ set(RECIPES)  # some are tested in several ways
    assert not odd, f"OPTIONS of tests/recipes.py must have rows for recipes alone, and for each: {odd}"


def test_each_codec_is_described():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "concepts" / "codec.md").read_text(encoding="utf-8"), re.MULTILINE)
    described = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert set(CODECS) <= described, "docs/concepts/codec.md has no row for each of them; see CONTRIBUTING.md"
