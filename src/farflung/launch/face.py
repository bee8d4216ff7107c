# SPDX-License-Identifier: Apache-2.0
"""The command `farflung launch`: its flags and help. What it does is loaded once they are read, so that a slip in
them is answered at once.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from farflung.base.lazy import LazyModule
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import Resolved, resolve
from farflung.launch.options import SettingsCommand, given, launch_options

if TYPE_CHECKING:
    from farflung.launch import plan, start
else:
    plan, start = LazyModule("farflung.launch.plan"), LazyModule("farflung.launch.start")

_HELP = """Run SCRIPT in one or several distributed processes.

Arguments after SCRIPT are passed to it. Flags may be written with `_` or with `-`. A flag takes precedence over an
environment variable, a variable over the configuration file, and the file over the default. The same order decides
between the CPU (--cpu) and GPUs (--multi_gpu, --gpu_ids) if both are requested, except that ACCELERATE_USE_CPU=true
overrules a flag for GPUs.
"""


def _launch(script: str, script_args: tuple[str, ...], stated: str | None, **params: Any) -> None:
    resolved = Resolved(LaunchSettings(**json.loads(stated)), {}, None) if stated else resolve(given(params))
    sys.exit(start.launch_script(resolved, plan.Script(script, script_args, exec_alone=True, is_inner=bool(stated))))


launch = SettingsCommand(
    "launch",
    params=[
        *launch_options(),
        click.Option(["--stated"], hidden=True),  # all settings in JSON, for a launcher under that of replicas
        click.Argument(["script"]),
        click.Argument(["script_args"], nargs=-1, type=click.UNPROCESSED),
    ],
    callback=_launch,
    help=_HELP,
)
