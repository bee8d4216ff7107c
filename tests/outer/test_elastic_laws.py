# SPDX-License-Identifier: Apache-2.0
"""What members decide in one store, without processes: who may give state, who is let in, and how each wait ends."""

import signal
import threading
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from farflung.address import c10d_transport, member_store
from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import Ask, LauncherNotes, MemberStore, Post, Record, encode
from farflung.address.transport import Entered
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import Event, Kind
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.members import admission, settlement, transfers as transfers_module
from farflung.members.elastic import Elastic
from farflung.members.generation_watch import GenerationWatch
from farflung.members.peers import Peers, description_of, other_versions, unlike, unlike_tensors
from farflung.members.settlement import _late_facts, await_ready, settle
from farflung.members.transfers import Transfers
from farflung.outer import diloco
from farflung.testing.patience import patience
from farflung.votes.ballot import odd_among
from farflung.votes.generation import Needs
from tests.errors import error_of
from tests.faults import stop
from tests.outer.elastic_run import EVERY, ElasticRun, served, wrong
from tests.waits import until

GRACE_S = 0.1
TENSORS = ("weight float32 [2, 3]",)


def needs(has_state=False, description="Every(every=4), Identity(), 1 fragment", tensors=TENSORS, admits=False):
    asks = {"settings": [description.split(", ")], "could": tensors}
    return Needs((), False, False, description, tensors, 1, admits, has_state, lambda is_whole: {}, **asks)


class Members:
    """Members of a run, as objects on threads over one store; those of `record` have come to it."""

    def __init__(self, record=None, ready=()):
        self.transport = C10dTransport(served())
        self.notes = LauncherNotes(self.transport.board)
        self.board = MemberStore(self.transport.board.part("loop1"))
        self.record = record
        if record is not None:
            self.board.board.put("generation/0", b"forgotten")  # as were those before it
            self.board.board.put(f"generation/{record.number}", encode(record))
            for one in ready:
                self.board.put(record.number, "ready", one)

    def member(self, number, **options):
        made = Elastic(self.transport, number, grace_s=GRACE_S, **options)
        if self.record is not None and number in self.record.ids:
            made.peers.record = self.record
        return made

    def runs(self, act):
        """Call `act` on a thread; return a function that waits for it and returns its result."""
        future = Future()

        def run():
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return partial(future.result, 60)

    def told(self, words):
        """Wait until a line was told."""
        lines = []

        def is_told():
            lines.extend(map(str, self.notes.receive()))
            return any(words in line for line in lines)

        until(is_told, lambda: str(lines))


def settled(member, has_state):
    return settle(member.peers, member.member, Post(1, has_state))


def asked(member, needed=None):
    """Ask to be admitted as one that has nothing; return the generation that it is in then."""
    needed = needed or needs()
    return member._admission.ask(False, member._description(needed), needed)


@pytest.mark.law("no-member-without-state-gives-state")
@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize("end", ["it comes", "it has ended", "nobody hears of it"])
def test_newcomers_wait_for_the_one_that_alone_has_state(end):
    members = Members(Record(2, 1, (1, 2, 3), newcomers=(2, 3)), ready=(1, 2, 3))
    results = [members.runs(lambda one=one: settled(members.member(one), False)) for one in (2, 3)]
    missing = "no other replica has the trained state (member 1: it did not come within"
    members.told(f"member 2, member 3 can't begin: {missing}")
    if end == "it comes":
        assert settled(members.member(1), True).ids == (1,)
        assert [result().ids for result in results] == [(1,), (1,)]
        members.told("generation 3: 1 replica connected again (members were lost)")
    elif end == "it has ended":
        members.notes.note_end(1, "was killed by SIGKILL")
        assert [(result().ids, result().is_fresh) for result in results] == [((2, 3), True)] * 2
        members.told("training begins again with 2 replicas")
    else:
        for result in results:
            with pytest.raises(RankFailure, match="Training from the beginning would lose it"):
                result()


