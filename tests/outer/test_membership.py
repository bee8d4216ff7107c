# SPDX-License-Identifier: Apache-2.0
"""The seam for membership: replicas leave at every phase of a round, and come, with the values of a plain reference.

Replica i moves its weights by -(i + 1) in each step, so that a reference needs no gradients and no network.
"""

import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from farflung.address import c10d_transport
from farflung.base.errors import CollectiveMismatch, ConfigError, RankFailure, Unreachable
from farflung.comm.collectives import broadcast_object_list
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.members.elastic import Elastic
from farflung.methods.anchored import Anchored
from farflung.methods.inner import AverageState, ResetState
from farflung.methods.recipes import (
    diloco,
    eager_diloco,
    edit,
    gossip,
    hierarchical,
    local_sgd,
    quadratic,
    streaming_diloco,
)
from farflung.outer import OuterLoop
from farflung.outer.membership import Membership
from farflung.testing.patience import patience
from farflung.testing.sim import SimGroup, run_replicas
from farflung.votes.generation import open_generation
from tests.faults import IN_A_ROUND, fail_at
from tests.outer.elastic_run import served
from tests.outer.replicas import on_replicas, same, shift, values

EVERY, LR, MOMENTUM, STEPS = 3, 0.5, 0.5, 12
DILOCO = diloco(EVERY, lr=LR, momentum=MOMENTUM)
STREAMING = streaming_diloco(4, 2, delay=1, lr=LR, momentum=MOMENTUM)


class Lost(Exception):
    """A replica is lost."""


def be_lost(group):
    raise Lost


DOORS = weakref.WeakKeyDictionary()  # of a stage: who waits to join, and who was let in: members and newcomers


def door_of(group):
    return DOORS.setdefault(group._stage, SimpleNamespace(waiting=[], admitted={}))


def join(group):
    """Wait until the members of another group admit this replica; return it and the ranks of the newcomers."""
    door, me = door_of(group), group._me
    door.waiting.append(me)
    if not group._stage.wait_until(me, lambda: me in door.admitted):
        raise RankFailure(f"Replica {me} waits to join, but nobody is left who could admit it.")
    members, newcomers = door.admitted.pop(me)
    return SimGroup(group._stage, me, members), [members.index(one) for one in newcomers]


def admit(group):
    """Return the group with those that wait to join, or this one, and the ranks of the newcomers: a collective."""
    stage, door, me = group._stage, door_of(group), group._me
    mine = torch.tensor([float(one in door.waiting) for one in range(stage.size)])
    newcomers = [one for one, waits in enumerate(group.all_gather_small(mine)[0]) if waits]  # as the first sees it
    if not newcomers:
        return group, []
    members = tuple(sorted({*group.members, *newcomers}))
    stage.regroups[me] += 1
    for one in set(newcomers).intersection(door.waiting):  # the first member to come here lets it in
        door.waiting.remove(one)
        door.admitted[one] = members, newcomers
        stage.regroups[one] = stage.regroups[me]
        stage.departures[one] = list(stage.departures[me])
    return SimGroup(stage, me, members), [members.index(one) for one in newcomers]


class ChangingMembership(Membership):
    """Replicas of which some are lost and others come: the `first` ones of a group of all that there will ever be."""

    is_fixed, island = False, SoloGroup()

    def __init__(self, group, first):
        self.most, self.number, self.generation, self.is_new = group.size, 0, None, group.rank not in first
        # SimGroup makes no group of some of the replicas otherwise.
        self.group = group if self.is_new else SimGroup(group._stage, group.rank, tuple(first))

    def enter(self, needs):
        group, newcomers = self.group, []
        if self.is_new:
            group, newcomers = join(group)
            self.is_new = False
        elif self.generation is not None and needs.admits:
            group, newcomers = admit(group)
        elif self.generation is None and self.number:  # after a loss; one that was just let in may have nothing yet
            states = group.all_gather_small(torch.tensor([float(needs.has_state)])).flatten().tolist()
            newcomers = [rank for rank, has_state in enumerate(states) if any(states) and not has_state]
        if self.generation is None or newcomers:
            self.group, self.number = group, self.number + 1
            self.generation = open_generation(self.number, group.members, group, self.island, needs, newcomers)
            away = [one for one in range(self.most) if one not in group.members]
            self.generation = replace(self.generation, lost=dict.fromkeys(away, "it is away"))
            if newcomers:
                giver = next(rank for rank in range(group.size) if rank not in newcomers)
                state = None if group.rank in newcomers else needs.state(True)
                (state,) = broadcast_object_list(Exchange(group), [state], giver)
                self.generation = replace(self.generation, given=state)
        return self.generation

    def is_awaited(self, needs):
        return bool(door_of(self.group).waiting)

    def agree(self, num_votes, here, odd):
        return here

    def lost(self, failure):
        self.group, self.generation = self.group.regroup(), None


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.tensor([64.0])) for _ in range(2))


