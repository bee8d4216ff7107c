# SPDX-License-Identifier: Apache-2.0
"""The tracker that needs no library: a file with one JSON object a line."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import suppress
from operator import attrgetter
from typing import Any

from farflung.base.checks import check_path
from farflung.base.files import open_lines
from farflung.process.run_files import json_line, plain, who
from farflung.trackers.base import ClientTracker


class JSONLTracker(ClientTracker):
    """Appends each line to `{logging_dir}/{run_name}.jsonl`, at once: what was logged survives a crash.

    Lines are those of a run folder's `metrics.jsonl`: `time` in seconds since the epoch, the numbers of the rank,
    `step`, and `values`, or for the settings `config`, or for a table `table`, `columns` and `data`. Tensors and arrays
    are written as nested lists, NaN and infinities as the texts `NaN`, `Infinity` and `-Infinity`, and what JSON has no
    word for as its text.

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
        self._file, self._who = open_lines(self.path), who()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write(None, config=values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write a line; keyword arguments are written next to `step`."""
        self._write(step, **kwargs, values=values)

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
        self._write(step, **kwargs, table=table_name, columns=columns, data=data)

    def finish(self) -> None:
        with suppress(OSError):  # what a full disk has refused would fail again
            self._file.close()

    def _write(self, step: int | None, **fields: Any) -> None:
        try:
            self._file.write(json_line(plain({"time": time.time(), **self._who, "step": step, **fields})))
        except OSError as error:
            warnings.warn(f"{self.path} can't be written: {error.strerror}. Training continues without.", stacklevel=2)
