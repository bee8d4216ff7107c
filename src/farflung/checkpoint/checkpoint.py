# SPDX-License-Identifier: Apache-2.0
"""Which folder is meant, a checkpoint by its name or the newest complete one; and that checkpoint, open for reading."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from farflung.base.bars import Bar, bar
from farflung.base.checks import Address, check_place
from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint import atomic, paths
from farflung.checkpoint.files import is_file, kind_of, sums_of
from farflung.checkpoint.manifest import Manifest, names_of
from farflung.checkpoint.reader import read_torch

_NUMBER = re.compile(r"^(.*?)(\d+)$")
_READERS = 4  # files that are read at a time

Fetch: TypeAlias = Callable[[Path, Iterable[tuple[int, int]]], None]  # of spans of a file, as start and length


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `open` finds out whether it is."""

    folder: Path
    manifest: Manifest | None  # None: another program than Farflung wrote it
    passed: tuple[str, ...] = ()  # why newer ones were not taken
    origin: str = ""  # the address that it was fetched from
    save: str = ""  # below which key there
    lazy: frozenset[str] = frozenset()  # files that `fetch_spans` brings here block by block
    fetch_spans: Any = None  # a `LazyFiles`, once this rank has the others' files

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Return the checkpoint in `folder`; CheckpointError if a file is missing or of another size."""
        atomic.finish(folder)
        checkpoint = cls(folder, Manifest.read(folder))
        if checkpoint.manifest is None and not is_checkpoint(folder):
            checkpoint._refuse("there is no checkpoint in it")
        if problem := checkpoint.misfit():
            checkpoint._refuse(problem)
        return checkpoint

    def misfit(self) -> str | None:
        """Say which file is missing or not as long as it was, without reading any; None: no such file."""
        for name, record in self.manifest.files.items() if self.manifest else ():
            try:
                status = (self.folder / name).stat()
            except OSError as error:
                return f"{name} can't be found ({error.strerror})"
            if kind := kind_of(status.st_mode):
                return f"{name} is {kind}, not a file"
            if status.st_size != record.num_bytes:
                return f"{name} has {status.st_size} bytes, but {record.num_bytes} were written"
        return None

    def verify(self, is_shown: bool = True) -> Checkpoint:
        """Read every byte, if checksums were written; CheckpointError names a file that is damaged.

        `is_shown` is False if no bar may show how far it is.
        """
        names, total = (self.manifest.files, self.manifest.num_bytes) if self.manifest else ((), 0)
        with (
            bar(f"Verifying {self.folder.name}", total, is_shown) as shown,
            ThreadPoolExecutor(_READERS, "farflung reader") as readers,
        ):
            problem = next(filter(None, readers.map(partial(self._damage_of, shown), names)), None)
        if problem:
            self._refuse(problem)
        return self

    def _damage_of(self, shown: Bar, name: str) -> str | None:
        assert self.manifest is not None
        written = self.manifest.files[name]
        try:
            sums = sums_of(self.folder / name, shown)
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        if sums == written[:2]:
            return None
        return f"{name} is damaged: its checksum is {sums[1]:08x}, but {written.crc32:08x} was written"

    def _refuse(self, problem: str) -> NoReturn:
        self.check_unchanged()
        raise CheckpointError(f"{self.folder} is not a complete checkpoint: {problem}.")

    def check_unchanged(self) -> None:
        """Check that this is still the checkpoint that was opened, so that all that was read since is of this one.

        A new one is announced by a folder before its first file is moved, and its manifest is moved last. No lock is
        needed, which file systems of several machines may not have. What another program wrote over its own files is
        not seen.
        """
        try:  # the folder is listed, as a network file system may have kept in mind that a name was not there
            is_there = atomic.READY not in os.listdir(self.folder) and Manifest.read(self.folder) == self.manifest
        except (OSError, CheckpointError):
            is_there = False
        if not is_there:
            raise CheckpointError(
                f"{self.folder} was replaced or removed by another process while it was read. Load it again, or save "
                "to a folder of its own each time (automatic_checkpoint_naming=True)."
            )

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name; CheckpointError if something else has it."""
        return is_file(self.folder / name)

    def read(self, name: str) -> Any:
        """Return what `torch.save` wrote to a file, on the CPU; for CheckpointError see `read_torch`."""
        return read_torch(self.folder / name)

    def read_if_there(self, name: str) -> Any:
        """Return what `torch.save` wrote to a file, None if there is no such file."""
        return self.read(name) if self.has(name) else None

    def model_path(self, index: int, taken: int = 0) -> Path:
        """Return where the weights of model `index` are: a folder of shards, or a file.

        Models that are neither sharded nor gathered from shards have numbers of their own in the names of their files.
        The `taken` models before it, which hooks have taken, have no such number.
        """
        is_there = self._has_weights()

        def sharded(k: int) -> str | None:
            return next(filter(is_there, (paths.model_shards(k), paths.gathered_model(k))), None)

        number = index - taken - sum(sharded(k) is not None for k in range(index))
        names = [paths.model(number, safe) for safe in (True, False)]
        name = sharded(index) or next(filter(is_there, names), None)
        if name is None:
            wanted = f"neither {names[0]} nor {names[1]} nor {paths.model_shards(index)}/"
            raise CheckpointError(f"{self.folder} has no weights of model {index}: {wanted} is there.")
        return self.folder / name

    def _has_weights(self) -> Callable[[str], bool]:
        """Return what says whether weights of a name are part of it: as its manifest says, or else as they are there.

        The folder may hold other weights too, such as those of `save_model`.
        """
        named = names_of(self.folder)
        if any(map(paths.MODEL.fullmatch, named)):
            return {name.split("/")[0] for name in named}.__contains__
        return lambda name: (self.folder / name).is_dir() if paths.SHARDS.fullmatch(name) else self.has(name)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, whole or not, and not a folder of checkpoints."""
    if (folder / paths.MANIFEST).exists() or (folder / atomic.READY).is_dir():
        return True
    return any(paths.KNOWN.fullmatch(path.name) or paths.SHARDS.fullmatch(path.name) for path in folder.iterdir())


def _may_be_checkpoint(folder: Path) -> bool:
    try:
        return is_checkpoint(folder)
    except OSError:  # it may not be read, or was just removed
        return False


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first: by their numbers if all have one, else by their age."""
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    folders = [path for path in folders if path.name.startswith(paths.PREFIX) or _may_be_checkpoint(path)]
    return [
        folder / name for name in in_order([path.name for path in folders], lambda name: _written_at(folder / name))
    ]


