# SPDX-License-Identifier: Apache-2.0
"""The command `farflung`: a table of subcommands by name, so that none is loaded before it is asked for."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from farflung.base.errors import ConfigError, FarflungError, Unsupported, did_you_mean
from farflung.base.events import flush_streams, tell
from farflung.base.signals import heed_children
from farflung.base.words import shortened
from farflung.config import environ
from farflung.launch.codes import BY_SIGNAL, INTERRUPTED, USAGE, of_error

# name -> where it lives, and what it does.
COMMANDS = {
    "launch": ("farflung.launch.face:launch", "Run a script in one or several distributed processes."),
    "report": ("farflung.observe.report:report", "Write a page about runs: curves, costs, who was there."),
    "watch": ("farflung.observe.watch:watch", "Show a run while it trains, or after."),
    "follow": ("farflung.launch.engines.submit:follow", "Show what a run that was submitted prints."),
    "scale": ("farflung.launch.engines.submit:scale", "Change how many replicas a run that was submitted has."),
    "cancel": ("farflung.launch.engines.submit:cancel", "End a run that was submitted."),
    "key": ("farflung.launch.key:key", "Make a new key, which the members of a run share."),
    "config": ("farflung.launch.ask:config", "Ask for settings and save them in a file."),
    "plan": ("farflung.observe.planned:plan", "Forecast what each method costs on a network."),
    "doctor": ("farflung.launch.doctor:doctor", "Find what is wrong with machines and the lines between them."),
    "env": ("farflung.launch.ask:env", "Show versions, devices and the settings in use."),
    "checkpoint": ("farflung.launch.checkpoint:checkpoint", "List, verify, compare and convert checkpoints."),
    "estimate": ("farflung.launch.estimate:estimate", "Estimate the memory of a published model."),
    "test": ("farflung.launch.commands:test", "Check that the processes of this machine train as one."),
    "to-fsdp2": ("farflung.launch.to_fsdp2:to_fsdp2", "Rewrite a file for FSDP version 1 for version 2."),
    "demo": ("farflung.demo.command:demo", "Train a small GPT in six ways and compare their costs."),
}

# Errors of the operating system about a path, which are a wrong use.
_REFUSED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
ALIASES = {"estimate-memory": "estimate"}  # Accelerate's names of commands that have another one here
# Accelerate's commands that have no counterpart of their name -> what to do instead.
ELSEWHERE = {
    "merge-weights": "Use `farflung checkpoint convert --to state-dict`.",
    "tpu-config": "Use torch_xla's own launcher.",
    "config update": "It is not needed: `farflung launch` reads Accelerate's files as they are.",
}


class CommandGroup(click.Group):
    """A command group that answers Accelerate's other commands by name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; raise Unsupported for one of Accelerate's, UsageError with the nearest for others."""
        asked = " ".join([*ctx.command_path.split()[1:], args[0]])
        if asked in ELSEWHERE:
            raise Unsupported(f"There is no `farflung {asked}`. {ELSEWHERE[asked]}")
        args = [ALIASES.get(args[0], args[0]), *args[1:]]
        known = self.list_commands(ctx)
        if args[0] not in known:
            raise click.UsageError(f"No such command {args[0]!r}.{did_you_mean(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)


class _LazyGroup(CommandGroup):
    """The group of all commands: its help comes from their table, and they are loaded on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who read this command's output has ended; click would end with code 1
            raise click.exceptions.Exit(BY_SIGNAL + signal.SIGPIPE) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, name = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table; none of the subcommands is loaded for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="farflung", prog_name="farflung")
def farflung() -> None:
    """Trains the loop you already have on far-flung machines, and talks as little as the network allows."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command with these arguments or this process's own; an error ends it with one clear line and its code."""
    _open_streams()
    environ.remove_empty()
    heed_children()
    try:
        _check_folder()
        sys.exit(farflung.main(args=arguments, prog_name="farflung", standalone_mode=False))
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.possibilities:  # the nearest first; click sorts them
            message = f"{error.message} Did you mean {error.possibilities[0]}?"
        click.UsageError(shortened(message), getattr(error, "ctx", None)).show()
        sys.exit(error.exit_code)
    except click.Abort:  # also where the answers end before the questions
        click.echo("Aborted!", err=True)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except FarflungError as error:
        _show(type(error).__name__, str(error))
        sys.exit(of_error(error))
    except OSError as error:
        if error.errno not in _REFUSED or error.filename is None:
            raise
        _show("ConfigError", f"{shortened(str(error.filename))}: {error.strerror}.")
        sys.exit(USAGE)
    finally:
        flush_streams()


def _open_streams() -> None:
    """Open the standard streams that the caller has closed, to nowhere: else the next file or socket is in their place.

    Processes that are started inherit them. Output that its encoding lacks is escaped.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for as long as the process lives
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":  # as stderr does, show all names
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_folder() -> None:
    """Refuse a current folder that is gone: neither torch nor git nor a script can do without."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"The current folder is gone ({error.strerror}). Change to one that is there.") from None


def _show(kind: str, message: str) -> None:
    shown = click.style(kind, fg="red", bold=True) if sys.stderr.isatty() else kind
    tell(f"{shown}: {message}")
