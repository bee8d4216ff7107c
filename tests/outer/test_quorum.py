# SPDX-License-Identifier: Apache-2.0
"""What a loss does to what members do together, in the one place that catches it, without any other rank."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch import nn

import farflung.outer
from farflung.base.errors import RankFailure
from farflung.comm.group import SoloGroup
from farflung.exchanged.replica import Replica
from farflung.outer import OuterLoop, diloco
from farflung.outer.membership import Membership
from farflung.outer.quorum import Quorum, Welcome
from farflung.outer.stats import Meter
from farflung.outer.timetable import Timetable
from farflung.votes.generation import open_generation

OUTER = Path(farflung.outer.__file__).parent
LEFT, FREED = "it continues without lost ranks: lost", "free, reusable: False"


class Members(Membership):
    """A membership of this rank alone, which notes what it is asked; some meetings and some agreements fail."""

    most, island = 1, SoloGroup()

    def __init__(self, path, is_fixed, lost_in=()):
        self.path, self.is_fixed, self.lost_in, self.number = path, is_fixed, list(lost_in), 0
        self.lost = lambda failure: path.append("lost")

    def enter(self, needs):
        self.number += 1
        self.path.append("enter")
        if self.number in self.lost_in:
            raise RankFailure("lost on the way in")
        group = SoloGroup()
        group.leave = lambda reason, cause: self.path.append(reason)
        group.free = lambda reusable: self.path.append(f"free, reusable: {reusable}")
        return open_generation(self.number, [0], group, self.island, needs)


class Nothing:
    """What is under way: a job, which may fail once."""

    def __init__(self, path, job_fails=False):
        self.path, self.fails = path, [None] * job_fails
        self.relaunch = partial(path.append, "relaunch")
        self.end_alike = lambda odd: path.append("end")

    def settle(self):
        self.path.append("settle")
        if self.fails:
            self.fails.pop()
            raise RankFailure("the job heard of it too")


def quorum_of(path, is_fixed=False, lost_in=(), **options):
    recipe, model = diloco(2), nn.Linear(2, 2)
    replica, timetable = Replica(model, recipe, 1024, 2), Timetable(recipe, lambda: 0.0, None)
    quorum = Quorum(Members(path, is_fixed, lost_in), recipe, replica, timetable, Meter())
    quorum.under_way = Nothing(path, **options)
    quorum.enter()
    path.clear()
    return quorum


def acts(path, name, times=0):
    """An action that fails so many times."""
    left = [None] * times

    def act():
        path.append(name)
        if left:
            left.pop()
            raise RankFailure("lost")

    return act


def test_after_a_loss_all_ends_the_next_generation_is_entered_and_the_action_is_done_again():
    path = []
    quorum = quorum_of(path)
    quorum.run(acts(path, "a"), acts(path, "b", times=2), acts(path, "c"))
    recovery = [LEFT, "settle", "end", "lost", FREED, "enter", "relaunch"]
    assert path == ["a", "b", *recovery, "b", *recovery, "b", "c"]
    quorum.enter()
    assert path[-2:] == ["enter", "free, reusable: True"]


def test_an_action_that_survivors_may_be_done_with_is_not_done_again():
    path = []
    quorum_of(path).run(acts(path, "a", times=1), acts(path, "b"), again=False)
    assert path == ["a", LEFT, "settle", "end", "lost", FREED, "enter", "relaunch", "b"]


def test_a_loss_in_a_job_or_on_the_way_in_changes_nothing_of_the_order():
    path = []
    quorum = quorum_of(path, lost_in=(2, 3), job_fails=True)
    quorum.run(acts(path, "a", times=1))
    again = ["lost", FREED, "enter"]
    on_the_way = [LEFT + " on the way in", *again] * 2
    assert path == ["a", LEFT, "settle", "settle", "end", *again, *on_the_way, "relaunch", "a"]
    assert quorum.generation.number == 4
    path.clear()
    quorum.membership.lost_in, quorum.membership.lost = [5], Mock(side_effect=RankFailure("nobody is left"))
    for act in quorum.enter, partial(quorum.run, acts(path, "b", times=1)):
        with pytest.raises(RankFailure):
            act()
    assert path == ["enter", *on_the_way[:1], FREED, "b"]


@pytest.mark.parametrize("raises", [True, False])
def test_where_the_membership_is_fixed_a_loss_ends_all_that_is_under_way_and_the_loop(raises):
    path = []
    quorum = quorum_of(path, is_fixed=True)
    if raises:
        with pytest.raises(RankFailure, match="lost"):
            quorum.run(acts(path, "a", times=1), acts(path, "b"))
    else:
        quorum.run(acts(path, "a", times=1), acts(path, "b"), raises=False)
    assert path == ["a", "settle", "end"]
    with pytest.raises(RankFailure):
        quorum.run(acts(path, "c", times=1))
    assert path == ["a", "settle", "end", "c"]


@pytest.mark.law("nothing-given-outlives-the-next-round")
def test_of_a_welcome_only_what_has_landed_is_replaced():
    given = {"num_rounds": 1, "agreed": {"weights": "old", "buffers": "old"}}
    now = {"num_rounds": 2, "agreed": {"weights": "new", "buffers": "new"}}
    welcome = Welcome(position=8, began=6, due=(), fragments=(given, given), changes={})
    assert welcome.after_landing(1, now, ()) == replace(welcome, fragments=(given, now))
    mixed = {"num_rounds": 2, "agreed": {"weights": "old", "buffers": "new"}}
    assert welcome.after_landing(0, now, ("buffers",)) == replace(welcome, fragments=(mixed, given))


def test_a_loop_that_is_dropped_gives_its_memory_back_at_once():
    """Without a pass of the garbage collector, which knows nothing of a GPU's memory."""
    outer = OuterLoop(nn.Linear(2, 2), diloco(1), membership=Members(path := [], False))
    outer.step()
    assert path == ["enter"]  # nobody waits to join
    rounds = weakref.ref(outer._rounds)
    gc.disable()
    try:
        outer.detach()
        del outer
        assert rounds() is None
    finally:
        gc.enable()


def test_a_loss_is_caught_in_one_place():
    paths = [*OUTER.glob("*.py"), *(OUTER.parent / "members").glob("*.py")]
    assert [path.name for path in paths for _ in path.read_text().split("except RankFailure")[1:]] == ["quorum.py"]
    assert not [path.name for path in paths if "suppress(RankFailure" in path.read_text()]
