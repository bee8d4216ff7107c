# SPDX-License-Identifier: Apache-2.0
"""The arguments of `simulate`, checked before any replica trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from farflung.base.checks import check_callable, check_number, check_type, check_whole, shown, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.outer.recipe import Recipe
from farflung.outer.schedule import ByTime
from farflung.testing.timed import Network

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class SimulateArguments:
    """The arguments of `simulate`, checked."""

    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], Iterable[Any]]
    recipe: Recipe
    replicas: int
    steps: int
    seconds: float
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    loss: Loss
    items: Callable[[Any], float] | None
    max_norm: float | None
    seed: int
    evaluate: Callable[[nn.Module], float] | None
    evaluate_every: int | None
    step_seconds: tuple[float, ...]
    delays: Mapping[tuple[int, int], float]
    lost: Mapping[int, int]
    network: Network
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0)
        check_number("seconds", self.seconds, above=0, finite=False)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, least=0, finite=False)
        if self.evaluate_every is not None:
            check_whole("evaluate_every", self.evaluate_every, least=1)
        self._check_functions()
        self._check_times()
        meets = self.recipe.optimizer is None or not self.recipe.agrees
        if self.evaluate_every is not None and isinstance(self.recipe.schedule, ByTime) and meets:
            raise ConfigError(
                "Evaluating this recipe averages the weights of all replicas, but with a schedule by time they reach a "
                "step at different times. Leave out evaluate_every, and evaluate once at the end."
            )

    def _check_functions(self) -> None:
        if isinstance(self.make_model, nn.Module):
            raise wrong_type(
                "make_model", self.make_model, "a function that makes one, such as lambda: model_of(config)"
            )
        check_callable("make_model", self.make_model, "lambda: nn.Linear(2, 1)")
        check_callable("make_data", self.make_data, "lambda rank: batches[rank]")
        check_callable("make_optimizer", self.make_optimizer, "lambda parameters: torch.optim.SGD(parameters, lr=0.1)")
        check_callable("loss", self.loss, "lambda model, batch: model(batch).mean()")
        for name, example in (
            ("make_scheduler", "lambda optimizer: LambdaLR(optimizer, schedule)"),
            ("items", "lambda batch: len(batch)"),
            ("evaluate", "lambda model: perplexity_of(model)"),
        ):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name), example)

    def _check_times(self) -> None:
        for seconds in self.step_seconds:
            check_number("step_seconds", seconds, least=0)
        if len(self.step_seconds) != self.replicas:
            raise ConfigError(
                f"step_seconds has {counted(len(self.step_seconds), 'value')} for {counted(self.replicas, 'replica')}: "
                "give one number, or one for each of them."
            )
        check_type("lost", self.lost, Mapping, "a dictionary of ranks and steps, such as {3: 100}")
        check_type("delays", self.delays, Mapping, "a dictionary of seconds, such as {(rank, step): 2.0}")
        for key, seconds in self.delays.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise wrong_type("delays: a key", key, "a rank and a step, such as (0, 5)")
            check_number(f"delays: {key}", seconds, least=0)
        for rank, step in self.lost.items():
            check_whole(f"lost: {rank!r}", step, least=0)
        strangers = sorted({*self.lost, *(rank for rank, _ in self.delays)} - set(range(self.replicas)), key=str)
        if strangers:
            raise ConfigError(
                f"lost and delays name ranks {strangers} of {counted(self.replicas, 'replica')}, counted from 0."
            )

    def model(self) -> nn.Module:
        """Make a model; raise ConfigError if `make_model` makes something else."""
        model = self.make_model()
        check_type("make_model: what it returned", model, nn.Module, "an nn.Module")
        return model

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch; raise ConfigError if it is no tensor of one number."""
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss: what it returned is {shown(loss)}; it must be a tensor of one number.")
        return loss
