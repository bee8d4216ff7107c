# SPDX-License-Identifier: Apache-2.0
"""A fragment of a living model: where its tensors are now, the buckets they travel in, the anchor if there is one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.base.errors import ConfigError, StateError
from laconic.comm.bucket import Buckets
from laconic.comm.group import Group
from laconic.comm.shards import local
from laconic.outer.aggregate import Share
from laconic.outer.anchor import Anchor
from laconic.outer.codec.base import Identity
from laconic.outer.exchange import Anchored, Averaged, Highest, Lane, look_over
from laconic.outer.fragments import Fragment, Place, without_masks
from laconic.outer.membership import Tally
from laconic.outer.recipes import Recipe


class Part:
    """Binds a fragment to memory; building it is a collective, which makes all ranks start from rank 0's values.

    Args:
        cap_bytes: the largest bucket.
    """

    def __init__(self, fragment: Fragment, recipe: Recipe, group: Group, cap_bytes: int) -> None:
        if group.size > 1:
            _start_alike(fragment, group, cap_bytes)
        self._fragment = without_masks(fragment)
        parameters = _buckets(self._fragment.parameters, cap_bytes)
        self._bound = [(_slots(self._fragment.parameters), parameters)]
        self.anchor: Anchor | None = None
        self._is_idle = group.size == 1 and recipe.optimizer is None  # the mean of one is what it was
        self._weights: Averaged | Anchored
        if recipe.optimizer is not None:
            self.anchor = Anchor(parameters, recipe.optimizer)
            self._weights = Anchored(parameters, recipe.aggregator, recipe.codec, self.anchor, recipe.merge)
        else:
            self._weights = Averaged(parameters, recipe.aggregator, recipe.codec)
        self._buffers = Averaged(self._bind(self._fragment.averages, cap_bytes), recipe.aggregator, Identity())
        self._counters = Highest(self._bind(self._fragment.counters, cap_bytes))

    def _bind(self, places: tuple[Place, ...], cap_bytes: int) -> Buckets:
        buckets = _buckets(places, cap_bytes)
        self._bound.append((_slots(places), buckets))
        return buckets

    def rebind(self) -> None:
        """Find tensors again that were replaced or moved since the last round.

        Raises:
            StateError: since this part was made a frozen parameter was thawed, or one changed its shape or layout.
        """
        for slots, buckets in self._bound:
            buckets.rebind([owner[key] for owner, key in slots])
        thawed = [place.name for place in self._fragment.frozen if place.get().requires_grad]
        if thawed:
            raise StateError(
                f"{', '.join(thawed[:3])} was frozen when the outer loop began, so it is not exchanged, and is trained "
                "now. End the loop, change requires_grad, begin anew."
            )

    def look_over(self) -> tuple[float, bool]:
        """Return what a ballot says of weights and of floating buffers; their first buckets are loaded afterwards."""
        if self._is_idle:
            return 0.0, True
        return look_over(self._weights), math.isfinite(look_over(self._buffers))

    def lanes(self, tally: Tally, group: Group) -> list[tuple[Lane, Share]]:
        """Return what travels in the round that `tally` allows, and how this rank counts in it."""
        share, of_buffers = tally.share(group.rank), tally.share_of_buffers(group.rank)
        if self._is_idle:
            return []
        if group.size == 1:
            return [(self._weights, share)]
        averaged: list[tuple[Lane, Share]] = [(self._buffers, of_buffers)] if of_buffers.total else []
        return [(self._weights, share), *averaged, (self._counters, share)]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's weights and buffers, and of the anchor."""
        mine = {place.name: local(place.get()).clone() for place in self._fragment.places}
        return {"local": mine, "anchor": None if self.anchor is None else self.anchor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, the weights into the model in place.

        Raises:
            ConfigError: the names are not those of this model.
        """
        saved: dict[str, Tensor] = state["local"]
        here = {place.name: place for place in self._fragment.places}
        if saved.keys() != here.keys():
            odd = sorted(saved.keys() ^ here.keys())
            raise ConfigError(f"The saved outer loop is of another model: they differ in {', '.join(odd[:5])}.")
        with torch.no_grad():
            for name, place in here.items():
                local(place.get()).copy_(saved[name])
        if self.anchor is not None:
            self.anchor.load_state_dict(state["anchor"])


def describe(recipe: Recipe, fragments: Sequence[Fragment], cap_bytes: int) -> str:
    """Write down all that must be the same on every rank, short enough to be read in an error."""
    outer = "none"
    if recipe.optimizer is not None:
        probe = recipe.optimizer([torch.nn.Parameter(torch.zeros(1))])
        outer = f"{type(probe).__name__}({', '.join(f'{key}={value}' for key, value in probe.defaults.items())})"
    layout = hashlib.blake2b(digest_size=4)
    places = [place for fragment in fragments for place in fragment.places]
    for place in places:
        tensor = local(place.get())
        layout.update(f"{place.name} {tensor.dtype} {list(tensor.shape)} {tensor.is_contiguous()};".encode())
    numel = sum(local(place.get()).numel() for fragment in fragments for place in fragment.parameters)
    return (
        f"{recipe.schedule}, {recipe.codec}, {recipe.aggregator}, {recipe.merge}, outer optimizer {outer}; "
        f"{len(fragments)} fragments of {len(places)} tensors with {numel} trainable values "
        f"(layout {layout.hexdigest()}), buckets of {cap_bytes} bytes"
    )


def _slots(places: Sequence[Place]) -> list[tuple[Mapping[str, Any], str]]:
    return [(place.owner, place.key) for place in places]


def _start_alike(fragment: Fragment, group: Group, cap_bytes: int) -> None:
    for places in (fragment.parameters, fragment.averages, fragment.counters):
        buckets = _buckets(places, cap_bytes)
        for k in range(len(buckets)):
            group.broadcast(buckets.pack(k), 0).wait()
            buckets.unpack(k)


def _buckets(places: Sequence[Place], cap_bytes: int) -> Buckets:
    tensors = [place.get() for place in places]
    if any(tensor.is_complex() for tensor in tensors):
        names = [place.name for place in places if place.get().is_complex()]
        raise ConfigError(f"{names[0]} is complex, which the outer loop can't average. Keep it as a real tensor.")
    dtype = torch.float32 if not tensors or tensors[0].is_floating_point() else torch.int64
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    return Buckets(tensors, dtype, cap_bytes=cap_bytes)
