# SPDX-License-Identifier: Apache-2.0
"""A fragment of a living model: where its tensors are now, the buckets they travel in, the anchor if there is one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import ConfigError
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.comm.shards import local
from farflung.comm.sizes import num_buffers_among
from farflung.outer.aggregate import mean_of
from farflung.outer.anchor import Anchor
from farflung.outer.codec.base import Identity
from farflung.outer.flight import Cargo
from farflung.outer.fragments import Fragment, Place, without_masks
from farflung.outer.lanes import Anchored, Averaged, Corrected, Highest, look_over
from farflung.outer.membership import BALLOT_SIZE
from farflung.outer.merge import Correct
from farflung.outer.recipe import Recipe
from farflung.outer.structure import Structure
from farflung.outer.weigh import Memory


class Part:
    """Binds a fragment to memory.

    Args:
        structure: of the model.
        cap_bytes: the largest bucket.
        is_new: all ranks shall start from rank 0's values, and buffers with values that are not finite are left out: a
            collective. False: the fragment is what was agreed on.
    """

    def __init__(
        self,
        fragment: Fragment,
        recipe: Recipe,
        structure: Structure,
        group: Group,
        cap_bytes: int,
        is_new: bool = True,
    ) -> None:
        self.memory = Memory()
        self.fresh = [0.0] * (
            1 + len(recipe.levels)
        )  # by level: what was done since values were last sent to be agreed on
        self._recipe = recipe
        self._structure = structure
        self._is_idle = group.size == 1 and recipe.optimizer is None  # the mean of one is what it was
        self._bound: list[tuple[list[tuple[Mapping[str, Any], str]], Buckets]] = []
        num_buffers = None if recipe.is_whole else num_buffers_among(group.size)
        parameters = self._bind(fragment.parameters, cap_bytes, num_buffers, tail=group.size * BALLOT_SIZE)
        counters = self._bind(fragment.counters, cap_bytes, num_buffers)
        if group.size > 1 and is_new:
            for buckets in (parameters, counters, _buckets(fragment.averages, cap_bytes, 2)):
                _start_alike(buckets, group)
        self._fragment = without_masks(fragment) if is_new else fragment
        self.trained = [place.get() for place in fragment.parameters]  # the objects, which tell when one is replaced
        averages = self._bind(self._fragment.averages, cap_bytes, num_buffers)
        aggregator = recipe.aggregator
        self.weights: Averaged | Anchored
        if recipe.optimizer is None:
            self.weights = Averaged(parameters, aggregator, recipe.codec)
        else:
            anchor = Anchor(parameters, recipe.optimizer, recipe.anchor_on_cpu)
            row = (parameters, aggregator, recipe.codec, anchor, recipe.merge)
            is_eager = isinstance(recipe.merge, Correct)
            self.weights = Corrected(*row, fraction=1 / group.size) if is_eager else Anchored(*row)
        self.cargo = Cargo(
            weights=self.weights,
            buffers=Averaged(averages, mean_of(Identity()), Identity()),
            counters=Highest(counters),
            is_whole=recipe.is_whole,
            votes_first=recipe.votes_first,
        )

    def _bind(self, places: tuple[Place, ...], cap_bytes: int, num_buffers: int | None, tail: int = 0) -> Buckets:
        buckets = _buckets(places, cap_bytes, num_buffers, tail)
        self._bound.append((_slots(places), buckets))
        return buckets

    def rebind(self) -> None:
        """Find tensors again that were moved since the last round, in a model that has the same ones still.

        Raises:
            StateError: a tensor is laid out in another way.
        """
        for slots, buckets in self._bound:
            buckets.rebind([owner[key] for owner, key in slots])

    def rebind_known(self) -> None:
        """Do so unless the model has changed, and the next round has to find out what it is made of."""
        if not self._structure.has_changed():
            self.rebind()

    def look_over(self) -> tuple[float, float, bool]:
        """Return what a ballot says of norm, largest magnitude and floating buffers, and load the first buckets."""
        if self._is_idle:
            return 0.0, 0.0, True
        norm, largest = look_over(self.weights)
        sound = math.isfinite(look_over(self.cargo.buffers)[0])
        if self.cargo.is_whole:
            for k in range(len(self.cargo.counters.buckets)):
                self.cargo.counters.load(k)
        return norm, largest, sound

    def work(self, amount: float) -> None:
        """Count what was done."""
        self.fresh = [done + amount for done in self.fresh]

    def begin(self, level: int) -> list[float]:
        """Return what was done since the last round on each level; this one and narrower ones begin anew."""
        narrower = range(len(self.fresh)) if level == 0 else range(1, level + 1)
        taken = [done if number in narrower else 0.0 for number, done in enumerate(self.fresh)]
        self.fresh = [done - gone for done, gone in zip(self.fresh, taken, strict=True)]
        return taken

    def take_back(self, taken: Sequence[float]) -> None:
        """Count again what was sent in a round that came to nothing."""
        self.fresh = [done + gone for done, gone in zip(self.fresh, taken, strict=True)]

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to exchange and nothing to do without."""
        return self._is_idle

    def digest(self) -> int:
        """Return 48 bits that follow from each bit of what was agreed on: call it right after a landing."""
        sums = []
        for k in range(len(self.weights.buckets)):
            agreed = (
                self.weights.anchor.chunks[k].detach() if isinstance(self.weights, Anchored) else self.weights.load(k)
            )
            sums.append(checksum(agreed))
        text = " ".join(str(int(x)) for x in sums)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    def checksums(self) -> list[tuple[str, int]]:
        """Return a checksum of what was agreed on of each parameter, by name: to name the one that differs."""
        found: dict[int, int] = {}
        for k in range(len(self.weights.buckets)):
            pieces = (
                self.weights.anchor.views(k) if isinstance(self.weights, Anchored) else self.weights.buckets.pieces(k)
            )
            for number, piece in zip(self.weights.buckets.owners(k), pieces, strict=True):
                found[number] = (31 * found.get(number, 0) + int(checksum(piece))) % 2**48
        return [(place.name, found.get(number, 0)) for number, place in enumerate(self._fragment.parameters)]

    def parameters(self) -> list[Tensor]:
        """Return what is trained, as the model has it now."""
        return [place.get() for place in self._fragment.parameters]

    @property
    def names(self) -> set[str]:
        """The names of all that is exchanged."""
        return {place.name for place in self._fragment.places}

    def averages(self) -> list[Tensor]:
        """Return the floating buffers, as the model has them now."""
        return [place.get() for place in self._fragment.averages]

    def adopt(self) -> None:
        """local <- anchor, where there is one: at the end all replicas are where they agreed."""
        if isinstance(self.weights, Anchored):
            self.rebind_known()
            for k in range(len(self.weights.buckets)):
                torch._foreach_copy_(self.weights.buckets.pieces(k), self.weights.anchor.views(k))

    def begin_here(self) -> None:
        """Begin anew: local weights are agreed on, and nothing has been done since."""
        self.rebind_known()
        self.fresh = [0.0] * len(self.fresh)
        if isinstance(self.weights, Anchored):
            self.weights.begin_here()

    def settle(self, agrees: bool) -> None:
        """After all rounds: local weights are what was agreed on; or those are agreed on from now."""
        if agrees:
            self.adopt()
        elif isinstance(self.weights, Anchored):
            self.rebind_known()
            self.weights.begin_here()

    def local_values(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's weights and buffers, each with a copy."""
        there = [local(tensor) for place in self._fragment.places if (tensor := place.find()) is not None]
        return [(tensor, tensor.clone()) for tensor in there]

    def kept(self) -> dict[str, dict[int, Tensor]]:
        """Return what is kept of each parameter between rounds, `[numel]`, by what it is and by the parameter's id."""
        if not isinstance(self.weights, Anchored):
            return {}
        ids = [id(tensor) for tensor in self.trained]
        flats = self.weights.kept()
        return {name: dict(zip(ids, self.weights.buckets.by_tensor(flats[name]), strict=True)) for name in flats}

    def go_on_like(self, other: Part, kept: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Take the place of another part, with what was kept of parameters that this one has too."""
        self.fresh, self.memory = other.fresh, other.memory
        if isinstance(self.weights, Anchored) and isinstance(other.weights, Anchored):
            self.weights.go_on_like(other.weights)
            for name, flats in self.weights.kept().items():
                rows = kept.get(name, {})
                self.weights.buckets.fill(flats, [rows.get(id(tensor)) for tensor in self.trained])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's weights and buffers, and of the anchor."""
        mine = {place.name: local(place.get()).clone() for place in self._fragment.places}
        agreed = self.weights.state_dict() if isinstance(self.weights, Anchored) else None
        return {"local": mine, "agreed": agreed, "fresh": list(self.fresh), "memory": asdict(self.memory)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, the weights into the model in place.

        Raises:
            ConfigError: the names are not those of this model.
        """
        saved: dict[str, Tensor] = state["local"]
        here = {place.name: place for place in self._fragment.places}
        if saved.keys() != here.keys():
            odd = sorted(saved.keys() ^ here.keys())
            raise ConfigError(f"The saved outer loop is of a different model: they differ in {', '.join(odd[:5])}.")
        with torch.no_grad():
            for name, place in here.items():
                local(place.get()).copy_(saved[name])
        if isinstance(self.weights, Anchored):
            self.weights.load_state_dict(state["agreed"])
        self.fresh = list(state["fresh"])
        self.memory = Memory(**state["memory"])


def checksum(x: Tensor) -> Tensor:
    """Sum the bits of all elements as whole numbers, which no order of summing changes."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()]
    together = 8 // x.element_size()  # elements that are one long number: torch would copy what it sums in another type
    flat = x.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() % together:
        flat = flat.clone(memory_format=torch.contiguous_format)
    whole = flat.numel() // together * together
    return flat[:whole].view(torch.int64).sum() + flat[whole:].view(words).sum(dtype=torch.int64)


def _slots(places: Sequence[Place]) -> list[tuple[Mapping[str, Any], str]]:
    return [(place.owner, place.key) for place in places]


def _start_alike(buckets: Buckets, group: Group) -> None:
    for k in range(len(buckets)):
        group.broadcast(buckets.pack(k), 0).wait()
        buckets.unpack(k)


def _buckets(places: Sequence[Place], cap_bytes: int, num_buffers: int | None, tail: int = 0) -> Buckets:
    tensors = [place.get() for place in places]
    if any(tensor.is_complex() for tensor in tensors):
        names = [place.name for place in places if place.get().is_complex()]
        raise ConfigError(f"{names[0]} is complex, which the outer loop can't average. Keep it as a real tensor.")
    dtype = torch.float32 if not tensors or tensors[0].is_floating_point() else torch.int64
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    return Buckets(tensors, dtype, cap_bytes=cap_bytes, num_buffers=num_buffers, tail=tail)
