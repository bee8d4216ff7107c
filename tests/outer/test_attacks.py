# SPDX-License-Identifier: Apache-2.0
"""Somebody with write access and no key attacks a run: it ends with the right weights, to the last bit, or with a line.

The weights of a run without attacks are `START - position`; see `elastic_run`. `tests/comm/test_hostile.py` has each
act on each kind of object, and `test_seal.py` files that are none.
"""

import ast
import random
import re
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from urllib.parse import unquote

import psutil
import pytest

from farflung.address.schemes import objects_at
from farflung.address.seal import Seal
from farflung.base.errors import Unreachable
from tests.comm import test_keyed_store
from tests.outer.elastic_run import EVERY, ElasticRun, as_of_many, replica, wrong

KEY, OTHER, NUM_ATTACKS, HELD_S = bytes.fromhex("5" * 64), bytes(32), 40, 0.1
CHANGED, PLAIN = "it was not sealed under this name, or was changed", "it is not sealed with any key"
FORGED = b'{"number": 666}'
# What is put in the place of an object, and why it is not taken; None: there is nothing like that yet.
ACTS = {
    "forged": (lambda it, key, now: FORGED, PLAIN),
    "empty": (lambda it, key, now: b"", PLAIN),
    "changed": (lambda it, key, now: now[:-1] + bytes([now[-1] ^ 1]), CHANGED),
    "cut": (lambda it, key, now: now[:-7], CHANGED),
    "longer": (lambda it, key, now: now + bytes(100), CHANGED),
    "huge": (lambda it, key, now: now[:56] + bytes(2**25), CHANGED),
    "older": (lambda it, key, now: it.first.get(key), "an older version of it was put back"),
    "swapped": (lambda it, key, now: it.draw.choice([*it.first.values()]), CHANGED),
    "of another generation": (lambda it, key, now: it.of_generation(1), CHANGED),
    "of another run": (lambda it, key, now: b"".join(Seal(KEY).below("run-00000000").close(key, [FORGED])), CHANGED),
    "of another key": (
        lambda it, key, now: b"".join(Seal(OTHER).close(key, [FORGED])),
        "it is sealed with another key",
    ),
}


class Attacker:
    """Has write access to the address of a run, and no key.

    Attributes:
        first: the first content of each object that it has seen, by key.
        names: of the objects that it has attacked: their keys, or new names.
    """

    def __init__(self, address, seed):
        self.raw, self.draw = objects_at(address).patient(0), random.Random(seed)
        self.first, self.names = {}, set()
        self.look()

    def look(self):
        """Return the names of all objects by their keys."""
        found = []
        while not self.raw.find_names("", found):
            continue
        there = {unquote(name.partition(".")[0]): name for name in found if "/probe/" not in f"/{name}"}
        for key, name in there.items():
            if key not in self.first and (content := self.content(name)):
                self.first[key] = content
        return there

    def content(self, name):
        return self.raw.read_name(name, lambda file, size: file.read())

    def put(self, name, content):
        self.raw.write_name(name, [content], is_new=False)

    def of_generation(self, number):
        found = [content for key, content in self.first.items() if f"/g{number}/" in key]
        return self.draw.choice(found) if found else None

    def attack(self):
        """Do one thing for a moment, as what was overwritten doesn't come back by itself; return if it was done."""
        key, name = self.draw.choice(sorted(self.look().items()))
        act = self.draw.choice([*ACTS, "deleted", "new"])
        if (now := self.content(name)) is None:
            return False
        if act == "new":
            aside = f"{name.rpartition('/')[0]}/{self.draw.randrange(10**6)}%2E1".lstrip("/")
            self.names.add(aside)
            self.put(aside, now)
            return True
        self.names.add(key)
        content = None if act == "deleted" else ACTS[act][0](self, key, now)
        if content in (None, now) and act != "deleted":
            return False
        if content is None:
            self.raw.delete_names([name])
        else:
            self.put(name, content)
        until = time.monotonic() + HELD_S
        while (is_held := self.content(name) == content) and time.monotonic() < until:
            time.sleep(0.005)
        if is_held:
            self.put(name, now)
        return True

    def copy(self):
        return {name: self.content(name) for name in self.look().values()}

    def restore(self, copy):
        """Put back how everything was earlier."""
        self.raw.delete_names([name for name in self.look().values() if name not in copy])
        for name, content in copy.items():
            self.put(name, content or b"")


@pytest.fixture(params=["folder", "bucket", "hub"])
def address(request, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FARFLUNG_KEY", KEY.hex())
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))
    return tmp_path.as_uri() if request.param == "folder" else request.getfixturevalue(request.param)


def begun(run, address, seed=0, plays=3 * (replica,), before=lambda attacker: None):
    """Start two replicas and, once somebody has seen all of that generation, and acted `before`, a third one."""
    members = []
    for play in plays[:2]:
        run._play = play
        members.append(run.start(len(members)))
    run.until(lambda: run.joined(*members) and run.at(2 * EVERY), 60.0)
    run.board.put("last", b"1000000000")
    attacker, run._play = Attacker(address, seed), plays[2]
    before(attacker)
    members.append(run.start(2))
    run.until(lambda: run.joined(*members), 60.0)
    run.board.put("last", b"1000000001")
    return attacker


def not_taken(run):
    """The objects that events name, and why they were not taken."""
    found = [re.search(r"may write there: ('.*'|\".*\") is not taken, as (.*)", str(event)) for event in run.events]
    return [(ast.literal_eval(match[1]), match[2]) for match in found if match]


