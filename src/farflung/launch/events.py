# SPDX-License-Identifier: Apache-2.0
"""The sinks of a launcher's events: its stderr, for people or as one JSON object a line, and the run's folder.

With `--json` the events of ranks come from the folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from farflung.base.events import EVENTS, Event, Kind, Sink, tell, words
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.folder import RunFolder
from farflung.launch.report import show_box
from farflung.observe.records import Lines
from farflung.process.run_files import EVENTS as EVENTS_FILE

_LOOK_S = 0.5  # between two looks at what ranks have written
_UNSPOKEN = (Kind.STARTED, Kind.ENDED)  # between what a script prints, unless the event says how to join


class Screen(Sink):
    """Stderr: words or, with `--json`, JSON, which has `message`, the words, besides; with `--quiet` errors alone."""

    def __init__(self, settings: LaunchSettings) -> None:
        self.is_json = settings.json
        self._reports = environ.integer(environ.REPORTS)  # of the tether above this launcher; not for the ranks
        super().__init__(logging.ERROR if settings.quiet and self._reports is None else logging.INFO)
        environ.remove(environ.REPORTS)

    def show(self, event: Event) -> None:
        is_spoken = event.kind not in _UNSPOKEN or "address" in event.facts
        sentence = words(event) if is_spoken else ""
        row = event.row() | ({"message": sentence} if sentence else {})
        if self.is_json and self._reports is not None:
            rest = memoryview(f"{json.dumps(row, default=str)}\n".encode())
            while rest:
                rest = rest[os.write(self._reports, rest) :]
        elif self.is_json:
            tell(json.dumps(row, default=str))
        elif "report" in event.facts:
            show_box(sentence, event.facts["report"])
        elif sentence:
            tell(f"farflung: {sentence}")


@contextmanager
def showing_ranks(screen: Screen, folder: RunFolder) -> Iterator[None]:
    """With `--json` show what ranks write into the run's folder too, for a block: people read the ranks' own lines."""
    if not screen.is_json or folder.path is None:
        yield
        return
    is_begun, is_over = False, threading.Event()

    def take(row: Mapping[str, Any]) -> float:
        event = Event.of_row(row)
        if event is not None and is_begun and "rank" in row and event.kind is not Kind.FAILED:
            screen.handle(logging.makeLogRecord({"msg": event}))
        return 0.0

    lines = Lines(folder.path / EVENTS_FILE, take)
    lines.look()  # pass over the events of earlier runs
    is_begun = True

    def follow() -> None:
        while not is_over.wait(_LOOK_S):
            lines.look()

    thread = threading.Thread(target=follow, name="farflung events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        lines.look()


@contextmanager
def showing(*sinks: Sink) -> Iterator[None]:
    """Show events in these sinks, and in those that are added meanwhile, for a block."""
    before = EVENTS.handlers
    EVENTS.handlers = list(sinks)
    try:
        yield
    finally:
        EVENTS.handlers = before


def pass_on(line: bytes, stream: TextIO) -> None:
    """Print a line of another program as it is; a stream that can't be written to ends no work."""
    with suppress(OSError, ValueError):
        if hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(line)
        else:  # a notebook's
            stream.write(line.decode(errors="replace"))
        stream.flush()
