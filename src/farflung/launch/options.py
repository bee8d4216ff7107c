# SPDX-License-Identifier: Apache-2.0
"""The flags of the launch settings, made from their one list; both `--num_processes` and `--num-processes` work."""

from __future__ import annotations

from typing import Any

import click

from farflung.base.errors import Unsupported
from farflung.config.foreign import foreign_flag
from farflung.config.launch import FIELDS
from farflung.config.setting import BOTH_SPELLINGS, Field, underscored

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
# Of `--help`: by the settings' names or how these begin. What is in none of them goes into the last one.
_SECTIONS = {
    "Processes and machines": (
        *("use_cpu", "num_", "machine_rank", "main_process_", "network_interface", "multi_gpu", "gpu_ids"),
        *("same_network", "rdzv_"),
    ),
    "Script": ("module", "no_python", "as_accelerate", "main_training_function", "config_file"),
    "Precision and steps": ("mixed_precision", "gradient_"),
    "Outer loop": ("outer_",),
    "Replicas that come and go": ("elastic", "replicas", "ranks_per_replica", "grace_s", "join", "meet"),
    "Sharding and islands": ("use_fsdp", "fsdp_", "use_parallelism_config", "parallelism_config_", "island_size"),
    "Compilation": ("dynamo_",),
    "Failures, logs and others": ("",),
}
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


class SettingsCommand(click.Command):
    """A command with the flags of the launch settings; it refuses Accelerate's other flags by name.

    What follows the first word that is no flag is left as it stands, even where it looks like a flag of ours.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["context_settings"] = BOTH_SPELLINGS | {"allow_interspersed_args": False}
        super().__init__(*args, **kwargs)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                name = param.name or ""
                sections[next(title for title, begins in _SECTIONS.items() if name.startswith(begins))].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

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
