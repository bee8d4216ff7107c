# SPDX-License-Identifier: Apache-2.0
"""One that reaches the port of a run with a key: whatever it sends, it reads and changes nothing, and is named."""

import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist

from farflung.address import keyed_store
from farflung.address.c10d_transport import C10dTransport
from farflung.address.keyed_store import KeyedStore
from farflung.address.seal import Seal
from farflung.base.errors import RankFailure
from tests.comm.test_c10d_transport import Calm
from tests.outer.elastic_run import served
from tests.waits import until

KEY = bytes(range(32))


@pytest.fixture
def run():
    """The transport of a launcher that serves a run with a key."""
    seal = Seal(KEY)
    transport = C10dTransport(served(seal), seal=seal)
    transport.board.put("generation/1", b"right")
    return transport


def at(run):
    host, port = run.address.split(":")
    return host, int(port)


def hello(run):
    return b"farflung keyed 1" + run.board.seal.digest + bytes(32)


def recorded(run):
    """What a member has sent: its hello, and the question what a record says."""
    sent = []

    class Wire(socket.socket):
        def sendall(self, content):
            sent.append(content)
            super().sendall(content)

    with Wire() as wire:
        wire.connect(at(run))
        channel = keyed_store._Channel(wire, Seal(KEY), is_server=False)
        channel.send(b"delete", b"nothing")
        channel.receive()
    return b"".join(sent)


SENDS = {
    "nothing": (lambda run, draw: b"", None),
    "c10d's own words": (lambda run, draw: b"\x0c" + struct.pack("<I", 0x3C85F7CE), "not speak"),
    "a web request": (lambda run, draw: b"GET / HTTP/1.1\r\n" + b"Accept: */*\r\n" * 4, "not speak"),
    "noise": (lambda run, draw: draw.randbytes(4096), "not speak"),
    "half a hello": (lambda run, draw: hello(run)[:40], None),
    "half a message": (lambda run, draw: hello(run) + struct.pack("!I", 40) + bytes(9), None),
    "another key": (lambda run, draw: b"farflung keyed 1" + draw.randbytes(40), "another key"),
    "a message that is not sealed": (lambda run, draw: hello(run) + struct.pack("!I", 40) + bytes(40), "not sealed"),
    "a huge message": (lambda run, draw: hello(run) + struct.pack("!I", 2**32 - 1), "too long"),
    "a large first message": (lambda run, draw: hello(run) + struct.pack("!I", 2**20), "too long"),
    "what a member has sent before": (lambda run, draw: recorded(run), "not sealed"),
}


@pytest.mark.parametrize("sends", SENDS)
def test_a_stranger_at_the_port_changes_nothing_and_is_named(run, sends):
    make, why = SENDS[sends]
    content = make(run, random.Random(sends))
    for _ in range(3):
        answer = b""
        with socket.create_connection(at(run), 10) as stranger, suppress(OSError):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            while piece := stranger.recv(4096):
                answer += piece
        assert len(answer) <= keyed_store._HELLO
        assert b"right" not in answer
    assert run.board.get("generation/1") == b"right"
    notices = run.board.seal.versions.notices
    until(lambda: notices or why is None)
    assert [notice.startswith("127.0.0.1 was refused") and why in notice for notice in notices] == (
        [True] if why else []
    )


@pytest.mark.parametrize("says", ["nothing", "a byte at a time"])
def test_connections_that_prove_nothing_keep_no_member_out_for_long(run, monkeypatch, says):
    monkeypatch.setattr(keyed_store, "_HELLO_S", 0.3)
    monkeypatch.setattr(keyed_store, "_FIRST_BYTES", 2**32)
    with ExitStack() as idle:
        number = 2 * keyed_store._MOST_HELLOS
        strangers = [idle.enter_context(socket.create_connection(at(run), 10)) for _ in range(number)]
        is_over = threading.Event()
        idle.callback(is_over.set)

        def speak():
            for byte in hello(run) + struct.pack("!I", 2**25) + bytes(10**6):
                for stranger in strangers:
                    with suppress(OSError):
                        stranger.send(bytes([byte]))
                if is_over.wait(0.02):
                    return

        if says != "nothing":
            threading.Thread(target=speak, daemon=True).start()
        time.sleep(2 * keyed_store._HELLO_S)
        assert run.board.get("generation/1") == b"right"
        assert C10dTransport(at(run), seal=Seal(KEY)).board.get("generation/1") == b"right"


@pytest.mark.parametrize("key", [KEY, bytes(32)], ids=["with the key", "with another key"])
def test_ranks_of_a_group_prove_who_they_are_over_its_own_connections(run, monkeypatch, key):
    """What has taken the place of a rank at gloo's port has no proof, whatever it knows of the store."""
    transports = [run, C10dTransport(at(run), seal=Seal(KEY))]
    groups = [one.connect("g1", rank, 2, Calm()) for rank, one in enumerate(transports)]
    object.__setattr__(transports[1].board, "seal", Seal(key))
    with ThreadPoolExecutor(2) as ranks:

        def gathered(group):
            try:
                return group.all_gather_small(torch.ones(1)).tolist()
            except RankFailure as error:
                return str(error)

        found = [*ranks.map(gathered, groups)]
    if key == KEY:
        assert found == [[[1], [1]]] * 2
    else:
        assert any("what has connected as rank" in one for one in found)
        assert all(isinstance(one, str) for one in found)
    for group in groups:
        group.free(reusable=False)
    for one in transports:
        one.close()


def test_a_group_of_gloo_waits_for_its_ranks_no_longer_than_it_may(run):
    store = KeyedStore(*at(run), Seal(KEY), 0.1)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="nobody has written x"):
        store.get("x")
    with pytest.raises(dist.DistStoreError, match="nobody has written y"):
        store.wait(["y"], keyed_store.timedelta(seconds=0.1))
    assert time.monotonic() < began + 60


@pytest.mark.parametrize("seal", [None, Seal(KEY)], ids=["without", "with"])
def test_a_store_answers_as_those_of_torch_do_with_a_key_and_without(seal):
    def asked(store):
        store.set("a", "1")
        found = [store.add("n", 2), store.add("n", 3), store.get("n"), store.check(["a", "n"]), store.check(["a", "b"])]
        found += [
            store.compare_set(*words) for words in (("a", "0", "2"), ("a", "1", "2"), ("b", "x", "y"), ("c", "", "z"))
        ]
        return [*found, store.delete_key("a"), store.delete_key("a"), store.check(["a"])]

    assert asked(KeyedStore("127.0.0.1", served(seal).port, seal, 5.0)) == asked(dist.HashStore())


def test_a_server_that_is_closed_answers_nobody():
    server = served(Seal(KEY))
    KeyedStore(server.host, server.port, Seal(KEY), 5.0).add("n", 1)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        KeyedStore(server.host, server.port, Seal(KEY), 5.0)
