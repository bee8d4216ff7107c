# SPDX-License-Identifier: Apache-2.0
"""Which parameters are exchanged: those that an optimizer has stepped, on any rank.

`requires_grad` tells it for an instant only: nets that train in turns are frozen while the others do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from farflung.base.errors import CollectiveMismatch
from farflung.comm.group import Group
from farflung.comm.recording import uncompiled
from farflung.comm.shards import local
from farflung.exchanged.bound import row_of
from farflung.exchanged.structure import adapter_in, buckets_of, line_of
from farflung.methods.agreement import Aggregator, NewParameters
from farflung.methods.fragments import TensorPlace, could_train, training
from farflung.votes.ballot import Tally, digest_of


class SteppedParameters:
    """The parameters of a model that have trained, as hooks of all optimizers see it.

    Attributes:
        known: the model's parameters by id.
        ids: of those that have trained.

    Args:
        first_move: called with the ids of those whose first move since `ids` was cleared comes now.
    """

    def __init__(self, first_move: Callable[[set[int]], None]) -> None:
        self.known: Mapping[int, Tensor] = {}
        self.ids: set[int] = set()
        self._first_move = first_move
        self._under_way: dict[int, set[int]] = {}  # what each optimizer has stepped since the latest count
        # Of optimizers with nothing left to note before the next round: parameter groups, their sizes, ids.
        self._complete: dict[int, tuple[list[dict[str, Any]], list[int], set[int]]] = {}
        self.seen = 0  # the id of the optimizer whose step under way had gradients before it
        _FOLLOWING.add(self)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note the parameters that a step of an optimizer moves: those with a gradient. Return whether it has any.

        Once all of its parameters have moved since the last round, it looks at a single one: a look at each of 32
        costs 90 us of a step in which they are not in the cache.
        """
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        before, known_sizes, found = self._complete.get(id(optimizer), ((), [], set()))
        if before is groups and known_sizes == sizes:
            if all(self.known[number].grad is None for number in found):
                return False
        else:
            mine = self.known.keys() & {id(parameter) for group in groups for parameter in group["params"]}
            found = {number for number in mine if self.known[number].grad is not None}
            if new := found - self.ids:
                self._first_move(new)
            self.ids |= found
            if mine <= self.ids:
                self._complete[id(optimizer)] = groups, sizes, mine
            found = found and found | self._under_way.get(id(optimizer), set())
        if found:
            self._under_way[id(optimizer)] = found
        return bool(found)

    def count(self) -> None:
        """Count a step; if no optimizer of torch's has made it, all that requires gradients may have moved."""
        if not self._under_way:
            self.ids |= {number for number, one in self.known.items() if one.requires_grad}
        self._under_way = {}

    def follow(self, known: Mapping[int, Tensor], ids: set[int]) -> None:
        """Continue with the parameters of a model; those with these ids have trained."""
        self.known, self.ids, self._complete = known, ids, {}

    def forget(self) -> None:
        """Count all that has trained as sent, but for the step under way."""
        self.follow(self.known, set().union(*self._under_way.values()))

    def end(self) -> None:
        _FOLLOWING.discard(self)


# Hooks can't be registered in hooks, where loops may begin.
_FOLLOWING: weakref.WeakSet[SteppedParameters] = weakref.WeakSet()


@uncompiled
def _before_step(optimizer: Optimizer, *_: Any) -> None:  # as a round may run in a hook after it
    for moves in list(_FOLLOWING):
        if moves.stepped(optimizer):
            moves.seen = id(optimizer)
        elif moves.seen == id(optimizer):
            moves.seen = 0


