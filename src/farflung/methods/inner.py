# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: how a round treats its state, hooks on its steps, and the parameters that Muon trains."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.base.checks import check_type, check_whole, wrong_type
from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.group import Group
from farflung.comm.recording import uncompiled
from farflung.comm.shards import is_sharded
from farflung.methods.agreement import average
from farflung.methods.weighting import Decision, in_proportion
from farflung.votes.ballot import digest_of

_STEPS_IN = inspect.getfile(Optimizer)
_COUNTER = "step"  # torch.optim keeps it as a float tensor, which has the shape of a parameter that is a scalar


class Inner:
    """How the state of the inner optimizer is updated after a round.

    Attributes:
        needs_optimizer: the loop must know the inner optimizer.
    """

    needs_optimizer = True

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        """Update the state of `parameters` after round number `rounds`; return the bytes that this rank sent.

        There may be no `optimizer` yet in the round that admits a newcomer.
        """
        return 0


@dataclass(frozen=True)
class KeepState(Inner):
    """Each replica keeps its own optimizer state, as in most methods."""

    needs_optimizer = False


@dataclass(frozen=True)
class ResetState(Inner):
    """Reset the optimizer state, so that the optimizer starts afresh from the agreed weights."""

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        if optimizer is not None:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
        return 0


@dataclass(frozen=True)
class AverageState(Inner):
    """Average the tensors of the optimizer state, each name at a period of its own.

    Args:
        every: rounds between two averagings, by the name in the optimizer state; empty averages all of them in every
            round. `{"exp_avg": 3, "exp_avg_sq": 6}` is DES-LOC's choice for Adam.

    Raises:
        ConfigError: a period is not a positive integer.

    Source: DES-LOC (arXiv:2505.22549).
    """

    every: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_type("every", self.every, Mapping, "a dictionary of names and rounds, such as {'exp_avg': 3}")
        for name, period in self.every.items():
            check_whole(name, period, least=1)

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        """Average the tensors that are due, unless ranks have different ones: an optimizer that never stepped has none.

        Ranks with values that are not finite get the mean of the others.

        Raises:
            ConfigError: the optimizer state has no tensor of a name in `every`.
        """
        due = [] if optimizer is None else self._due(optimizer, parameters, rounds)
        layout = " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in due)
        mark = digest_of(layout)
        sound = float(all(bool(torch.isfinite(tensor).all()) for tensor in due))
        marks, sounds = group.all_gather_small(torch.tensor([float(mark), sound], dtype=torch.float64)).T.tolist()
        shares = in_proportion([factor * one for factor, one in zip(decision.factors, sounds, strict=True)])
        if not due or len(set(marks)) != 1 or not shares.total:
            return 0
        return average(due, group, shares)

    def _due(self, optimizer: Optimizer, parameters: Sequence[Tensor], rounds: int) -> list[Tensor]:
        states = [(parameter, optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state]
        kept = {name for _, state in states for name in state}
        if states and not kept >= set(self.every):
            raise ConfigError(
                f"The optimizer's state has {sorted(kept)}, but none of {sorted(set(self.every) - kept)}."
            )
        return [
            value
            for parameter, state in states
            for name, value in sorted(state.items())
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
            if name != _COUNTER and (not self.every or (name in self.every and rounds % self.every[name] == 0))
        ]


def muon_groups(model: nn.Module, adamw: Iterable[str] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters of a model into hidden matrices, for Muon, and all others, for AdamW.

        hidden, others = muon_groups(model)
        optimizers = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=lr)

    Hidden matrices are the parameters `[out, in]` whose name ends in `weight`, other than embeddings and the head. An
    embedding is the weight of an `nn.Embedding` or `nn.EmbeddingBag`, and so is a head that is tied to it. A head that
    is not tied is the last weight `[out, in]` in the order in which the model registers them; a transformers model also
    says which module its head is (`get_output_embeddings`). Models don't say which other matrices face their inputs or
    outputs: name those in `adamw`, such as the first layer of a perceptron or the second of two heads. Vectors,
    convolutions, stacked experts and parameters with other names, such as a table of positions, are never for Muon.

    Args:
        adamw: names of parameters, or of modules with all of theirs, that are left to AdamW too.

    Returns:
        hidden matrices and others, each in the order of `model.parameters()`.

    Raises:
        ConfigError: the model has no parameter or module of a name in `adamw`, or no hidden matrix is left.
        Unsupported: a hidden matrix is sharded; `torch.optim.Muon` orthogonalizes whole matrices.

    Source: MuLoCo (arXiv:2505.23725), and Muon (kellerjordan.github.io/posts/muon).
    """
    check_type("muon_groups: model", model, nn.Module, "the model to train")
    if isinstance(adamw, str):
        raise wrong_type("muon_groups: adamw", adamw, "a list of names, such as ['head']")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    excluded = _at_the_ends(model) | {id(one) for name in adamw for one in _named(model, name)}
    hidden = [one for name, one in trained.items() if _is_matrix(name, one) and id(one) not in excluded]
    if not hidden:
        raise ConfigError(
            "muon_groups: the model has no trainable weight [out, in] other than embeddings, its last one and those in "
            "`adamw`, so there is nothing for Muon to train. Use AdamW alone."
        )
    if any(map(is_sharded, hidden)):
        raise Unsupported(
            "muon_groups: torch.optim.Muon orthogonalizes whole matrices and does not know shards. Train with AdamW, "
            "or with DDP."
        )
    chosen = set(map(id, hidden))
    return hidden, [parameter for parameter in trained.values() if id(parameter) not in chosen]


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and name.endswith("weight")


def _at_the_ends(model: nn.Module) -> set[int]:
    """Return the ids of embeddings and heads; a tied head is the last name of an embedding."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    matrices = [one for name, one in model.named_parameters(remove_duplicate=False) if _is_matrix(name, one)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [*matrices[-1:], *(head.parameters() if isinstance(head, nn.Module) else ())]
    return {*map(id, embeddings), *map(id, heads)}


def _named(model: nn.Module, name: str) -> list[nn.Parameter]:
    found = [one for path, one in model.named_parameters(remove_duplicate=False) if f"{path}.".startswith(f"{name}.")]
    if not found:
        raise ConfigError(f"muon_groups: the model has no parameter and no module {name!r}, which `adamw` names.")
    return found


def hooks_of(
    optimizers: Sequence[Optimizer],
    before: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None],
    after: Callable[[], None],
) -> list[RemovableHandle]:
    """Call `before` before each step of each optimizer, and `after` once for each iteration that is over."""
    iteration = IterationTracker(optimizers)

    def count(optimizer: Optimizer, *_: Any) -> None:
        for _done in iteration.step_attempted(optimizer) if is_outermost_step(optimizer) else ():
            after()

    hooks = [optimizer.register_step_pre_hook(uncompiled(before)) for optimizer in optimizers]
    return hooks + [optimizer.register_step_post_hook(uncompiled(count)) for optimizer in optimizers]