@pytest.mark.law("no-member-without-state-gives-state")
def test_members_of_a_first_generation_that_never_came_are_not_waited_for():
    assert settled(Members(Record(1, 1, (1, 2), began=1), ready=(2,)).member(2), False).ids == (2,)


@pytest.mark.law("no-two-different-rounds-of-a-number")
@pytest.mark.law("no-member-without-state-gives-state")
@pytest.mark.parametrize("who_has_state", [(1, 2, 3), (2,)])
def test_one_that_has_ended_after_its_report_is_left_out_and_its_report_does_not_count(who_has_state):
    members = Members(Record(1, 1, (1, 2, 3), began=1), ready=(1, 2, 3))
    for one, complete in ((2, {0: 4}), (3, {0: 2})):
        members.board.put(1, "post", one, encode(Post(1, one in who_has_state, complete)).decode())
    members.notes.note_end(2, "was killed by SIGKILL")
    mine = Post(1, 1 in who_has_state, {0: 3})
    new = settle(members.member(1).peers, 1, mine)
    assert (new.ids, new.lost, new.common) == ((1, 3), {2: "was killed by SIGKILL"}, {0: 2})
    assert new.is_fresh is (who_has_state == (2,))


@pytest.mark.parametrize("is_alive", [True, False])
def test_who_asks_while_another_one_begins_waits_for_it_if_its_launcher_looks_after_it(is_alive, monkeypatch):
    monkeypatch.setattr(admission, "_ASK_S", 0.05)
    members = Members(Record(1, 1, (1,), began=1))
    if is_alive:
        members.notes.put("machine", 1, "node1:7")
        members.notes.beat("node1:7", 600.0)
    result = members.runs(lambda: asked(Elastic(members.transport, 2, grace_s=600.0)))
    if is_alive:
        until(members.board.asks)
        members.board.close(*members.board.asks())  # as if it had been in a generation that it has not seen
        until(members.board.asks)
        assert members.board.append(Record(2, 1, (1, 2), (2,)))
    assert result().ids == ((1, 2) if is_alive else (2,))


@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize("launcher", ["none", "dead"])
def test_who_asks_members_of_whom_nothing_is_heard_ends_with_a_sentence(launcher):
    members = Members(Record(1, 1, (1,)))
    why = "no launcher looks after it, so it is unknown whether it is alive"
    if launcher == "dead":
        members.notes.put("machine", 1, "node1:7")
        why = "its machine gave no sign for"
    result = members.runs(lambda: asked(members.member(2)))
    members.told(f"member 2 waits: no other replica has the trained state (member 1: {why}")
    with pytest.raises(RankFailure, match=f"No replica with the trained state has come for .*: {why}"):
        result()


@pytest.mark.law("no-member-without-state-gives-state")
def test_of_those_that_begin_without_the_members_the_one_with_the_newest_state_gives_it(monkeypatch):
    monkeypatch.setattr(admission, "_ASK_S", 0.05)
    members = Members(Record(7, 1, (1,)))
    members.notes.note_end(1, "was killed by SIGKILL")
    for one, last, has_state in ((2, 3, True), (3, 0, False), (4, 6, True)):
        members.board.ask(Ask(one, last, has_state, members.member(one)._description(needs())))
    members.notes.put("stopped", 4)
    result = members.runs(lambda: asked(members.member(5)))
    members.told("member 5 waits: no other replica has the trained state (member 4: its process is stopped)")
    members.notes.forget(4, "stopped")
    assert (result().ids[0], set(result().newcomers)) == (4, {2, 3, 5})
    assert not members.board.asks()


def test_no_more_replicas_begin_than_the_run_may_have():
    members = Members()
    first = Elastic(members.transport, 1, grace_s=GRACE_S, expected=2, most=2)
    for one in (2, 3):
        members.board.ask(Ask(one, 0, False, first._description(needs())))
    assert members.runs(lambda: asked(first))().ids == (1, 2)


def test_where_more_replicas_train_than_may_nobody_is_let_in():
    members = Members(Record(1, 1, (1, 2)), ready=(1,))
    member = members.member(1, most=1)
    for one in (3, 4, 5):
        members.board.mark_ready(members.board.ask(Ask(one, 0, False, member._description(needs()))))
    assert not member.is_awaited(needs(True))
    assert member._next(needs(True, admits=True)).ids == (1, 2)


