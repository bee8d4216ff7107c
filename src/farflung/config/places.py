# SPDX-License-Identifier: Apache-2.0
"""Where configuration files are, and which of them counts; none is read for it. Without a home folder `~` stays."""

from __future__ import annotations

import os
from pathlib import Path

from farflung.base.checks import check_path
from farflung.base.errors import ConfigError
from farflung.config import environ

LOCAL_FILE, NO_FILE = Path("farflung.yaml"), "none"


def own_file() -> Path:
    """Return where the user's own settings are kept: `~/.config/farflung/config.yaml`, or under `$XDG_CONFIG_HOME`."""
    return Path(os.path.expanduser(environ.text("XDG_CONFIG_HOME") or "~/.config"), "farflung", "config.yaml")


def accelerate_files() -> tuple[Path, ...]:
    """Return where Accelerate keeps its settings, its preferred file first."""
    cache = environ.text("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.path.expanduser(environ.text("HF_HOME") or f"{cache}/huggingface"))
    return home / "accelerate" / "default_config.yaml", home / "accelerate" / "default_config.json"


def find_file(named: str | None = None) -> Path | None:
    """Return the file that counts: the one named, `./farflung.yaml`, the user's own, Accelerate's, or None.

    The name `none` stands for no file.
    """
    if named == NO_FILE:
        return None
    if named is not None:
        path = check_path("--config_file", named)
        if not os.path.isfile(path):  # `Path.is_file` fails in folders that may not be read
            there = "is not a file" if os.path.exists(path) else "does not exist"
            raise ConfigError(f"The configuration file {named} {there}. `farflung config` writes one.")
        return path
    return next((path for path in (LOCAL_FILE, own_file(), *accelerate_files()) if os.path.isfile(path)), None)
