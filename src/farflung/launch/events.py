# SPDX-License-Identifier: Apache-2.0
"""The launcher's own messages on stderr: words for people or, with `--json`, one JSON object a line."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import click

from farflung.config.launch import LaunchSettings

# Of lines about replicas, some of which another launcher or a replica has written: the event, by words in the line.
_EVENTS = (
    ("warning", r"^warning:"),
    ("lost", r" is out: | was left out: "),
    ("joined", r" joined; | was let in; "),
    ("refused", r" is not let in: | was not let in: "),
    ("restarted", r" starts again in "),
    ("failed", r" not started again$"),
    ("began", r": training (begins|continues) with "),
    ("cut_off", r"cut off from the run's store | store at .* is gone;"),
    ("reached", r"^reaches the run's store "),
)


def say(settings: LaunchSettings, event: str, words: str | None, *, is_error: bool = False, **facts: Any) -> None:
    """Print a message, unless `--quiet` is given and it is no error.

    Args:
        event: what happened in one word: started, failed, restarted, joined, lost, ended ...
        words: the message; None: only `--json` has one.
        facts: more keys of the JSON object, which has `event`, `time` in seconds since 1970 and `message` besides.
    """
    if settings.quiet and not is_error:
        return
    if settings.json:
        said = {"event": event, "time": round(time.time(), 3)} | ({"message": words} if words else {}) | facts
        click.echo(json.dumps(said), err=True)
    elif words is not None:
        click.echo(f"farflung: {words}", err=True)


def event_of(line: str) -> dict[str, Any]:
    """Return what a line about replicas says, read from its words: the event, the replica and the generation."""
    event = next((event for event, words in _EVENTS if re.search(words, line)), "note")
    generation, replica = re.match(r"generation (\d+)", line), re.search(r"replica \d+(?: of [^\s,;]+(?<!:))?", line)
    facts: dict[str, Any] = {"generation": int(generation[1])} if generation else {}
    return {"event": event} | facts | ({"replica": replica[0]} if replica else {})
