# SPDX-License-Identifier: Apache-2.0
"""`farflung key`: make a key that the members of a run share."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

import click

from farflung.base.errors import ConfigError
from farflung.config.key import new_key, write_key


@click.command()
@click.argument("file", required=False)
def key(file: str | None) -> None:
    """Make a new key: `farflung key run7.key`, then `farflung launch --key_file run7.key` on each machine.

    Nobody else may read the FILE, which must be new; without one the key is printed. Copy it to the other machines over
    ssh, not through the address of the run.
    """
    if file is not None:
        write_key(file)
        return
    mode = 0
    with suppress(OSError, ValueError):  # a stream that has no file
        mode = os.fstat(sys.stdout.fileno()).st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        raise ConfigError(
            f"The key would be printed into a file that others may open (mode {stat.S_IMODE(mode):o}), and whoever has "
            "it open reads the key. Use `farflung key FILE`, which makes one of your own."
        )
    click.echo(new_key())
