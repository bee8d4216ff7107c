# SPDX-License-Identifier: Apache-2.0
"""What ranks publish for each other: how those of a machine are named, and why one has left."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from farflung.base.causes import Cause
from farflung.comm import presence
from farflung.comm.presence import PresenceStore


def gone():
    raise dist.DistNetworkError("no store")


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def ranks(store, monkeypatch):
    """What four ranks publish for each other."""
    monkeypatch.setattr(presence, "default_store", lambda: store)
    for name, seconds in (("_ALIVE_WAIT_S", 0.02), ("_AGREE_WAIT_S", 0.1), ("REPORT_S", 0.1)):
        monkeypatch.setattr(presence, name, seconds)
    return [PresenceStore("left", rank, 4) for rank in range(4)]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["a 10.0.0.1", "a 10.0.0.1", "a 10.0.0.1"], "ranks 0, 1 and 2"),
        (["a 10.0.0.1", "b 10.0.0.2", "b 10.0.0.2"], "rank 0 on a and ranks 1 and 2 on b"),
        (["ubuntu 10.0.0.1", "ubuntu 10.0.0.2", "b "], "rank 0 on ubuntu (10.0.0.1) and rank 1 on ubuntu (10.0.0.2)"),
    ],
)
def test_machines_of_one_name_are_told_apart_by_their_addresses(hosts, said):
    store = SimpleNamespace(hosts=dict(enumerate(hosts)), size=3)
    assert PresenceStore.describe(store, range(3)).startswith(said)


@pytest.mark.parametrize(
    ("left", "described"),
    [
        ([("ValueError: a", Cause.OWN), ("b", Cause.PEER), ("c", Cause.LATE)], "rank 1 left (ValueError: a)"),
        ([("RankFailureOfMine: a", Cause.OWN), ("Rank 1 is lost", Cause.PEER)], "rank 1 left (RankFailureOfMine: a)"),
        ([("a", Cause.PEER), ("b", Cause.LATE)], "rank 1 left (a); rank 2 left (b)"),
        ([("a", Cause.OWN), ("b", Cause.FAULT)], "rank 1 left (a); rank 2 left (b)"),
        ([], ""),
    ],
)
def test_ranks_that_left_because_others_had_are_not_named_beside_them(left, described, ranks):
    for rank, (reason, cause) in enumerate(left, 1):
        ranks[rank].mark_left(reason, cause)
    assert ranks[0].describe_left() == described


def test_who_has_left_more_often_than_a_rank_is_named_to_it_and_what_all_have_read_is_deleted(ranks, store):
    first, second, *others = ranks
    second.mark_left("to come back")
    first.mark_left("as it did")
    store.set("closed/1", "here")
    assert first.describe_left() == ""
    assert others[0].describe_left() == "rank 0 left (as it did); rank 1 left (to come back)"
    second.mark_left("for good")
    for _ in range(2):  # in vain until all have left once
        second.forget(["closed"])
        for one in others:
            one.mark_left("last")
    assert first.describe_left() == "rank 1 left (for good); rank 2 left (last); rank 3 left (last)"
    first.mark_ended()
    assert (second.ended([0, 2]), first.ended([0, 1]), store.check(["closed/1"])) == ([0], [], False)


def test_a_question_has_one_answer_and_the_first_mismatch_stays(ranks):
    ranks[0].answer_to("call", 7, 2, "all")
    asked = [(1, 7), (2, 6), (2, 7), (2, 7)]
    assert [ranks[rank].answer("call", number) for rank, number in asked] == [None, None, "all", None]
    assert not ranks[0].has_alarm()
    for rank, text in enumerate(("one", "another"), 1):
        ranks[rank].publish_mismatch(text)
    assert (ranks[0].published("mismatch"), ranks[0].asked(), ranks[0].has_alarm()) == ("one", 1, True)


def test_of_a_broken_group_those_are_named_that_gave_no_sign_or_are_known_to_be_late(ranks):
    first, second, third, fourth = ranks
    second.post("", "alive")
    silent = "ranks 2 and 3 sent no heartbeat for 0.02 s"
    assert first.check_alive(set) == f"{silent}, so the process died, has ended or is busy elsewhere"
    assert (second.has_alarm(), second.posts("alive")) == (True, {0: "", 1: ""})
    assert first.check_alive(lambda: {1, 3}).startswith(f"rank 3{silent[13:]} and the connection is closed")
    third.post("", "alive")
    fourth.mark_overdue()
    assert first.check_alive(set).startswith("every rank is alive")  # no report has come
    third.publish_hang("rank 1 is late")
    assert (first.check_alive(set), first.published("signal")) == ("rank 1 is late", "")


def test_the_smallest_number_is_agreed_on_by_those_that_live_and_without_a_store_by_each(ranks, monkeypatch):
    assert [ranks[rank].agree_min(number, "votes") for rank, number in ((1, 5), (2, 3), (0, 4))] == [5, 3, 3]
    ranks[1].forget([])
    assert ranks[0].posts("agree_min", "votes") == {0: "4", 2: "3"}
    monkeypatch.setattr(presence, "default_store", gone)
    told = "ranks 1, 2 and 3 can't be asked, as the run's store is gone too"
    assert ranks[0].check_alive(set).startswith(told)
    ranks[0].mark_left("nobody hears it")
    ranks[0].mark_overdue()
    assert (ranks[0].agree_min(7, "votes"), ranks[0].has_alarm(), ranks[0].published("hang")) == (7, False, "")
