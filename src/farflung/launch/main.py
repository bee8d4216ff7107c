# SPDX-License-Identifier: Apache-2.0
"""The command `farflung`: a table of subcommands by name, so that none is loaded before it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from farflung.base.errors import FarflungError

# name -> where it lives, and what it does.
COMMANDS = {
    "launch": ("farflung.launch.run:launch", "Run a script in one or several distributed processes."),
    "config": ("farflung.launch.ask:config", "Ask for settings and save them in a file."),
    "plan": ("farflung.cost.command:plan", "Forecast what each method costs on a network."),
    "env": ("farflung.launch.env:env", "Show versions, devices and the settings in use."),
    "checkpoint": ("farflung.launch.checkpoint:checkpoint", "List, verify, compare and convert checkpoints."),
    "demo": ("farflung.demo.command:demo", "Train a small GPT in four ways and compare their costs."),
}


class LazyGroup(click.Group):
    """A group whose help comes from `COMMANDS` and whose subcommands are loaded on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the subcommand `cmd_name`, or return None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table; none of the subcommands is loaded for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="farflung", prog_name="farflung")
def farflung() -> None:
    """Trains the loop you already have on far-flung machines, and talks as little as the network allows."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; an error of ours or of the command line ends it with one clear line and exit code 2.

    Args:
        arguments: what stands behind `farflung` on the command line; by default this process's own arguments.
    """
    try:
        code = farflung.main(args=arguments, prog_name="farflung", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except FarflungError as error:
        click.echo(f"{click.style(type(error).__name__, fg='red', bold=True)}: {error}", err=True)
        sys.exit(2)
    sys.exit(code)