def train(group, first, recipe, fails_at, lost, steps, proposals=(), moves=None):
    """Train one replica; return its weight after each step, at last with the changes of H, and the phases it came to.

    The one that may be lost proposes another H after some steps; each moves by `moves` in a step, or its number plus 1.
    """
    me, model, path, fragments = group.rank, Two(), [], set()
    fault = fail_at(None, fails_at if me == lost else 0, be_lost)
    membership = fault.membership(ChangingMembership(group, first))
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # whose rate a schedule may read
        outer = OuterLoop(model, fault.recipe(recipe), membership=membership, inner=optimizer)
        outer.listeners.append(lambda one: fragments.add(one.fragment))
        while outer.position < steps:
            shift(model.parameters(), -(moves or me + 1))
            outer.step()
            path.append((outer.position, model.weight.item()))
            for step, every in proposals if me == lost else ():
                if step == outer.position:
                    outer.change_schedule(every)
        outer.close()
    except Lost:
        return path, fault.seen
    assert fragments == set(range(recipe.schedule.fragments))
    return [*path, (steps, model.weight.item(), *outer.changes)], fault.seen


def anchors_of(members):
    """The anchor after each round and the slow weights at the end; `members(n, pending)` says who brings its steps."""
    anchor, velocity, anchors, pending = 64.0, 0.0, [], dict.fromkeys(range(4), 0)
    for number in range(STEPS // EVERY + 1):
        brought = members(number, pending)
        done = np.array([pending.pop(one) for one in brought], dtype=float)
        if done.sum():
            delta = (done * done * (np.array(brought) + 1)).sum() / done.sum()
            velocity = MOMENTUM * velocity + delta
            anchor -= LR * (delta + MOMENTUM * velocity)
            pending.update(dict.fromkeys(brought, 0))
        anchors.append(anchor)
    return [*anchors[:-1], anchor + LR * MOMENTUM * velocity]


def without(lost, in_round, applied):
    """The anchors of three replicas of which one is lost in a round, which it is in still or not."""

    def members(number, pending):
        there = [one for one in range(3) if one != lost or number < in_round + applied]
        for one in there:
            pending[one] += EVERY if number < STEPS // EVERY else 0
        return there

    return anchors_of(members)


def seen_of(path):
    """What a replica has after each round, and at the end."""
    return [*(weight for step, weight in path[:-1] if step % EVERY == 0), path[-1][1]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_replica_may_be_lost_at_any_phase_of_a_round(lost):
    """Before the vote, in it, in the middle of what is sent, before all know that it arrived, and in the last flush.

    No step of the others is lost, and none counts twice: the round goes on among them.
    """
    seen = run_replicas(train, 3, range(3), DILOCO, None, lost, STEPS)[lost][1]
    for at in range(1, len(seen) + 1):
        found = run_replicas(train, 3, range(3), DILOCO, at, lost, STEPS)
        path, failed_in = found.pop(lost)
        assert failed_in == seen[:at]
        in_round = len(path) // EVERY
        survivors = [seen_of(path) for path, _ in found]
        assert survivors[0] == survivors[1]
        assert survivors[0] in [without(lost, in_round, applied) for applied in (False, True)], at
    assert set(seen) == IN_A_ROUND


@pytest.mark.parametrize("first", [[0, 1], [1, 2], [0, 3]])
def test_replicas_come_before_a_round_with_the_anchor_and_count_from_the_next_one(first):
    def members(number, pending):
        for one in range(4):
            pending[one] += EVERY if number < STEPS // EVERY and (one in first or number > 1) else 0
        return list(range(4))

    anchors = anchors_of(members)
    for rank, (path, _) in enumerate(run_replicas(train, 4, first, DILOCO, None, 0, STEPS)):
        assert seen_of(path) == pytest.approx(anchors if rank in first else anchors[2:])


@pytest.mark.parametrize("inner", [ResetState(), AverageState()])
def test_a_newcomer_may_not_know_its_optimizer_yet_in_the_round_that_admits_it(inner):
    def train(group):
        model = Two()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        known = None if group.rank == 2 else optimizer
        membership = ChangingMembership(group, [0, 1])
        with OuterLoop(model, replace(DILOCO, inner=inner), membership=membership, inner=known) as outer:
            began = outer.position
            outer.attach(optimizer)
            while outer.position < STEPS:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, (group.rank + 1.0) ** outer.position)
                optimizer.step()
        return began, model.weight.item()

    (*_, (began, _)) = found = run_replicas(train, 3)
    assert began > 0
    assert len({weight for _, weight in found}) == 1


def flush_and_load(group, first):
    """Train, or as a newcomer wait in a flush before the first step; then load what was there before, and train."""
    model, is_new = Two(), group.rank not in first
    outer = OuterLoop(model, DILOCO, membership=ChangingMembership(group, first))
    saved, weights = outer.state_dict(), []
    for steps in (0 if is_new else 3 * EVERY + 1, 2 * EVERY):
        for _ in range(steps):
            shift(model.parameters(), -(group.rank + 1))
            outer.step()
        outer.flush()
        if is_new and not weights:
            outer.load_state_dict(saved)
        weights.append(model.weight.item())
    outer.close()
    return weights


@pytest.mark.law("nothing-given-outlives-the-next-round")
def test_a_newcomer_that_waits_in_a_flush_and_then_loads_has_what_all_have_in_common_now():
    found = run_replicas(flush_and_load, 3, [0, 1])
    assert found == found[:1] * 3


def loads_what_exchanged_more(group, first):
    """Train one of two nets; a newcomer first loads the state of a loop that has exchanged both."""
    model, is_new = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), group.rank not in first
    outer = OuterLoop(model, DILOCO, SoloGroup())
    saved = outer.state_dict()
    outer.detach()
    model[0].requires_grad_(False)
    with OuterLoop(model, DILOCO, membership=ChangingMembership(group, first)) as outer:
        began = outer.position
        if is_new:
            outer.load_state_dict(saved)
        while outer.position < 4 * EVERY:
            shift(model[1].parameters(), -(group.rank + 1))
            outer.step()
    return began > 0, values(model[1])


