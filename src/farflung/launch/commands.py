# SPDX-License-Identifier: Apache-2.0
"""`farflung test`, and how a parser and a function of Accelerate's become a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import click

from farflung.base.errors import ConfigError, did_you_mean
from farflung.config.resolve import resolve
from farflung.launch.plan import Script
from farflung.launch.start import launch_script


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028  it is no test
    """Return the parser of `farflung test`; with `subparsers` it is their command of that name."""
    about = "Start the processes that the settings ask for, and check that they communicate and train as one."
    parser = command_parser("test", about, test_command, subparsers)
    parser.add_argument("--config_file", "--config-file", help="Read the settings from this file.")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the check in the processes that the settings ask for; exit with the code of the one that failed."""
    named = {} if args.config_file is None else {"config_file": args.config_file}
    code = launch_script(resolve({**named, "module": True}), Script("farflung.demo.check"))
    if code != 0:
        sys.exit(code)
    print("The test has passed: the processes communicate, and train as one.")


def command_parser(
    name: str, about: str, run: Callable[[argparse.Namespace], None], subparsers: Any, accelerates: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of the command `name`; with `subparsers` it is their command of that, or Accelerate's, name."""
    if subparsers is None:
        return argparse.ArgumentParser(f"farflung {name}", description=about, allow_abbrev=False)
    parser: argparse.ArgumentParser = subparsers.add_parser(accelerates or name, description=about, allow_abbrev=False)
    parser.set_defaults(func=run)
    return parser


def parsed_command(
    name: str, parser: Callable[[], argparse.ArgumentParser], run: Callable[[argparse.Namespace], None]
) -> click.Command:
    """Return the command `name`, which calls `run` with its arguments as `parser()` reads them."""

    def call(words: tuple[str, ...]) -> None:
        reader = parser()
        args, unknown = reader.parse_known_args(words)
        if unknown:
            near = did_you_mean(unknown[0].partition("=")[0], reader._option_string_actions)
            raise click.UsageError(f"Unexpected arguments: {' '.join(unknown)}.{near}", click.get_current_context())
        try:
            run(args)
        except (OSError, ImportError) as error:  # a file that is not there, or is there already; a missing package
            raise ConfigError(str(error)) from error

    return click.Command(
        name,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        callback=call,
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,  # the parser has its own
    )


test = parsed_command("test", test_command_parser, test_command)
