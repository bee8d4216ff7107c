# SPDX-License-Identifier: Apache-2.0
"""Many members of an elastic run at an address: what they wait for does not grow with them, and nothing gets lost."""

import itertools
import time

import pytest

from farflung.address.member_store import DONE, LauncherNotes, MemberStore, Post, Record, encode
from farflung.address.object_group import ObjectTransport
from farflung.base.errors import RankFailure
from farflung.base.events import Kind
from farflung.members.elastic import Elastic
from farflung.members.settlement import await_ready, settle
from tests.memory_bucket import MemoryBoard, memory_board
from tests.outer.storm import STOPS, Storm, storm
from tests.outer.test_elastic_laws import Members, needs, settled
from tests.virtual_time import virtual_time

ROUND_S = 30.0


def two_rounds(num_members, *kinds):
    """How long two rounds take, in the first of which something befalls members while they train."""
    with virtual_time() as clock:
        run = Storm(clock, num_members)
        run.until(lambda: len(run.landings) == num_members, 200.0)
        time.sleep(ROUND_S / 2)
        for kind in kinds:
            run.befall(kind)
        run.until(lambda: len(run.rounds()) == 3, 400.0)
        before, _, after = run.rounds()
        run.finish()
        return after - before


@pytest.mark.parametrize("kind", ["kill", "join"])
def test_what_befalls_one_of_24_members_costs_what_it_costs_among_4(kind):
    assert two_rounds(24, kind) < two_rounds(4, kind) + 1.0


def test_12_newcomers_cost_the_others_what_one_costs():
    assert two_rounds(12, *["join"] * 12) < two_rounds(12, "join") + 1.0


def test_of_two_that_do_not_come_each_has_the_grace_however_long_rounds_are():
    assert two_rounds(4, "kill", "stop") < 2 * ROUND_S + 15.0


def test_a_newcomer_comes_in_with_the_round_that_a_member_misses():
    with virtual_time() as clock:
        run = Storm(clock, 4)
        run.until(lambda: len(run.landings) == 4, 200.0)
        last = max(run.there)
        newcomer = run.start()
        run.until(lambda: len(run.rounds()) == 2, 100.0)  # which has shown that it waits
        run.there[last].stopped_until = clock.now + ROUND_S + STOPS * run.grace_s
        run.until(lambda: len(run.rounds()) == 3, 100.0)
        run.finish()
        assert any(f"{run.notes.name_of(last)} is out" in str(event) for _, event in run.events)
        assert newcomer in run.ends
        assert last not in run.ends


def test_the_state_is_sent_on_to_a_newcomer_when_a_member_is_lost_in_a_round():
    with virtual_time() as clock:
        run = Storm(clock, 4, late_s=0.05)
        run.until(lambda: len(run.landings) == 4, 200.0)
        lost = max(run.there)
        newcomer = run.start()
        time.sleep(ROUND_S / 2)
        run.there.pop(lost).is_dead = True
        run.until(lambda: len(run.rounds()) == 4, 150.0)  # the second has begun to send it
        run.finish()
        first = min(position for _, member, position in run.landings if member == newcomer)
        assert first == 4 * run.every


def test_nobody_comes_in_where_no_member_has_data_any_more():
    with virtual_time() as clock:
        run = Storm(clock, 2, grace_s=2 * ROUND_S)
        run.until(lambda: len(run.landings) == 2, 200.0)
        run.without_data |= {*run.there}
        newcomer = run.start()
        run.until(lambda: len(run.ends) == 2, 100.0)
        assert len(run.rounds()) == 2  # which has shown that it waits
        run.finish()
        assert "The run has ended" in str(run.errors[newcomer])


@pytest.mark.parametrize("giver_has_data", [False, True])
def test_a_newcomer_comes_in_while_a_member_without_data_waits_for_the_others(giver_has_data):
    with virtual_time() as clock:
        run = Storm(clock, 3, grace_s=2 * ROUND_S)
        run.until(lambda: len(run.landings) == 3, 200.0)
        run.without_data.add((max if giver_has_data else min)(run.there))
        newcomer = run.start()
        run.until(lambda: newcomer in {member for _, member, _ in run.landings}, 200.0)
        run.finish()
        kinds = [event.kind for _, event in run.events if event.kind is not Kind.WAITS]
        assert kinds == [Kind.BEGAN, Kind.JOINED]
        assert min(position for _, member, position in run.landings if member == newcomer) == 4 * run.every