def test_members_admit_those_that_are_alive_and_drop_the_questions_of_others():
    members = Members(Record(3, 1, (1, 2, 3)))
    member = members.member(1)
    for one, last in ((2, 2), (3, 3), (4, 0), (5, 0), (6, 0)):  # 2 had asked before it came in, 3 can't continue
        members.board.ask(Ask(one, last, False, member._description(needs())))
    members.notes.note_end(4, "was killed by SIGKILL")
    members.notes.put("stopped", 5)
    waiting = member._admission.waiting(members.record, member._description(needs()), needs(True))
    assert [one.member for one in waiting.values()] == [6]
    assert {one.member for one in members.board.asks().values()} == {3, 5, 6}


@pytest.mark.law("a-newcomer-stops-nobody")
def test_one_that_is_not_like_the_members_is_not_let_in_and_one_with_other_versions_is(caplog):
    members = Members(Record(1, 1, (1,)), ready=(1,))
    member = members.member(1)
    wrong_one = needs(description="Every(every=8), Identity(), 1 fragment", tensors=("weight float32 [2, 4]",))
    results = [members.runs(lambda: asked(members.member(2), wrong_one))]
    other = members.member(3)
    other._versions = {**other._versions, "torch": "2.6.0"}
    results.append(members.runs(lambda: asked(other)))
    until(lambda: len(members.board.asks()) == 2)
    assert member.is_awaited(needs(True))
    assert member._next(needs(True, admits=True)).ids == (1, 3)
    why = (
        r"its outer loop is Every\(every=8\); the run's is Every\(every=4\); it alone has weight float32 \[2, 4\]; the "
        r"run alone has weight float32 \[2, 3\]"
    )
    with pytest.raises(ConfigError, match=why):
        results[0]()
    assert results[1]().newcomers == (3,)
    assert "This replica differs from those that it has joined: torch: '2.6.0' instead of" in caplog.text
    members.told("member 2 is not let in: its outer loop is Every(every=8)")


def test_one_that_is_late_again_and_again_hears_what_helps_and_waits_longer():
    peers = Members(Record(1, 1, (1, 2))).member(1).peers
    assert [_late_facts(peers, 2) for _ in range(3)][1:] == [{"num_lates": n, "pause_s": 2.0**n} for n in (2, 3)]
    event = Event.now(Kind.LOST, "member 2", 2, why="late", has_state=True, replicas=1, **_late_facts(peers, 2))
    assert "late 4 times so far: rounds by time, such as diloco(seconds=...)" in str(event)
    assert "it asks again in 16 s" in str(event)


def test_without_a_grace_given_it_follows_from_the_rounds():
    peers = Peers(Members().transport, "loop1", None)
    assert peers.grace_s == 30.0
    peers.expect_round(100.0)
    assert peers.grace_s == 200.0
    peers.record, peers.is_admitting = Record(1, 1, (1, 2), newcomers=(2,)), True
    assert [peers.limit_s(one) for one in (1, 2)] == [200.0, 5.0]
    assert [peers.cause(2, waited_s) for waited_s in (4.9, 5.1)] == ["", "it did not come within 5.1 s"]
    peers.note_round()
    assert (peers.grace_s, peers.limit_s(2)) == (30.0, 30.0)
    peers._last_round_at -= 100.0
    peers.note_round()
    assert peers.grace_s >= 200.0


def test_one_that_is_late_may_take_as_long_as_a_round_more_unless_it_is_stopped():
    members = Members(Record(1, 1, (1, 2)))
    peers = members.member(1).peers
    peers.expect_round(4.0)
    assert [peers.cause(2, waited_s) for waited_s in (4.0, 4.2)] == ["", "it did not come within 4.2 s"]
    members.notes.put("stopped", 2)
    assert [peers.cause(2, waited_s) for waited_s in (0.0, 0.2)] == ["", "its process is stopped, and 100 ms are over"]
    peers.record, peers.is_admitting = Record(1, 1, (1, 2), newcomers=(2,)), True
    assert peers.limit_s(2) == GRACE_S


