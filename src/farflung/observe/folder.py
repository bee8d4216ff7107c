# SPDX-License-Identifier: Apache-2.0
"""The names of runs' folders and of the files in them, and the folder that a user means."""

from __future__ import annotations

from pathlib import Path

from farflung.base.errors import ConfigError

RUNS, LATEST, FACTS = "farflung-runs", "latest", "run.json"


def named_run(name: str | None) -> Path:
    """Return the folder that a user names: a path or a name in `farflung-runs`; None: the newest there.

    `latest` counts only as a link. Copied by a tool without links it is a folder, which nobody updates.

    Raises:
        ConfigError: there is no such folder.
    """
    runs = Path(RUNS)
    if name is not None and not name.strip():
        raise ConfigError("The name of the run is empty; a variable of your shell may not be set. Name a run's folder.")
    tried = [runs / LATEST] if name is None else [Path(name), runs / name]
    for path in tried:
        if (path / FACTS).is_file() and (name is not None or path.is_symlink()):
            return path.resolve()
    folders = [file.parent for file in runs.glob(f"*/{FACTS}") if not file.parent.is_symlink()]
    known = sorted(folder.name for folder in folders if folder.name != LATEST)
    if name is None and known:
        return (runs / known[-1]).resolve()
    said = f" There are: {', '.join(known[-5:])}." if known else ""
    what = f"There is no run in {runs.absolute()}" if name is None else f"{name} is no folder of a run"
    raise ConfigError(f"{what}: `farflung launch` makes one for each run, with a file {FACTS}.{said}")
