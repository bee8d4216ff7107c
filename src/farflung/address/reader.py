# SPDX-License-Identifier: Apache-2.0
"""The agreed weights of a run, for a process that takes no part in it: an evaluation, or a server of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from farflung.address.objects import PATIENCE_S
from farflung.address.packed import Damaged
from farflung.address.run_record import part_of_run
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import objects_at
from farflung.address.seal import Seal
from farflung.base.bars import bar
from farflung.base.errors import ConfigError, Unreachable
from farflung.base.events import Kind, record, tell
from farflung.base.files import atomic_file, utf8_name
from farflung.comm.patience import aloud, waiting
from farflung.config.key import run_key

_PATIENCE_S = 5.0  # for one version alone


@dataclass(frozen=True)
class Version:
    """Weights that all replicas had agreed on.

    Attributes:
        step: in the schedule of the run.
        weights: the trained parameters and the buffers, on the CPU, by their names in the model.
        is_last: the run has come to its end with them.
    """

    step: int
    weights: Mapping[str, Tensor]
    is_last: bool

    def save(self, path: Path) -> str:
        """Write the weights to a file of safetensors, which others find whole; return what they are."""
        with atomic_file(path) as part, utf8_name(part.parent) as folder:
            save_file(dict(self.weights), f"{folder}/{part.name}", metadata={"format": "pt", "step": str(self.step)})
        return f"{len(self.weights)} tensors after step {self.step}"


class Reader:
    """Reads the agreed weights of a run at its address, while it trains or later. The permission to read is enough.

        for version in Reader("s3://bucket/run7"):
            model.load_state_dict(version.weights, strict=False)

    An iteration yields the newest version, each newer one that is found when the caller asks again, and ends with that
    of the run's end. Each is whole, and its bytes are checked; versions that are not are refused.

    Args:
        address: of the run, as `farflung launch --meet` has it.
        key: the run's, if it has one. None: that of `FARFLUNG_KEY` or `FARFLUNG_KEY_FILE`.
        refused: called with a sentence about each version that is refused; by default it is printed.

    Raises:
        ConfigError: nothing can be read there.
    """

    def __init__(self, address: str, key: bytes | None = None, refused: Callable[[str], object] = tell) -> None:
        self.address = address
        self._key, self._refused = key or run_key(), refused

    def newest(self) -> Version:
        """Return the newest version; ConfigError if there is none that is whole."""
        why = "No state was written there yet"
        with self._states(_PATIENCE_S) as states:
            for saved in states.newest():
                try:
                    return _read(states, saved)
                except Damaged as error:
                    why = f"The newest states are damaged: {error}"
        raise ConfigError(f"Nothing can be pulled from {self.address}. {why}.")

    def __iter__(self) -> Iterator[Version]:
        order, refused = [0], set[str]()  # of the last one, and names since
        with self._states(PATIENCE_S) as states:
            while True:
                for _ in waiting(states.look_s, say=aloud("this process", f"for newer weights at {self.address}")):
                    there = list(states.newest())
                    newer = [one for one in there if one.order > order and one.name not in refused]
                    if newer or (there and there[0].is_last):
                        break
                if not newer:
                    return
                try:
                    version = _read(states, newer[0])
                except Damaged as error:
                    refused.add(newer[0].name)
                    self._refused(f"The state at step {newer[0].position} was not taken: {error}")
                else:
                    order = newer[0].order
                    yield version

    @contextmanager
    def _states(self, patience_s: float) -> Iterator[SavedStates]:
        """Yield the saved states of the run."""
        seal = None if self._key is None else Seal(self._key)
        try:
            board = objects_at(self.address, seal).patient(patience_s)
            name = part_of_run(board, self.address)
            yield SavedStates((board.part(name) if name else board).part("loop1"))
        except Unreachable as error:
            raise ConfigError(str(error)) from None
        finally:
            for notice in () if seal is None else seal.versions.notices:
                record(Kind.WARNING, message=notice)


def _read(states: SavedStates, saved: Saved) -> Version:
    """Return the version of a state; Damaged if it isn't whole."""
    with bar(f"Reading step {saved.position}", states.num_bytes(saved)) as shown:
        weights = _weights_of([states.read(saved, rank, shown) for rank in range(saved.ranks)])
    return Version(saved.position, weights, saved.is_last)


def _weights_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the whole tensors of a state by their names in the model, given each rank's part of it."""
    found: dict[str, Tensor] = {}
    for parts in ranks:
        rest = parts["place"].get("rest")
        for tree in [tree for part, tree in parts.items() if part != "place"] + [rest] * (rest is not None):
            for kind, rows in tree["names"].items():
                agreed = tree["agreed"][kind]
                pieces = _evaluated(**agreed) if isinstance(agreed, dict) else [x for bucket in agreed for x in bucket]
                flat = torch.cat([piece.flatten() for piece in pieces]) if pieces else torch.empty(0)
                sizes = [prod(shape) for _, _, _, _, shape in rows]
                for (name, dtype, whole, offset, shape), values in zip(rows, torch.split(flat, sizes), strict=True):
                    tensor = found.setdefault(name, torch.empty(whole, dtype=getattr(torch, dtype)))
                    place = tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))
                    tensor[place] = values.view(shape).to(tensor.dtype)
    return found


def _evaluated(
    chunks: Sequence[Tensor], optimizer: Mapping[str, Any] | None = None, average: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """Return the values to evaluate: a running mean, or the slow weights of an anchor (`methods.momentum.lead_of`)."""
    if average or optimizer is None:
        return average or chunks
    ahead = optimizer["param_groups"][0].get("look_ahead", 0.0)  # which states of earlier versions don't have
    momenta = [optimizer["state"].get(k, {}).get("momentum_buffer") for k in range(len(chunks))]
    return [x if m is None or not ahead else torch.add(x, m, alpha=ahead) for x, m in zip(chunks, momenta, strict=True)]
