# SPDX-License-Identifier: Apache-2.0
"""`farflung checkpoint`: what is in a checkpoint, is it whole, how do two differ, and other forms of it.

What the commands do needs torch, which is loaded when the arguments have been read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflung.base.checks import Address, check_path, check_place
from farflung.base.errors import ConfigError
from farflung.base.lazy import LazyModule
from farflung.config.key import run_key
from farflung.launch.main import CommandGroup

if TYPE_CHECKING:
    from farflung.address import reader
    from farflung.checkpoint import tools
else:
    tools = LazyModule("farflung.checkpoint.tools")
    reader = LazyModule("farflung.address.reader")


class _FolderOrAddress(click.Path):
    """A folder that exists, or an address."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        place = check_place(param.human_readable_name if param else "FOLDER", value)
        return place if isinstance(place, Address) else super().convert(place, param, ctx)


_FOLDER = _FolderOrAddress(exists=True, file_okay=False, path_type=Path)


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """List, verify, compare and convert checkpoints."""


@checkpoint.command(short_help="List the checkpoints in a folder, or the files of one.")
@click.argument("folder", type=_FOLDER)
def ls(folder: Path | Address) -> None:
    """List the checkpoints in FOLDER or FOLDER/checkpoints, newest first, or the files if FOLDER is a checkpoint.

    It may be an address, such as s3://bucket/run.
    """
    tools.ls(folder)


@checkpoint.command(short_help="Read every byte of checkpoints and check it.")
@click.argument("folder", type=_FOLDER)
def verify(folder: Path | Address) -> None:
    """Read every byte of a checkpoint, or of all those in FOLDER, and check it against what was written.

    It may be an address, such as s3://bucket/run.
    """
    tools.verify(folder)


@checkpoint.command(short_help="Show how two checkpoints differ.")
@click.argument("one", type=_FOLDER)
@click.argument("other", type=_FOLDER)
@click.pass_context
def diff(ctx: click.Context, one: Path | Address, other: Path | Address) -> None:
    """Show how two checkpoints differ, in folders or at addresses: files, names, shapes, how far apart values are.

    The exit code is 0 if they are the same, 1 if they differ, and 2 if they can't be compared.
    """
    with tools.here(one) as mine, tools.here(other) as theirs:
        ctx.exit(1 if tools.diff(mine, theirs) else 0)


@checkpoint.command(short_help="Write a checkpoint in another format.")
@click.argument("source", type=_FOLDER)
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["accelerate", "farflung", "state-dict"]),
    required=True,
    help="accelerate: without Farflung's own files. farflung: with a manifest. state-dict: one file with the weights.",
)
@click.option("--model", default=0, help="Index of the model, for state-dict.", show_default=True)
def convert(source: Path | Address, target: Path, form: str, model: int) -> None:
    """Write the checkpoint SOURCE, a folder or an address, in another format to TARGET, which must not exist yet."""
    if check_path("TARGET", target).exists():
        raise ConfigError(f"{target} already exists. Name another target.")
    with tools.here(source) as folder:
        tools.convert(folder, target, form, model)


@checkpoint.command(short_help="Write the newest weights of an elastic run that meets at an address.")
@click.argument("address")
@click.argument("target")
@click.option("--key_file", "--key-file", help="The file with the run's key, if it has one. [the key in FARFLUNG_KEY]")
@click.option("--follow", is_flag=True, help="Write each newer version over it, until the run ends.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of floating weights; with --follow, versions are read by how much they differ. [as the model has them]",
)
def pull(address: str, target: str, key_file: str | None, follow: bool, dtype: str | None) -> None:
    """Write the newest agreed weights of the run at ADDRESS (see `launch --meet`) to the safetensors file TARGET.

    If TARGET is a folder, peft loads an adapter from it. The run may be under way, or over. Reading is enough.
    """
    path = check_path("TARGET", target)
    folder = path if path.is_dir() or target.endswith("/") else path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"is {target}, but {folder} is no folder that can be written to.", "TARGET")
    found = reader.Reader(address, run_key(key_file), click.echo, dtype=reader.DTYPES[dtype] if dtype else None)
    for version in found if follow else [found.newest()]:
        click.echo(f"{target} has {version.save(path)}")
