# SPDX-License-Identifier: Apache-2.0
"""Finds which ranks have made a call that a script may make on all ranks or on some, before anything is sent for it.

Ranks make their collectives in one order. So a rank that waits in one that this rank has not started has passed this
call by and will not make it; any other rank will make it, or pass it by. Rank 0 waits until it knows which of the two
each rank has done, and the others wait for its answer. The outcome depends on the program, never on timing. The
watchdogs answer for their ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from farflung.base.errors import CollectiveMismatch
from farflung.comm.frames import user_call
from farflung.comm.torch_group import TorchGroup

_POINT = "a call of all ranks or of some"
_NAME = "call"  # of what is published for this
_LOOK_S = 0.001  # how often a rank looks for the others at first, growing to the last
_LAST_LOOK_S = 0.05
_ASK_S = 0.25  # how long rank 0 waits before it asks where the others are
_ASK_AGAIN_S = 0.3
_ASK_RANK_0_S = 2.0  # how long the others wait before they ask where rank 0 is
_CLOSED_S = 5.0  # how long a rank does not answer before it is looked whether it is gone

Made = Literal["all", "some", "not rank 0"]


def match(group: TorchGroup, name: str, what: str | None = None, required: str | None = None) -> Made:
    """Return which ranks have made a call that this one makes now: all of them, or some.

    Args:
        name: of the call, for errors.
        what: its argument, if that is the same on all ranks. Calls of one argument are one call, and calls from the
            same lines of the script.
        required: why all ranks have to make it; None: they need not.

    Raises:
        CollectiveMismatch: not all ranks make it though they have to; on all that wait in Farflung's calls.
    """
    made = user_call(sys._getframe())
    call = _Call(group, name, what, required, str(made), made.lines)
    point = 1 + sum(group.collectives().values())
    with group.waits.noted(group.waits.reach(_POINT, point, name), in_background=True):
        return call.decide() if group.rank == 0 else call.await_decision()


@dataclass
class _Call:
    """One call of this rank, until it is known who has made it too."""

    group: TorchGroup
    name: str
    what: str | None
    required: str | None
    doing: str
    lines: list[list[str | int]]
    _looked: float = field(default_factory=time.monotonic)
    _pause_s: float = _LOOK_S
    _asked: int = 0
    _ask_at: float = 0.0
    _silent_since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.presence = self.group.presence
        self.number = self.group.shared.arrivals.get(self.group.rank, 0) + 1

    # ---- rank 0

    def decide(self) -> Made:
        """Wait until each other rank has made the call or passed it by; tell those that made it."""
        self._ask_at = time.monotonic() + _ASK_S
        made: dict[int, int] = {}  # rank: the number of its call
        passed: dict[int, str] = {}  # rank: where it is instead
        others = set(range(1, self.group.size))
        while missing := others - made.keys() - passed.keys():
            self._pause()
            gone = self._passed_by(missing)
            found = self._arrived(missing)  # after it: who has come has not passed
            made |= {rank: post["number"] for rank, post in found.items() if self._is_same(post)}
            passed |= {rank: f"is in {post['doing']}" for rank, post in found.items() if rank not in made}
            passed |= {rank: where for rank, where in gone.items() if rank not in found}
        says: Made = "some" if passed else "all"
        if passed and self.required:
            self._refuse(passed)
        for rank, number in made.items():
            self.group.shared.arrivals[rank] = number
            self.presence.answer_to(_NAME, number, rank, says)
        return says

    def _arrived(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return what ranks have published of a call that was not matched yet."""
        posts = {rank: json.loads(text) for rank, text in self.presence.posts(_NAME, ranks=ranks).items() if text}
        arrivals = self.group.shared.arrivals
        return {rank: post for rank, post in posts.items() if post["number"] > arrivals.get(rank, 0)}

    def _is_same(self, post: dict[str, Any]) -> bool:
        if _is_further(post, self._mine()):
            return False
        is_same_argument = self.what is not None and post["what"] == self.what
        return bool(post["name"] == self.name and (is_same_argument or post["lines"] == self.lines))

    # ---- the others

    def await_decision(self) -> Made:
        """Publish that this rank makes the call; wait for rank 0's decision, or until rank 0 has passed it by."""
        self._ask_at = time.monotonic() + _ASK_RANK_0_S
        self.group.shared.arrivals[self.group.rank] = self.number
        words = {"name": self.name, "what": self.what, "lines": self.lines, "doing": self.doing}
        started = {} if self.group.supported == {"cpu"} else self.group.collectives_of_torch()
        self.presence.post(json.dumps({**words, "number": self.number, "started": started, "needs": {}}), _NAME)
        while True:
            self._pause()
            gone = self._passed_by({0})
            says = self.presence.answer(_NAME, self.number)  # after it: rank 0 may have answered before it continued
            if says is not None:
                return "all" if says == "all" else "some"
            if gone:
                self.presence.post("", _NAME)  # or a later call of rank 0 would be taken for this one
                if self.required:
                    self._refuse(gone)
                return "not rank 0"

    # ---- both

    def _pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LAST_LOOK_S)
        if time.monotonic() - self._looked > _LAST_LOOK_S * 4:
            self.group.raise_if_broken()
            self._looked = time.monotonic()

    def _passed_by(self, ranks: set[int]) -> dict[int, str]:
        """Return which of `ranks` are known to have passed this call by, and what they do: asks now and then."""
        now = time.monotonic()
        if now < self._ask_at:
            return {}
        if not self._asked:
            self._asked = self.presence.ask()
        ended = dict.fromkeys(self.presence.ended(ranks), "has ended")
        posts = {rank: json.loads(text) for rank, text in self.presence.posts("answer", ranks=ranks).items()}
        answers = {rank: answer for rank, answer in posts.items() if answer["question"] >= self._asked}
        if answers.keys() | ended.keys() >= ranks:
            self._asked, self._ask_at, self._silent_since = 0, now + _ASK_AGAIN_S, now
        elif now - self._silent_since > _CLOSED_S:
            self._silent_since = now
            self.group.raise_if_closed(ranks - answers.keys())
        mine = self._mine()
        return ended | {rank: f"is in {one['doing']}" for rank, one in answers.items() if _is_further(one, mine)}

    def _mine(self) -> dict[str, int]:
        """Return how many collectives this rank has started, by group."""
        return self.group.waits.entered | self.group.collectives_of_torch()

    def _refuse(self, passed: dict[int, str]) -> None:
        """Raise, here and on all ranks that wait, as a call lacks some of them."""
        others = "; ".join(f"rank {rank} {where}" for rank, where in passed.items())
        text = f"{self.name}: every process must call it, as {self.required}. Rank {self.group.rank} is in {self.doing}"
        advice = "Move it out of the `if` that only some processes pass, such as `if accelerator.is_main_process:`."
        self.presence.publish_mismatch(f"{text}, but {others}. {advice}")
        raise CollectiveMismatch(f"{text}, but {others}. {advice}")


def _is_further(other: dict[str, Any], mine: dict[str, int]) -> bool:
    """Return whether another rank waits in a collective that this one has not started.

    If ranks don't wait for the end of a collective, as with NCCL, it is enough that it has started one.
    """
    pairs = [*other["started"].items(), *other["needs"].items()]
    return any(mine.get(name, number) < number for name, number in pairs if name != _POINT)
