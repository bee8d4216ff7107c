# SPDX-License-Identifier: Apache-2.0
"""A file with a line of JSON for each round of an outer loop."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.base.errors import ConfigError
from farflung.base.files import open_lines
from farflung.process.failure import OUTER_ROUND, leave_note

if TYPE_CHECKING:
    from farflung.outer.stats import Round

_RANK = "{rank}"


def opened_log(name: str | None, rank: int) -> Path | None:
    """Return the file for this rank's rounds, once it can be written; None where it writes none.

    Args:
        name: the file's; with `{rank}` in it each rank writes one, else rank 0 alone.

    Raises:
        ConfigError: it can't be written.
    """
    if name is None or (_RANK not in name and rank != 0):
        return None
    path = Path(name.replace(_RANK, str(rank)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open_lines(path).close()
    except OSError as error:
        raise ConfigError(f"The log of the outer loop, {path}, can't be written: {error.strerror}.") from error
    return path.absolute()  # a script may go to another folder


class RoundLog:
    """Notes that there are rounds, and adds a line of JSON to a file for each, unless `path` is None."""

    def __init__(self, path: Path | None, model: int) -> None:
        self._path = path
        self._model = model

    def __call__(self, this: Round) -> None:
        leave_note(OUTER_ROUND)
        if self._path is None:
            return
        line = json.dumps({"model": self._model, **_finite(asdict(this))}, allow_nan=False)
        with open_lines(self._path) as file:
            file.write(line + "\n")


def _finite(value: Any) -> Any:
    """Put None where a number is none, or infinite: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
