# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation as a part of a recipe: no single replica can spoil the common weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from farflung.base.checks import check_word
from farflung.base.errors import ConfigError
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.sparse import TopK
from farflung.methods.aggregate import RadialMean, ReduceScatterMean, TrimmedMean
from farflung.methods.inner import AverageState
from farflung.methods.policies import ClippedToMedian, Screened
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Levels, TrialSchedule, Warmup
from farflung.methods.weighting import ByWork, Norm

RULES = ("trimmed", "clip")


def robust(recipe: Recipe, rule: str) -> Recipe:
    """Return `recipe` with an aggregation that a faulty replica can't spoil: `robust(diloco(32), "trimmed")`.

    Both rules leave out a replica whose pseudo-gradient is not finite, or too large in three rounds (`Screened`), and
    take a trimmed mean of floating buffers. Equal pseudo-gradients give their mean, as without a rule.

    Args:
        rule: `trimmed`, the coordinate-wise trimmed mean of four replicas or more: each reads the values of all others,
            and trusts no report of a norm. Or `clip`, which scales pseudo-gradients down to the median norm of three
            replicas or more: it sends no more than the recipe alone, and trusts the norms that replicas report.

    Raises:
        ConfigError: the recipe is not one of a mean over all replicas that the rule can take the place of.

    Source: trimmed mean, arXiv:1803.01498; clipping to the median norm, SparseLoCo (arXiv:2508.15706).
    """
    check_word("robust", rule, RULES)
    if why := next(_reasons(recipe, rule), ""):
        raise ConfigError(f"is {rule!r}, but {why}.", "robust")
    norm: Norm = "none" if recipe.optimizer is None else "sent" if isinstance(recipe.codec, ErrorFeedback) else "local"
    if rule == "clip":
        return replace(recipe, policy=Screened(ClippedToMedian(), norm))
    return replace(recipe, aggregator=TrimmedMean(), policy=Screened(ByWork(), norm))


def _reasons(recipe: Recipe, rule: str) -> Iterator[str]:
    """Yield why a rule can't be part of a recipe."""
    if isinstance(recipe.schedule, TrialSchedule):
        yield "the recipe is yet to be chosen, and not each takes a rule. Use diloco, or leave out robust"
    if not recipe.agrees:
        how = "eager anchors" if recipe.eager else str(recipe.aggregator)
        yield f"with {how} replicas do not take the same mean of all. Use diloco, or leave out robust"
    if isinstance(recipe.schedule, Warmup):
        yield "a warm-up averages gradients, which no rule protects. Use local_sgd, or leave out robust"
    if isinstance(recipe.schedule, Levels):
        yield f"{recipe.schedule} also averages groups that may have no majority. Use local_sgd, or leave out robust"
    if not isinstance(recipe.policy, (ByWork, ClippedToMedian)):
        yield f"{recipe.policy} has a rule of its own for outliers. Use diloco, or leave out robust"
    if isinstance(recipe.aggregator, ReduceScatterMean) and rule == "trimmed":
        yield f"it reads the values of each replica, and {recipe.aggregator} sends sums of them. Leave out exchange"
    if isinstance(recipe.inner, AverageState):
        yield f"{recipe.inner} is a plain mean of optimizer states. Keep or reset them (inner), or leave out robust"
    if rule == "clip" and recipe.optimizer is None:
        yield "weights that are averaged have no norm to compare. Use diloco or slowmo, or robust=trimmed"
    if rule == "trimmed" and isinstance(recipe.aggregator, RadialMean):
        yield "radial gives the mean another length. Leave out radial, or use robust=clip"
    if rule == "trimmed" and isinstance(recipe.codec, (ErrorFeedback, TopK)):
        yield f"of most values {recipe.codec} sends nothing, so trimmed means are 0. Use another codec, or robust=clip"
