# SPDX-License-Identifier: Apache-2.0
"""Recipes and codecs by name: in a script as on the command line."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from farflung import Accelerator, OuterConfig
from farflung.base.errors import ConfigError
from farflung.codec.named import CODECS as MADE, codec_of
from farflung.config.outer import CODECS, RECIPES as NAMES
from farflung.config.recipes import RECIPES
from farflung.methods.arguments import MAKERS, chosen_recipe, recipe_of
from farflung.methods.schedule import TrialSchedule
from farflung.outer import ErrorFeedback, OuterLoop, Streaming, TopK, WithoutOutliers, by_bytes, diloco
from farflung.testing.simulate import simulate
from tests.errors import error_of
from tests.recipes import needed


def comparable(recipe):
    """A recipe's parts, with the outer optimizer's settings in place of the function that makes it."""
    parts = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    return {**parts, "optimizer": getattr(recipe.optimizer, "keywords", None)}


def test_a_name_alone_is_the_recipe_with_its_defaults():
    for name in (name for name in NAMES if not needed(name)):
        for recipe in (chosen_recipe(name), recipe_of(OuterConfig(name), 1)):
            assert comparable(recipe) == comparable(MAKERS[name]())
    assert recipe_of(OuterConfig("auto", steps=99), 1).schedule == TrialSchedule(99)


def test_defaults_that_no_page_shows_are_those_of_the_papers_and_what_is_given_counts():
    assert MAKERS["streaming_diloco"]().schedule == Streaming(32, 4, 1)
    assert MAKERS["streaming_diloco"](cut=by_bytes).fragments is by_bytes
    assert MAKERS["eager_diloco"]().optimizer.keywords == {"lr": 0.7, "momentum": 0.3, "nesterov": True}
    assert MAKERS["sparse_loco"](codec=ErrorFeedback(TopK(), 0.5)).codec.beta == 0.5
    assert MAKERS["edit"]().optimizer.keywords == {"lr": 0.7, "momentum": 0.8, "nesterov": True}
    assert MAKERS["edit"]().policy == WithoutOutliers(3.0, 1.0, 10.0, 0.98, 10)


@pytest.mark.parametrize(
    ("name", "needed"),
    {
        "hierarchical": "levels, such as levels='4:machine,64:all'; as flags: --outer_levels 4:machine,64:all",
        "post_local_sgd": "warmup, such as warmup=500; as flags: --outer_warmup 500",
        "quadratic": "every and alpha, such as every=32, alpha=0.01; as flags: --outer_every 32 --outer_alpha 0.01",
    }.items(),
)
def test_a_name_that_needs_a_choice_says_which(name, needed):
    assert error_of(ConfigError, chosen_recipe, name) == f"{name} needs {needed}."


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_can_be_named_wherever_one_is_taken(codec):
    meant = codec_of(codec)
    for name in (name for name, arguments in RECIPES.items() if "codec" in [each.name for each in arguments]):
        make, options = MAKERS[name], {"pull": 0} if name == "noloco" else {}  # a pull would have anchors rounded
        recipe = make(**needed(name), codec=codec, **options)
        assert recipe.codec == (ErrorFeedback(meant, 0.9) if name == "sparse_loco" else meant)
    assert replace(diloco(2), codec=codec, aggregator=diloco(2, codec=codec).aggregator).codec == meant
    assert ErrorFeedback(codec).codec == meant


def test_flags_and_functions_know_the_same_codecs():
    assert tuple(MADE) == CODECS  # the flags read the names from the text of the table


def test_names_work_in_a_script_a_bare_loop_and_a_simulation():
    model = nn.Linear(2, 1)
    with OuterLoop(model, "diloco") as loop:
        assert "every=32" in loop.state_dict()["description"]
    with OuterLoop(model, OuterConfig("diloco", bucket_bytes=64)) as loop:
        assert "buckets of 64 bytes" in loop.state_dict()["description"]
    accelerator = Accelerator(cpu=True)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for recipe in ("diloco", OuterConfig("slowmo", every=4, codec="int8")):
        with accelerator.outer(prepared, recipe) as loop:
            assert accelerator.outer_loops == [loop]
    batches = [torch.ones(2, 2)]
    run = simulate(
        lambda: nn.Linear(2, 1), lambda rank: batches, "local_sgd", replicas=2, steps=8, loss=lambda m, x: m(x).mean()
    )
    assert run.stats[0].rounds == 1
