# SPDX-License-Identifier: Apache-2.0
"""The first member writes by how much each state's weights differ from those before, as long as someone reads that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from farflung.address.difference import DTYPES, ReferenceWeights, weights_in
from farflung.address.saved_state import SavedStates, order_of
from farflung.base.errors import Unreachable

_MOST = 64  # states of a chain


class DifferenceWriter:
    """A chain of differences for each dtype in which readers have the weights.

    A chain goes back as far as its differences together are shorter than the weights. It ends, and its memory is freed,
    once the latest state that a reader has noted lies further back.

    Attributes:
        wanted: dtypes of readers, as rank 0 knows them.
    """

    def __init__(self, states: SavedStates) -> None:
        self._states = states
        self.wanted: Sequence[str] = ()
        self._held: dict[str, ReferenceWeights] = {}
        self._sizes: dict[str, dict[str, int]] = {}  # bytes of differences, by dtype and by state

    def to(self, name: str, parts: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
        """Return how this rank's part of a state differs from the one before, by dtype, if that one is known.

        Args:
            wanted: of rank 0.
        """
        found, held, sizes = {}, self._held, self._sizes
        self._held, self._sizes = {}, {}  # none, if this fails
        for dtype in wanted:
            own, before = held.pop(dtype, None), sizes.get(dtype, {})
            difference = None if own is None else own.advance(name, weights_in(parts, DTYPES[dtype]))
            if own is None or difference is None:
                own, before = ReferenceWeights.of(name, DTYPES[dtype], weights_in(parts, DTYPES[dtype])), {name: 0}
            else:
                found[dtype] = difference
                before[name] = sum(piece["data"].nbytes for piece in difference["pieces"])
            while len(before) > _MOST or sum([*before.values()][1:]) > own.bits.nbytes:
                del before[next(iter(before))]
            self._held[dtype], self._sizes[dtype] = own, before
        return found

    def chains(self) -> dict[str, list[str]]:
        """Return the names of states from the first one on from which differences lead to the last, by dtype."""
        return {dtype: [*sizes] for dtype, sizes in self._sizes.items()}

    def look(self) -> None:
        """Find out who reads."""
        with suppress(Unreachable):  # who has read so far still does
            wanted = []
            for dtype, order in self._states.readers().items():
                sizes = self._sizes.get(dtype, {})
                first, size = next(iter(sizes.items()), ("", 0))
                if size and order < order_of(first):  # the chain had begun before
                    self._states.forget_readers(dtype)
                elif dtype in DTYPES:
                    wanted.append(dtype)
            self.wanted = wanted

    def clear(self) -> None:
        """Begin again with the next state, as the last one does not count."""
        self._held, self._sizes = {}, {}
