# SPDX-License-Identifier: Apache-2.0
"""Members that do together what is no round, while one of them is stopped, killed, slow, or does not see an object.

Replicas are threads that meet in a folder, or processes. A wait of one of them ends, or doesn't, by itself: another one
may have all values of a call, and be in the next one.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import nn

from farflung.address.member_store import LauncherNotes
from farflung.address.object_group import ObjectGroup
from farflung.address.schemes import transport_at
from farflung.address.transport import Entered
from farflung.base.errors import RankFailure
from farflung.members.elastic import Elastic
from farflung.members.generation_watch import GenerationWatch
from farflung.outer import OuterLoop, diloco, local_sgd, streaming_diloco
from farflung.testing.patience import patience
from tests.faults import fail_at, kill, stop
from tests.outer.conftest import in_turn
from tests.outer.elastic_run import ElasticRun, transport_at as transport_of
from tests.outer.replicas import shift

GRACES_S = 0.8, 6.0  # on a busy machine healthy threads may be late, too
RECIPES = {
    "diloco": diloco(4, lr=1.0, momentum=0.0),
    "with momentum": diloco(2, lr=0.5, momentum=0.5),
    "local_sgd": local_sgd(3),
    "streaming": streaming_diloco(4, 2, delay=1, lr=1.0, momentum=0.0),
}
KINDS = ("killed", "stopped before", "stopped after", "slow", "blind")


@dataclass(frozen=True)
class Fault:
    """What befalls a member at one of the calls that it makes with the others."""

    member: int
    kind: str
    call: int


class Killed(BaseException):
    """A replica is dead."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.two = nn.Linear(3, 2)
        with torch.no_grad():
            for number, tensor in enumerate(self.parameters()):
                tensor.fill_(64.0 + number)


def act(outer, model, number, name, amount):
    """Do one thing of a program."""
    if name == "step":
        for _ in range(amount + (number if amount % 2 else 0)):
            shift(model.parameters(), -(number + 1.0))
            model.norm.running_mean += number
            outer.step()
    elif name == "flush":
        outer.flush()
    elif name == "look":
        if not outer.has_anchor:  # a collective, to which all come after equally many rounds
            outer.flush()
        with outer.synced():
            pass
    elif name == "set":
        shift(model.parameters(), float(number))
        outer.flush()
    elif name == "forward":
        model.norm.running_var += number
        outer.flush()
    elif name == "grow":
        outer.flush()
        setattr(model, f"more{amount}", nn.Linear(2, 2))


