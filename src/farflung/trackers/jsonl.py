# SPDX-License-Identifier: Apache-2.0
"""The tracker that needs no library: a file with one JSON object a line."""

from __future__ import annotations

import json
import os
import time
import warnings
from contextlib import suppress
from operator import attrgetter
from typing import Any

from farflung.base.checks import check_path
from farflung.base.files import open_lines
from farflung.process.run_files import plain
from farflung.trackers.base import ClientTracker


class JSONLTracker(ClientTracker):
    """Appends each event to `{logging_dir}/{run_name}.jsonl`, at once: what was logged survives a crash.

    A line has `event` (`start`, `config`, `log`, `table` or `finish`), `run`, `time` in seconds since the epoch, and
    for `log` and `table` the `step`. Tensors and arrays are written as nested lists, NaN and infinities as the texts
    `NaN`, `Infinity` and `-Infinity`, and what JSON has no word for as its text.

    Args:
        run_name: the name of the project.
        logging_dir: where the file is; made when the run starts. A file that is there is continued.
    """

    name = "jsonl"
    requires_logging_directory = True
    tracker = property(attrgetter("_file"), doc="The open file.")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__(run_name)
        self.path = check_path("JSONLTracker: logging_dir", logging_dir) / f"{run_name}.jsonl"

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(self.path)
        self._write("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("config", config=values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a line; keyword arguments are written next to `step`."""
        self._write("log", step=step, **kwargs, values=values)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table, given by its columns and rows or as a pandas data frame."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        self._write("table", step=step, **kwargs, table=table_name, columns=columns, data=data)

    def finish(self) -> None:
        self._write("finish")
        with suppress(OSError):  # what a full disk has refused would fail again
            self._file.close()

    def _write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "run": self.run_name, "time": time.time(), **fields}
        finite = json.loads(json.dumps(plain(line)), parse_constant=str)
        try:
            self._file.write(json.dumps(finite) + "\n")
        except OSError as error:
            warnings.warn(f"{self.path} can't be written: {error.strerror}. Training continues without.", stacklevel=2)