def in_order(names: Collection[str], written_at: Callable[[str], float]) -> list[str]:
    """Return the names of checkpoints, the newest first: by their numbers if all have one, else by their age."""
    found = {name: match for name in names if (match := _NUMBER.match(name))}
    if len({match[1] for match in found.values()}) == 1 and len(found) == len(names):
        return sorted(found, key=lambda name: int(found[name][2]), reverse=True)
    return sorted(names, key=written_at, reverse=True)


def newest(folder: Path, is_shown: bool = True) -> Checkpoint:
    """Return the newest complete checkpoint in `folder`, verified; CheckpointError if none is, with the reasons.

    For `is_shown` see `Checkpoint.verify`.
    """
    passed: list[str] = []
    for candidate in candidates(folder):
        try:
            checkpoint = Checkpoint.open(candidate).verify(is_shown)
        except (CheckpointError, OSError) as error:
            passed.append(str(error))
            continue
        return replace(checkpoint, passed=tuple(passed))
    reasons = "".join(f"\n  {reason}" for reason in passed)
    raise CheckpointError(f"There is no complete checkpoint in {folder}.{reasons}")


def resolve(given: str | os.PathLike[str] | None, automatic: Path | Address | None) -> tuple[Path | Address, bool]:
    """Return the folder that a script means by `given`, and whether it holds checkpoints rather than being one.

    An address is asked later. `automatic` is where automatic naming puts checkpoints; None: it is off.
    """
    if given is not None and (Path(given).is_dir() or str(given) != "latest"):
        folder = check_place("load_state: input_dir", given)
        if isinstance(folder, Address):
            return folder, False
        if not folder.is_dir():
            raise ConfigError(f"load_state: there is no folder {folder}.")
        return folder, not is_checkpoint(folder) and bool(candidates(folder))
    if automatic is None:
        raise ConfigError(
            f"load_state({given!r}) loads the newest automatically named checkpoint, but automatic naming is off. "
            "Name a folder, or use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    if isinstance(automatic, Path) and not automatic.is_dir():
        raise ConfigError(f"load_state: there is no folder {automatic}, so nothing was saved yet.")
    return automatic, True


def _written_at(folder: Path) -> float:
    try:
        manifest = Manifest.read(folder)
        return folder.stat().st_mtime if manifest is None else manifest.written_at
    except (CheckpointError, OSError):
        return 0.0
