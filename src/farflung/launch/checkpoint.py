# SPDX-License-Identifier: Apache-2.0
"""`farflung checkpoint`: what is in a checkpoint, is it whole, how do two differ, and other forms of it."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.tree import flatten
from farflung.checkpoint import atomic, choose, layout
from farflung.checkpoint.manifest import Entry, Manifest
from farflung.checkpoint.save import save_object
from farflung.checkpoint.sink import sums_of
from farflung.checkpoint.source import read_torch, read_weights

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_SHOWN = 10  # names of one kind that are listed before the rest is counted


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, and change their form."""


@checkpoint.command()
@click.argument("folder", type=_FOLDER)
def ls(folder: Path) -> None:
    """List the checkpoints in FOLDER, the newest first, or the files of the checkpoint that it is."""
    if choose.is_checkpoint(folder):
        for name, size in sorted(_sizes(folder).items()):
            click.echo(f"{_short(size):>9}  {name}")
        return
    for path in choose.candidates(folder):
        click.echo(_line(path))


@checkpoint.command()
@click.argument("folder", type=_FOLDER)
def verify(folder: Path) -> None:
    """Read every byte of a checkpoint, or of all in FOLDER, and say whether it is what was written."""
    paths = [folder] if choose.is_checkpoint(folder) else choose.candidates(folder)
    if not paths:
        raise CheckpointError(f"There is no checkpoint in {folder}.")
    broken = []
    for path in paths:
        try:
            found = choose.opened(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        if found.manifest is None:
            for name in _sizes(path):
                _read(path / name)
        click.echo(f"{path}: whole" if found.manifest else f"{path}: readable; without a manifest no more can be said")
    if broken:
        raise CheckpointError("\n".join(broken))


@checkpoint.command()
@click.argument("one", type=_FOLDER)
@click.argument("other", type=_FOLDER)
def diff(one: Path, other: Path) -> None:
    """Say how two checkpoints differ: files, names, shapes, and how far values are apart."""
    mine, theirs = _sizes(one), _sizes(other)
    for name in sorted(mine.keys() ^ theirs.keys()):
        click.echo(f"{name}: only in {one if name in mine else other}")
    same = 0
    for name in sorted(mine.keys() & theirs.keys() - set(layout.MANIFESTS)):
        if sums_of(one / name) == sums_of(other / name):
            same += 1
            continue
        lines = list(_differences(_read(one / name), _read(other / name)))
        for line in lines[:_SHOWN]:
            click.echo(f"{name}: {line}")
        if len(lines) > _SHOWN:
            click.echo(f"{name}: and {len(lines) - _SHOWN} more")
    click.echo(f"{same} files are the same")


@checkpoint.command()
@click.argument("source", type=_FOLDER)
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["accelerate", "farflung", "state-dict"]),
    required=True,
    help="accelerate: without what Farflung adds. farflung: with a manifest. state-dict: the weights in one file.",
)
@click.option("--model", default=0, help="Which model, for state-dict.", show_default=True)
def convert(source: Path, target: Path, form: str, model: int) -> None:
    """Write the checkpoint SOURCE in another form to TARGET, which must not be there yet."""
    if target.exists():
        raise ConfigError(f"{target} is there already. Name another target.")
    found = choose.opened(source)
    if form == "state-dict":
        save_object(_weights(source, model), target, safe_serialization=target.suffix == ".safetensors")
        return
    draft = atomic.Draft(target, secrets.token_hex(4))
    draft.begin()
    names = [name for name in _sizes(source) if name not in layout.MANIFESTS]
    if form == "accelerate":
        names = [name for name in names if name.split("/")[0] not in layout.FOLDERS]
    for name in names:
        (draft.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, draft.folder / name)
    if form == "farflung":
        files = {name: Entry(*sums_of(draft.folder / name)) for name in names}
        old = found.manifest or Manifest({}, world_size=sum(name.startswith("random_states_") for name in names))
        facts = {k: getattr(old, k) for k in ("step", "iteration", "world_size", "versions")}
        Manifest(files, written_at=time.time(), **facts).write(draft.folder / layout.MANIFEST)
    draft.commit()


def _weights(folder: Path, index: int) -> dict[str, Any]:
    """Return a model's weights under the names of the bare model."""
    for safe in (True, False):
        path = folder / layout.model(index, safe)
        if path.is_file():
            weights = read_weights(path)
            wrapped = bool(weights) and all(name.startswith("module.") for name in weights)
            return {name.removeprefix("module.") if wrapped else name: value for name, value in weights.items()}
    raise CheckpointError(f"{folder} has no weights of a model {index}.")


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return read_weights(path)
    return read_torch(path) if layout.is_torch(path.name) else path.read_bytes()


def _differences(mine: Any, theirs: Any) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in mine.keys() ^ theirs.keys():
            yield f"{key} is only in the {'first' if key in mine else 'second'}"
        for key in mine.keys() & theirs.keys():
            yield from (f"{key}: {line}" for line in _differences(mine[key], theirs[key]))
        return
    leaves, others = flatten(mine), flatten(theirs)
    if leaves[1] != others[1]:
        yield "the structures differ"
        return
    for one, other in zip(leaves[0], others[0], strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                yield f"{list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
            elif not torch.equal(one, other):
                yield f"values are up to {(one.double() - other.double()).abs().max().item():.3g} apart"
        elif str(one) != str(other):
            yield f"{one!r:.40} and {other!r:.40}"


def _line(path: Path) -> str:
    """Describe a checkpoint in one line, without reading its files."""
    try:
        manifest = Manifest.read(path)
        if manifest is None:
            return f"{path.name}: without a manifest, {_short(sum(_sizes(path).values()))}"
        problem = manifest.misfits(path)
    except CheckpointError as error:
        return f"{path.name}: NOT COMPLETE: {error}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.written_at))
    facts = f"step {manifest.step}, {manifest.world_size} processes, {_short(manifest.num_bytes)}, {when}"
    return f"{path.name}: {f'NOT COMPLETE: {problem}' if problem else facts}"


def _sizes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in atomic.names_in(folder)}


def _short(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
