# SPDX-License-Identifier: Apache-2.0
"""The parts of a recipe, which make up one method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch

from farflung.base.checks import check_callable, check_flag, check_protocol, check_whole, check_word, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.lazy import LazyModule
from farflung.base.sizes import FEW_ROUNDS
from farflung.base.words import counted
from farflung.codec.base import Codec, Identity
from farflung.codec.feedback import ErrorFeedback
from farflung.comm.group import SoloGroup
from farflung.methods.agreement import Aggregator, Blend, MakeOptimizer, Max, Mean, Merge, Replace, Ways
from farflung.methods.fragments import Cut, whole
from farflung.methods.inner import Inner, KeepState
from farflung.methods.momentum import OuterSGD
from farflung.methods.schedule import (
    Change,
    ChangingSchedule,
    Every,
    Levels,
    Quadratic,
    Schedule,
    Streaming,
    TrialSchedule,
    Warmup,
    after_warmup,
    check_schedule,
    streaming,
)
from farflung.methods.weighting import ByWork, Policy

if TYPE_CHECKING:
    from farflung.codec import named as named
else:
    named = LazyModule("farflung.codec.named")

Work: TypeAlias = Literal["steps", "items", "items_squared"]

_SELDOM = 32  # steps of a round, from which on adapters take a momentum to 0.9 (docs/evidence.md)


@dataclass(frozen=True)
class Recipe:
    """One method: when to exchange, what, in how many bits, how it is combined, and how the model takes it over.

    `dataclasses.replace(diloco(every=32), optimizer=functools.partial(torch.optim.Adam, lr=1e-3))` is another one.

    Args:
        schedule: when which fragment is exchanged.
        codec: how values are encoded to be sent.
        aggregator: how all ranks' values are combined.
        policy: how much each rank counts.
        weigh_by: what a rank's work is counted in: `steps`; the `items` (samples, tokens) that `count` is given; or
            `items_squared`, the square of each step's items. If all steps of a replica have as many items, that is
            items**2 / steps: its items times the size of its batches (arXiv:2604.21428).
        optimizer: makes the outer optimizer of the anchor's parameters, from `torch.optim`. None keeps no anchor: the
            weights themselves are averaged, which gives their exact mean (anchor - mean(anchor - local) does not).
        merge: how local weights take over the anchor.
        eager: apply a rank's own newest pseudo-gradient to its anchor at once, and those of the others when they have
            arrived, a round later. So each rank has an anchor of its own.
        fragments: splits a model into as many fragments as the schedule has.
        anchor_on_cpu: keep the anchor and the outer optimizer's state in host memory.
        average: over how many rounds the weights are averaged that are evaluated, saved and left at the end: a running
            mean, over a tenth of the rounds so far at most. None: they are those of the last round.
        inner: what a round does with the inner optimizer's state.
        bucket_bytes: bucket size, unless the `OuterLoop` is given one; see there.
        same_data: replicas may see the same batches. Otherwise changes that are equal to the last bit in their first
            three rounds raise a ConfigError.
        changes: from which steps on H is another one. Settings of the outer optimizer that follow from H change too.

    Raises:
        ConfigError: the parts do not go together.
        Unsupported: the aggregator can't work with the codec.
    """

    schedule: Schedule
    codec: Codec = field(default_factory=Identity)
    aggregator: Aggregator = field(default_factory=Mean)
    policy: Policy = field(default_factory=ByWork)
    weigh_by: Work = "steps"
    optimizer: MakeOptimizer | None = None
    merge: Merge = field(default_factory=Replace)
    eager: bool = False
    fragments: Cut = whole
    anchor_on_cpu: bool = False
    average: int | None = None
    inner: Inner = field(default_factory=KeepState)
    bucket_bytes: int | None = None
    same_data: bool = False
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        self._check_kinds()
        self.scheduled(self.changes)
        if self.optimizer is None:
            self._check_without_anchor()
        inside = after_warmup(self.schedule)
        fits = isinstance(inside, Streaming) and inside.fragments == 1 and inside.delay == inside.every
        if self.eager and not fits:
            raise ConfigError("eager needs a schedule with one fragment and a delay equal to every.")
        if self.eager and (why := self.aggregator.not_eager):
            raise ConfigError(f"eager replaces this rank's term in a mean, and {self.aggregator} {why}.")
        if self.levels and self.optimizer is not None:
            raise ConfigError(
                f"{self.schedule} with an outer optimizer: rounds in smaller groups would leave each group an anchor "
                "of its own. Leave the optimizer out, so that weights are averaged."
            )
        for part in (self.aggregator, self.policy) if self.weighs_items else ():
            if not part.weighs_work:
                raise ConfigError(
                    f"is {self.weigh_by!r}, but {part} does not weight replicas by their work. Leave it out, or use a "
                    "recipe that does, such as diloco.",
                    "weigh_by",
                )
        # Refuses now what the aggregator would refuse in the first round.
        residual = torch.zeros(1) if isinstance(self.codec, ErrorFeedback) else None
        self.aggregator.prepare(torch.zeros(1), self.codec, SoloGroup(), residual)
        if self.eager and isinstance(self.codec, ErrorFeedback):
            raise ConfigError("eager replaces this rank's stale term, and ErrorFeedback() has not sent all of it.")
        if self.inner != KeepState() and self.schedule.delay:
            raise ConfigError(f"{self.inner} needs rounds that block training, so it can't be used with a delay.")

    def _check_kinds(self) -> None:
        check_schedule("schedule", self.schedule)
        if not isinstance(self.codec, Identity):
            object.__setattr__(self, "codec", named.codec_of(self.codec))
        wanted = "an Aggregator of farflung.methods.agreement, such as Mean()"
        check_protocol("aggregator", self.aggregator, ("prepare", "start", "lengths"), wanted)
        wanted = "a Policy of farflung.methods.weighting, such as ByWork()"
        check_protocol("policy", self.policy, ("norm", "max_norm", "screens"), wanted)
        check_word("weigh_by", self.weigh_by, get_args(Work))
        if self.optimizer is not None:
            check_callable("optimizer", self.optimizer, "functools.partial(torch.optim.Adam, lr=1e-3)")
        check_protocol("merge", self.merge, ("__call__",), "a merge, such as Replace() or Blend(0.5)")
        check_callable("fragments", self.fragments, "farflung.outer.strided")
        for name in ("anchor_on_cpu", "eager", "same_data"):
            check_flag(name, getattr(self, name))
        if self.average is not None:
            check_whole("average", self.average, least=1)
            if not self.has_anchor:
                raise ConfigError(
                    f"is {self.average}, but only an anchor shared by all replicas has a mean.", "average"
                )
        if self.bucket_bytes is not None:
            check_whole("bucket_bytes", self.bucket_bytes, least=1)
        if not isinstance(self.changes, tuple) or not all(isinstance(one, Change) for one in self.changes):
            raise wrong_type("changes", self.changes, "a tuple of changes, such as (Change(step=640, every=64),)")
        check_protocol("inner", self.inner, ("needs_optimizer",), "one of KeepState(), ResetState() and AverageState()")

    def _check_without_anchor(self) -> None:
        if self.anchor_on_cpu:
            raise ConfigError("is True, but without an outer optimizer the recipe keeps no anchor.", "anchor_on_cpu")
        if self.schedule.delay:
            raise ConfigError(
                f"delay={self.schedule.delay}: weights that are averaged late would undo the steps since. Give the "
                "recipe an outer optimizer, so that pseudo-gradients are exchanged instead of weights."
            )
        if isinstance(self.codec, ErrorFeedback) or isinstance(self.merge, Blend):
            raise ConfigError(f"{self.codec} with {self.merge} needs an anchor: give the recipe an outer optimizer.")
        if why := self.aggregator.needs_anchor:
            raise ConfigError(f"{self.aggregator} {why}: give the recipe an outer optimizer.")
        if self.policy.norm != "none":
            raise ConfigError(
                f"{self.policy} needs the replicas' pseudo-gradients: give the recipe an outer optimizer."
            )

    def scheduled(self, changes: tuple[Change, ...]) -> Schedule:
        """Return the schedule with these changes of H; ConfigError if they do not fit the recipe."""
        for change in changes:
            self.check_interval(change.every, change.delay)
        return ChangingSchedule(self.schedule, changes) if changes else self.schedule

    def check_interval(self, every: int, delay: int) -> None:
        """Raise ConfigError unless H could change to `every`, with this delay."""
        streaming(self.schedule, every, delay)
        if self.eager and delay != every:
            raise ConfigError(f"is {every} and delay is {delay}: eager needs a delay equal to every.", "every")

    @property
    def exchange(self) -> Aggregator:
        """How weights are exchanged: as `aggregator` says, but in one hop where a value may be rounded once only."""
        return self.aggregator.rounding_once() if self.eager or self.optimizer is None else self.aggregator

    @property
    def is_whole(self) -> bool:
        """Whether a fragment must be in its buffers as a whole: it is sent during training, or its norm is changed."""
        return bool(self.schedule.delay) or self.policy.norm == "sent" or self.changes_norm

    @property
    def changes_norm(self) -> bool:
        """Whether the aggregate is made longer or shorter."""
        return self.policy.max_norm < math.inf or self.aggregator.is_radial

    @property
    def least(self) -> int:
        """The number of replicas that its aggregation needs, so that the others outvote any one of them."""
        trim = self.aggregator.trim
        return 2 * trim + 1 + (1 if trim else 2) * self.policy.screens

    @property
    def weighs_items(self) -> bool:
        """Whether each step must state how many items it has."""
        return self.weigh_by != "steps"

    def work_of(self, items: float) -> float:
        return {"steps": 1.0, "items": items, "items_squared": items * items}[self.weigh_by]

    @property
    def votes_first(self) -> bool:
        """Whether nothing is sent before the votes are in.

        The votes decide what to send; or the round runs in the background and needs no hurry; or its size may differ
        between ranks, if some have had a round in a smaller group since the model changed; or values times items, in
        which each rank would scale its own, would be too large for the codec.
        """
        is_tight = self.weighs_items and self.codec.limit < math.inf
        return self.is_whole or self.policy != ByWork() or bool(self.levels) or is_tight

    @property
    def agrees(self) -> bool:
        """Whether a round leaves all replicas with the same anchor."""
        return self.aggregator.agrees and not self.eager

    @property
    def leaves_alike(self) -> bool:
        """Whether replicas that have made equally many steps have the same weights right after a round."""
        inside = after_warmup(self.schedule)
        is_whole = getattr(inside, "fragments", 1) == 1 and not self.schedule.delay
        return self.agrees and is_whole and isinstance(self.merge, Replace)

    @property
    def has_anchor(self) -> bool:
        """Whether that anchor is kept between rounds, in addition to the weights that are trained."""
        return self.agrees and self.optimizer is not None

    @property
    def warmup(self) -> int:
        """The number of first steps in which gradients are averaged."""
        return self.schedule.steps if isinstance(self.schedule, Warmup) else 0

    @property
    def every(self) -> int | None:
        """The sync interval H in steps, the shortest if it varies; None if it depends on a clock."""
        inside = after_warmup(self.schedule)
        if isinstance(inside, (Every, Streaming, Quadratic)):
            return inside.every
        return max(inside.sizes) if isinstance(inside, Levels) else None

    @property
    def beside(self) -> Ways:
        """How buffers, and what is averaged outside of rounds, are aggregated."""
        return self.policy.beside or (Mean(), Max())

    @property
    def is_undecided(self) -> bool:
        """Whether it is that of a trial, after which another one is chosen."""
        return isinstance(after_warmup(self.schedule), TrialSchedule)

    @property
    def may_warm_up(self) -> bool:
        """Whether gradients are averaged in the first steps, as far as is known before the loop has met other ranks."""
        return self.warmup > 0 or self.is_undecided

    def few_rounds(self, steps: int) -> str:
        """Return a sentence if a run of so many steps has too few rounds for an outer loop, else nothing."""
        trained = max(0, steps - self.warmup)
        if self.every is None or trained >= FEW_ROUNDS * self.every:
            return ""
        shorter = max(1, trained // (2 * FEW_ROUNDS))
        return (
            f"{counted(steps, 'step')} make {counted(trained // self.every, 'round')} of {self.every}. Replicas that "
            f"meet so seldom hardly train together: rounds of {shorter} make {trained // shorter}."
        )

    @property
    def advice_for_adapters(self) -> str:
        """A sentence if `diloco`'s momentum may grow too large for a model that is mostly frozen, else empty."""
        optimizer = self.optimizer
        if self.is_undecided or not isinstance(optimizer, OuterSGD) or (self.every or _SELDOM) >= _SELDOM:
            return ""
        if optimizer.momentum is not None or optimizer.largest is not None or optimizer.sooner != 1.0:
            return ""
        return (
            f"less than half of this model trains, and rounds of {self.every} steps have an outer momentum that grows "
            "to 0.9. Adapters have ended far above plain averages so, and not with max_momentum=0.5 "
            "(--outer-max-momentum 0.5)"
        )

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of ranks in a group of each level but the last, which is all ranks."""
        inside = after_warmup(self.schedule)
        return inside.groups if isinstance(inside, Levels) else ()


def unfit(recipe: Recipe, most: int, is_fixed: bool, by_ddp: bool = False) -> str:
    """Return why a recipe can't be used in a run; empty if it can.

    Args:
        most: how many replicas there may be.
        is_fixed: no replica comes or goes.
        by_ddp: the gradients of a warm-up are averaged by DDP, over the ranks of a replica that comes and goes.
    """
    if by_ddp and recipe.warmup and not is_fixed:
        return (
            f"warmup is {recipe.warmup}: DDP would average the gradients of these steps within each replica alone, "
            "where replicas come and go. Use local_sgd, or fixed ranks (without --elastic); a plain OuterLoop with an "
            "attached optimizer averages them over all replicas."
        )
    if recipe.levels and not is_fixed:
        return (
            "hierarchical averages blocks of neighbouring ranks, which change where replicas come and go. Use islands "
            "(--ranks_per_replica) with any other recipe, or fixed ranks (without --elastic)."
        )
    if most >= recipe.least:
        return ""
    return (
        f"{recipe.aggregator} with {recipe.policy} needs {counted(recipe.least, 'replica')}, so that the others "
        f"outvote any one of them, and there are at most {most}. Add replicas, or leave out the rule (robust)."
    )


def check_model(model: object) -> None:
    """Raise WrongType unless `model` is a module; a recipe, or settings with its name, was swapped with it."""
    if not isinstance(model, torch.nn.Module):
        is_recipe = isinstance(model, Recipe) or isinstance(getattr(model, "recipe", None), str)
        raise wrong_type("model", model, f"an nn.Module{': the model comes before the recipe' * is_recipe}")