def test_one_that_waits_for_admission_asks_of_one_member_whether_it_lives():
    with virtual_time() as clock:
        run = Storm(clock, 24, step_s=10.0)
        run.until(lambda: len(run.landings) == 24, 200.0)
        time.sleep(10.0)
        run.befall("join")
        time.sleep(10.0)
        run.board.counts.clear()
        time.sleep(20.0)
        assert run.board.counts["read"] < 20 * 25, run.board.counts
        run.finish()


@pytest.mark.parametrize("lists", ["at once", "late"])
def test_nobody_begins_without_one_whose_work_is_done_whenever_that_is_recorded(monkeypatch, lists):
    ask, find_names = MemoryBoard.ask, MemoryBoard.find_names

    def found_late(board, folder, found):
        is_all = find_names(board, folder, found)
        found[:] = [name for name in found if "left/" not in name]
        return is_all

    if lists == "late":
        monkeypatch.setattr(MemoryBoard, "find_names", found_late)
    with virtual_time():
        for instant in range(40):
            board = memory_board()
            transport, notes = ObjectTransport(board, "memory"), LauncherNotes(board)
            last, left_out = notes.enroll("the last one"), notes.enroll("left out before")
            record = Record(2, last, (last,), lost={left_out: "it was late"}, began=1)
            MemberStore(board.part("loop1")).board.put("generation/2", encode(record))
            member = Elastic(transport, left_out, grace_s=4.0)
            num_requests = itertools.count()

            def counted(board, *args, instant=instant, last=last, notes=notes, num_requests=num_requests):
                if next(num_requests) == instant:
                    notes.leave_loop("loop1", last, DONE)
                return ask(board, *args)

            with monkeypatch.context() as patch:
                patch.setattr(MemoryBoard, "ask", counted)
                with pytest.raises(RankFailure, match="The run has ended"):
                    member._admission.ask(True, "{}", needs())
        assert next(num_requests) > instant  # all of its looks, and more than one of them, were tried


@pytest.mark.long
@pytest.mark.law("acts-end-alike")
@pytest.mark.parametrize(("every_s", "least"), [(1.0, 1), (10.0, 4)])
def test_in_a_storm_no_step_is_lost_or_counted_twice_and_all_end_alike(every_s, least):
    with virtual_time() as clock:
        run, rounds = storm(clock, 200.0, every_s, num_members=16)
        run.finish()
        assert len(rounds) > least
        assert run.num_refused


def test_one_that_looks_for_posts_that_the_others_have_decided_on_and_forgotten_follows_them(monkeypatch):
    members = Members(Record(1, 1, (1, 2, 3)))
    later = Record(2, 2, (1, 2, 3))
    for one in later.ids:
        members.notes.note_end(one, "was killed by SIGKILL")

    def all_put(store, *_):
        if members.board.append(later):
            members.board.forget_before(2)
        return True

    monkeypatch.setattr(MemberStore, "all_put", all_put)
    assert settled(members.member(1), True) == later


def test_one_that_has_not_come_out_of_a_generation_has_the_grace_alone():
    members = Members(Record(1, 1, (1, 2)))
    peers = members.member(1).peers
    peers.expect_round(100.0)
    assert peers.causes({2: 1.0}) == {2: ""}
    assert peers.causes({2: 1.0}, trains=False) == {2: "it did not come within 1 s"}


def test_one_that_does_not_come_into_a_generation_has_the_grace_once():
    with virtual_time() as clock:
        transport = ObjectTransport(memory_board(), "memory")
        peers = Elastic(transport, 1, grace_s=4.0).peers
        peers.record = Record(1, 1, (1, 2))
        assert peers.members.append(peers.record)
        with pytest.raises(RankFailure, match="member 2: it did not come within"):
            await_ready(peers, 1, peers.record)
        missed_at = clock.now
        assert settle(peers, 1, Post(1, True), trains=False).ids == (1,)
        assert clock.now < missed_at + peers.grace_s