def test_only_the_first_differences_of_two_models_are_named():
    five = "it alone has a; it alone has b; the run alone has c; the run alone has d; the run alone has e"
    assert unlike_tensors("ba", "cde") == five
    assert unlike_tensors("ba", "fcde") == f"{five}; and 1 more"


def test_replicas_of_other_sizes_and_other_data_are_not_alike_and_other_scripts_are():
    mine = description_of(needs(), 1, ["2 files", "seed 0"], {"torch": "2.6.0", "script": "a.py"})
    other = description_of(needs(), 2, ["2 files", "seed 1"], {"torch": "2.7.0", "script": "a.py"})
    assert unlike(mine, mine) == other_versions(mine, mine) == ""
    assert unlike(other, mine) == (
        "its processes in a replica is 2; the run's is 1; its data is seed 1; the run's is seed 0"
    )
    assert other_versions(other, mine) == "torch: '2.7.0' instead of '2.6.0'"


@pytest.mark.parametrize(
    ("reason", "has_last", "writes"), [("", False, True), ("", True, False), ("an error", False, False)]
)
def test_the_next_member_writes_the_last_state_if_those_before_it_can_not(reason, has_last, writes):
    members = Members(record := Record(1, 1, (1, 2)))
    member = members.member(2)
    assert member._writes_last(SimpleNamespace(has_last=lambda number: has_last), record, reason) is writes


@pytest.mark.parametrize("odd", [(), (2,)])
def test_one_that_was_left_out_between_rounds_keeps_its_steps_unless_it_was_odd(odd):
    members = Members(Record(1, 1, (1, 2)))
    member = members.member(2)
    member.landed(needs(True), 1)
    assert members.board.append(Record(2, 1, (1,), odd=odd))
    member.lost(RankFailure("a wait is over"))
    assert member._is_unapplied is not bool(odd)
    members.runs(lambda: member._next(needs(True)))
    until(members.board.asks)
    assert [one.has_state for one in members.board.asks().values()] == [not odd]


def test_a_member_that_can_not_tell_a_newcomer_that_it_may_come_continues_and_reports_strangers(monkeypatch):
    members = Members(Record(1, 1, (1,)), ready=(1,))
    member = members.member(1)
    members.board.ask(Ask(2, 0, False, member._description(needs())))
    monkeypatch.setattr(MemberStore, "mark_ready", Mock(side_effect=Unreachable("no store")))
    monkeypatch.setattr(Transfers, "pause", pause := Mock())
    assert not member.is_awaited(needs(True))
    pause.assert_called_once_with()  # which leaves the line to the round
    monkeypatch.setattr(LauncherNotes, "strangers", lambda notes: [Event.now(Kind.REFUSED, message="a strange file")])
    member.landed(needs(True), 1)
    members.told("a strange file")


def test_the_odd_one_is_the_one_that_differs_from_most_and_of_two_the_later():
    assert [odd_among(digests) for digests in ([1, 1], [1, 2], [1, 2, 2], [3, 1, 1, 2])] == [[], [1], [0], [0, 3]]


# ---- on real ranks


@pytest.mark.long
@pytest.mark.law("a-newcomer-stops-nobody")
@pytest.mark.law("nothing-given-outlives-the-next-round")
def test_a_wrong_newcomer_a_damaged_one_and_one_that_hangs_cost_the_others_no_step(address):
    with ElasticRun(address=address, expected=2, grace_s=20.0) as run:
        there = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*there))
        unlike = run.start(2, recipe=diloco(2 * EVERY, lr=1.0, momentum=0.0))
        run.until(lambda: run.has_ended(unlike))
        assert any("replica 2 is not let in: its outer loop is" in event for event in run.events)
        hangs = run.start(3, dies=("admission", 1, stop))
        run.until(lambda: any("replica 3 is out: " in event and " 5 s" in event for event in run.events))
        damaged = run.start(4, damages=True)
        run.until(lambda: any("replica 4 is out: The replicas no longer agree on" in event for event in run.events))
        run.until(lambda: sum("replica 4 joined" in event for event in run.events) == 2)
        run.processes[hangs].kill()
        said = run.finish()
        assert not wrong([one for one in said if one["member"] in there])
        ends = {one["member"]: one["weight"] for one in said if "end" in one}
        assert ends.keys() == {*there, damaged}
        assert len(set(ends.values())) == 1


