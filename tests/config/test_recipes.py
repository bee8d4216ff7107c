# SPDX-License-Identifier: Apache-2.0
"""What is read from the recipes' text is what Python says of the functions, and what a flag's help says of them."""

import inspect
import re
import types
from collections.abc import Mapping
from typing import Union, get_args, get_origin, get_type_hints

import pytest

from farflung.config.outer import COMMON, OPTIONS
from farflung.config.recipes import RECIPES, help_of
from farflung.methods import recipes
from farflung.methods.recipe import Recipe

KINDS = {int: int, float: float, bool: bool, str: str, Mapping: str}


def sayable(hint):
    """What a flag parses for an annotation, None if no flag can say it."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((KINDS[kind] for kind in (get_origin(each) or each for each in members) if kind in KINDS), None)


def test_each_public_function_that_returns_a_recipe_is_listed():
    functions = {
        name
        for name, value in vars(recipes).items()
        if inspect.isfunction(value) and value.__module__ == recipes.__name__ and not name.startswith("_")
        if get_type_hints(value)["return"] is Recipe
    }
    assert set(recipes.__all__) == functions == set(RECIPES)


@pytest.mark.parametrize("name", recipes.__all__)
def test_names_types_and_needs_of_arguments_are_those_of_the_function(name):
    function = getattr(recipes, name)
    hints = get_type_hints(function)
    expected = [
        (each.name, sayable(hints[each.name]), each.default is inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    ]
    read = [(each.name, each.kind, each.is_needed) for each in RECIPES[name]]
    assert read == [each for each in expected if each[1] is not None]
    assert [each for each in expected if each[1] is None] == [("cut", None, False)] * (name == "streaming_diloco")


def test_an_option_is_of_one_type_everywhere_and_a_recipe_takes_no_name_of_a_common_one():
    for arguments in RECIPES.values():
        for each in arguments:
            assert OPTIONS[each.name].kind is each.kind, each
            assert each.name not in ("recipe", *(option.name for option in COMMON))


def test_the_help_is_the_docstrings_words_with_the_recipes_names_where_they_differ():
    for each in OPTIONS.values():
        assert each.help[0].isupper() or each.help.partition(":")[0].removesuffix(" only") in RECIPES, each
    assert help_of("lr") == "Learning rate of the outer optimizer."
    assert help_of("delay").startswith("streaming_diloco only: steps for which ")
    assert help_of("every").startswith("Sync interval H, in optimizer steps. quadratic: steps in the shortest round. ")
    assert re.findall(r"(?:^|\. )(\w+): ", help_of("alpha")) == ["quadratic", "slowmo", "streaming_diloco"]
