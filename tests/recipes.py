# SPDX-License-Identifier: Apache-2.0
"""The one table of recipes: each with small numbers, some in several ways, for the tests of all rooms."""

from farflung.config.recipes import RECIPES as ARGUMENTS
from farflung.methods.arguments import MAKERS
from farflung.outer import Recipe, TopK

# What follows a recipe's name says which of its ways a row is.
OPTIONS = {
    "local_sgd": {"every": 2},
    "post_local_sgd": {"warmup": 3, "every": 2},
    "hierarchical": {"levels": {1: 2, 3: None}},
    "quadratic": {"every": 1, "alpha": 0.1},
    "slowmo": {"every": 2},
    "diloco": {"every": 2},
    "diloco radial": {"every": 2, "radial": True},
    "diloco average": {"every": 2, "average": 3},
    "diloco in two hops": {"every": 2, "codec": "int8", "exchange": "reduce_scatter"},
    "streaming_diloco": {"every": 4, "fragments": 2, "delay": 1},
    "streaming_diloco without delay": {"every": 3, "fragments": 3, "delay": 0, "alpha": 0.0},
    "streaming_diloco in two hops": {"every": 4, "fragments": 2, "delay": 2, "exchange": "reduce_scatter"},
    "eager_diloco": {"every": 3},
    "sparse_loco": {"every": 2, "codec": TopK(k=3, chunk=16)},
    "edit": {"every": 2},
    "gossip": {"every": 2},
    "noloco": {"every": 2},
}


def made(name: str, **options: object) -> Recipe:
    """The recipe of a row, with some options changed."""
    return MAKERS[name.split()[0]](**OPTIONS[name] | options)


def needed(name: str) -> dict[str, object]:
    """The options of a row for which a recipe has no default."""
    return {each.name: OPTIONS[name][each.name] for each in ARGUMENTS[name] if each.is_needed}


RECIPES = {name: made(name) for name in OPTIONS}