@pytest.mark.law("no-member-without-state-gives-state")
def test_a_newcomer_waits_for_a_stopped_member_that_alone_has_what_was_trained():
    with ElasticRun(expected=1, grace_s=1.0) as run:
        first = run.start(0)
        run.until(lambda: run.at(9))
        run.signal(first, signal.SIGSTOP)
        second = run.start(1)
        run.until(lambda: any("no other replica has the trained state" in event for event in run.events))
        run.signal(first, signal.SIGCONT)
        run.until(lambda: run.joined(second))
        assert not wrong(run.finish())


@pytest.mark.law("no-two-different-rounds-of-a-number")
@pytest.mark.parametrize(
    ("phase", "address"),
    [
        ("confirmation", "store"),
        ("landing", "folder"),
        *(pytest.param("landing", place, marks=pytest.mark.long) for place in ("store", "bucket")),
    ],
    indirect=["address"],
)
def test_of_two_replicas_one_that_stops_in_a_round_has_closed_no_other_one_than_its_peer(phase, address):
    with ElasticRun(address=address, expected=2, grace_s=patience(0.5)) as run:
        first, second = run.start(0), run.start(1, dies=(phase, 5, stop))
        run.lets_back(second, 1)
        said = run.finish()
        rounds = [
            {one["round"]: one["ranks"] for one in said if one["member"] == me and "round" in one}
            for me in (first, second)
        ]
        assert all(rounds[0][number] == ranks for number, ranks in rounds[1].items())
        assert not wrong([one for one in said if one["member"] == first])


def test_a_newcomer_is_sent_the_state_again_if_its_way_was_cut_until_it_has_all_or_asks_no_more(monkeypatch):
    peers, connects, made = Members(Record(1, 1, (1,))).member(1).peers, Mock(), []
    begun = [call.offer("all of it"), call.pause(), call.offer("a part")]

    def sender(connect):
        connect(bool)
        made.append(Mock(is_over=False, may_finish=False))
        return made[-1]

    monkeypatch.setattr(transfers_module, "StateSender", sender)
    transfers = Transfers(connects, peers, 1, SoloGroup(), Exchange(SoloGroup()), None)
    state = {True: "all of it", False: "the place"}.__getitem__
    assert transfers.serve([2, 3], state) == []
    transfers.pause()
    transfers.offer(lambda: "a part")
    made[0].is_over = made[1].may_finish = True
    assert transfers.serve([2, 3], state) == [3]
    assert [peers.members.transfer(one, 0) for one in (2, 3)] == [None, ("g1/t3.2", 1)]
    assert transfers.serve([2], state) == []
    keys = [f"g1/t{name}/c0/1" for name in ("2.1", "2.3", "2.30")]
    for key in keys:
        peers.members.board.put(key, b"values")
    peers.members.forget_before(2, transfers.names)
    assert [peers.members.board.get(key) is not None for key in keys] == [False, True, False]
    transfers.finish(Record(2, 1, (1, 3), newcomers=(3,)), state)
    transfers.close()
    ends = [call.stop(), call.join(1.0)]
    assert [one.mock_calls for one in made[:3]] == [[*begun, call.stop()]] * 2 + [[call.offer("all of it"), *ends]]
    assert made[3].mock_calls == [call.offer("all of it"), call.finish("the place"), *ends]
    names = [one.args[0] for one in connects.connect.call_args_list]
    assert names == [f"loop1/g1/t{one}.{number}/c0" for one, number in ((2, 1), (3, 2), (2, 3), (3, 4))]


