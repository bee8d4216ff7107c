# SPDX-License-Identifier: Apache-2.0
"""What `farflung checkpoint` does: list checkpoints, verify, compare and convert them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from farflung.base.bars import Bar, bar
from farflung.base.checks import Address
from farflung.base.errors import CheckpointError
from farflung.base.tree import flatten
from farflung.base.words import counted, in_bytes
from farflung.checkpoint import atomic, paths
from farflung.checkpoint.checkpoint import Checkpoint, candidates, is_checkpoint
from farflung.checkpoint.files import is_file, sums_of
from farflung.checkpoint.manifest import FileRecord, Manifest
from farflung.checkpoint.reader import read_torch, read_weights
from farflung.checkpoint.remote import RemoteCheckpoints, name_of
from farflung.checkpoint.sharded import ShardReader
from farflung.checkpoint.writer import FileWriter, save_object, tensor_bytes

_NO_MODEL = "it has no model weights"
_BLOCK = 2**20  # bytes that are copied at a time
_SHOWN = 10  # names of one kind that are listed before the rest is counted


@contextmanager
def here(place: Path | Address) -> Iterator[Path]:
    """Yield the folder of a checkpoint, which is fetched from an address for the time being."""
    if isinstance(place, Path):
        yield place
        return
    with ExitStack() as fetched:
        yield RemoteCheckpoints(place).newest(fetched, None, is_shown=True).folder


def ls(folder: Path | Address) -> None:
    """List the checkpoints in a folder or at an address, newest first, or the files of a checkpoint."""
    if isinstance(folder, Address):
        _ls_remote(RemoteCheckpoints(folder))
        return
    if not is_checkpoint(folder):
        for path in _checkpoints(folder):
            click.echo(_line(path))
        return
    atomic.finish(folder)
    sizes = _sizes(folder)
    for name, size in sorted(sizes.items()):
        click.echo(f"{in_bytes(size):>9}  {name}")
    if not _has_model(folder):
        click.echo(_NO_MODEL)


def _ls_remote(remote: RemoteCheckpoints) -> None:
    saves, has_several = remote.candidates(paths.CHECKPOINTS)
    for save in saves:
        try:
            files = (manifest := remote.manifest(save)).files
        except CheckpointError as error:
            click.echo(f"{Address(name_of(save)).name}: NOT COMPLETE: {error}")
            continue
        lacks = [] if any(map(paths.MODEL.fullmatch, files)) else [_NO_MODEL]
        if has_several:
            lines = [f"{Address(name_of(save)).name}: {', '.join(lacks + _facts(manifest))}"]
        else:
            lines = [f"{in_bytes(record.num_bytes):>9}  {name}" for name, record in sorted(files.items())] + lacks
        click.echo("\n".join(lines))


def _verify_remote(remote: RemoteCheckpoints) -> None:
    broken = []
    for save in remote.candidates(paths.CHECKPOINTS)[0]:
        try:
            with ExitStack() as fetched:
                found = remote.fetch(save, fetched, None, is_shown=True)
                lacks = "" if _has_model(found.folder) else f"; {_NO_MODEL}"
                click.echo(f"{found.origin}: complete{lacks}")
        except CheckpointError as error:
            broken.append(str(error))
    if broken:
        raise CheckpointError("\n".join(broken))


def verify(folder: Path | Address) -> None:
    """Read a checkpoint, or all those in a place; raise CheckpointError if one is not what was written."""
    if isinstance(folder, Address):
        _verify_remote(RemoteCheckpoints(folder))
        return
    paths = [folder] if is_checkpoint(folder) else _checkpoints(folder)
    broken = []
    for path in paths:
        try:
            checkpoint = Checkpoint.open(path).verify()
            verified = [True] if checkpoint.manifest else [_is_verified(path / name) for name in _units(path)]
            lacks = "" if _has_model(path) else f"; {_NO_MODEL}"
        except (CheckpointError, OSError) as error:
            broken.append(str(error))
            continue
        state = "complete" if all(verified) else "readable, but it can't be verified without a manifest"
        click.echo(f"{path}: {state}{lacks}")
    if broken:
        raise CheckpointError("\n".join(broken))


def diff(one: Path, other: Path) -> bool:
    """Show how two checkpoints differ, and return whether they do; raise CheckpointError if one is none."""
    for folder in (one, other):
        if not is_checkpoint(folder):
            raise CheckpointError(f"There is no checkpoint in {folder}, so it can't be compared. Name two checkpoints.")
        atomic.finish(folder)
    mine, theirs = _units(one), _units(other)
    alone = sorted(mine ^ theirs)
    for name in alone:
        click.echo(f"{name}: only in {one if name in mine else other}")
    both = sorted(mine & theirs - {paths.MANIFEST})
    plain = [folder / name for name in both if not paths.SHARDS.fullmatch(name) for folder in (one, other)]
    with bar("Reading both", sum(path.stat().st_size for path in plain)) as shown:
        sums = {path: sums_of(path, shown) for path in plain}
    same = 0
    for name in both:
        is_copy = one / name in sums and sums[one / name] == sums[other / name]
        lines = [] if is_copy else _compared(name, one, other)
        same += not lines
        for line in lines[:_SHOWN]:
            click.echo(f"{name}: {line}")
        if len(lines) > _SHOWN:
            click.echo(f"{name}: and {len(lines) - _SHOWN} more")
    click.echo(f"Identical files: {same} of {len(both) + len(alone)}")
    return same < len(both) + len(alone)


def _compared(name: str, one: Path, other: Path) -> list[str]:
    """Return how a file, or a folder of shards, differs in two checkpoints."""
    mine, theirs = _read(one / name), _read(other / name)
    with bar(f"Comparing {name}", tensor_bytes([mine, theirs])) as shown:
        return list(_differences(mine, theirs, shown))


def convert(source: Path, target: Path, form: str, model: int) -> None:
    """Write a checkpoint in another form: `accelerate`, `farflung`, or `state-dict` of the model with this index."""
    checkpoint = Checkpoint.open(source).verify()
    if form == "state-dict":
        weights = _weights(checkpoint, model)
        checkpoint.check_unchanged()
        target.parent.mkdir(parents=True, exist_ok=True)
        with bar(f"Writing {target.name}", tensor_bytes(weights)) as shown:
            save_object(weights, target, target.suffix == ".safetensors", shown)
        click.echo(f"Written to {target}: {counted(len(weights), 'tensor')}, {in_bytes(target.stat().st_size)}.")
        return
    there = _sizes(source)
    names = [name for name in there if name != paths.MANIFEST and is_file(source / name)]
    if form == "accelerate":
        names = [name for name in names if name.split("/")[0] not in paths.FOLDERS]
    staged = atomic.StagedDir(target, secrets.token_hex(4))
    staged.begin()
    try:
        _copy(names, checkpoint, staged.folder, with_manifest=form == "farflung")
        staged.commit()
    except BaseException:
        staged.discard()
        raise
    written = _sizes(target)
    click.echo(f"Written to {target}: {', '.join(sorted(written))} ({in_bytes(sum(written.values()))}).")
    if left_out := sorted(there.keys() - written.keys()):
        click.echo(f"Left out: {', '.join(left_out)}.")


def _copy(names: list[str], checkpoint: Checkpoint, target: Path, with_manifest: bool) -> None:
    files = {}
    with bar(f"Writing {target.name}", sum((checkpoint.folder / name).stat().st_size for name in names)) as shown:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (
                open(checkpoint.folder / name, "rb", buffering=0) as file,
                FileWriter(target / name, bar=shown) as writer,
            ):
                while block := file.read(_BLOCK):
                    writer.write(block)
            files[name] = FileRecord(writer.num_bytes, writer.crc32)
    checkpoint.check_unchanged()
    if with_manifest:
        old = checkpoint.manifest or Manifest({}, world_size=sum(name.startswith("random_states_") for name in names))
        facts = {k: getattr(old, k) for k in ("step", "optimizer_steps", "iteration", "world_size", "versions")}
        Manifest(files, written_at=time.time(), **facts).write(target / paths.MANIFEST)


def _weights(checkpoint: Checkpoint, index: int) -> dict[str, Any]:
    is_model = checkpoint.folder.name == paths.model_shards(index)  # its shards alone
    path = checkpoint.folder if is_model else checkpoint.model_path(index)
    if paths.SHARDS.fullmatch(path.name):
        state: dict[str, Any] = ShardReader(path).read_whole()["model"]
        return state
    weights = read_weights(path)
    # No wrapper's names are in ours; `convert` knows no versions.
    ours = checkpoint.manifest is not None and checkpoint.manifest.versions
    wrapped = not ours and bool(weights) and all(name.startswith("module.") for name in weights)
    return {name.removeprefix("module.") if wrapped else name: value for name, value in weights.items()}


def _units(folder: Path) -> set[str]:
    """Return the names of the files in a checkpoint; those of shards that belong together count as their folder."""
    names = ((name, name.split("/")[0]) for name in _sizes(folder))
    return {first if paths.SHARDS.fullmatch(first) else name for name, first in names}


def _has_model(folder: Path) -> bool:
    """Return whether there are weights of a model in a folder, which may be that of its shards."""
    return any(paths.MODEL.fullmatch(name) or paths.MODEL.fullmatch(f"{folder.name}/{name}") for name in _sizes(folder))


def _is_verified(path: Path) -> bool:
    """Read a file, or a folder of shards, and return whether there was a manifest to check it against."""
    if paths.SHARDS.fullmatch(path.name) and (path / paths.MANIFEST).exists():
        Checkpoint.open(path).verify()
        return True
    _read(path)
    return False


def _read(path: Path) -> Any:
    if paths.SHARDS.fullmatch(path.name):
        return ShardReader(path).read_whole()
    if path.suffix == ".safetensors":
        return read_weights(path)
    if path.name.endswith(paths.TORCH):
        return read_torch(path)
    return path.read_bytes() if is_file(path) else b""


def _differences(mine: Any, theirs: Any, shown: Bar) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted(mine.keys() ^ theirs.keys(), key=str):
            yield f"{key} is only in the {'first' if key in mine else 'second'}"
        for key in sorted(mine.keys() & theirs.keys(), key=str):
            yield from (f"{key}: {line}" for line in _differences(mine[key], theirs[key], shown))
        return
    leaves, others = flatten(mine), flatten(theirs)
    if leaves[1] != others[1]:
        yield "the structures differ"
        return
    for one, other in zip(map(_as_tensor, leaves[0]), map(_as_tensor, others[0]), strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            shown.advance(tensor_bytes([one, other]))
            if one.shape != other.shape or one.dtype != other.dtype:
                yield f"{list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
            elif (gap := _gap(one, other)) is not None:
                yield f"values are up to {gap:.3g} apart"
        elif str(one) != str(other):
            yield f"{one!r:.40} and {other!r:.40}"


def _as_tensor(leaf: Any) -> Any:
    """Return a numpy array as a tensor, and anything else unchanged. Torch reads no array of a type that it lacks."""
    return torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _gap(one: Tensor, other: Tensor) -> float | None:
    """Return the largest difference of two tensors of one shape and type, None: they are equal. NaN equals NaN."""
    if torch.equal(one, other):
        return None
    differ = (one != other) & ~((one != one) & (other != other))
    wide = torch.complex128 if one.is_complex() else torch.float64
    gaps = (one[differ].to(wide) - other[differ].to(wide)).abs()
    return gaps.max().item() if gaps.numel() else None


def _line(path: Path) -> str:
    """Describe a checkpoint in one line, without reading its files."""
    try:
        atomic.finish(path)
        manifest, sizes = Manifest.read(path), _sizes(path)
        problem = Checkpoint(path, manifest).misfit()
    except CheckpointError as error:
        problem = str(error)
    if problem is not None:
        return f"{path.name}: NOT COMPLETE: {problem}"
    facts = [] if _has_model(path) else [_NO_MODEL]
    if manifest is None:
        facts += ["without a manifest", in_bytes(sum(sizes.values()))]
    else:
        facts += _facts(manifest)
    return f"{path.name}: {', '.join(facts)}"


def _facts(manifest: Manifest) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.written_at))
    return [_step(manifest), counted(manifest.world_size, "process"), in_bytes(manifest.num_bytes), when]


def _step(manifest: Manifest) -> str:
    if manifest.completed_steps is not None:
        return f"step {manifest.completed_steps:,}"
    return "no optimizer" if manifest.optimizer_steps == [] else "steps not recorded"


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, or in `checkpoints` in it, where automatic naming puts those of a project."""
    inner = folder / paths.CHECKPOINTS
    folders = candidates(folder) or (candidates(inner) if inner.is_dir() else [])
    if not folders:
        raise CheckpointError(f"There is no checkpoint in {folder}. Name a checkpoint, or the folder of a project.")
    return folders


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {name: (folder / name).stat().st_size for name in atomic.names_in(folder)}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} can't be read: {error.strerror}. Remove it, or copy it again."
        ) from error
