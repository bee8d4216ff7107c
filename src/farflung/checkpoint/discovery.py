# SPDX-License-Identifier: Apache-2.0
"""Which folder is meant: a checkpoint by its name, or the newest complete one among several."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint import atomic, layout
from farflung.checkpoint.manifest import Manifest, names_of
from farflung.checkpoint.reader import DAMAGE
from farflung.checkpoint.regular import is_file

_NUMBER = re.compile(r"^(.*?)(\d+)$")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint.

    Attributes:
        folder: where it is.
        manifest: None where another program than Farflung wrote it.
        passed: what was looked at before, and why it was not taken.
    """

    folder: Path
    manifest: Manifest | None
    passed: tuple[str, ...] = ()


def is_checkpoint(folder: Path) -> bool:
    """Say whether a folder is a checkpoint, whole or not, and not a folder of checkpoints."""
    if layout.manifest(folder).exists() or (folder / atomic.READY).is_dir():
        return True
    return any(layout.is_known(path.name) or layout.is_shards(path.name) for path in folder.iterdir())


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first: by their numbers where all have one, else by their age."""
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [path for path in found if is_checkpoint(path) or path.name.startswith(layout.PREFIX)]
    matches = [_NUMBER.match(path.name) for path in found]
    if len({match[1] for match in matches if match}) == 1 and all(matches):
        return sorted(found, key=lambda path: int(_NUMBER.match(path.name)[2]), reverse=True)  # type: ignore[index]
    return sorted(found, key=_written_at, reverse=True)


def find(folder: Path) -> Found:
    """Return the checkpoint in `folder`, all of whose files are there, in their sizes. `verify` reads them.

    Raises:
        CheckpointError: it is not complete; the message names the file.
    """
    atomic.finish(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        problem = None if is_checkpoint(folder) else "there is no checkpoint in it"
    else:
        problem = manifest.misfits(folder)
    found = Found(folder, manifest)
    if problem:
        raise _incomplete(found, problem)
    return found


def verify(found: Found) -> None:
    """Read every byte of a checkpoint. One that another program wrote has no checksums, and passes.

    Raises:
        CheckpointError: it is not what was written; the message names the file.
    """
    problem = None if found.manifest is None else found.manifest.damage(found.folder)
    if problem:
        raise _incomplete(found, problem)


def _incomplete(found: Found, problem: str) -> CheckpointError:
    check_unchanged(found)
    return CheckpointError(f"{found.folder} is not a complete checkpoint: {problem}.")


def check_unchanged(found: Found) -> None:
    """Check that a checkpoint is still the one that was found, so that all that was read since is of this one.

    A new one is announced by a folder before its first file is moved, and its manifest is moved last. No lock is
    needed, which file systems of several machines may not have. What another program wrote over its own files is not
    seen.

    Raises:
        CheckpointError: another process has replaced or removed it, or is about to.
    """
    try:  # the folder is listed, as a network file system may have kept in mind that a name was not there
        is_there = atomic.READY not in os.listdir(found.folder) and Manifest.read(found.folder) == found.manifest
    except (OSError, CheckpointError):
        is_there = False
    if not is_there:
        raise CheckpointError(
            f"{found.folder} was replaced or removed by another process while it was read. Load it again, or save to a "
            "folder of its own each time (automatic_checkpoint_naming=True)."
        )


def find_verified(folder: Path) -> Found:
    """Return the checkpoint in `folder` once it is known to be complete, every byte of it.

    Raises:
        CheckpointError: it is not; the message names the file.
    """
    found = find(folder)
    verify(found)
    return found


def model_path(folder: Path, index: int, taken: int = 0) -> Path:
    """Return where the weights of model `index` are: a folder of shards, or a file.

    Models that are neither sharded nor gathered from shards have numbers of their own in the names of their files.

    Args:
        taken: how many models before it hooks have taken, so that they have no such number.

    Raises:
        CheckpointError: there are none.
    """
    is_there = _names_of_weights(folder)

    def sharded(k: int) -> str | None:
        return next(filter(is_there, (layout.model_shards(k), layout.gathered_model(k))), None)

    number = index - taken - sum(sharded(k) is not None for k in range(index))
    names = [layout.model(number, safe) for safe in (True, False)]
    name = sharded(index) or next(filter(is_there, names), None)
    if name is None:
        wanted = f"neither {names[0]} nor {names[1]} nor {layout.model_shards(index)}/"
        raise CheckpointError(f"{folder} has no weights of model {index}: {wanted} is there.")
    return folder / name


def _names_of_weights(folder: Path) -> Callable[[str], bool]:
    """Return what says whether weights of a name are part of a checkpoint: as its manifest says, or as they are there.

    The folder may hold other weights too, such as those of `save_model`.
    """
    named = names_of(folder)
    if any(map(layout.is_model, named)):
        return {name.split("/")[0] for name in named}.__contains__
    return lambda name: (folder / name).is_dir() if layout.is_shards(name) else is_file(folder / name)


def newest(folder: Path) -> Found:
    """Return the newest checkpoint in `folder` that is whole.

    Raises:
        CheckpointError: none is, or there is none.
    """
    passed: list[str] = []
    for candidate in candidates(folder):
        try:
            found = find_verified(candidate)
        except CheckpointError as error:
            passed.append(str(error))
            continue
        return Found(found.folder, found.manifest, tuple(passed))
    reasons = "".join(f"\n  {reason}" for reason in passed)
    raise CheckpointError(f"There is no complete checkpoint in {folder}.{reasons}")


def resolve(given: str | os.PathLike[str] | None, automatic: Path | None) -> tuple[Path, bool]:
    """Return the folder that is meant, and whether it holds checkpoints rather than being one.

    Args:
        given: what the script said: a folder, `latest`, or nothing.
        automatic: where automatic naming puts checkpoints; None: it is off.

    Raises:
        ConfigError: there is no such folder, or nothing says which.
    """
    if given is not None and (Path(given).is_dir() or str(given) != "latest"):
        folder = Path(os.path.expanduser(given))
        if not folder.is_dir():
            raise ConfigError(f"load_state: there is no folder {folder}.")
        return folder, not is_checkpoint(folder) and bool(candidates(folder))
    if automatic is None:
        raise ConfigError(
            f"load_state({given!r}) loads the newest automatically named checkpoint, but automatic naming is off. "
            "Name a folder, or use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    if not automatic.is_dir():
        raise ConfigError(f"load_state: there is no folder {automatic}, so nothing was saved yet.")
    return automatic, True


def _written_at(folder: Path) -> float:
    try:
        manifest = Manifest.read(folder)
        return folder.stat().st_mtime if manifest is None else manifest.written_at
    except (CheckpointError, *DAMAGE):
        return 0.0
