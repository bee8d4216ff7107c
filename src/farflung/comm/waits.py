# SPDX-License-Identifier: Apache-2.0
"""What the threads of this process wait for, and deadlock detection: ranks that wait for each other in different calls.

Rank 0 is in a round and waits for rank 1, which is in a `gather` and waits for rank 0: neither wait can end. A thread
that has waited for a second writes down where it is, reads what the others wrote, and again after two, four, eight
seconds. If two waits exclude each other, all ranks raise the same `CollectiveMismatch`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any, NamedTuple

import torch.distributed as dist

from farflung.comm.frames import user_call
from farflung.comm.mismatch import waits_differ
from farflung.comm.presence import REPORT_S, PresenceStore

_REMEMBERED = 16  # collectives of a group whose kinds are known; ranks are rarely further apart
_FIRST_CHECK_S = 1.0  # how long a thread waits before it compares its wait with those of other ranks


class Wait(NamedTuple):
    """A collective that a thread waits in: its group, its index there, and its kind."""

    group: str
    number: int
    kind: str


def handed_over(group: str) -> str:
    """Return what waits for jobs of other threads in `group` are counted under."""
    return f"{group} (handed over)"


class Waits:
    """The collectives over one set of ranks, in a group and its duplicates, as this process knows them."""

    def __init__(self, presence: PresenceStore) -> None:
        # How many this rank has started, by group; 0 at first in each that it is in. And the kinds of the latest.
        self.entered: defaultdict[str, int] = defaultdict(int)
        self.kinds: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self.waiting: dict[int, Wait] = {}  # what each thread has been waiting for, since a moment at least
        self.is_watched = False  # a watchdog asks who is late
        self.overdue: tuple[Wait, float] | None = None  # what has ended by its own time-out, of so many seconds
        self._presence = presence

    def join(self, group: str) -> None:
        for name in (group, handed_over(group)):
            self.entered[name] += 0

    def part(self, group: str) -> None:
        """Forget `group`, which is destroyed: another one may get its name."""
        for name in (group, handed_over(group)):
            self.entered.pop(name, None)
            self.kinds.pop(name, None)

    def reach(self, name: str, number: int, kind: str) -> Wait:
        """Record that this rank has reached the point `number` of `name`; return a wait there."""
        self.entered[name] = number
        return Wait(name, number, kind)

    def enter(self, group: str, kind: str) -> Wait:
        """Count a collective of `group` that this rank starts; return a wait for it."""
        self.entered[group] += 1
        self.kinds[group].append(kind)
        return Wait(group, self.entered[group], kind)

    def await_report(self, wait: Wait, allowed_s: float) -> None:
        """Give the watchdog, if there is one, time to publish who is late in a collective that ran out of time."""
        deadline = time.monotonic() + REPORT_S
        self._presence.mark_overdue()
        self.overdue = (wait, allowed_s)
        while self.is_watched and self.overdue is not None and time.monotonic() < deadline:
            time.sleep(REPORT_S / 200)
        self.overdue = None

    @contextmanager
    def noted(self, wait: Wait, in_background: bool = False) -> Iterator[Callable[[], None]]:
        """Record, for the length of a block, that the calling thread waits; `in_background`: on behalf of another one.

        The function that it yields, called now and then, compares this wait with those of the other ranks.
        """
        began, due_s, is_posted = time.monotonic(), float("inf") if in_background else _FIRST_CHECK_S, False

        def check() -> None:
            """If this wait and another rank's exclude each other, publish that for all ranks of the set."""
            nonlocal due_s, is_posted
            if time.monotonic() - began < due_s:
                return
            due_s *= 2
            mine = {
                "wait": wait,
                "entered": self.entered,
                "kinds": {group: list(kinds) for group, kinds in list(self.kinds.items())},  # other threads add some
                "doing": str(user_call(sys._getframe())),
            }
            with suppress(dist.DistError):  # without a store the wait itself ends with an error
                self._presence.post(json.dumps(mine), "wait")
                is_posted = True
                posts = {rank: json.loads(text) for rank, text in self._presence.posts("wait").items() if text}
                if any(_exclude(mine, post) for post in posts.values()):
                    self._presence.publish_mismatch(waits_differ({rank: post["doing"] for rank, post in posts.items()}))

        self.waiting[get_ident()] = wait
        try:
            yield check
        finally:
            self.waiting.pop(get_ident(), None)
            if is_posted:
                with suppress(dist.DistError):
                    self._presence.post("", "wait")


def _exclude(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether neither of two waits can end.

    Both ranks stand in their own collective until the other one comes to it. In one group, one of them has made another
    collective of it; in two, neither has entered the other's, though it is in that group.
    """
    mine, theirs = Wait(*one["wait"]), Wait(*other["wait"])
    if mine.group == theirs.group:
        return _made_another(mine, other) or _made_another(theirs, one)
    return _is_late(one, theirs) and _is_late(other, mine)


def _is_late(post: Mapping[str, Any], wait: Wait) -> bool:
    return bool(post["entered"].get(wait.group, wait.number) < wait.number)


def _made_another(wait: Wait, post: Mapping[str, Any]) -> bool:
    """Return whether the rank that posted this is known to have started something else instead of this collective."""
    ago = post["entered"].get(wait.group, 0) - wait.number
    kinds = post["kinds"].get(wait.group, [])
    return bool(0 <= ago < len(kinds) and kinds[-1 - ago] != wait.kind)
