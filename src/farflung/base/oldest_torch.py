# SPDX-License-Identifier: Apache-2.0
"""The oldest torch that Farflung works with, checked at `import farflung`, if torch itself is not loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec

OLDEST_TORCH = (2, 11)  # as in pyproject.toml


def check_torch() -> None:
    """Raise ImportError if the installed torch is older than the oldest one that the tests pass with."""
    version, where = _installed()
    release = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if release and release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"Farflung needs torch {oldest} or newer, but torch {version} is installed in {where}. Run "
            f"`pip install --upgrade 'torch>={oldest}'`."
        )


def _installed() -> tuple[str, str]:
    """Return torch's version and folder; empty texts if there is none, or one that is no folder of files."""
    try:
        spec = find_spec("torch")
        folder = os.path.dirname(spec.origin) if spec is not None and spec.origin is not None else os.devnull
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as lines:
            version_line = next(line for line in lines if line.startswith("__version__"))
    except (OSError, ValueError, StopIteration):
        return "", ""
    return version_line.partition("=")[2].strip(" '\"\n"), folder
