# SPDX-License-Identifier: Apache-2.0
"""A board's requests end: with an answer, over another connection, or with an error that says what is gone."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from farflung.address import c10d_transport as module
from farflung.address.c10d_transport import C10dTransport
from farflung.address.keyed_store import KeyedStore
from farflung.address.seal import Seal
from farflung.base.errors import RankFailure, Unreachable
from farflung.launch.network import get_free_port
from farflung.testing.ranks import fork_context
from tests.comm.test_objects import Watch
from tests.outer import elastic_run
from tests.waits import until


def serve(pipe, port, key):
    store = elastic_run.served(key and Seal(key), port)
    pipe.send(store.port)
    time.sleep(3600)


@pytest.fixture
def served():
    """Starts processes that serve a store each, at a port; returns the process and the port."""
    context, started = fork_context(), []

    def start(port=0, key=None):
        here, there = context.Pipe(duplex=False)
        started.append(context.Process(target=serve, args=(there, port, key)))
        started[-1].start()
        return started[-1], here.recv()

    yield start
    for one in started:
        one.kill()
        one.join()


@pytest.mark.law("every-wait-has-an-end-and-a-line")
def test_a_store_that_is_stopped_killed_or_of_another_run_ends_no_request_late_or_wrongly(served, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    process, port = served()
    board = C10dTransport(("127.0.0.1", port)).board.part("a")
    board.put("said", b"1")
    assert (board.get("said"), board.get("nothing"), board.put_new("new", b"2")) == (b"1", None, True)

    os.kill(process.pid, signal.SIGSTOP)  # as if its line were cut: connections stay open, and nothing comes
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    began = time.monotonic()
    board.patient(0).put("said", b"2")
    for _ in range(2):
        with pytest.raises(Unreachable, match=rf"The store of this run at 127\.0\.0\.1:{port} has given no answer for"):
            board.patient(0).get("said")
    silent_s = board.part("other").silent_s()
    assert 0.5 <= silent_s <= time.monotonic() - began < 60
    os.kill(process.pid, signal.SIGCONT)
    assert board.get("said") == b"2"  # what was written before has come first
    assert board.silent_s() == 0
    assert board.get("new") == b"2"  # no answer is taken for that to another question
    assert C10dTransport(("127.0.0.1", port)).board.part("a").get("said") == b"2"

    process.kill()
    process.join()
    with pytest.raises(Unreachable, match="is gone: the launcher that serves it has probably ended"):
        board.get("said")
    served(port)
    with pytest.raises(Unreachable, match="another run is served there now"):
        board.get("said")


@pytest.mark.parametrize("keys", [(None, bytes(32)), (bytes(32), None), (bytes(32), bytes([1] * 32))])
def test_a_run_with_another_key_at_the_same_port_is_another_run(keys, served):
    process, port = served(key=keys[0])
    transport = C10dTransport(("127.0.0.1", port), seal=keys[0] and Seal(keys[0]))
    transport.board.put("said", b"1")
    assert transport.board.get("said") == b"1"
    process.kill()
    process.join()
    served(port, keys[1])
    for _ in range(2):
        with pytest.raises(Unreachable, match="another run is served there now"):
            transport.board.get("said")


def test_a_process_group_may_meet_in_a_part_of_it():
    board = C10dTransport(elastic_run.served()).board
    board.part("loop1").lend("group").set("rank", "0")
    assert board.get("loop1/group/rank") == b"0"


def test_what_is_asked_of_a_store_that_is_gone_fails_at_once_and_for_good():
    port = get_free_port()
    board = C10dTransport(("127.0.0.1", port)).board
    with pytest.raises(Unreachable, match=f"store of this run at 127.0.0.1:{port} is gone"):
        board.lend("group")
    with pytest.raises(Unreachable):
        board.put("key", b"1")
    elastic_run.served(port=port)
    assert board.get("key") is None  # what has failed is not written later


class Calm:
    """Sees no loss of a replica."""

    connect_s = 10.0
    break_off = RankFailure

    def look(self, entered, waited_s):
        pass

    note_end = look


@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize("is_freed", [True, False])  # False: as an error on the way into a generation drops it
def test_a_group_that_gloo_can_not_end_holds_nobody_up(is_freed):
    transport = C10dTransport(elastic_run.served())
    groups = [transport.connect("g1", rank, 2, Calm()) for rank in range(2)]
    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(lambda group: group.all_gather_small(torch.ones(1)).tolist(), groups)] == [[[1], [1]]] * 2
    groups[0].begin_all_gather_small(torch.ones(1))  # the other rank never takes part
    began = time.monotonic()
    dropped = groups.pop(0)
    if is_freed:
        dropped.free()
    del dropped
    assert transport.connect("g2", 0, 1, Calm()).all_gather_small(torch.ones(1)).tolist() == [[1]]
    transport.close()
    assert time.monotonic() - began < 20
    groups[0].free(reusable=False)  # closes the connections: this does end what the first rank began
    transport.close()
    assert not any(thread.name == "release a process group" for thread in threading.enumerate())


def test_a_line_that_is_cut_while_ranks_find_each_other_ends_the_generation_alone(monkeypatch):
    def cut(*_):
        raise ConnectionResetError("cut")

    transport = C10dTransport(elastic_run.served())
    for method in ("get", "set", "wait"):
        monkeypatch.setattr(KeyedStore, method, cut)
    with pytest.raises(RankFailure):
        transport.connect("g1", 0, 2, Watch()).barrier()


def test_waits_ask_their_watch_and_end_with_a_rank_that_leaves():
    transport = C10dTransport(elastic_run.served())
    watches = [Watch() for _ in range(2)]
    first, second = groups = [transport.connect("g1", rank, 2, watch) for rank, watch in enumerate(watches)]
    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(lambda group: group.all_gather_small(torch.ones(1)).tolist(), groups)] == [[[1], [1]]] * 2
        waiting = ranks.submit(lambda: first.broadcast(torch.ones(3), 1).wait())
        until(lambda: watches[0].looks)
        second.broadcast(torch.zeros(3), 1).wait()
        waiting.result()
    assert watches[0].looks[-1] == watches[0].ends[-1] == ("g1#2", 12, (), True)
    first.raise_if_broken()
    assert watches[0].looks[-1] == ("", 0, (), False)
    second.leave("enough")
    until(first.closed_by)
    first.supported = {"cpu", "cuda"}  # as on each build with NCCL, where the host waits in another way
    with pytest.raises(RankFailure, match="the transport said: "):
        first.barrier()
    assert watches[1].reasons == ["enough"]
    for group in groups:
        group.free(reusable=False)
    transport.close()