def ended(run):
    """Let the run end; check that it was right, or that each replica has ended with a line; return those lines."""
    said = run.finish(timeout_s=120.0)
    assert not wrong(said)
    assert not any("666" in event for event in run.events)
    return [one["error"] for one in said if "error" in one]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "play"), [(0, replica), (1, as_of_many)])
def test_an_attacked_run_of_three_replicas_ends_with_the_right_weights_and_names_what_was_done(address, seed, play):
    with ElasticRun(address=address, expected=2, grace_s=5.0) as run:
        attacker = begun(run, address, seed, 3 * (play,))
        num_done, is_over = 0, threading.Event()

        def attacks():
            nonlocal num_done
            while num_done < NUM_ATTACKS and not is_over.is_set():
                try:
                    num_done += attacker.attack()
                except (Unreachable, OSError, IndexError):
                    continue  # what it meant was gone

        thread = threading.Thread(target=attacks)
        thread.start()
        try:
            run.until(lambda: num_done == NUM_ATTACKS or run.has_ended(*run.processes), 180.0)
        finally:
            is_over.set()
            thread.join()
        if not run.has_ended(*run.processes):
            name, key = attacker.look()["last"], "last"  # which all of them read in each step
            for make, why in ACTS.values():
                now = attacker.content(name)
                attacker.names.add(key)
                attacker.put(name, make(attacker, key, now))
                run.until(lambda why=why: any(one == key and why in said for one, said in not_taken(run)), 60.0)
                attacker.put(name, now)
        errors = ended(run)
    assert all("vanished" in error for error in errors)
    named = not_taken(run)
    assert len(set(named)) == len(named) > 0
    # A part of an object is named by its number, too.
    assert all(attacker.names & {name, name.rpartition("/")[0]} for name, _ in named)
    assert {why for _, why in named} <= {*(why for _, why in ACTS.values()), *OTHERS}


OTHERS = {"its name has no tag of the key", "it is too short", "an older version of it was put back, or a deleted one"}
KINDS = {
    "shares": r"loop1/g\d+/c.*",
    "states": "loop1/(state/.*|saved/.*)",
    "notes": "(name|in|left|process)/.*",
    "settings": "last",
    "generations": r"loop1/generation/\d+",
    "everything": ".*",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "address"), [*zip(KINDS, 2 * ["folder", "bucket", "hub"], strict=True)], indirect=["address"]
)
def test_what_is_deleted_costs_a_run_nothing_or_ends_it_with_a_line(address, kind):
    with ElasticRun(address=address, expected=2, grace_s=2.0) as run:
        attacker = begun(run, address)
        attacker.raw.delete_names([name for key, name in attacker.look().items() if re.fullmatch(KINDS[kind], key)])
        errors = ended(run)
    assert all(re.search(r"Records of the run have vanished: \S+ was written", error) for error in errors)
    assert not errors or kind in ("generations", "everything")  # of these too, if it has ended before it looked again
    assert not not_taken(run)


@pytest.mark.long
def test_a_run_whose_address_is_put_back_to_an_earlier_copy_notices_it(address):
    copies = []
    with ElasticRun(address=address, expected=2, grace_s=2.0) as run:
        attacker = begun(run, address, before=lambda attacker: copies.append(attacker.copy()))
        run.go_on(EVERY)
        attacker.restore(*copies)
        run.until(lambda: run.has_ended(*run.processes) or not_taken(run), 60.0)
        errors = ended(run)
    assert all("vanished" in error for error in errors)
    assert errors or not_taken(run)


def off(shift_s, *row):
    """Be a replica whose clock is off."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + shift_s, lambda: now_ns() + int(1e9 * shift_s)
    replica(*row)


@pytest.mark.long
def test_clocks_that_are_minutes_off_let_nothing_be_refused_and_no_older_object_be_taken(address):
    with ElasticRun(address=address, expected=2, grace_s=5.0) as run:
        attacker = begun(run, address, plays=(partial(off, -600), partial(off, 600), replica))
        assert not not_taken(run)
        name = attacker.look()["last"]
        now = attacker.content(name)
        time.sleep(2 * HELD_S)  # each has read it
        attacker.put(name, attacker.first["last"])
        run.until(lambda: not_taken(run), 60.0)
        attacker.put(name, now)
        assert not ended(run)
    assert not_taken(run) == [("last", "an older version of it was put back, or a deleted one")]


@pytest.mark.long
def test_strangers_at_each_port_of_a_run_over_tcp_change_nothing_and_end_nothing(monkeypatch):
    monkeypatch.setenv("FARFLUNG_KEY", test_keyed_store.KEY.hex())
    draw = random.Random(0)
    with ElasticRun(expected=2, grace_s=10.0) as run:
        (port,) = run._place
        server = SimpleNamespace(address=f"127.0.0.1:{port}", board=SimpleNamespace(seal=Seal(test_keyed_store.KEY)))
        contents = [make(server, draw) for make, _ in test_keyed_store.SENDS.values()]

        def visit():
            processes = [psutil.Process(one.pid) for one in run.processes.values()]
            ports = [each.laddr.port for one in processes for each in one.net_connections() if each.status == "LISTEN"]
            for there in [port, *ports]:
                with suppress(OSError), socket.create_connection(("127.0.0.1", there), 10) as stranger:
                    stranger.sendall(draw.choice(contents))
            return len(ports)

        members = [run.start(name) for name in range(2)]
        num_ports = 0
        while not (run.joined(*members) and run.at(20 * EVERY)):
            run.until(lambda: all(map(psutil.pid_exists, (one.pid for one in run.processes.values()))))
            num_ports = max(num_ports, visit())
            time.sleep(0.01)
        members.append(run.start(2))
        while not run.joined(*members):
            visit()
            time.sleep(0.01)
        assert num_ports
        assert not ended(run)
