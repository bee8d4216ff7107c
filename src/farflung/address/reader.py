# SPDX-License-Identifier: Apache-2.0
"""The agreed weights of a run, for a process that takes no part in it: an evaluation, or a server of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from farflung.address.difference import DTYPES as DTYPES, ReferenceWeights, assembled, weights_in
from farflung.address.objects import PATIENCE_S
from farflung.address.packed import Damaged
from farflung.address.run_record import part_of_run
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import objects_at
from farflung.address.seal import Seal
from farflung.base.bars import Bar, bar
from farflung.base.errors import ConfigError, Unreachable
from farflung.base.events import Kind, record, tell
from farflung.base.files import atomic_file, utf8_name
from farflung.comm.patience import aloud, waiting
from farflung.config.key import run_key

_PATIENCE_S = 5.0  # for one version alone
_ATTEMPTS = 5
_LOOK_S = 1.0  # between two looks for a run that has not begun


@dataclass(frozen=True)
class Version:
    """Weights that all replicas had agreed on.

    Attributes:
        step: in the schedule of the run.
        weights: the trained parameters and the buffers, on the CPU, by their names in the model.
        is_last: the run has come to its end with them.
        num_bytes: that were read at the address for it.
        adapter: of an adapter of peft, its settings as JSON, and how its file names each tensor, by name.
    """

    step: int
    weights: Mapping[str, Tensor]
    is_last: bool
    num_bytes: int
    adapter: Mapping[str, Any] | None = None

    def save(self, path: Path) -> str:
        """Write the weights to a file of safetensors, which others find whole; return what they are.

        Args:
            path: of the file, or of a folder that exists: from it peft loads an adapter.

        Raises:
            ConfigError: it can't be written there.
        """
        weights = dict(self.weights)
        try:
            if path.is_dir() and self.adapter is not None:
                weights = {own: weights[name] for name, own in self.adapter["names"].items() if name in weights}
                with atomic_file(path / "adapter_config.json") as part:
                    part.write_text(self.adapter["settings"], encoding="utf-8")
            if path.is_dir():
                path /= "model.safetensors" if self.adapter is None else "adapter_model.safetensors"
            with atomic_file(path) as part, utf8_name(part.parent) as folder:
                save_file(weights, f"{folder}/{part.name}", metadata={"format": "pt", "step": str(self.step)})
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"The weights after step {self.step} can't be written to {path}: {error}") from None
        return f"{len(self.weights)} tensors after step {self.step}"


class Reader:
    """Reads the agreed weights of a run at its address, while it trains or later. The permission to read is enough.

        for version in Reader("s3://bucket/run7"):
            model.load_state_dict(version.weights, strict=False)

    An iteration yields the newest version, each newer one that is found when the caller asks again, and ends with that
    of the run's end. Each is whole, and its bytes are checked; versions that are not are refused.

    Without a `dtype` each version is read as a whole state, which has the outer momentum too. With one, only the first
    three are, and those after a break, such as another first member or a damaged difference; of others this reads by
    how much they differ from the version before. The bits are the same. The first member writes differences as long as
    someone reads them: this process leaves a note at the address with each version, if it may write there.

    Of 14M weights, 8 steps of AdamW later, a difference has 1/34 of their bytes in bfloat16 and 1/2.3 in float32 at a
    learning rate of 1e-6, and 1/2.5 and 1/1.3 at 1e-3 (`benchmarks/bench_reader.py`).

    Args:
        address: of the run, as `farflung launch --meet` has it.
        key: the run's, if it has one. None: that of `FARFLUNG_KEY` or `FARFLUNG_KEY_FILE`.
        refused: called with a sentence about each version that is refused; by default it is printed.
        dtype: `torch.bfloat16`, `torch.float16` or `torch.float32`: of floating weights, as in `model.to(dtype)`. None:
            as the model has them, and each version is read whole.

    Raises:
        ConfigError: nothing can be read there, or the dtype is another one.
    """

    def __init__(
        self,
        address: str,
        key: bytes | None = None,
        refused: Callable[[str], object] = tell,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in (None, *DTYPES.values()):
            raise ConfigError(f"is {dtype}. Give torch.{', torch.'.join(DTYPES)} or None.", "dtype")
        self.address = address
        self._key, self._refused, self._dtype = key or run_key(), refused, dtype

    def newest(self) -> Version:
        """Return the newest version; ConfigError if there is none that is whole."""
        why, tried = "No state was written there yet", set[str]()
        with self._states(_PATIENCE_S) as states:
            # There may be new ones, each of which is replaced while it is read.
            while len(tried) < _ATTEMPTS and (left := [one for one in states.newest() if one.name not in tried]):
                tried.add(left[0].name)
                try:
                    return _VersionReader(states, self._dtype, self._refused).whole(left[0])
                except Damaged as error:
                    why = f"The newest states are damaged, or were replaced while they were read: {error}"
        raise ConfigError(f"Nothing can be pulled from {self.address}. {why}.")

    def __iter__(self) -> Iterator[Version]:
        latest, refused = "", set[str]()  # names: of the version before, and of versions that can't be read
        with self._states(PATIENCE_S, waits=True) as states:
            following = _VersionReader(states, self._dtype, self._refused)
            while True:
                for _ in waiting(states.look_s, say=aloud("this process", f"for newer weights at {self.address}")):
                    there = list(states.newest())
                    names = [one.name for one in there]
                    since = there[: names.index(latest)] if latest in names else there
                    newer = [one for one in since if one.name not in refused]
                    if newer or (there and there[0].is_last):
                        break
                if not newer:
                    return
                try:
                    version = following.read(newer[0])
                except Damaged as error:
                    refused.add(newer[0].name)
                    self._refused(f"The state at step {newer[0].position} was not taken: {error}")
                else:
                    latest = newer[0].name
                    yield version

    @contextmanager
    def _states(self, patience_s: float, waits: bool = False) -> Iterator[SavedStates]:
        """Yield the saved states of the run, once it has begun if one `waits` for that."""
        seal = None if self._key is None else Seal(self._key)
        try:
            board = objects_at(self.address, seal).patient(patience_s)
            looks = waiting(_LOOK_S, say=aloud("this process", f"for a run to begin at {self.address}"))
            while (name := part_of_run(board, self.address)) is None and waits:
                next(looks)
            yield SavedStates((board.part(name) if name else board).part("loop1"))
        except Unreachable as error:
            raise ConfigError(str(error)) from None
        finally:
            for notice in () if seal is None else seal.versions.notices:
                record(Kind.WARNING, message=notice)


class _VersionReader:
    """Reads one version after another: by differences, if there are any to the one before."""

    def __init__(self, states: SavedStates, dtype: torch.dtype | None, say: Callable[[str], object]) -> None:
        self._states, self._dtype, self._say = states, dtype, say
        self._part = str(dtype).removeprefix("torch.")
        self._held: list[ReferenceWeights] = []  # of each rank
        self._adapter: Mapping[str, Any] | None = None
        self._follows = self._has_warned = False

    def read(self, saved: Saved) -> Version:
        """Return the version of a state; Damaged if it isn't whole."""
        if self._dtype is None:
            return self.whole(saved)
        version = self._by_differences(saved) or self.whole(saved)
        try:
            self._states.note_reader(self._part, saved.name)
        except Unreachable as error:
            if not self._has_warned:
                self._say(f"Versions are read whole, as no note that asks for differences can be left: {error}")
            self._has_warned = True
        return version

    def whole(self, saved: Saved) -> Version:
        self._held = []
        with bar(f"Reading step {saved.position}", self._states.num_bytes(saved)) as shown:
            pairs = (weights_in(self._parts(saved, rank, shown), self._dtype) for rank in range(saved.ranks))
            if self._dtype is None:
                return self._version(saved, assembled(pairs), shown)
            held = [ReferenceWeights.of(saved.name, self._dtype, one) for one in pairs]
            version = self._version(saved, assembled(one.pairs() for one in held), shown)
        self._held = held
        return version

    def _parts(self, saved: Saved, rank: int, shown: Bar) -> dict[str, Any]:
        parts = self._states.read(saved, rank, shown)
        self._adapter = parts["place"].get("adapter")
        return parts

    def _by_differences(self, saved: Saved) -> Version | None:
        """Return the version of a state; None if it must be read whole."""
        names, held = list(saved.chains.get(self._part, ())), self._held
        is_there = len(held) == saved.ranks and held[0].name in names
        try:
            if self._follows and not is_there:
                self._say(f"Step {saved.position} is read whole, as there are no differences to it.")
            self._follows = is_there
            if not is_there:
                return None
            with bar(f"Reading step {saved.position}", 0) as shown:
                for name in names[names.index(held[0].name) + 1 :]:
                    for rank, one in enumerate(held):
                        one.apply(name, self._states.read_part(name, rank, self._part, shown))
                return self._version(saved, assembled(one.pairs() for one in held), shown)
        except Damaged as error:
            self._say(f"Step {saved.position} is read whole, as a difference to it can't be used: {error}.")
            return None

    def _version(self, saved: Saved, weights: Mapping[str, Tensor], shown: Bar) -> Version:
        return Version(saved.position, weights, saved.is_last, shown.num_done, self._adapter)
