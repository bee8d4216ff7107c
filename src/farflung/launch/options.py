# SPDX-License-Identifier: Apache-2.0
"""The flags of the launch settings, made from their one list; both `--num_processes` and `--num-processes` work."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import Unsupported, did_you_mean
from farflung.config.foreign import foreign_flag
from farflung.config.groups import FIRST, GROUPS
from farflung.config.launch import FIELDS
from farflung.config.setting import BOTH_SPELLINGS, Field, underscored

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
_ASKED = "farflung.help"  # the group that `--help` was asked for
_SETTINGS = {entry.name for entry in FIELDS}
_OF_A_RUN = ("processes", "machines", "engines", "outer", "elastic")  # groups that a script seldom has flags of
_LONGEST_METAVAR = 60  # a longer list of words is shown by the error that a wrong word gets


def launch_options() -> list[click.Parameter]:
    """Return one option for each launch setting. An option that is not given has the value None."""
    return [_option(entry) for entry in FIELDS]


def _option(entry: Field) -> click.Option:
    if entry.is_switch:
        words = [f"{flag}/--no_{flag[2:]}" if entry.in_file and flag[1] == "-" else flag for flag in entry.flags]
        return click.Option([entry.name, *words], is_flag=True, default=None, help=_help(entry))
    # A text whatever the kind: the settings parse it themselves, as they do for files and variables.
    takes = ("true", "false") if entry.kind is bool else entry.choices
    choices = "|".join(takes) if len(takes) > 1 else ""
    metavar = choices if 0 < len(choices) <= _LONGEST_METAVAR else _METAVARS[entry.kind]
    return click.Option([entry.name, *entry.flags], type=str, default=None, metavar=metavar, help=_help(entry))


def _help(entry: Field) -> str:
    known = entry.kind is not bool and entry.default not in (None, "")
    return f"{entry.help} [{entry.default}]" if known else entry.help


def given(params: dict[str, Any]) -> dict[str, str | bool]:
    """Return the launch settings among a command's parameters that the command line gave."""
    return {entry.name: params[entry.name] for entry in FIELDS if params.get(entry.name) is not None}


def launch_flags(script: str, arguments: Sequence[str], given: Collection[str]) -> list[str]:
    """Return the flags among a script's arguments that look like the launcher's: its text does not know them.

    Those of the settings in `given` are left out: who has given both writes them where they belong.
    """
    text = ""
    with suppress(OSError, ValueError):  # ValueError: a name that no file has
        if Path(script).is_file():  # no module, folder or pipe
            text = underscored(Path(script).read_text(encoding="utf-8", errors="ignore"))
    wanted = [entry for entry in FIELDS if entry.group in _OF_A_RUN and entry.name not in given]
    ours = {flag for entry in wanted for flag in entry.flags}
    flags = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    return [flag for flag in dict.fromkeys(flags) if f"--{underscored(flag[2:])}" in ours and not _has(text, flag)]


def _has(text: str, flag: str) -> bool:
    return re.search(rf"(?<!\w)_*{re.escape(underscored(flag[2:]))}(?!\w)", text) is not None


class SettingsCommand(click.Command):
    """A command with the flags of the launch settings; it refuses Accelerate's other flags by name.

    What follows the first word that is no flag is left as it stands, even if it looks like a flag of ours.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["context_settings"] = BOTH_SPELLINGS | {"allow_interspersed_args": False}
        super().__init__(*args, **kwargs)

    def get_help_option(self, ctx: click.Context) -> click.Option:
        """Return `--help`, which takes the name of a group."""
        text = "Show the first flags and the groups; with GROUP or `all`, that group or all of them."
        words = ctx.help_option_names
        return click.Option(
            ["_help", *words],
            is_flag=False,
            flag_value="",
            is_eager=True,
            expose_value=False,
            metavar="[GROUP]",
            help=text,
            callback=self._show_help,
        )

    def _show_help(self, ctx: click.Context, param: click.Parameter, group: str | None) -> None:
        if group is None or ctx.resilient_parsing:
            return
        if group not in ("", "all", *GROUPS):
            known = ", ".join([*GROUPS, "all"])
            raise click.UsageError(
                f"There is no group {group!r} of flags; use one of {known}.{did_you_mean(group, GROUPS)}", ctx
            )
        ctx.meta[_ASKED] = group
        click.echo(ctx.get_help())
        ctx.exit()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage and the first flags, or those of the group that was asked for."""
        if ctx.meta.get(_ASKED) not in GROUPS:
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first flags and a line for each group, or the flags of the group that was asked for."""
        asked = ctx.meta.get(_ASKED, "")
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {
            str(option.name): record for option in options if (record := option.get_help_record(ctx)) is not None
        }
        for group, about in GROUPS.items():
            if asked in (group, "all"):
                with formatter.section(f"{group}: {about.about}"):
                    formatter.write_dl([records[entry.name] for entry in FIELDS if entry.group == group])
        if asked == "":
            with formatter.section("First flags"):
                formatter.write_dl([records[name] for name in FIRST])
            with formatter.section("All flags, by group (`--help outer` shows one, `--help all` all)"):
                formatter.write_dl([(name, group.about) for name, group in GROUPS.items()])
        if asked in ("", "all"):
            own = [record for name, record in records.items() if name not in _SETTINGS]
            with formatter.section("Of this command"):
                formatter.write_dl(own)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags; raise Unsupported for Accelerate's of something that Farflung does not do."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            foreign = foreign_flag(underscored(error.option_name.lstrip("-")))
            if foreign is None:
                raise
            raise Unsupported(
                f"{error.option_name} asks for {foreign.what}, which Farflung does not support. {foreign.instead}"
            ) from None
