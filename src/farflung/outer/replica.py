# SPDX-License-Identifier: Apache-2.0
"""This rank's model as an outer loop sees it: fragments bound to memory, with all that is kept between rounds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.errors import CollectiveMismatch, ConfigError
from farflung.base.words import numbered
from farflung.codec.base import Identity
from farflung.comm.bucket import Buckets, broadcast_values
from farflung.comm.group import Group
from farflung.comm.shards import local, reshard
from farflung.outer.agreement import Anchored, Averaged, Max, Mean
from farflung.outer.ballot import Voters
from farflung.outer.eager import Eager
from farflung.outer.fragments import Fragment, Place, without_masks
from farflung.outer.recipe import Recipe
from farflung.outer.structure import Change, Structure, change_of, describe
from farflung.outer.weighting import NormHistory

_DIGEST_EVERY = 50  # rounds of a fragment between two checks that the ranks still agree


class BoundFragment:
    """A fragment bound to memory.

    Args:
        num_buffers: as of `Buckets`. None: it is in its buffers as a whole, for the exchange and until it is applied.
        is_new: all ranks shall start from rank 0's values, and buffers with values that are not finite are left out: a
            collective. False: the fragment is what was agreed on.

    Attributes:
        weights, buffers, counters: how each kind of values comes together; `agreements` has them by name.
        pending_weight: by level, what was done since values were last sent.
        num_rounds: that were applied.
        num_landed: buckets that a round has brought in which goes on, as ranks were lost in it.
        digest: of what the last round agreed on, where it is to be compared with that of other ranks; else -1.
    """

    def __init__(
        self,
        fragment: Fragment,
        recipe: Recipe,
        group: Group,
        cap_bytes: int,
        num_buffers: int | None,
        is_new: bool,
    ) -> None:
        self.num_ranks = group.size
        self.history = NormHistory()
        self.pending_weight = [0.0] * (1 + len(recipe.levels))
        self.num_rounds, self.digest, self.num_landed = 0, -1, 0
        self.is_whole = num_buffers is None
        parameters = _buckets(fragment.parameters, cap_bytes, num_buffers)
        counters = _buckets(fragment.counters, cap_bytes, num_buffers)
        if group.size > 1 and is_new:
            broadcast_values([local(place.get()) for place in fragment.places], group)
        self._fragment = without_masks(fragment) if is_new else fragment
        self.trained = self.parameters()  # the objects, which tell when one is replaced
        averages = _buckets(self._fragment.averages, cap_bytes, num_buffers)
        kinds = (self._fragment.parameters, self._fragment.averages, self._fragment.counters)
        self._bound = list(zip(kinds, (parameters, averages, counters), strict=True))
        self.weights = Averaged(parameters, recipe.aggregator, recipe.codec)
        if recipe.optimizer is not None:
            parts = (parameters, recipe.aggregator, recipe.codec, recipe.optimizer, recipe.merge, recipe.anchor_on_cpu)
            self.weights = Eager(*parts, num_ranks=group.size) if recipe.eager else Anchored(*parts)
        self.buffers = Averaged(averages, Mean(), Identity())
        self.counters = Averaged(counters, Max(), Identity())
        self.agreements = {"weights": self.weights, "buffers": self.buffers, "counters": self.counters}

    def enter(self, before: Sequence[int], ids: Sequence[int]) -> None:
        """Go on in an epoch of other members: what is remembered of a replica goes with its id."""
        known = dict(zip(before, range(len(before)), strict=True))
        seen, self.num_ranks = self.history.seen, len(ids)
        ranks = [(rank, known[one]) for rank, one in enumerate(ids) if one in known]
        self.history = NormHistory({rank: seen[old] for rank, old in ranks if old in seen})
        if isinstance(self.weights, Eager):
            self.weights.num_ranks = len(ids)

    def replicated(self) -> dict[str, Any]:
        """Return what all replicas have in common between rounds."""
        common = {"history": asdict(self.history), "num_rounds": self.num_rounds}
        return {**common, "agreed": {kind: one.replicated() for kind, one in self.agreements.items()}}

    def join(self, replicated: dict[str, Any]) -> None:
        self.history = NormHistory(**replicated["history"])
        self.num_rounds = replicated["num_rounds"]
        self.num_landed, self.pending_weight = 0, [0.0] * len(self.pending_weight)
        for kind, agreement in self.agreements.items():
            agreement.join(replicated["agreed"][kind])

    def rebind(self) -> None:
        """Find tensors again that were moved since the last round, in a model that has the same ones still.

        Raises:
            StateError: a tensor is laid out in another way.
        """
        for places, buckets in self._bound:
            buckets.rebind([place.owner[place.key] for place in places])

    def load(self, must_look: bool) -> tuple[float, float, bool]:
        """Return what a ballot says of norm, largest magnitude and floating buffers, and fill the buffers.

        Args:
            must_look: even if nothing was done.
        """
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

    def count(self, amount: float) -> None:
        self.pending_weight = [done + amount for done in self.pending_weight]

    def claim(self, level: int) -> list[float]:
        """Return what was done since the last round on each level; this one and narrower ones begin anew."""
        narrower = range(len(self.pending_weight)) if level == 0 else range(1, level + 1)
        claimed = [done if number in narrower else 0.0 for number, done in enumerate(self.pending_weight)]
        self.pending_weight = [done - gone for done, gone in zip(self.pending_weight, claimed, strict=True)]
        return claimed

    def give_back(self, claimed: Sequence[float]) -> None:
        """Count again what was sent in a round that came to nothing."""
        self.pending_weight = [done + gone for done, gone in zip(self.pending_weight, claimed, strict=True)]

    def note_round(self, is_common: bool) -> None:
        """Count a round that was applied, and note what it left now and then, if that is the same on all ranks."""
        self.num_rounds += 1
        self.note_agreement(is_common and self.num_rounds % _DIGEST_EVERY == 1)

    def note_agreement(self, is_compared: bool) -> None:
        """Note what is agreed on, if it is to be compared in the next vote."""
        text = " ".join(str(value) for _, value in self._checksums()) if is_compared else ""
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        self.digest = int.from_bytes(digest, "big") if is_compared else -1

    def check_agreement(self, digests: Sequence[int], voters: Voters) -> None:
        """Compare what all ranks have noted.

        Raises:
            CollectiveMismatch: it differs; the message names the first tensor that does.
        """
        if len(set(digests)) == 1:
            return
        names, mine = zip(*self._checksums(), strict=True)
        everyone = voters.group.all_gather_small(torch.tensor(mine, dtype=torch.float64))
        for column, name in enumerate(names):
            values = everyone[:, column].tolist()
            usual = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != usual]
            if odd:
                where = numbered(voters.noun, odd)
                raise CollectiveMismatch(
                    f"The replicas no longer agree on {name}: its value on {where} is not that of the others. "
                    "Something has written to it, or their machines compute differently."
                )
        raise CollectiveMismatch(
            f"The replicas no longer agreed at the end of their last round (digests {list(digests)}), though the "
            "tensors are equal now: something wrote to them in between."
        )

    def _checksums(self) -> list[tuple[str, int]]:
        """Return a checksum of what was agreed on of each parameter, by name."""
        found: dict[int, int] = {}
        for k in range(len(self.weights.buckets)):
            for number, piece in zip(self.weights.buckets.owners(k), self.weights.agreed(k), strict=True):
                found[number] = (31 * found.get(number, 0) + int(checksum(piece))) % 2**48
        return [(place.name, found.get(number, 0)) for number, place in enumerate(self._fragment.parameters)]

    def parameters(self) -> list[Tensor]:
        return [place.get() for place in self._fragment.parameters]

    def buffer_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's floating buffers and its integer ones, as the model has them now."""
        averages, counters = self._fragment.averages, self._fragment.counters
        return [local(place.get()) for place in averages], [local(place.get()) for place in counters]

    @property
    def embeddings(self) -> list[bool]:
        return [place.is_embedding for place in self._fragment.parameters]

    @property
    def names(self) -> set[str]:
        return {place.name for place in self._fragment.places}

    def floats(self) -> list[Tensor]:
        """Return this rank's weights and floating buffers, as the model has them now."""
        return [local(place.get()) for place in (*self._fragment.parameters, *self._fragment.averages)]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        there = [local(tensor) for place in self._fragment.places if (tensor := place.find()) is not None]
        return [(tensor, tensor.clone()) for tensor in there]

    def kept(self) -> dict[str, dict[int, Tensor]]:
        """Return what is kept of each parameter between rounds, `[numel]`, by what it is and by the parameter's id."""
        ids = [id(tensor) for tensor in self.trained]
        rows = self.weights.rows()
        return {name: dict(zip(ids, self.weights.buckets.by_tensor(rows[name]), strict=True)) for name in rows}

    def continue_from(self, other: BoundFragment, kept: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Take the place of another fragment, with what was kept of parameters that this one has too."""
        self.pending_weight, self.history = other.pending_weight, other.history
        self.num_rounds, self.digest = other.num_rounds, other.digest
        self.weights.continue_from(other.weights)
        for name, flats in self.weights.rows().items():
            rows = kept.get(name, {})
            self.weights.buckets.fill(flats, [rows.get(id(tensor)) for tensor in self.trained])

    def state_dict(self) -> dict[str, Any]:
        return {
            "local": {place.name: local(place.get()).clone() for place in self._fragment.places},
            "agreed": self.weights.state_dict(),
            "pending_weight": list(self.pending_weight),
            "history": asdict(self.history),
            "num_rounds": self.num_rounds,
            "digest": self.digest,
        }

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
        self.weights.load_state_dict(state["agreed"])
        self.pending_weight = list(state["pending_weight"])
        self.history = NormHistory(**state["history"])
        self.num_rounds, self.digest = state["num_rounds"], state["digest"]


class Replica:
    """All fragments of a model. Making one sends nothing; `bind` does.

    Args:
        num_buffers: see `BoundFragment`.

    Attributes:
        description: what must be the same on all ranks: recipe, shapes, cut.
        tensors: a line for each tensor that is exchanged, of which the description has no more than a digest.
        fragments: bound to memory.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, cap_bytes: int, num_buffers: int | None) -> None:
        self._model = model
        self._recipe = recipe
        self._cap_bytes, self._num_buffers = cap_bytes, num_buffers
        self._cut = recipe.fragments(model, recipe.schedule.fragments)
        self._structure = Structure(model)
        self.description, self.tensors = describe(recipe, self._cut, cap_bytes)
        self.fragments: list[BoundFragment] = []

    def bind(self, group: Group) -> None:
        self._group = group
        self.fragments = [self._bound(fragment, is_new=True) for fragment in self._cut]

    def _bound(self, fragment: Fragment, is_new: bool) -> BoundFragment:
        return BoundFragment(fragment, self._recipe, self._group, self._cap_bytes, self._num_buffers, is_new)

    def enter(self, group: Group, before: Sequence[int], ids: Sequence[int]) -> None:
        self._group = group
        for fragment in self.fragments:
            fragment.enter(before, ids)

    def rebind(self, number: int) -> None:
        """Find a fragment's tensors again, unless the model has changed: the next round follows that."""
        if not self._structure.has_changed():
            self.fragments[number].rebind()

    def change(self) -> Change | None:
        """Return what the model is made of now, if that has changed since the last round."""
        if not self._structure.has_changed():
            return None
        kept = {name for fragment in self.fragments for name in fragment.names}
        known = {place.name: place.name in kept for one in self._cut for place in one.averages}
        trained = [tensor for fragment in self.fragments for tensor in fragment.trained]
        change = change_of(self._model, self._recipe, self._cap_bytes, known, trained)
        must_agree = change.description != self.description or bool(change.new and self._recipe.optimizer)
        return replace(change, must_agree=must_agree)

    def follow(self, change: Change) -> None:
        """Go on with what the model is made of now, and what was kept of the parameters that it still has."""
        self._structure.note()
        kept: dict[str, dict[int, Tensor]] = {}
        for fragment in self.fragments:
            for name, rows in fragment.kept().items():
                kept.setdefault(name, {}).update(rows)
        self.description, self.tensors, self._cut = change.description, change.tensors, change.fragments
        for number, one in enumerate(change.fit):
            bound = self._bound(one, is_new=False)
            bound.continue_from(self.fragments[number], kept)
            bound.digest = -1 if change.must_agree else bound.digest
            self.fragments[number] = bound

    def adopt(self) -> None:
        for number, fragment in enumerate(self.fragments):
            self.rebind(number)
            fragment.weights.adopt()

    def reset_anchor(self) -> None:
        for number, fragment in enumerate(self.fragments):
            self.rebind(number)
            fragment.weights.reset_anchor()

    def count(self, amount: float) -> None:
        for fragment in self.fragments:
            fragment.count(amount)

    def reset(self) -> None:
        self.reset_anchor()
        for fragment in self.fragments:
            fragment.pending_weight = [0.0] * len(fragment.pending_weight)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        reshard(self._model.modules())
        return [pair for fragment in self.fragments for pair in fragment.copies()]


def checksum(x: Tensor) -> Tensor:
    """Sum the bits of all elements as whole numbers, which no order of summing changes."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()]
    together = 8 // x.element_size()  # elements that are one long number: torch would copy what it sums in another type
    flat = x.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() % together:
        flat = flat.clone(memory_format=torch.contiguous_format)
    whole = flat.numel() // together * together
    return flat[:whole].view(torch.int64).sum() + flat[whole:].view(words).sum(dtype=torch.int64)


def _buckets(places: Sequence[Place], cap_bytes: int, num_buffers: int | None) -> Buckets:
    tensors = [place.get() for place in places]
    if any(tensor.is_complex() for tensor in tensors):
        names = [place.name for place in places if place.get().is_complex()]
        raise ConfigError(f"{names[0]} is complex, which the outer loop can't average. Keep it as a real tensor.")
    dtype = torch.float32 if not tensors or tensors[0].is_floating_point() else torch.int64
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    return Buckets(tensors, dtype, cap_bytes=cap_bytes, num_buffers=num_buffers)
