# SPDX-License-Identifier: Apache-2.0
"""Somebody with write access and no key attacks a run of three replicas: it ends with the right weights.

Not every attack is named, as what was overwritten is put back at once; an event that was forged is.
"""

import random
import threading

import pytest

from farflung.base.errors import Unreachable
from farflung.comm.address import objects_at
from tests.outer.elastic_run import EVERY, ElasticRun, wrong

NUM_ATTACKS = 40


def attack(raw, draw, copies):
    """Do one thing to an object that exists, but delete none; `copies` are of what was there before."""
    names = []
    raw.find_names("", names)
    name = draw.choice(names)
    content = raw.read_name(name, lambda file, size: file.read()) or b""
    copies.setdefault(name, content)
    another = draw.choice([*copies.values()])
    aside = f"{name.partition('/')[0]}/loop1/ask/{draw.randrange(10**6)}%2E1"
    acts = {
        "forged": (name, b'{"number": 666}'),
        "changed": (name, content[:-1] + bytes([content[-1] ^ 1]) if content else b"x"),
        "cut": (name, content[:-7]),
        "older": (name, copies[name]),
        "swapped": (name, another),
        "oversized": (name, content + bytes(1_000_000)),
        "new": (aside, another),
    }
    target, put = acts[draw.choice([*acts])]
    raw.write_name(target, [put], is_new=False)
    if target == name and put != content:  # an overwritten decision can't come back by itself; what is not taken must
        raw.write_name(name, [content], is_new=False)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_an_attacked_run_of_three_replicas_ends_with_the_right_weights(kind, seed, tmp_path, request, monkeypatch):
    monkeypatch.setenv("FARFLUNG_KEY", "5" * 64)
    address = tmp_path.as_uri() if kind == "folder" else request.getfixturevalue("bucket")
    raw, draw, copies, num_done, is_over = objects_at(address).patient(0), random.Random(seed), {}, 0, threading.Event()

    with ElasticRun(address=address, expected=3, grace_s=5.0) as run:
        members = [run.start(name) for name in range(3)]
        run.until(lambda: run.joined(*members) and run.at(2 * EVERY), 60.0)

        def attacks():
            nonlocal num_done
            while num_done < NUM_ATTACKS and not is_over.wait(0.02):
                try:
                    attack(raw, draw, copies)
                    num_done += 1
                except (Unreachable, OSError, IndexError):
                    continue  # what it meant was gone

        attacker = threading.Thread(target=attacks)
        attacker.start()
        try:
            run.until(lambda: num_done == NUM_ATTACKS, 120.0)
        finally:
            is_over.set()
            attacker.join()
        raw.write_name("events/first/forged", [b'{"kind": "note"}'], is_new=False)
        notices = run.board.seal.versions.notices
        run.until(lambda: any("events/first/forged" in one for one in [*notices, *run.events]))
        said = run.finish(timeout_s=120.0)
    assert not wrong(said)
    assert all("error" not in one or "vanished" in one["error"] for one in said)
    assert not any("666" in event for event in run.events)
