# SPDX-License-Identifier: Apache-2.0
"""A fragment of this rank's model, bound to memory, with all its state between rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import ConfigError
from farflung.codec.base import Identity
from farflung.comm.bucket import broadcast_values
from farflung.comm.group import Group
from farflung.comm.shards import local, part_of
from farflung.comm.tensor_memory import fingerprint, fingerprints
from farflung.exchanged.comparison import Comparison
from farflung.exchanged.structure import buckets_of
from farflung.methods.agreement import AgreedBuffers, Averaged, Evaluated
from farflung.methods.anchored import Anchored
from farflung.methods.eager import Eager
from farflung.methods.fragments import Fragment, TensorPlace, without_masks
from farflung.methods.recipe import Recipe
from farflung.methods.weighting import NormHistory
from farflung.votes.ballot import Seen, digest_of


class BoundFragment:
    """A fragment bound to memory.

    Args:
        num_buffers: see `Buckets`. None: it is in its buffers as a whole, for the exchange and until it is applied.
        island_size: the number of ranks that train one replica.
        is_new: all ranks start from rank 0's values, without buffers that hold values which are not finite: a
            collective. False: the fragment holds the values that were agreed on.

    Attributes:
        cut: its tensors.
        weights, buffers, counters: how each kind of value is combined; `agreements` has them by name.
        pending_weight: by level, the work that was done since values were last sent.
        num_rounds: that were applied.
        num_landed: buckets that were already applied of a round that continues after a loss.
        num_averaged: rounds that a running mean of the weights has seen.
        comparison: compares it with that of the other replicas.
    """

    def __init__(
        self,
        fragment: Fragment,
        recipe: Recipe,
        group: Group,
        cap_bytes: int,
        num_buffers: int | None,
        island_size: int,
        is_new: bool,
    ) -> None:
        self.num_ranks = group.size
        self.history: NormHistory = {}
        self.pending_weight = [0.0] * (1 + len(recipe.levels))
        self.num_rounds = self.num_landed = self.num_averaged = 0
        self._average = recipe.average or 1
        self.is_whole = num_buffers is None
        parameters = buckets_of(fragment.parameters, cap_bytes, num_buffers, island_size)
        counters = buckets_of(fragment.counters, cap_bytes, num_buffers, island_size)
        if group.size > 1 and is_new:
            broadcast_values([local(place.get()) for place in fragment.places], group)
        self.cut = without_masks(fragment) if is_new else fragment
        self.comparison = Comparison([place.name for place in self.cut.parameters])
        averages = buckets_of(self.cut.averages, cap_bytes, num_buffers, island_size)
        # The objects, which tell when one is replaced.
        self._objects = [[place.owner[place.key] for place in places] for places in self.cut.kinds]
        self.weights = Averaged(parameters, recipe.exchange, recipe.codec)
        if recipe.optimizer is not None:
            rule = (recipe.exchange, recipe.codec, recipe.optimizer, recipe.merge)
            parts = (parameters, *rule, recipe.anchor_on_cpu, recipe.average is not None)
            self.weights = Eager(*parts, num_ranks=group.size) if recipe.eager else Anchored(*parts)
        self.buffers = Averaged(averages, recipe.beside[0], Identity())
        self.counters = Averaged(counters, recipe.beside[1], Identity())
        if recipe.optimizer is not None:
            self.buffers = AgreedBuffers(averages, recipe.beside[0], Identity(), recipe.average is not None)
            self.counters = AgreedBuffers(counters, recipe.beside[1], Identity(), has_mean=False)
        self.agreements = {"weights": self.weights, "buffers": self.buffers, "counters": self.counters}

    def enter(self, before: Sequence[int], ids: Sequence[int]) -> None:
        """Continue in a generation of other members: the memory of a replica follows its id."""
        seen = {one: self.history[rank] for rank, one in enumerate(before) if rank in self.history}
        self.history = {rank: seen[one] for rank, one in enumerate(ids) if one in seen}
        self.num_ranks = len(ids)
        if isinstance(self.weights, Eager):
            self.weights.num_ranks = len(ids)

    def replicated(self) -> dict[str, Any]:
        """Return the state that all replicas share between rounds."""
        common = {"history": self.history, "num_rounds": self.num_rounds, "num_averaged": self.num_averaged}
        return {**common, "agreed": {kind: one.replicated() for kind, one in self.agreements.items()}}

    def names(self) -> dict[str, list[tuple[str, str, list[int], list[int], list[int]]]]:
        """Return whose values `replicated` has, in its order: names, dtypes, shapes, and this rank's parts of them."""
        return {kind: list(map(row_of, places)) for kind, places in zip(self.agreements, self.cut.kinds, strict=True)}

    def join(self, replicated: dict[str, Any], keeps: bool) -> None:
        """Take over what `replicated` returned on another rank.

        Args:
            keeps: continue with the steps since the last round, which the next one then includes.
        """
        self.history = deepcopy(replicated["history"])
        self.num_rounds, self.num_averaged = replicated["num_rounds"], replicated.get("num_averaged", 0)
        if keeps:
            self.rebind()
        else:
            self.num_landed, self.pending_weight = 0, [0.0] * len(self.pending_weight)
        for kind, agreement in self.agreements.items():
            agreement.join(replicated["agreed"][kind], keeps)

    def rebind(self) -> None:
        """Find tensors again that were moved since the last round, in a model that still has the same ones."""
        for places, agreement in zip(self.cut.kinds, self.agreements.values(), strict=True):
            agreement.buckets.rebind([place.get() for place in places])

    def load(self, must_look: bool) -> tuple[float, float, bool]:
        """Fill the buffers; return, for a ballot, norm, largest magnitude, and whether floating buffers are finite."""
        for agreement in self.agreements.values():
            agreement.forget()
        is_idle = self.num_ranks == 1 and not self.weights.is_anchored  # nothing to do without other replicas
        if is_idle or not must_look:
            return 0.0, 0.0, True
        norm, largest = self.weights.measure()
        sound = math.isfinite(self.buffers.measure()[0])
        if self.is_whole:
            self.counters.load()
        return norm, largest, sound

    def fingerprint(self) -> int:
        """Return a number that differs for weights with different bits."""
        return digest_of(str(fingerprints(map(local, self.parameters()))))

    def held_by_several(self) -> Seen:
        """Return, of each parameter that several ranks of an island hold, where this rank's part begins, and a hash."""
        pairs = zip(self.cut.parameters, self.weights.buckets.shares, strict=True)
        found = [(place.name, place.get()) for place, share in pairs if share < 1]
        return {name: (part_of(tensor)[1], fingerprint(local(tensor))) for name, tensor in found}

    def count(self, amount: float) -> None:
        self.pending_weight = [done + amount for done in self.pending_weight]

    def claim(self, level: int) -> list[float]:
        """Return the work done since the last round on each level, and reset this level and narrower ones."""
        narrower = range(len(self.pending_weight)) if level == 0 else range(1, level + 1)
        claimed = [done if number in narrower else 0.0 for number, done in enumerate(self.pending_weight)]
        self.pending_weight = [done - gone for done, gone in zip(self.pending_weight, claimed, strict=True)]
        return claimed

    def give_back(self, claimed: Sequence[float]) -> None:
        """Count again the work that was sent in a round without a result."""
        self.pending_weight = [done + gone for done, gone in zip(self.pending_weight, claimed, strict=True)]

    def note_round(self, is_common: bool) -> None:
        """Count a round that was applied; its result may be compared if it `is_common` to all ranks."""
        self.num_rounds += 1
        self.num_averaged += 1
        self.keep()
        for agreement in self.agreements.values():  # over a tenth of the rounds at most
            agreement.mix(1 / min(self._average, max(1, self.num_rounds // 10), self.num_averaged))
        self.comparison.note_round(self.weights, self.num_rounds, is_common)

    @property
    def trained(self) -> list[Tensor]:
        """Its parameters, as they were when it was bound."""
        return self._objects[0]

    def lend(self) -> None:
        """Put the values to evaluate into the model."""
        for agreement in self.agreements.values():
            agreement.lend()

    def keep(self, *kinds: str) -> None:
        """Keep the values to evaluate, as all ranks have just agreed on these `kinds`; none: on all of them."""
        for kind in kinds or self.agreements:
            self.agreements[kind].keep()

    def reset_anchor(self, is_set: bool) -> None:
        """anchor <- local, and what belongs to it; see `Averaged.reset_anchor`."""
        self.num_averaged *= not is_set
        for agreement in self.agreements.values():
            agreement.reset_anchor(is_set)

    def parameters(self) -> list[Tensor]:
        return [place.get() for place in self.cut.parameters]

    def kept(self) -> dict[str, dict[int, Tensor]]:
        """Return the state of each tensor between rounds, `[numel]`, by its kind and by the tensor's id."""
        found: dict[str, dict[int, Tensor]] = {}
        for agreement, tensors in zip(self.agreements.values(), self._objects, strict=True):
            for name, flats in agreement.rows().items():
                rows = zip(map(id, tensors), agreement.buckets.by_tensor(flats), strict=True)
                found.setdefault(name, {}).update(rows)
        return found

    def latest(self) -> dict[int, Tensor]:
        """Return the values of each parameter after the last round, `[numel]`, by its id. The recipe has an anchor."""
        assert isinstance(self.weights, Evaluated)
        buckets = self.weights.buckets
        flats = [self.weights.latest(k) for k in range(len(buckets))]
        return dict(zip(map(id, self.trained), buckets.by_tensor(flats), strict=True))

    def continue_from(self, other: BoundFragment, kept: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Replace another fragment, with its state of the parameters that this one has too."""
        self.pending_weight, self.history = other.pending_weight, other.history
        self.num_rounds, self.num_averaged = other.num_rounds, other.num_averaged
        self.comparison.continue_from(other.comparison)
        self.weights.continue_from(other.weights)
        for agreement, tensors in zip(self.agreements.values(), self._objects, strict=True):
            for name, flats in agreement.rows().items():
                rows = kept.get(name, {})
                agreement.buckets.fill(flats, [rows.get(id(tensor)) for tensor in tensors])

    def state_dict(self) -> dict[str, Any]:
        return {
            "local": {place.name: local(place.get()).clone() for place in self.cut.places},
            "agreed": self.weights.state_dict(),
            "kept": [self.buffers.state_dict(), self.counters.state_dict()],
            "pending_weight": list(self.pending_weight),
            "history": {"seen": deepcopy(self.history)},
            "num_rounds": self.num_rounds,
            "num_averaged": self.num_averaged,
            "digest": self.comparison.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved: dict[str, Tensor] = state["local"]
        here = {place.name: place for place in self.cut.places}
        if saved.keys() != here.keys():
            odd = sorted(saved.keys() ^ here.keys())
            raise ConfigError(f"The saved outer loop is of a different model: they differ in {', '.join(odd[:5])}.")
        with torch.no_grad():
            for name, place in here.items():
                local(place.get()).copy_(saved[name])
        self.weights.load_state_dict(state["agreed"])
        self.keep()
        for agreement, one in zip((self.buffers, self.counters), state.get("kept", ()), strict=False):
            agreement.load_state_dict(one)
        self.pending_weight = list(state["pending_weight"])
        self.history = state["history"]["seen"]
        self.num_rounds, self.comparison.digest = state["num_rounds"], state["digest"]
        self.num_averaged = state.get("num_averaged", 0)


def row_of(place: TensorPlace) -> tuple[str, str, list[int], list[int], list[int]]:
    """Return a tensor's name, dtype and whole shape, and where this rank's part lies in it."""
    tensor = place.get()
    shape, offset = part_of(tensor)
    return place.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, shape
