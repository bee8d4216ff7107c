# SPDX-License-Identifier: Apache-2.0
"""A bucket as a board: which one is refused, and what a server that fails for a while costs."""

import sys
import threading
import time

import pytest
import torch

from farflung.base.errors import ConfigError, Unreachable
from farflung.comm.address import transport_at
from farflung.comm.object_store import BucketTransport
from farflung.comm.objects import PATIENCE_S
from tests.comm.test_objects import Watch, each


@pytest.fixture
def board(bucket):
    return BucketTransport(bucket).board


@pytest.mark.parametrize("key", ["../../etc/x", ".", "..", "a/../b", "a b:c%2E/ü", "x.value", "log/1", "%41"])
def test_no_key_is_taken_for_another_one(board, key):
    board.put("a/b", b"another")
    board.put(key, b"1")
    assert (board.get(key), board.get("a/b")) == (b"1", b"another")
    assert [one for one in board.list("") if one != "a/b"] == [key]
    board.delete(key)
    board.delete(key)
    assert board.list("") == ["a/b"]


def test_many_objects_are_deleted_by_one_request(board, s3):
    for number in range(5):
        board.put(f"{number}", b"1")
    before = s3.counts()
    board.delete("0", "nothing", "1", "2", "3")
    after = s3.counts()
    assert sum(after.values()) - sum(before.values()) == 1
    assert board.list("") == ["4"]


def test_a_bucket_that_overwrites_what_was_to_be_created_is_refused(bucket, s3):
    s3.set(ignores=True)
    with pytest.raises(ConfigError, match=f"can't meet at {bucket}. It overwrites objects"):
        transport_at(bucket)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s3://nowhere/run", "404 Not Found: The specified bucket does not exist"),
        ("az://somewhere", "Account must be specified"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_one_that_can_not_be_used_is_refused_at_once_in_the_stores_own_words(address, why):
    with pytest.raises(ConfigError, match=f"Replicas can't meet at {address}.*{why}"):
        transport_at(address, PATIENCE_S)


def test_without_obstore_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "farflung.comm.object_store")
    with pytest.raises(ConfigError, match=r"needs obstore: pip install 'farflung\[bucket\]'"):
        transport_at("s3://runs/run")


@pytest.mark.parametrize("num_bytes", [1, 256 * 1024, 256 * 1024 + 1, 13_000_000])
def test_an_object_of_any_size_comes_back(board, num_bytes):
    sent = torch.randint(256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()
    board.write("key", [sent[:1], memoryview(sent)[1:]])
    assert board.read("key", lambda file, size: (size, file.read())) == (num_bytes, sent)


def test_a_server_that_answers_with_errors_is_asked_again_and_callers_without_patience_hear_of_it(board, s3):
    board.put("key", b"1")
    s3.set(error_s=1.0)
    with pytest.raises(Unreachable, match=r"The run's s3://runs/run\d+ can't be used: .*503 Service Unavailable"):
        board.patient(0).get("key")
    assert (board.get("key"), board.put_new("key", b"2")) == (b"1", False)


def test_a_record_whose_answer_was_lost_belongs_to_its_writer(board, s3):
    s3.set(loses=3)
    assert [board.put_new(f"key{number}", b"mine") for number in range(4)] == [True] * 4
    assert not any(board.put_new(f"key{number}", b"another") for number in range(4))


@pytest.mark.parametrize("faults", [{"error_s": 3.0}, {"loses": 10}, {"late_s": 0.5}], ids=["503", "loses", "late"])
def test_collectives_go_through_a_server_that_fails_for_a_while(bucket, s3, faults):
    groups = [transport_at(bucket).connect("group", rank, 2, Watch()) for rank in range(2)]
    timer = threading.Timer(0.2, lambda: s3.set(**faults))

    def rounds(group):
        found = []
        for number in range(20):
            out = torch.empty(2)
            group.all_gather(out, torch.tensor([10.0 * number + group.rank])).wait()
            found.append(out.tolist())
        return found

    timer.start()
    assert each(groups, rounds) == [[[10.0 * number, 10.0 * number + 1] for number in range(20)]] * 2
    timer.join()


def test_puts_of_a_rank_go_on_while_it_computes(bucket, s3):
    group, other = (transport_at(bucket).connect("group", rank, 2, Watch()) for rank in range(2))
    s3.set(late_s=1.0)
    began = time.monotonic()
    works = [group.broadcast(torch.zeros(10), 0) for _ in range(3)]
    assert time.monotonic() - began < 1.0
    for one in works:
        other.broadcast(torch.ones(10), 0).wait()
        one.wait()
