# SPDX-License-Identifier: Apache-2.0
"""The command `farflung env`: what to put into a bug report."""

from __future__ import annotations

import platform

import click

from farflung.base.optional import installed_version
from farflung.config.resolve import resolve
from farflung.launch.ask import describe
from farflung.launch.plan import count_gpus, usable_cores

_PACKAGES = ("farflung", "torch", "numpy", "safetensors", "accelerate", "transformers")


@click.command()
@click.option("--config_file", "--config-file", metavar="FILE", help="Show the settings in this file.")
def env(config_file: str | None) -> None:
    """Show versions, devices and the settings in use."""
    resolved = resolve({} if config_file is None else {"config_file": config_file})
    facts = {"platform": platform.platform(), "python": platform.python_version()}
    facts |= {package: installed_version(package) or "not installed" for package in _PACKAGES}
    facts |= {"cores": str(usable_cores()), "gpus": str(count_gpus()), "settings": str(resolved.file or "defaults")}
    for name, fact in facts.items():
        click.echo(f"{name}: {fact}")
    for line in describe(resolved, origin=True):
        click.echo(f"  {line}")
