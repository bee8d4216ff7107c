# SPDX-License-Identifier: Apache-2.0
"""Accelerate's functions around its launcher, for programs that start scripts from Python."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch.distributed as dist

from farflung.base.enums import DistributedType
from farflung.base.errors import Unsupported
from farflung.config import environ
from farflung.config.foreign import foreign_flag
from farflung.config.launch import DEFAULT_PORT, FIELDS, rank_variables
from farflung.config.resolve import resolve
from farflung.config.setting import Field, underscored
from farflung.launch import main as command
from farflung.launch.network import get_free_port
from farflung.launch.plan import Script
from farflung.launch.start import launch_script


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with `message`, or raise Unsupported for the first flag in it that asks for what Farflung does not do."""
        words = [underscored(word.lstrip("-")) for word in message.split() if word.startswith("--")]
        _refuse_foreign(words)
        super().error(message)


_ENGINES = ("use_deepspeed", "use_megatron_lm", "tpu")  # switches that Accelerate's parser knows: refused at the launch


def _refuse_foreign(words: Iterable[str]) -> None:
    for word in words:
        foreign = foreign_flag(word.split("=")[0])
        if foreign is not None:
            raise Unsupported(f"--{word} asks for {foreign.what}, which Farflung does not support. {foreign.instead}")


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of what stands behind `farflung launch` on a command line.

    It finds the launch settings by name, None if a flag is left out, and `training_script` with its arguments.
    Switches of other engines are refused at the launch.
    With `subparsers`, what `ArgumentParser.add_subparsers` returned, the parser is its command `launch`.
    """
    description = (
        "Run a script in one or several distributed processes. Flags can be written with dashes too: --num-processes."
    )
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser("launch", description=description, allow_abbrev=False)
        parser.set_defaults(func=launch_command)
    else:
        parser = _Parser("farflung launch", description=description, allow_abbrev=False)
    for entry in FIELDS:
        _add(parser, entry)
    for engine in _ENGINES:
        flags = dict.fromkeys((f"--{engine}", _dashed(f"--{engine}")))
        parser.add_argument(*flags, dest=engine, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("training_script", help="The script, a module with -m, or a program with --no_python.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its arguments.")
    return parser


def _add(parser: argparse.ArgumentParser, entry: Field) -> None:
    dashed = [spelled for flag in entry.flags if (spelled := _dashed(flag)) not in entry.flags]
    kind = str if entry.says_word else entry.kind
    how: dict[str, Any] = {"action": "store_true"} if entry.is_switch else {"type": kind}
    unset = False if entry.name == "multi_gpu" else None  # as in Accelerate's parser
    parser.add_argument(*entry.flags, dest=entry.name, default=unset, help=entry.help.replace("%", "%%"), **how)
    if dashed:
        parser.add_argument(*dashed, dest=entry.name, default=unset, help=argparse.SUPPRESS, **how)
    for flag in (*entry.flags, *dashed) if entry.is_switch and entry.in_file else ():
        if flag.startswith("--"):
            words = dict.fromkeys((f"--no_{flag[2:]}", f"--no-{flag[2:]}"))
            parser.add_argument(*words, dest=entry.name, action="store_false", default=None, help=argparse.SUPPRESS)


def _dashed(flag: str) -> str:
    return flag[:2] + flag[2:].replace("_", "-")


def flags_of(args: argparse.Namespace) -> dict[str, str | bool]:
    """Return what a namespace says of the launch settings, as a command line says it.

    Raises Unsupported if it asks for an engine that Farflung does not do.
    """
    _refuse_foreign(engine for engine in _ENGINES if getattr(args, engine, False))
    flags = {entry.name: getattr(args, entry.name, None) for entry in FIELDS}
    flags["multi_gpu"] = flags["multi_gpu"] or None  # which has no `--no_multi_gpu`
    return {
        name: value if isinstance(value, bool) else str(value) for name, value in flags.items() if value is not None
    }


def launch_command(args: argparse.Namespace) -> None:
    """Run a script as `farflung launch` does, and return when all of its processes have ended; exit if one failed."""
    code = launch_script(resolve(flags_of(args)), Script(args.training_script, tuple(args.training_script_args)))
    if code != 0:
        sys.exit(code)


simple_launcher = multi_gpu_launcher = launch_command


def main() -> NoReturn:
    """Run `farflung launch` with this process's arguments, as `python -m farflung.commands.launch` does."""
    command.main(["launch", *sys.argv[1:]])


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a script in one process; `args` from `launch_command_parser`."""
    settings = resolve(flags_of(args)).settings
    python = [] if settings.no_python else [sys.executable, *(["-m"] if settings.module else [])]
    return [*python, args.training_script, *args.training_script_args], environ.snapshot() | rank_variables(settings)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of each process of a script, without what tells them apart.

    `args`, from `launch_command_parser`, gets what torchrun's parser calls otherwise: `nproc_per_node`, `master_port`
    and, for several machines, `nnodes`, `node_rank` and `master_addr`.
    """
    settings = resolve(flags_of(args)).settings
    port = settings.main_process_port
    args.nproc_per_node = str(settings.num_local or 1)
    args.master_port = str(get_free_port() if port == 0 else port or DEFAULT_PORT)
    if settings.num_machines > 1:
        args.nnodes, args.node_rank = str(settings.num_machines), settings.machine_rank
        args.master_addr = str(settings.main_process_ip)
    return environ.snapshot() | rank_variables(settings)


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the grid of ranks to `current_env`, and return it.

    `args` are from `launch_command_parser`, with or without `--use_parallelism_config`.
    """
    variables = rank_variables(resolve(flags_of(args) | {"use_parallelism_config": True}).settings)
    current_env.update({name: value for name, value in variables.items() if "PARALLELISM_CONFIG" in name})
    return current_env


class PrepareForLaunch:
    """A function to be called in a process of its own, with the process's number and further arguments.

    Args:
        launcher: the function; it gets the further arguments.
        distributed_type: with several processes, the environment variables tell each its rank.
        debug: join a gloo group by the file that `ACCELERATE_DEBUG_RDV_FILE` names instead.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str | DistributedType = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            size = environ.integer("WORLD_SIZE") or 1
            store = dist.FileStore(environ.text("ACCELERATE_DEBUG_RDV_FILE") or "", size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.value.startswith("MULTI_"):
            before = (environ.integer("NODE_RANK") or 0) * (environ.integer("NPROC") or 1)
            environ.export({"LOCAL_RANK": str(index), "RANK": str(before + index)})
        environ.export({"FORK_LAUNCHED": "1"})
        self.launcher(*args)