def state_comes(waits, until_s, ends_at):
    """Wait for a newcomer, or as one, while more of a state comes until a time; return why that ends, and when."""
    members, record = Members(), Record(1, 1, (1, 2), newcomers=(2,))
    peers = Elastic(members.transport, 1 if waits is settlement else 2, grace_s=3.0).peers
    clock = SimpleNamespace(now=0, monotonic=lambda: clock.now)  # and what receives the state
    assert members.board.append(record)

    def sleep(_):
        clock.now += 1
        clock.num_bytes = min(clock.now, until_s)
        if waits is settlement:
            members.board.put(1, "progress", 2, str(clock.num_bytes))
        if clock.now == ends_at:
            members.board.append(Record(2, 1, (1,)))

    clock.sleep = clock.wait = sleep
    receive = Transfers(None, peers, 2, SoloGroup(), Exchange(SoloGroup()), None).receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "time", clock)
        wait = partial(await_ready, peers, 1) if waits is settlement else partial(receive, clock)
        why = error_of(RankFailure, wait, record)
    assert members.board.get(1, "progress", [2]) == {2: str(clock.num_bytes)}
    return why, clock.now


@pytest.mark.law("every-wait-has-an-end-and-a-line")
def test_a_wait_for_a_newcomer_or_its_giver_ends_a_grace_after_the_state_has_stopped_coming():
    giver = "member 1, which was to give the trained state"
    for waits, who in (settlement, "member 2"), (transfers_module, giver):
        assert state_comes(waits, 0, 99) == (f"{who}: it did not come within 4 s", 5)
        assert state_comes(waits, 9, 99) == (f"{who}: it did not come within 4 s", 13)
        assert state_comes(waits, 9, 8) == ("the others have entered a later generation", 8)


# ---- what ends a wait for another replica: the silence of its machine, values that do not come, and that it is late


def test_a_rank_that_can_not_look_ends_the_wait_of_its_whole_replica_and_one_that_has_all_returns_it():
    peers, record = Members(Record(1, 1, (1, 2))).member(2).peers, Record(1, 1, (1, 2), newcomers=(2,))
    transfers = Transfers(None, peers, 2, SoloGroup(), Exchange(SoloGroup()), None)
    assert transfers.receive(SimpleNamespace(wait=lambda seconds: True, state="all"), record) == "all"
    with pytest.raises(RankFailure, match="no store"):
        transfers.receive(SimpleNamespace(wait=Mock(side_effect=Unreachable("no store"))), record)


def test_a_member_that_was_left_out_meanwhile_serves_and_refuses_nobody():
    members = Members(Record(1, 1, (1, 2)))
    late, newcomer = members.member(1), members.member(3)
    name = members.board.ask(Ask(3, 0, False, newcomer._description(needs(description="of another recipe"))))
    assert members.board.append(Record(2, 2, (2,), lost={1: "it was late"}))
    assert not late.is_awaited(needs(True))
    assert members.board.transfer(3, 0) is None
    assert members.board.askers() == {name: (3, 0)}


def test_how_a_process_ended_stays_known_while_a_generation_names_it():
    members = Members(Record(1, 1, (1, 2)), ready=(1, 2))
    for one in (1, 2):
        members.notes.note_end(one, "was killed by SIGKILL")
        members.notes.forget(one)
    assert asked(members.member(3)).ids == (3,)


@pytest.fixture
def waiting():
    """A member that waits in a generation with another one, whose launcher has given a sign; and its watch."""
    peers = Peers(C10dTransport(served()), "loop1", 3.0)
    peers.notes.put("name", 2, "replica 1")
    peers.notes.put("machine", 2, "node1")
    peers.notes.beat("node1", 0.05)
    peers.record = record = Record(1, 1, (1, 2))
    assert peers.members.append(record)
    watch, place = GenerationWatch(peers, 1, SoloGroup(), record, 1.0), Entered("c0#7", 125_000)
    watch.look(place, 2.0)
    return peers, watch, lambda waited_s: watch.look(place, waited_s)


