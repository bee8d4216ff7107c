# SPDX-License-Identifier: Apache-2.0
"""A bucket as a board: which one is refused, and what a server that fails for a while costs."""

import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from obstore import exceptions as errors

from farflung.base.errors import ConfigError, Unreachable
from farflung.comm import objects
from farflung.comm.address import transport_at
from farflung.comm.object_store import BucketTransport, bucket_at
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
    for _ in range(2):
        board.delete(key)
    assert board.list("") == ["a/b"]


@pytest.mark.parametrize(("manners", "most"), [({}, 1), ({"bulk": "NotImplemented"}, 6)], ids=["one request", "each"])
def test_many_objects_are_deleted_by_one_request_or_one_at_a_time_where_the_store_can_no_more(
    bucket, s3, manners, most
):
    s3.set(**manners)
    board = transport_at(bucket).board
    for number in range(5):
        board.put(f"{number}", b"1")
    before = sum(s3.counts().values())
    board.delete("0", "nothing", "1", "2", "3")
    assert sum(s3.counts().values()) - before <= most
    assert board.list("") == ["4"]


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


REFUSED = [
    ({"denied": ["Put"]}, r"403 Forbidden.*may lack a permission: s3:PutObject"),
    ({"denied": ["Get"]}, "may lack a permission: s3:GetObject"),
    ({"denied": ["List"]}, "may lack a permission: s3:ListBucket"),
    ({"denied": ["Delete"]}, "may lack a permission: s3:DeleteObject"),
    ({"create": "NotImplemented"}, "501.*can't create an object only if there is none. S3, R2"),
    ({"create": "InvalidArgument"}, "400.*can't create an object only if there is none. S3, R2"),
    ({"create": "ignored"}, "It overwrites objects"),
    ({"then": "ExpiredToken", "for_s": 99}, "400.*credentials have expired.*start this again with new ones"),
    ({"then": "AuthorizationHeaderMalformed", "for_s": 99}, "400.*AWS_REGION is probably not"),
    ({"then": "PermanentRedirect", "for_s": 99}, "AWS_REGION is probably not"),
    ({"then": "InvalidAccessKeyId", "for_s": 99}, "Check AWS_ACCESS_KEY_ID"),
]


@pytest.mark.parametrize(("manners", "why"), REFUSED, ids=[str(manners) for manners, _ in REFUSED])
def test_what_the_run_will_need_is_tried_at_the_start_and_told_with_its_remedy(bucket, s3, manners, why, monkeypatch):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: pytest.fail("asking again would not help"))
    s3.set(**manners)
    with pytest.raises(ConfigError, match=f"can't meet at {bucket}.*{why}"):
        transport_at(bucket)


def test_credentials_that_lie_in_a_profile_alone_are_missed_by_name(bucket, s3):
    board = replace(bucket_at(bucket), is_strict=True)
    ask = mock.Mock(side_effect=errors.GenericError("Error performing PUT http://169.254.169.254/latest/api"))
    with pytest.raises(Unreachable, match=r"Profiles in ~/.aws are not read.*aws configure export-credentials"):
        board.ask(ask)


@pytest.mark.parametrize("manners", [{"conflicts": 0.5, "lost": 0.2, "page": 2}, {"loses": 3}], ids=str)
def test_a_create_that_conflicts_or_whose_answer_is_lost_is_sent_again_and_its_writers_own(
    board, s3, manners, monkeypatch
):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    s3.set(**manners)
    assert [board.put_new(f"key{number}", b"mine") for number in range(4)] == [True] * 4
    assert not any(board.put_new(f"key{number}", b"another") for number in range(4))
    assert len(board.list("key")) == 4


ASKED = {"put": ("key", b"2"), "put_new": ("new", b"1"), "get": ("key",), "list": ("",), "delete": ("key", "new")}


