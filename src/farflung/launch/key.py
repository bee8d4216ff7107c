# SPDX-License-Identifier: Apache-2.0
"""`farflung key`: make a key that the members of a run share."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

import click

from farflung.base.events import tell
from farflung.config.key import new_key


@click.command()
def key() -> None:
    """Print a new key: `farflung key > run7.key`, then `farflung launch --key_file run7.key` on each machine.

    Nobody else may read the file. Copy it to the other machines over ssh, not through the address of the run.
    """
    with suppress(OSError, ValueError):  # a stream that has no file
        output = sys.stdout.fileno()
        if stat.S_ISREG(os.fstat(output).st_mode):
            with suppress(PermissionError):
                os.fchmod(output, 0o600)
            if (mode := stat.S_IMODE(os.fstat(output).st_mode)) & 0o077:
                tell(f"farflung: others may read this file (mode {mode:o}); keep keys where `chmod 600` works")
    click.echo(new_key())