@uncompiled
def _after_step(optimizer: Optimizer, *_: Any) -> None:  # of a closure that has computed the gradients
    for moves in list(_FOLLOWING):
        if moves.seen != id(optimizer):
            moves.stepped(optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


@dataclass(eq=False)
class TrainedSet:
    """The parameters that all ranks exchange, and what this one has trained since.

    Args:
        keeps: what is trained and not exchanged yet is copied before its first step, as a recipe's anchor is.
        aggregator: of parameters in their first round.

    Attributes:
        names: of the parameters that are exchanged.
        places: the parameters that could be, by name.
        moves: which have trained since they were last sent.
        ever: the names of all that were exchanged at some time.
        adapter: see `adapter_in`.
    """

    keeps: bool
    aggregator: Aggregator
    names: set[str] = field(default_factory=set)
    places: dict[str, TensorPlace] = field(default_factory=dict)
    moves: SteppedParameters = field(init=False)
    ever: set[str] = field(default_factory=set)
    adapter: dict[str, Any] | None = None
    _names_of: dict[int, str] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)  # the first step of what is not exchanged yet

    def __post_init__(self) -> None:
        this = weakref.ref(self)
        self.moves = SteppedParameters(lambda ids: None if (one := this()) is None else one._keep(ids))

    def _keep(self, ids: set[int]) -> None:
        names = {self._names_of[number] for number in ids if number in self._names_of} - self.names
        for name in names - self._before.keys() if self.keeps else ():
            self._before[name] = local(self.places[name].get()).detach().clone()

    def read(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Find the parameters of a model that has changed."""
        before, known = self.moves.known, {id(one): one for one in parameters}
        new = known.keys() - before.keys() if before else set()  # unseen until now
        self.moves.follow(known, self.moves.ids | new)
        self.places, self._names_of = could_train(model)
        self.adapter = adapter_in(model)

    def as_exchanged(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block exactly what is exchanged requires gradients, which is the same on all ranks."""
        exchanged = self.ids()
        return training(model, lambda one: id(one) in exchanged)

    def continue_from(self, other: TrainedSet) -> None:
        """Count what has trained since the last round of another exchange of the same model."""
        new = {number for number, one in self.moves.known.items() if one.requires_grad} - other.moves.known.keys()
        self.moves.ids = other.moves.ids & self.moves.known.keys() | new
        self.ever = self.ever | other.ever
        self._before = {name: other._before[name] for name in other._before.keys() & self.places.keys() - self.names}

    def exchange(self, names: set[str]) -> None:
        self.names, self.ever = names, self.ever | names
        self._before = {name: value for name, value in self._before.items() if name in self.places.keys() - names}

    def resting(self, own: bool, coming: Collection[str] = ()) -> dict[str, Tensor]:
        """Return what was trained once and is not exchanged now, as it is on this rank or as was agreed on, by name.

        Args:
            coming: the names of what rounds under way exchange for the first time.
        """
        names = self.ever.union(self.names_of_moves(), coming) - self.names
        there = {name: local(place.get()).detach() for name, place in self.places.items() if name in names}
        return there if own else there | self._before

    def shared(self) -> dict[str, Any]:
        """Return copies of what has been agreed on and is not exchanged, in the form of a fragment's shared state."""
        rest = self.resting(own=False)
        values = [value.clone() for value in rest.values()]
        return {"names": {"rest": [row_of(self.places[name]) for name in rest]}, "agreed": {"rest": [values]}}

    def state_dict(self, coming: Collection[str]) -> dict[str, Any]:
        kept = {"rest": self.resting(True, coming), "before": self._before}
        copies = {kind: {name: value.clone() for name, value in values.items()} for kind, values in kept.items()}
        return {"names": self.names_of_moves(), **copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget_moves()
        self.load_resting(state["rest"])
        self.count_again(state["names"])
        self._before = dict(state["before"])

    def load_resting(self, values: Mapping[str, Tensor]) -> None:
        """Take over what `resting` has returned, except for what has trained here meanwhile."""
        self.ever |= values.keys()
        for name in (values.keys() & self.places.keys()) - set(self.names_of_moves()):
            local(self.places[name].get()).detach().copy_(values[name])

    def moved(self) -> list[TensorPlace]:
        """Return what this rank has trained, and is not exchanged yet."""
        return self.coming({*self.names_of_moves(), *self._before})

    def adopt(self) -> None:
        """Put back what was agreed on of that."""
        for name, value in self._before.items():
            local(self.places[name].get()).copy_(value)

    def forget_moves(self) -> None:
        """Count all that was trained as agreed on, but for the step under way."""
        self.moves.forget()
        self._before.clear()

    def ids(self) -> set[int]:
        """Return the ids of the parameters that are exchanged, under each of their names."""
        return {number for number, name in self._names_of.items() if name in self.names}

    def names_of_moves(self) -> list[str]:
        """Return what this rank has trained since the last call of `take`."""
        return sorted({self._names_of[number] for number in self.moves.ids if number in self._names_of})

    def wish(self) -> TrainedProposal:
        """Return what this rank has trained since the round before."""
        return TrainedProposal(self, set(self.names_of_moves()))

    def take(self) -> TrainedProposal:
        """Return the same, for the next round."""
        wish = self.wish()
        self.moves.follow(self.moves.known, set())
        return wish

    def count_again(self, names: Collection[str]) -> None:
        """Count parameters as trained whose values were not exchanged after all."""
        self.moves.ids |= {id(self.places[name].get()) for name in names if name in self.places}

    def coming(self, names: Collection[str]) -> list[TensorPlace]:
        """Return the parameters of these names that are not exchanged yet, in the order of the model."""
        return [place for name, place in self.places.items() if name in names and name not in self.names]


@dataclass(eq=False)
class TrainedProposal:
    """What one rank has trained since the round before, `names`, and wants to be exchanged from now on.

    Attributes:
        accepted: the names of what is exchanged once the round has landed; None: the same as before.
        coming: the parameters of these that were not exchanged before.
    """

    trained: TrainedSet
    names: set[str]
    accepted: set[str] | None = None
    coming: NewParameters = field(init=False)

    def accept(self, names: set[str], cap_bytes: int) -> None:
        self.accepted = names
        self.coming = NewParameters(buckets_of(self.trained.coming(names), cap_bytes, None), self.trained.aggregator)

    def state_dict(self) -> dict[str, list[str] | None]:
        return {"names": sorted(self.names), "accepted": None if self.accepted is None else sorted(self.accepted)}

    def anchors(self) -> dict[int, Tensor]:
        """Return the mean of each parameter that has come, `[numel]`, by its id: of one rank alone, its value."""
        buckets, means = self.coming.buckets, self.coming.means
        rows = buckets.by_tensor([means[k] if k in means else buckets.pack(k).clone() for k in range(len(buckets))])
        new = self.trained.coming(self.accepted or ())
        return {id(place.get()): row for place, row in zip(new, rows, strict=True)}

    @property
    def digest(self) -> int:
        return digest_of(str(sorted(self.names))) if self.names else 0

    @property
    def is_finite(self) -> bool:
        """Whether the values are that are to be exchanged for the first time."""
        return all(bool(torch.isfinite(local(place.get())).all()) for place in self.trained.coming(self.names))

    def agreed(self, tally: Tally, *groups: Group) -> set[str] | None:
        """Return the names that any rank wants, if they are not what is exchanged: a collective then.

        Args:
            groups: those of this rank's island, and the ranks that it meets in the round.

        Raises:
            CollectiveMismatch: a rank has no such parameter.
        """
        now = digest_of(str(sorted(self.trained.names)))
        if all(digest in (0, now) for digest in tally.trained):
            return None
        places = self.trained.places
        lines = [line_of(places[name]) for name in self.names]
        for group in groups:
            lines = sorted({line for lines in group.all_gather_json(lines) for line in lines})
        here = {line_of(place): name for name, place in places.items()}
        missing = [line for line in lines if line not in here]
        for group in groups:
            missing = sorted({line for lines in group.all_gather_json(missing) for line in lines})
        if missing:
            raise CollectiveMismatch(
                f"The ranks of an outer loop train different models: not all of them have {missing[0]}, which is "
                "trained on others. Change the model in the same way on all ranks."
            )
        names = {here[line] for line in lines}
        return None if names == self.trained.names else names