@pytest.mark.parametrize(("act", "arguments"), ASKED.items())
def test_a_conflict_passes_whatever_was_asked(board, s3, act, arguments):
    board.put("key", b"1")
    s3.set(then="ConditionalRequestConflict", for_s=0.5)
    getattr(board, act)(*arguments)
    s3.set(then="ConditionalRequestConflict", for_s=60.0)
    with pytest.raises(Unreachable, match="conflicting operation"):
        getattr(board.patient(0), act)(*arguments)


def test_a_storm_while_one_object_is_deleted_at_a_time_passes(bucket, s3, monkeypatch):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    s3.set(bulk="InvalidArgument", storm=0.4, seed=3)
    board = transport_at(bucket, 10.0).board
    names = [f"key{number}" for number in range(12)]
    for name in names:
        board.put(name, b"1")
    board.delete(*names)
    s3.set()
    assert not any(map(board.get, names))


@pytest.mark.parametrize("then", ["AccessDenied", "InternalError"])
def test_those_that_wait_one_after_the_other_for_an_address_that_is_gone_share_one_patience(board, s3, then):
    patient = board.patient(1.5)
    patient.put("key", b"1")
    s3.set(then=then, for_s=600.0)
    with pytest.raises(Unreachable):
        patient.get("key")
    counts = sum(s3.counts().values())
    for act, *arguments in (patient.put, "key", b"2"), (patient.part("a").put_new, "b", b"1"), (patient.list, ""):
        with pytest.raises(Unreachable):
            act(*arguments)
    assert sum(s3.counts().values()) <= counts + 4  # each is asked once
    s3.set()
    assert patient.get("key") == b"1"
    s3.set(then=then, for_s=0.5)  # another outage
    assert patient.get("key") == b"1"


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        ({"then": "AccessDenied", "for_s": 0.8}, "s3:GetObject"),
        ({"then": "ExpiredToken", "for_s": 0.8}, "credentials have expired"),
        ({"error_s": 1.0}, r"The run's s3://runs/run\d+ can't be used: .*503 Service Unavailable"),
    ],
)
def test_a_failure_in_mid_run_may_pass_and_callers_without_patience_hear_of_it(board, s3, manners, words):
    board.put("key", b"1")
    s3.set(**manners)
    with pytest.raises(Unreachable, match=words):
        board.patient(0).get("key")
    assert (board.get("key"), board.put_new("key", b"2")) == (b"1", False)


@pytest.mark.parametrize("num_bytes", [1, 256 * 1024, 256 * 1024 + 1, 13_000_000])
def test_an_object_of_any_size_comes_back(board, num_bytes):
    sent = torch.randint(256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()
    board.write("key", [sent[:1], memoryview(sent)[1:]])
    assert board.read("key", lambda file, size: (size, file.read())) == (num_bytes, sent)


@pytest.mark.parametrize("faults", [{"error_s": 1.0}, {"loses": 10}, {"late_s": 0.2}], ids=["503", "loses", "late"])
def test_collectives_go_through_a_server_that_fails_for_a_while(bucket, s3, faults):
    groups = [transport_at(bucket).connect("group", rank, 2, Watch()) for rank in range(2)]

    def rounds(group):
        for number in range(8):
            if (number, group.rank) == (2, 0):
                s3.set(**faults)
            out = torch.empty(2)
            group.all_gather(out, torch.tensor([10.0 * number + group.rank])).wait()
            assert out.tolist() == [10.0 * number, 10.0 * number + 1]

    each(groups, rounds)


def test_puts_of_a_rank_go_on_while_it_computes(bucket, s3):
    group, other = (transport_at(bucket).connect("group", rank, 2, Watch()) for rank in range(2))
    s3.set(late_s=1.0)
    began = time.monotonic()
    works = [group.broadcast(torch.zeros(10), 0) for _ in range(3)]
    assert time.monotonic() - began < 1.0
    for one in works:
        other.broadcast(torch.ones(10), 0).wait()
        one.wait()