def test_who_waits_hears_of_an_end_though_the_request_that_asked_for_it_failed(waiting, monkeypatch):
    peers, _, look = waiting
    peers.notes.note_end(2, "was killed by SIGKILL")
    get, failures = LauncherNotes.get, [Unreachable("the store is away")]

    def failing(notes, what, member):
        if what == "gone" and failures:
            raise failures.pop()
        return get(notes, what, member)

    monkeypatch.setattr(LauncherNotes, "get", failing)
    look(2.0)
    with pytest.raises(RankFailure, match="replica 1: was killed by SIGKILL"):
        look(2.0)


def test_who_waits_for_a_machine_that_is_gone_hears_of_it_even_if_its_member_had_come(waiting, monkeypatch):
    monkeypatch.setattr(member_store, "_LEAST_LOST_S", 0.2)
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    time.sleep(0.3)
    peers.notes.beat("node1", 0.05)
    look(2.0)
    time.sleep(0.3)
    with pytest.raises(RankFailure, match="replica 1: its machine gave no sign for"):
        look(2.0)


def test_who_waits_for_values_that_do_not_come_gives_up_after_the_grace_and_their_time_on_a_slow_line(waiting):
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    look(3.9)  # at 1 Mbit/s they take a second
    with pytest.raises(RankFailure, match=r"no values came for 4\.1 s, though all wait for them"):
        look(4.1)


def test_a_line_that_was_faster_leaves_values_less_time_and_a_slower_one_more(waiting):
    peers, watch, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    watch.note_end(Entered("c0#5", 1_250_000), 20.0)
    look(22.9)
    watch.note_end(Entered("c0#5", 12_500_000), 1.0)  # 100 Mbit/s, so 10 times longer is 0.1 s
    watch.note_end(Entered("c0#6", 100), 1.0)  # says nothing of the line
    look(3.05)
    with pytest.raises(RankFailure, match="no values came"):
        look(3.15)


def test_a_line_is_as_fast_as_it_was_since_values_were_sent_and_not_since_they_are_waited_for(waiting, monkeypatch):
    peers, watch, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    now = [0.0]
    monkeypatch.setattr(c10d_transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    group = C10dTransport(served()).connect("c0", 0, 2, watch)
    sent = group.enter("all_gather", 12_500_000)
    now[0] = 10.0  # in which this rank waits for the values before these, on the same line
    with group.watching(sent):
        now[0] += 0.01
    look(3.9)  # at 1 Mbit/s they take a second
    with pytest.raises(RankFailure, match="no values came"):
        look(4.1)


def test_who_waits_for_one_that_is_elsewhere_gives_up_after_the_grace(waiting):
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#6")
    look(2.9)
    with pytest.raises(RankFailure, match="replica 1: late by more than 3 s"):
        look(3.1)
    assert peers.cause(2, 0.0) == ""  # it may have waited for a third one, and then it comes at once
    assert peers.cause(2, 2.1) == "it was late by more than 3 s"


def test_who_waits_hears_that_the_generation_is_over_and_why(waiting):
    peers, watch, look = waiting
    assert peers.members.get(1, "wait0", [1]) == {1: "c0#7"}
    peers.notes.note_end(2, "was killed by SIGKILL")
    look(0.9)
    for waited_s in (2.0, 0.1):  # the first tells the others
        assert "replica 1: was killed by SIGKILL" in error_of(RankFailure, look, waited_s)
    assert watch.break_off("it sent a text", 1).why == {2: "it sent a text"}


def test_who_waits_while_the_others_are_in_a_later_generation_hears_of_it(waiting):
    peers, _, look = waiting
    assert peers.members.append(Record(2, 2, (2,)))
    assert "the others have entered a later generation" in error_of(RankFailure, look, 2.0)


def test_who_waits_without_a_store_ends_after_the_grace_or_at_once_if_values_go_through_it(waiting):
    peers, _, look = waiting
    for is_gone, peers.needs_store, end_s in (False, True, 4.1), (True, False, 4.1), (True, True, 1.5):
        peers.members_soon = Mock(**{"broken.side_effect": Unreachable("no store", is_gone)})
        look(3.9) if end_s > 3.9 else None
        assert f"no values came for {end_s} s. no store" in error_of(RankFailure, look, end_s)