def test_a_newcomer_that_loads_exchanges_what_the_members_do():
    (*_, (is_late, _)) = found = run_replicas(loads_what_exchanged_more, 3, [0, 1])
    assert is_late
    assert same(*(end for _, end in found))


class MayLose(ChangingMembership):
    """A membership that goes on without those that are late."""

    def enter(self, needs):
        self.generation = replace(super().enter(needs), may_lose=True)
        return self.generation


@pytest.mark.law("no-two-different-rounds-of-a-number")
@on_replicas(2)
def test_of_two_that_may_go_on_without_each_other_none_applies_what_the_other_may_not_have(group):
    model, fault = Two(), fail_at(None, 0)
    outer = OuterLoop(model, fault.recipe(DILOCO), membership=fault.membership(MayLose(group, [0, 1])))
    for _ in range(EVERY):
        shift([model.weight], -1)
        outer.step()
    assert fault.seen.index("landing") > fault.seen.index("confirmed")


def names_the_odd(group):
    """Train until members would continue without some; return these, and why."""
    noted, membership = {}, MayLose(group, [0, 1])
    membership.agree = lambda num_votes, complete, odd: noted.update(odd) or complete
    membership.lost = be_lost
    with suppress(Lost):
        outer = OuterLoop(Two(), DILOCO, membership=membership)
        for _ in range(STEPS):
            outer.step()
    return noted


