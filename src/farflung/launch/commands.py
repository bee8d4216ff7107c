# SPDX-License-Identifier: Apache-2.0
"""`farflung test`, and how a parser and a function of Accelerate's become a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import click

from farflung.config.resolve import resolve
from farflung.launch.run import launch_script


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028  it is no test
    """Return the parser of `farflung test`; with `subparsers` it is their command of that name."""
    told = "Start the processes that the settings ask for, and check that they communicate and train as one."
    if subparsers is None:
        parser = argparse.ArgumentParser("farflung test", description=told, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("test", description=told, allow_abbrev=False)
        parser.set_defaults(func=test_command)
    parser.add_argument("--config_file", "--config-file", help="Read the settings from this file.")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the check in the processes that the settings ask for; exit with the code of the one that failed."""
    named = {} if args.config_file is None else {"config_file": args.config_file}
    code = launch_script(resolve({**named, "module": True}), "farflung.demo.check", ())
    if code != 0:
        sys.exit(code)
    print("The test has passed: the processes communicate, and train as one.")


def parsed_command(
    name: str, parser: Callable[[], argparse.ArgumentParser], run: Callable[[argparse.Namespace], None]
) -> click.Command:
    """Return the command `name`, which calls `run` with its arguments as `parser()` reads them."""
    return click.Command(
        name,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        callback=lambda words: run(parser().parse_args(words)),
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,  # the parser has its own
    )


test = parsed_command("test", test_command_parser, test_command)
