# SPDX-License-Identifier: Apache-2.0
"""Tracks which batches of a replica are in the common weights: handed out, sent, landed. Plain Python, without a store.

A batch is handed out when the training gets it. It is sent with the first step of an outer loop after that, and lands
when that loop's rounds up to this step have been applied, for all parts of the model. It is done when it has landed in
all outer loops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

# How many batches of a slot are done, by epoch and slot.
Done: TypeAlias = "dict[tuple[int, int], int]"


class Share(NamedTuple):
    """A batch of a slot that this replica holds."""

    loader: int  # its number among the loaders of the replica
    tenure: int  # in which it was taken
    epoch: int
    slot: int
    done: int  # how many batches of the slot are done with this one


@dataclass(eq=False)
class Sent:
    """The batches that one outer loop has sent, and the replicas with which its rounds have landed."""

    num_fragments: int = 1  # parts of the model that are sent apart
    generation: int = 0  # at the latest step
    step: int = 0  # the latest one
    num_landed: int = 0  # of the times that batches were handed out
    # Since which generation other replicas have been members, and up to which step the rounds have landed that they
    # took part in, by their ids.
    met: dict[int, tuple[int, int]] = field(default_factory=dict)
    _steps: deque[tuple[int, int]] = field(default_factory=deque)  # each with how often batches were handed out by then
    _landed: dict[int, int] = field(default_factory=dict)  # step by fragment

    def meet(self, generation: int, members: Iterable[int]) -> None:
        self.generation = generation
        for member in members:
            self.met.setdefault(member, (generation, -1))

    def send(self, step: int, num_handed_out: int) -> None:
        self.step = step
        self._steps.append((step, num_handed_out))

    def land(self, fragment: int, step: int) -> None:
        """Record that a round of a fragment has landed, up to a step, in which all members took part."""
        self._landed[fragment] = step
        if len(self._landed) == self.num_fragments:
            through = min(self._landed.values())
            self.met = {member: (since, through) for member, (since, _) in self.met.items()}
            while self._steps and self._steps[0][0] <= through:
                self.num_landed = self._steps.popleft()[1]

    def send_again(self) -> None:
        """Count batches that have not landed as part of the next round of each fragment, at whatever step that is."""
        self._landed.clear()
        self._steps = deque([(-1, self._steps[-1][1])] if self._steps else ())

    def forget(self) -> None:
        """Drop batches that were sent and have not landed."""
        self._steps.clear()
        self._landed.clear()


class Ledger:
    """The batches of one replica.

    Attributes:
        tenure: how often this replica has been left out; what it took before that is no longer its own.
        open: batches that were handed out and are not done, by the number of their loader.
        mixed: how many steps in a row were made on batches of several loaders.
    """

    def __init__(self) -> None:
        self.tenure = 0
        self.open: dict[int, Done] = {}
        self.mixed = 0
        self._fresh: set[int] = set()  # the loaders of the batches since the latest step
        self.loops: list[Sent] = []
        self._num_handed_out = 0
        self._waiting: deque[tuple[int, Sequence[Share]]] = deque()  # each with how often batches were handed out

    def hand_out(self, shares: Sequence[Share]) -> None:
        self._num_handed_out += 1
        self._waiting.append((self._num_handed_out, shares))
        self._fresh |= {share.loader for share in shares}
        for share in shares:
            self.open.setdefault(share.loader, {})[share.epoch, share.slot] = share.done

    def send(self, loop: Sent, step: int) -> None:
        """Record that the rounds of a loop after this step contain all batches handed out so far."""
        loop.send(step, self._num_handed_out)
        if self._fresh:  # the first loop of the step
            self.mixed = self.mixed + 1 if len(self._fresh) > 1 else 0
            self._fresh = set()

    def land(self, loop: Sent, fragment: int, step: int) -> dict[int, Done]:
        """Record that a round has landed; return the batches that are done now, by the number of the loader."""
        loop.land(fragment, step)
        landed = min(one.num_landed for one in self.loops)
        done: dict[int, Done] = {}
        while self._waiting and self._waiting[0][0] <= landed:
            for one in self._waiting.popleft()[1]:
                done.setdefault(one.loader, {})[one.epoch, one.slot] = one.done
        for loader, counts in done.items():
            left = {place: count for place, count in self.open[loader].items() if counts.get(place) != count}
            self.open[loader] = left
        return done

    def steps(self) -> list[tuple[int, int]]:
        """Return the generation and the step of each outer loop's latest step."""
        return [(loop.generation, loop.step) for loop in self.loops]

    def lose(self, is_member: Callable[[int], bool]) -> dict[int, list[tuple[int, int]]]:
        """Forget replicas that are no longer members; return the entries of `Sent.met` for each, loop by loop."""
        lost = {member for loop in self.loops for member in loop.met if not is_member(member)}
        return {member: [loop.met.pop(member, (0, -1)) for loop in self.loops] for member in lost}

    def give_up(self) -> None:
        """Forget all batches that are not done: this replica was left out, and others get them."""
        self.tenure += 1
        self.open.clear()
        self._waiting.clear()
        for loop in self.loops:
            loop.forget()
