# SPDX-License-Identifier: Apache-2.0
"""Failures as data: `fail_at(phase, number)` makes this rank fail at one moment of an outer round.

    fault = fail_at("landing", 2)  # kill this process when it merges a bucket for the second time
    OuterLoop(model, fault.recipe(diloco(2)), membership=fault.membership(FixedMembership(group, SoloGroup())))

The fault sits between the loop and what a script hands to it: the codec and the merge of the recipe, and the groups
of the membership. It changes nothing before that moment. `writing` does the same for the files of checkpoints.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from farflung.checkpoint.entries import Entry
from farflung.checkpoint.sharded import ShardedEntry
from farflung.testing.patience import patience

PHASES = {
    "local step": "the script trains",
    "saving": "the script asks for a state dict",
    "admission": "a generation has newcomers, who have got nothing yet",
    "a state": "it is about to be written to the run's address",
    "encoding": "a bucket is encoded",
    "vote": "the ballot is on its way",
    "after the vote": "all ballots have come",
    "exchange": "a bucket, or what a newcomer gets, is on its way",
    "arrival": "this rank begins to wait for that",
    "confirmation": "the word that this rank has all buckets is about to be sent",
    "confirmed": "all ranks have sent that word",
    "landing": "the anchor has taken a bucket, which the weights have not",
}
IN_A_ROUND = set(list(PHASES)[4:])


def kill(group: Any = None) -> None:
    """End this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(group: Any = None) -> None:
    """Stop this process, until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Fault:
    """A failure that is still to come; see `fail_at`.

    Attributes:
        seen: the phases that counted so far, in their order; the last one is where the rank failed.
    """

    phases: set[str]
    number: int
    act: Callable[[Any], object]
    is_armed: bool
    seen: list[str] = field(default_factory=list)

    def arm(self) -> None:
        self.is_armed = True

    def reach(self, phase: str, group: Any = None) -> None:
        """Note that this rank is at a phase, and fail if that is the one."""
        if self.is_armed and phase in self.phases:
            self.seen.append(phase)
            if len(self.seen) == self.number:
                self.act(group)

    def recipe(self, recipe: Any) -> Any:
        """Return the same recipe, whose codec and merge may fail."""
        is_armed, self.is_armed = self.is_armed, False  # a new recipe tries its codec
        same = replace(recipe, codec=_Codec(recipe.codec, self), merge=_Merge(recipe.merge, self))
        self.is_armed = is_armed
        return same

    def membership(self, membership: Any) -> Any:
        """Return the same membership, in the groups of which this rank may fail, or as it writes a state."""
        if saver := getattr(membership, "saver", None):
            write = saver._states.write
            saver._states.write = lambda *parts: (self.reach("a state"), write(*parts))
        return _Membership(membership, self)


def fail_at(phase: str | None, number: int = 1, act: Callable[[Any], object] = kill, is_armed: bool = True) -> Fault:
    """Let this rank fail when it comes to a phase for the `number`-th time; with 0 never.

    Args:
        phase: one of `PHASES`. The script itself calls `reach` for the first two. None: any of `IN_A_ROUND`.
        act: what happens. It is given the group in which it does, or None.
        is_armed: count from the beginning, not only after `arm`.
    """
    assert phase is None or phase in PHASES, phase
    return Fault(IN_A_ROUND if phase is None else {phase}, number, act, is_armed)


def lives_until(others_know: Callable[[], object], most_s: float = 5.0) -> None:
    """Be busy while others find out about a failure."""
    deadline = time.monotonic() + patience(most_s)
    while not others_know() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def writing(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` before each file of a checkpoint is written here; what it raises is the disk's error."""

    def after_act(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*args: Any, **options: Any) -> Any:
            act()
            return write(*args, **options)

        return written

    kinds = {kind: kind.write for kind in (Entry, ShardedEntry)}
    try:
        for kind, write in kinds.items():
            kind.write = after_act(write)
        yield
    finally:
        for kind, write in kinds.items():
            kind.write = write


def disk_is_full() -> None:
    raise OSError(28, "No space left on device")


class _Faulty:
    """Something that is as before, but for what may fail."""

    def __init__(self, inner: Any, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._inner)  # recipes ask for the class of their merge

    def __repr__(self) -> str:
        return repr(self._inner)  # which all ranks compare


class _Codec(_Faulty):
    def encode(self, x: Any) -> Any:
        self._fault.reach("encoding")
        return self._inner.encode(x)


class _Merge(_Faulty):
    def __call__(self, local: Any, anchor: Any) -> None:
        self._fault.reach("landing")
        self._inner(local, anchor)


class _Membership(_Faulty):
    def enter(self, needs: Any) -> Any:
        generation = self._inner.enter(needs)
        groups: dict[int, _Group] = {}
        for voters in (generation.beside, *generation.levels):
            if not isinstance(voters.group, _Group):
                groups.setdefault(id(voters.group), _Group(voters.group, self._fault))
                voters.group = groups[id(voters.group)]
        if groups and generation.newcomers:
            self._fault.reach("admission")
        return generation


class _Group(_Faulty):
    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("all_reduce", "all_gather", "all_to_all", "swap"):
            return value

        def exchange(*args: Any) -> _Work:
            work = value(*args)
            self._fault.reach("exchange", self._inner)
            return _Work(work, self._fault, self._inner)

        return exchange

    def begin_all_gather_small(self, x: Any) -> Callable[[], Any]:
        end = self._inner.begin_all_gather_small(x)
        self._fault.reach("vote", self._inner)

        def wait() -> Any:
            votes = end()
            self._fault.reach("after the vote", self._inner)
            return votes

        return wait

    def all_gather_small(self, x: Any) -> Any:
        self._fault.reach("confirmation", self._inner)
        everyone = self._inner.all_gather_small(x)
        self._fault.reach("confirmed", self._inner)
        return everyone


class _Work(_Faulty):
    def __init__(self, inner: Any, fault: Fault, group: Any) -> None:
        super().__init__(inner, fault)
        self._group = group

    def wait(self) -> Any:
        self._fault.reach("arrival", self._group)
        return self._inner.wait()