def is_outermost_step(optimizer: Optimizer) -> bool:
    """Return whether the hook that asks is that of a step which no other step of `optimizer` has called.

    torch calls hooks around the step of each class, so twice where that of a subclass calls its super's.
    """
    frame, around = sys._getframe(1), list[FrameType]()
    while frame is not None:
        if frame.f_code.co_filename == _STEPS_IN and frame.f_locals.get("args", (None,))[0] is optimizer:
            around.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return len(around) < 2


class IterationTracker:
    """Determines when an iteration of a loop with several optimizers is over: once all have attempted a step.

    A round may not run before: an optimizer that steps after it would apply a gradient of the weights before the round
    to those after it. An optimizer that attempts another step first shows that the iteration went without the others;
    it is counted then. Optimizers that were missing in two iterations in a row are awaited again once they step.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._awaited: WeakSet[Optimizer] = WeakSet(optimizers)
        self._missing: WeakSet[Optimizer] = WeakSet()  # in the iteration before
        self._attempted: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # in this one; True: it has stepped

    def expect(self, optimizer: Optimizer) -> None:
        self._awaited.add(optimizer)

    @property
    def is_open(self) -> bool:
        """Whether some of the optimizers have attempted a step in this iteration, and others are awaited."""
        return bool(self._attempted)

    def step_attempted(self, optimizer: Optimizer, done: bool = True) -> list[bool]:
        """Return for each iteration that is over now whether any optimizer has stepped in it."""
        ended = []
        if optimizer in self._attempted:
            missing = self._awaited - WeakSet(self._attempted)
            self._awaited -= missing & self._missing
            ended.append(self._end(missing))
        self._awaited.add(optimizer)
        self._attempted[optimizer] = done
        if len(self._attempted) == len(self._awaited):
            ended.append(self._end(WeakSet()))
        return ended

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return it as plain data, with the places of optimizers among these."""
        places = dict(enumerate(optimizers))
        return {
            "awaited": [place for place, one in places.items() if one in self._awaited],
            "missing": [place for place, one in places.items() if one in self._missing],
            "attempted": {place: self._attempted[one] for place, one in places.items() if one in self._attempted},
        }

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        here = dict(enumerate(optimizers))
        self._awaited, self._missing = (
            WeakSet(here[place] for place in state[name] if place in here) for name in ("awaited", "missing")
        )
        self._attempted = WeakKeyDictionary({here[k]: done for k, done in state["attempted"].items() if k in here})

    def close(self) -> list[bool]:
        """End the iteration without the optimizers that are awaited; return as `step_attempted` does."""
        return [self._end(self._missing)] if self._attempted else []

    def _end(self, missing: WeakSet[Optimizer]) -> bool:
        has_stepped = any(self._attempted.values())
        self._attempted.clear()
        self._missing = missing
        return has_stepped