class Run:
    """A program of several replicas, one of which a fault befalls."""

    def __init__(self, folder, recipe, program, fault, grace_s, num_replicas=3):
        self.address, self.recipe, self.program, self.fault = folder.as_uri(), recipe, program, fault
        self.notes = LauncherNotes(transport_at(self.address).board)
        self.members = [self.notes.enroll(f"replica {number}") for number in range(num_replicas)]
        self.calls = dict.fromkeys(self.members, 0)
        self.ends, self.errors, self.lost, self.grace_s = {}, {}, {}, grace_s

    def befalls(self, group, kind):
        """Whether the fault befalls this member in this call, which has begun."""
        member = group._watch._member
        return (
            self.fault is not None
            and member == self.members[self.fault.member]
            and kind == self.fault.kind
            and (self.calls[member] == self.fault.call)
        )

    def begin(self, group):
        self.calls[group._watch._member] += 1
        if self.befalls(group, "killed"):
            raise Killed
        if self.befalls(group, "stopped before"):
            time.sleep(3 * self.grace_s)

    def finish(self, group, number):
        if self.befalls(group, "stopped after"):
            time.sleep(3 * self.grace_s)
        if self.befalls(group, "slow"):
            time.sleep(self.grace_s / 2)
        if self.befalls(group, "blind"):
            began = time.monotonic()
            while time.monotonic() < began + patience(20.0):
                group._watch.look(Entered(f"{group._name}#{number}", 8), time.monotonic() - began)
                time.sleep(0.02)

    def play(self, number):
        member = self.members[number]
        membership = Elastic(transport_at(self.address), member, expected=len(self.members), grace_s=self.grace_s)
        model = Net()
        try:
            with OuterLoop(model, self.recipe, membership=membership, bucket_bytes=32) as outer:
                for name, amount in self.program:
                    act(outer, model, number, name, amount)
            self.ends[number] = {name: value.clone() for name, value in model.state_dict().items()}
            self.lost[number] = outer.stats().steps_lost
        except Killed:
            self.notes.note_end(member, "was killed by SIGKILL")
        except BaseException as error:
            self.errors[number] = error
            self.notes.note_end(member, f"{type(error).__name__}")

    def finished(self):
        threads = [
            threading.Thread(target=self.play, args=(number,), daemon=True) for number in range(len(self.members))
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + patience(60.0)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [number for number, thread in enumerate(threads) if thread.is_alive()]


OPS = st.tuples(st.sampled_from(["step", "step", "flush", "look", "set", "forward", "grow"]), st.integers(1, 7))
FAULTS = st.builds(Fault, st.integers(0, 2), st.sampled_from(KINDS), st.integers(12, 70))


def played_by_threads(folder, recipe, program, fault, grace_s, hop_bytes, monkeypatch):
    """A run of the program, at the end."""
    folder.mkdir()
    run = Run(folder, recipe, program, fault, grace_s)
    begin, finish = ObjectGroup._begin, ObjectGroup.finish

    def begins(group, *args, **options):
        if isinstance(group._watch, GenerationWatch) and group.size > 1:
            run.begin(group)
        return begin(group, *args, **options)

    def finishes(group, reading, rows):
        if isinstance(group._watch, GenerationWatch) and group.size > 1:
            run.finish(group, reading.number)
        return finish(group, reading, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectGroup, "_begin", begins)
        patch.setattr(ObjectGroup, "finish", finishes)
        patch.setattr(ObjectGroup, "hop_bytes", hop_bytes)
        hung = run.finished()
    assert not hung, (hung, run.ends.keys(), run.errors)
    return run


def check(folder, recipe, program, fault, hop_bytes, monkeypatch):
    """Check that healthy members end equal; again with a longer grace, if one of them was late by itself."""
    healthy = [number for number in range(3) if number != fault.member]
    for grace_s in GRACES_S:
        run = played_by_threads(folder / str(grace_s), RECIPES[recipe], program, fault, grace_s, hop_bytes, monkeypatch)
        events = [str(event) for event in run.notes.receive()]
        out = [event for event in events for number in healthy if f"replica {number} is out" in event]
        out = [event for event in out if "its work is done" not in event]
        if not any("it did not come within" in event or "it was late by" in event for event in out):
            break
    assert not set(run.errors) & set(healthy), (run.errors, events)
    assert run.ends.keys() >= set(healthy), run.ends.keys()
    first, *others = (run.ends[number] for number in sorted(run.ends))
    for other in others:
        assert first.keys() == other.keys()
        odd = [(name, first[name], other[name]) for name in first if not torch.equal(first[name], other[name])]
        assert not odd, odd
    assert [run.lost[number] for number in healthy] == [0, 0], (run.lost, events)
    assert not out, events
    assert isinstance(run.errors.get(fault.member, RankFailure("")), RankFailure), run.errors  # it came too late
    if fault.kind in ("slow", "blind"):
        assert fault.member in run.ends, (events, run.errors)
        assert run.lost[fault.member] == 0


PROGRAM = (("step", 5), ("set", 1), ("forward", 1), ("grow", 1), ("step", 4))
# Where healthy members ended, or were left out, while each continued where a loss had interrupted it.
KNOWN = [
    ("diloco", "blind", 12),
    ("diloco", "blind", 26),
    ("local_sgd", "killed", 24),
    ("streaming", "stopped after", 20),
]


HOPS = (0, ObjectGroup.hop_bytes)  # a reduction of few values takes two, or one


@pytest.mark.law("acts-end-alike")
@pytest.mark.parametrize("hop_bytes", HOPS)
@pytest.mark.parametrize(("recipe", "kind", "call"), KNOWN)
def test_a_fault_in_a_known_call_leaves_the_others_equal(tmp_path, monkeypatch, recipe, kind, call, hop_bytes):
    check(tmp_path, recipe, PROGRAM, Fault(1, kind, call), hop_bytes, monkeypatch)


MANY = settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.law("acts-end-alike")
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(5))  # of 200 programs, side by side
@MANY
@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    program=st.lists(OPS, min_size=3, max_size=8),
    fault=FAULTS,
    hop_bytes=st.sampled_from(HOPS),
)
def test_a_fault_in_any_call_leaves_the_others_equal(
    tmp_path_factory, monkeypatch, part, recipe, program, fault, hop_bytes
):
    check(tmp_path_factory.mktemp("run"), recipe, program, fault, hop_bytes, monkeypatch)


def played(pipe, place, folder, member, variables, step_s, numel, dies, recipe, *rest):
    """A process that goes through the program."""
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    fault, model = fail_at(*dies or ("saving", 0)), Net()
    membership = fault.membership(Elastic(transport_of(*place), member, **rest[-1]))
    number = int(membership.peers.notes.name_of(member)[-1])
    with OuterLoop(model, fault.recipe(recipe), membership=membership, bucket_bytes=32) as outer:
        pipe.send({"member": member, "joined": outer.position})
        for name, amount in PROGRAM:
            act(outer, model, number, name, amount)
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    pipe.send({"member": member, "end": values, "lost": outer.stats().steps_lost})


KILLED = [("confirmation", 5, kill), ("exchange", 9, kill)]
STOPPED = [("confirmed", 7, stop), ("vote", 6, stop), ("arrival", 8, stop)]
ENDS = [*in_turn(KILLED), *(pytest.param(*one.values, marks=pytest.mark.long) for one in in_turn(STOPPED))]


@pytest.mark.law("acts-end-alike")
@pytest.mark.parametrize(("dies", "address"), ENDS, indirect=["address"])
def test_a_process_that_is_killed_or_stopped_leaves_the_others_equal(dies, address):
    options = {"recipe": RECIPES["diloco"], "expected": 3, "grace_s": patience(1.0), "play": played}
    with ElasticRun(address=address, **options) as run:
        healthy = [run.start(0), run.start(1)]
        faulty = run.start(2, dies=dies)
        run.until(lambda: run.has_ended(*healthy), 40.0)
        if dies[-1] is stop:
            run.signal(faulty, signal.SIGCONT)
        ends = {one["member"]: one for one in run.said if "end" in one}
        assert ends.keys() >= set(healthy), run.events
        assert ends[healthy[0]] | {"member": 0} == ends[healthy[1]] | {"member": 0}
        assert ends[healthy[0]]["lost"] == 0
        assert not [event for event in run.events if "replica 0 is out" in event or "replica 1 is out" in event]