@on_replicas(4)
def test_blocks_of_neighbours_are_refused_where_replicas_come_and_go(group):
    with pytest.raises(ConfigError, match="hierarchical averages blocks"):
        OuterLoop(Two(), hierarchical({2: 2, 4: None}), membership=ChangingMembership(group, [0, 1, 2, 3]))


def test_what_a_newcomer_got_is_compared_in_its_first_vote(monkeypatch):
    join = Anchored.join

    def damaged(weights, *given):
        join(weights, *given)
        weights.rows()["anchor"][0].add_(1)

    monkeypatch.setattr(Anchored, "join", damaged)
    with pytest.raises(CollectiveMismatch, match="no longer agree on weight: its value on rank 2 is not that of"):
        run_replicas(train, 3, [0, 1], DILOCO, None, 0, STEPS)
    for noted in run_replicas(names_the_odd, 3):
        assert list(noted) == [2]
        assert "no longer agree on weight: its value on rank 2 is not that of" in noted[2]


OTHERS = {
    "local_sgd": local_sgd(3),
    "streaming without delay": streaming_diloco(4, 2, delay=0, lr=LR, momentum=MOMENTUM),
    "quadratic": quadratic(2, alpha=0.5),
    "gossip": gossip(2),
    "edit": edit(2, lr=LR, momentum=MOMENTUM),
    "streaming": STREAMING,
    "eager": eager_diloco(3, lr=LR, momentum=MOMENTUM),
}


@pytest.mark.parametrize("name", OTHERS)
def test_replicas_come_and_go_under_other_recipes(name):
    """One comes, another one is lost at each phase; those that stay end with the same weights."""
    for at in range(8, 48, 3):  # also while the other one is let in; a round has 7 or 8 phases
        found = run_replicas(train, 4, [0, 1, 2], OTHERS[name], at, 1, 2 * STEPS)
        ends = [path[-1] for rank, (path, _) in enumerate(found) if rank != 1]
        assert len(set(ends)) == 1, (at, ends)


@pytest.mark.law("a-changed-h-is-a-planned-h")
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "quadratic"])
def test_replicas_come_and_go_while_h_changes(name):
    """The one that proposes may be lost at each phase before and after the others have agreed; another one comes."""
    found = set()
    for size, at in [(3, at) for at in range(1, 48, 5)] + [(4, at) for at in range(8, 64, 8)]:  # see above
        paths = run_replicas(train, size, [0, 1, 2], OTHERS[name], at, 1, 2 * STEPS, [(1, 5), (7, 6)])
        (end,) = {path[-1] for rank, (path, _) in enumerate(paths) if rank != 1}
        found.add(tuple(change.every for change in end[2:]))
    assert found == {(), (5,), (5, 6)}


@pytest.mark.law("a-changed-h-is-a-planned-h")
def test_no_step_is_lost_in_a_change_of_h_nor_counts_twice():
    recipe = replace(diloco(EVERY, lr=1.0, momentum=0.0), same_data=True)
    for at in range(1, 48):
        for path, _ in run_replicas(train, 3, [0, 1, 2], recipe, at, 1, 2 * STEPS, [(3, 5), (9, 2)], 1.0):
            assert all(weight == 64.0 - position for position, weight, *_ in path), at


def test_a_replica_that_is_interrupted_does_not_wait_for_a_store_that_is_silent(monkeypatch):
    monkeypatch.setattr(c10d_transport, "ANSWER_S", 0.3)
    server, over = served(), threading.Event()
    membership = Elastic(c10d_transport.C10dTransport(("127.0.0.1", server.port)), 1)

    def silent(*request):
        over.wait(60)

    monkeypatch.setattr(server, "_answer", silent)
    with pytest.raises(Unreachable):
        membership.peers.at_once.mark_broken(1, "it is cut off")  # a request without an answer
    began = time.monotonic()
    membership.end("KeyboardInterrupt")
    over.set()
    assert time.monotonic() - began < patience(10), "its patience is a minute"
