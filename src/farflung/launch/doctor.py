# SPDX-License-Identifier: Apache-2.0
"""`farflung doctor`: what is wrong with a machine, with the lines between machines, or with an address where they meet.

The probes are those of the room `doctor`; they are loaded, and torch with them, when the arguments have been read.
"""

from __future__ import annotations

import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import ConfigError
from farflung.config.launch import DEFAULT_PORT, LaunchSettings
from farflung.config.resolve import resolve
from farflung.config.setting import BOTH_SPELLINGS
from farflung.cost.units import parse_count
from farflung.launch.network import address_towards, choose_interface, refuse_busy_port
from farflung.launch.options import given, launch_options
from farflung.launch.plan import usable_cores

# Of `farflung launch`, with its words and defaults.
_SHARED = (
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "network_interface", "meet"),
    "config_file",
)
_ANY_REPLICAS = "1:64"  # `meet` is a setting of elastic runs


def _doctor(folder: str, parameters: str, timeout: float, as_json: bool, **params: Any) -> None:
    count = parse_count(parameters, "--parameters")
    if not 0 < timeout < math.inf:
        raise ConfigError(f"--timeout is {timeout:g}; it must be more than 0 s, and finite.")
    flags = given(params)
    if "meet" in flags:
        flags["elastic"] = _ANY_REPLICAS
    resolved = resolve(flags)
    for note in resolved.notes:
        click.echo(f"farflung: {note}", err=True)
    settings = resolved.settings
    if (settings.meet or "").startswith("tcp://"):
        raise ConfigError(
            f"--meet {settings.meet} is a line between machines, not the address of a folder or a bucket. Measure it "
            "with --num_machines, --machine_rank and --main_process_ip."
        )
    place = _place(settings) if settings.num_machines > 1 else None
    room = import_module("farflung.doctor.report")
    asked = room.Asked(Path(folder).absolute(), count, timeout, usable_cores(), settings.meet, place)
    report = room.examine(asked, lambda line: click.echo(f"farflung: {line}", err=True))
    click.echo(report.as_json() if as_json else report.as_text())
    sys.stdout.flush()
    sys.exit(1 if report.todo else 0)


def _place(settings: LaunchSettings) -> dict[str, Any]:
    """Return this machine's place among the others, found as `farflung launch` finds it."""
    host, port = str(settings.main_process_ip), settings.main_process_port or DEFAULT_PORT
    interface = choose_interface(settings, host)
    if settings.machine_rank == 0:
        refuse_busy_port(port)
    listen = address_towards(host, interface) if settings.machine_rank == 0 else None
    return {
        "rank": settings.machine_rank,
        "size": settings.num_machines,
        "host": host,
        "port": port,
        "listen": listen,
        "address": interface.address,
        "interface": interface.name,
    }


doctor = click.Command(
    "doctor",
    params=[
        *(option for option in launch_options() if option.name in _SHARED),
        click.Option(["--folder"], default=".", metavar="FOLDER", help="Where checkpoints are to be written. [.]"),
        click.Option(["--parameters"], default="124M", metavar="COUNT", help="Of the model to synchronize. [124M]"),
        click.Option(["--timeout"], default=10.0, metavar="SECONDS", help="Time limit of each probe. [10]"),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the figures as JSON: bytes, bits and seconds."),
    ],
    callback=_doctor,
    context_settings=BOTH_SPELLINGS,
    help="""Find what is wrong before a run does, and measure what `farflung plan` asks for.

    Alone, it looks at this machine. With the flags of `farflung launch` for several machines, run on each of them at
    about the same time, it measures the lines between them; with --meet, the requests at an address. The exit code is
    1 if there is something to do, and 0 otherwise.
    """,
)
