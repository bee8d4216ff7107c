# SPDX-License-Identifier: Apache-2.0
"""Many members of an elastic run, as threads that meet in a `memory_bucket`, and what befalls them, in virtual time."""

import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from unittest.mock import Mock

import torch
from torch import nn

from farflung.address.member_store import LauncherNotes
from farflung.address.object_group import ObjectTransport
from farflung.base.errors import ConfigError
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop, diloco
from tests.memory_bucket import memory_board
from tests.virtual_time import Killed, Owner

KINDS = ("kill", "join", "stop", "late", "refused")
START, WIDTH = 2.0**20, 64
STOPS = 5  # graces, for which one that is stopped sleeps


@dataclass
class Storm:
    """One run; a step takes 1 off each weight, so weights show how many steps they hold.

    Args:
        clock: see `virtual_time`.
        num_members: at the beginning.
        every, step_s: steps in a round, and the time of one.
        grace_s: see `Elastic`; who is late comes after half of it, who is stopped continues after `STOPS` of it.
        late_s: of each answer of the bucket.

    Attributes:
        there: the processes of the run that have not ended, each with its owner.
        without_data: those of them that have no more of it from the next round on, and end once the others do.
        landings: when each member had come how far: `(time, member, position)`.
        wrong: what members have found that had a step too many or too few.
        ends, errors: the position and weights with which members have ended, or the error.
    """

    clock: object
    num_members: int
    every: int = 10
    step_s: float = 3.0
    grace_s: float = 4.0
    late_s: float = 0.02
    seed: int = 0

    def __post_init__(self):
        self.board = memory_board(self.late_s)
        self.transport, self.notes = ObjectTransport(self.board, "memory"), LauncherNotes(self.board)
        self.draw, self.there, self.landings, self.wrong = random.Random(self.seed), {}, [], []
        self.without_data = set()
        self.late, self.ends, self.errors, self.num_refused, self.events = Counter(), {}, {}, 0, []
        self.is_over, self.num_started, self.threads = False, 0, []
        for _ in range(self.num_members):
            self.start()
        self.in_thread(self.receive, Owner())

    def in_thread(self, act, owner, *args):
        thread = threading.Thread(target=act, args=args, daemon=True)
        thread.owner = owner
        thread.start()
        self.threads.append(thread)
        return thread

    def start(self, width=WIDTH):
        """Start a process, and the launcher on its machine."""
        self.num_started += 1
        member = self.notes.enroll(f"replica {self.num_started}", f"machine{self.num_started}")
        owner = Owner()
        if width == WIDTH:
            self.there[member] = owner
        process = self.in_thread(self.train, owner, member, width)
        self.in_thread(self.launch, Owner(), member, process, owner)
        return member

    def launch(self, member, process, owner):
        """What a launcher does: it writes heartbeats, and whether its process is stopped, and records its end."""
        beat_at, was_stopped = 0.0, False
        while not process.ended.done():
            if self.clock.now >= beat_at:
                self.notes.beat(f"machine{self.notes.name_of(member).split()[1]}", self.board.heartbeat_s)
                beat_at = self.clock.now + self.board.heartbeat_s
                is_stopped = owner.stopped_until > self.clock.now
                if is_stopped and not was_stopped:
                    self.notes.put("stopped", member)
                elif was_stopped and not is_stopped:
                    self.notes.forget(member, "stopped")
                was_stopped = is_stopped
            time.sleep(0.1)
            if owner.is_dead:
                return self.notes.note_end(member, "was killed by SIGKILL")
        return None

    def receive(self):
        while not self.is_over:
            self.events += [(self.clock.now, event) for event in self.notes.receive()]
            time.sleep(1.0)

    def train(self, member, width):
        membership = Elastic(
            self.transport, member, expected=self.num_members, most=2 * self.num_members, grace_s=self.grace_s
        )
        model = nn.Linear(width, 1, bias=False)
        nn.init.constant_(model.weight, START)
        recipe = replace(diloco(self.every, lr=1.0, momentum=0.0), same_data=True)
        outer = Mock()
        try:
            with OuterLoop(model, recipe, membership=membership) as outer:
                # Each ends with a round, so that nobody makes fewer steps of it than the others.
                while not (self.is_over or member in self.without_data) or outer.position % self.every:
                    time.sleep(self.step_s + self.late.pop(member, 0) * self.grace_s / 2)
                    with torch.no_grad():
                        model.weight -= 1
                    outer.step()
                    if not (model.weight == START - outer.position).all():
                        self.wrong.append((self.clock.now, member, outer.position, model.weight[0, 0].item()))
                    if outer.position % self.every == 0:
                        self.landings.append((self.clock.now, member, outer.position))
            self.ends[member] = outer.position, model.weight.detach().clone()
        except Killed:
            outer._finalizer.detach()  # a process that is killed runs none
            raise
        except ConfigError:
            self.num_refused += 1
        except BaseException as error:
            self.errors[member] = error
        self.there.pop(member, None)

    def befall(self, kind):
        """Make something happen, to a member drawn by chance."""
        member = self.draw.choice(sorted(self.there))
        if kind == "kill":
            self.there.pop(member).is_dead = True
        elif kind == "stop":
            self.there[member].stopped_until = self.clock.now + STOPS * self.grace_s
        elif kind == "late":
            self.late[member] = 1
        else:
            self.start(WIDTH if kind == "join" else WIDTH + 1)

    def rounds(self):
        """When each round has landed, in order; on the last member that had it."""
        found = {}
        for now, _, position in self.landings:
            found[position] = max(now, found.get(position, 0.0))
        return [found[position] for position in sorted(found)]

    def until(self, condition, within_s):
        """Wait in virtual time."""
        end = self.clock.now + within_s
        while not condition():
            assert self.clock.now < end, (self.errors, self.events[-20:])
            time.sleep(0.25)

    def finish(self, within_s=600.0):
        """End the run; check that all have ended, with the same weights and the steps that they hold."""
        # Some land a moment later than others: one that saw the end before them would end a round earlier.
        self.until(lambda: self.clock.now > self.landings[-1][0] + self.step_s / 2, within_s)
        self.is_over, end = True, self.clock.now + within_s
        for thread in self.threads:
            thread.join(max(0.0, end - self.clock.now))
            assert thread.ended.done(), (thread, self.events[-20:])
        assert not self.wrong, self.wrong
        positions, weights = zip(*self.ends.values(), strict=True)
        assert len(set(positions)) == 1, positions
        assert all(torch.equal(one, weights[0]) for one in weights)
        odd = [error for error in self.errors.values() if "The run has ended" not in str(error)]
        assert not odd, odd


def storm(clock, seconds, every_s, kinds=KINDS, **options):
    """Return a run, to which something has happened every so many seconds for so long, and when its rounds landed.

    `every_s` is 0 if nothing happens.
    """
    run = Storm(clock, **options)
    run.until(lambda: len(run.landings) >= run.num_members, 600.0)
    end, happens = clock.now + seconds, itertools.cycle(kinds)
    while clock.now < end:
        time.sleep(every_s or seconds)
        if every_s:
            run.befall(next(happens))
    return run, run.rounds()
