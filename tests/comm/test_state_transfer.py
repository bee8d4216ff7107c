# SPDX-License-Identifier: Apache-2.0
"""A state goes from one rank to another while it changes; what has the same bits goes once."""

import io
import json
import re
import sys
import threading
import time
from unittest import mock

import pytest
import torch

from farflung.address import state_transfer
from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import Heartbeats, LauncherNotes
from farflung.address.state_transfer import StateReceiver, StateSender, TransferWatch
from farflung.base import bars
from farflung.base.errors import RankFailure, Unreachable
from farflung.comm.group import Done, Group
from farflung.testing.patience import patience
from tests.outer.elastic_run import served
from tests.waits import until

LARGE = 3_000_000


class Pair:
    """A sender and a receiver, members 1 and 2 of a run."""

    def __init__(self, have=dict, **how):
        self.transport = C10dTransport(served())
        self.notes = LauncherNotes(self.transport.board)
        self.found, self.groups = ("g1/t2.1", 1), []
        self.sender = self.sends("g1/t2.1")
        self.outages = [Unreachable("the store is away")]
        self.receiver = StateReceiver(self.find, lambda name, giver, over: self.group(name, 1, over), 0.01, have, **how)

    def find(self):
        if self.outages:
            raise self.outages.pop()
        return self.found

    def sends(self, name):
        return StateSender(lambda over: self.group(name, 0, over))

    def group(self, name, rank, is_over):
        group = self.transport.connect(name, rank, 2, TransferWatch(Heartbeats(self.notes), 2 - rank, is_over))
        group.free = mock.Mock(wraps=group.free)
        self.groups.append(group)
        return group


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def paired(monkeypatch):
    """Make pairs, which end with the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    pairs = []

    def paired(*have, **how):
        pairs.append(Pair(*have, **how))
        return pairs[-1]

    yield paired
    for pair in pairs:
        pair.sender.stop()
        pair.sender.join(20)
        pair.receiver.stop(20)
        pair.transport.close()
    assert not {"send a state", "receive a state"} & {thread.name for thread in threading.enumerate()}


@pytest.fixture
def pair(paired):
    return paired()


def test_what_the_receiver_has_from_elsewhere_is_not_sent_again(paired):
    same, old, new = torch.arange(LARGE, dtype=torch.float32), torch.zeros(7), torch.ones(7)
    pair = paired(lambda: {"0.same": same, "0.other": old})
    pair.sender.offer({"0": {"same": same.clone(), "other": new}})
    pair.sender.finish({"1": {"same": torch.ones(3)}})
    assert pair.receiver.wait(patience(60))
    state = pair.receiver.state
    assert state["0"]["same"] is same
    assert (state["0"]["other"].tolist(), state["1"]["same"].tolist()) == ([1.0] * 7, [1.0] * 3)
    assert pair.receiver.num_bytes == 40


def test_a_receiver_follows_a_later_transfer_though_the_member_that_began_one_lives_on(pair):
    until(lambda: pair.receiver.num_bytes == 0 and len(pair.groups) == 2)  # the first one sends nothing
    other = pair.sends("g2/t2.1")
    pair.found = "g2/t2.1", 1
    other.offer({"a": torch.ones(3)})
    other.finish({})
    assert pair.receiver.wait(patience(60))
    assert pair.receiver.state["a"].tolist() == [1.0] * 3


def test_trees_of_tensors_numbers_and_texts_arrive_as_they_are(pair):
    tree = {
        0: {"betas": (0.9, 0.95), "lr": 0.1, "name": "sgd", "on": True, "none": None, "nan": [float("inf")]},
        "bf16": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "rest": [torch.tensor(7), torch.empty(0), torch.tensor([True, False]), torch.arange(9).view(3, 3).t()],
    }
    pair.sender.offer({"first": tree})
    pair.sender.finish({"place": {"position": 8}})
    until(lambda: pair.receiver.wait(0.1))
    found = pair.receiver.state["first"]
    assert pair.receiver.state["place"] == {"position": 8}
    assert found[0] == tree[0]
    assert type(found[0]["betas"]) is tuple
    for mine, its in zip([found["bf16"], *found["rest"]], [tree["bf16"], *tree["rest"]], strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


def test_what_has_changed_meanwhile_comes_again_and_nothing_else(pair):
    still, moves = torch.zeros(LARGE), torch.zeros(10)
    pair.sender.offer({"a": {"still": still.clone(), "moves": moves.clone()}})
    until(lambda: pair.sender.may_finish and pair.receiver.num_bytes == still.nbytes + moves.nbytes)
    moves[1], moves[3] = 2, 1
    pair.sender.offer({"a": {"still": still.clone(), "moves": moves.clone()}})
    moves[[1, 3]] = moves[[3, 1]]  # the same values in other places
    pair.sender.finish({"a": {"still": still.clone(), "moves": moves.clone()}})
    until(lambda: pair.receiver.wait(0.1))
    assert torch.equal(pair.receiver.state["a"]["moves"], moves)
    assert still.nbytes < pair.receiver.num_bytes <= still.nbytes + 3 * moves.nbytes


def test_a_sender_that_pauses_leaves_the_line_alone_until_the_next_offer(pair):
    pair.sender.pause()
    pair.sender.offer({"a": torch.zeros(10)})  # which ends a pause
    until(lambda: pair.receiver.num_bytes == 40)
    assert pair.sender.may_finish
    pair.sender.offer({"b": torch.zeros(20 * LARGE)})
    assert not pair.sender.may_finish
    pair.sender.pause()
    before = -1
    while before != pair.receiver.num_bytes:  # some of it is on its way
        before = pair.receiver.num_bytes
        time.sleep(0.5)
    assert before < 40 + 80 * LARGE
    pair.sender.finish({})
    until(lambda: pair.receiver.wait(0.1))
    assert pair.receiver.num_bytes == 40 + 80 * LARGE


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_terminal_shows_how_much_has_come_of_all_that_is_left(is_shown, paired, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "_PATIENCE_S", 0)
    monkeypatch.setattr(bars, "_REDRAW_S", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    pair = paired(is_shown=is_shown)
    pair.sender.offer({"a": torch.zeros(LARGE), "b": torch.zeros(LARGE)})
    until(lambda: pair.receiver.num_bytes == 8 * LARGE)
    pair.sender.finish({"a": torch.ones(LARGE)})  # comes again
    until(lambda: pair.receiver.wait(0.1))
    pair.sender.join(20)
    pair.receiver.stop(20)
    said = re.findall(r"Receiving the trained state.*?([\d.]+)/([\d.]+) MB", terminal.getvalue())
    assert {("24.0", "24.0"), ("36.0", "36.0")} <= {*said} if is_shown else terminal.getvalue() == ""


class Line(Group):
    """A line to a receiver that has nothing, on which nothing moves while it is `shut`."""

    rank, size, all_gather = 0, 2, None

    def __init__(self):
        self.is_open, self.sent, self.was_reusable, self.num_begun = threading.Event(), [], None, 0

    def broadcast(self, x, src):
        self.num_begun += 1
        assert self.is_open.wait(60)
        if src == 1:
            x.copy_(torch.tensor([2] if x.dtype is torch.int64 else [*b"{}"]))
        elif x.dtype is torch.uint8:
            self.sent.append("piece" if len(x) == 40 else json.loads(bytes(x.tolist())))
        return Done()

    def free(self, reusable=True):
        self.was_reusable = reusable


@pytest.mark.parametrize("finishes", [True, False])
def test_what_has_changed_longest_ago_is_sent_first_and_a_line_that_is_too_slow_is_waited_for_no_longer(
    finishes, monkeypatch
):
    line = Line()
    sender = StateSender(lambda over: line)
    sender.offer({"a": torch.zeros(10), "b": torch.zeros(10)})
    sender.offer({"a": torch.ones(10)})
    assert sender.may_finish  # it is so little
    monkeypatch.setattr(state_transfer, "_SMALL", 0)
    assert not sender.may_finish
    line.is_open.set()
    until(lambda: sender.may_finish)
    assert [(one["name"], one["left"]) for one in line.sent[::2]] == [("b", 80), ("a", 40)]
    for number in range(2, 5):  # the same again and again, as rounds go on
        line.is_open.clear()
        sender.offer({"a": torch.full((10,), float(number))})
        assert not sender.may_finish
        line.is_open.set()
        until(lambda: sender.may_finish)
    line.is_open.clear()
    before = line.num_begun
    sender.offer({"a": torch.zeros(10)})
    until(lambda: line.num_begun > before)
    assert sender.may_finish
    sender.finish({}) if finishes else sender.stop()
    line.is_open.set()
    sender.join(20)
    assert (sender.is_over, line.was_reusable, "forms" in line.sent[-1]) == (True, finishes, finishes)
    assert line.sent.count("piece") == 5 + finishes


@pytest.mark.law("every-wait-has-an-end-and-a-line")
def test_a_receiver_goes_on_with_another_member_when_the_first_one_ends(pair):
    pair.sender.offer({"a": torch.zeros(10)})
    until(lambda: pair.receiver.num_bytes == 40)
    pair.sender.stop()
    until(lambda: pair.sender.is_over)
    pair.found = ("g2/t2.1", 3)
    other = pair.sends("g2/t2.1")
    other.offer({"a": torch.ones(10)})
    other.finish({})
    until(lambda: pair.receiver.wait(0.1))
    assert torch.equal(pair.receiver.state["a"], torch.ones(10))
    until(lambda: all(group.free.called for group in pair.groups))
    freed = sorted((group.rank, group.free.call_args.kwargs["reusable"]) for group in pair.groups)
    assert freed == [(0, False), (0, True), (1, False), (1, True)]


def test_the_waits_of_a_transfer_end_with_the_other_replica_or_when_it_is_stopped(pair):
    is_over = threading.Event()
    watch = TransferWatch(Heartbeats(pair.notes), 2, is_over.is_set)
    watch.look(None, 1e6)  # nobody is late
    TransferWatch(mock.Mock(ended=mock.Mock(side_effect=Unreachable("away"))), 2, is_over.is_set).look(None, 0.0)
    is_over.set()
    with pytest.raises(RankFailure, match="it was stopped"):
        watch.look(None, 0.0)
    is_over.clear()
    pair.notes.put("stopped", 2)
    with pytest.raises(RankFailure, match="its process is stopped"):
        watch.look(None, 0.0)
    pair.notes.note_end(2, "was killed by SIGKILL")
    with pytest.raises(RankFailure, match="was killed by SIGKILL"):
        watch.look(None, 0.0)
