# SPDX-License-Identifier: Apache-2.0
"""A probe: a question to a machine, a line or an address, which has an answer within a time limit, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, field
from typing import Any

from farflung.base.words import in_seconds
from farflung.comm.threads import ThreadedCall


@dataclass(frozen=True)
class Found:
    """The result of a probe."""

    text: str  # for people; a probe of several lines has several
    figures: Mapping[str, Any] = field(default_factory=dict)  # for programs: bytes, bits, seconds
    todo: tuple[str, ...] = ()  # what is wrong, and what to do


def unknown(why: str, *todo: str) -> Found:
    """Return that a probe has no answer."""
    return Found(f"not known: {why}", {"not_known": why}, todo)


def within(timeout_s: float, name: str, probe: Callable[[], Found]) -> Found:
    """Return what a probe finds. One that fails, or has no answer in time, is not known, and something to look after.

    A probe that has no answer stays in a thread of its own: a request to a file server that is gone can't be ended.
    """
    task = ThreadedCall(probe, name)
    try:
        return task.result(timeout_s)
    except NoAnswer:
        why = f"no answer within {in_seconds(timeout_s)}"
        return unknown(why, f"{name}: {why}. Find out what it waits for, or give more with --timeout.")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return unknown(why, f"{name}: {why}")
