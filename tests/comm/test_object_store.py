# SPDX-License-Identifier: Apache-2.0
"""A bucket as a board: which one is refused, and what a server that fails for a while costs."""

import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from obstore import exceptions as errors

from farflung.address import object_store, objects
from farflung.address.object_store import BucketTransport, bucket_at
from farflung.address.objects import PATIENCE_S
from farflung.address.schemes import transport_at
from farflung.base.errors import ConfigError, Unreachable
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


@pytest.mark.parametrize(("manners", "most"), [({}, 2), ({"bulk": "NotImplemented"}, 6)], ids=["one request", "each"])
def test_many_objects_are_deleted_by_one_request_or_one_at_a_time_where_the_store_can_no_more(
    bucket, s3, manners, most
):
    s3.set(**manners)
    board = transport_at(bucket).board
    for number in range(5):
        board.put(f"{number}", b"1")
    before = sum(s3.counts().values())
    board.delete("0", "nothing")
    board.delete("1", "2", "3")
    assert sum(s3.counts().values()) - before <= most
    assert board.list("") == ["4"]


def test_to_delete_what_is_gone_is_no_error_of_a_store_that_deletes_one_at_a_time(monkeypatch):
    delete = mock.Mock(side_effect=[FileNotFoundError, FileNotFoundError, None])
    monkeypatch.setattr(object_store.obstore, "delete", delete)
    bucket_at("gs://bucket/run").delete("gone", "there")
    assert [call.args[1] for call in delete.mock_calls] == [["gone", "there"], "gone", "there"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s3://nowhere/run", "404 Not Found: The specified bucket does not exist"),
        ("az://somewhere", "Account must be specified"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_one_that_can_not_be_used_is_refused_at_once_in_the_stores_own_words(address, why):
    with pytest.raises(ConfigError, match=f"({address} can't be used|can't meet at {address}).*{why}"):
        transport_at(address, PATIENCE_S)


@pytest.mark.parametrize("name", ["run#7", "run?7", "other/../run", "./run"])
def test_no_two_addresses_are_one_place(name):
    with pytest.raises(ConfigError, match=r"would be another place\. Write %3F and %23"):
        bucket_at(f"gs://bucket/{name}")
    assert {bucket_at(f"gs://bucket/{one}").quick.prefix for one in ("run", "run%237")} == {"run", "run#7"}


def test_without_obstore_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "farflung.address.object_store")
    with pytest.raises(ConfigError, match=r"needs obstore: pip install 'farflung\[bucket\]'"):
        transport_at("s3://runs/run")


REFUSED = [
    ({"denied": ["Put"]}, r"403 Forbidden.*may lack a permission: s3:PutObject"),
    ({"denied": ["Get"]}, "may lack a permission: s3:GetObject, or s3:ListBucket, without which S3 refuses to say"),
    ({"denied": ["List"]}, "may lack a permission: s3:ListBucket"),
    ({"denied": ["Delete"]}, "may lack a permission: s3:DeleteObject"),
    ({"create": "NotImplemented"}, "501.*can't create an object only if there is none. S3, R2"),
    ({"create": "InvalidArgument"}, "400.*only if there is none. S3, R2, MinIO, Google Cloud Storage and Azure do"),
    ({"create": "ignored"}, "It overwrites objects .* if there are none. S3, .* and Azure heed that condition"),
    ({"then": "ExpiredToken", "for_s": 99}, "400.*credentials have expired.*start this again with new ones"),
    ({"then": "AuthorizationHeaderMalformed", "for_s": 99}, "400.*AWS_REGION is probably not"),
    ({"then": "PermanentRedirect", "for_s": 99}, "AWS_REGION is probably not"),
    ({"then": "InvalidAccessKeyId", "for_s": 99}, "Check AWS_ACCESS_KEY_ID and .*_URL is where they belong"),
]


@pytest.mark.parametrize(("manners", "why"), REFUSED, ids=[str(manners) for manners, _ in REFUSED])
def test_what_the_run_will_need_is_tried_at_the_start_and_told_with_its_remedy(bucket, s3, manners, why, monkeypatch):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: pytest.fail("asking again would not help"))
    s3.set(**manners)
    with pytest.raises(ConfigError, match=f"can't meet at {bucket}.*{why}"):
        transport_at(bucket)


def test_each_kind_of_request_that_a_run_makes_is_tried(bucket, s3):
    before = Counter(s3.counts())
    transport_at(bucket)
    # It overwrites an object, reads one that is missing, and creates one twice, of which the second reads who did.
    assert Counter(s3.counts()) - before == {"PUT": 4, "GET": 3, "LIST": 1, "POST": 1}


XML = (
    "Server returned non-2xx status code: 403 Forbidden: <?xml version='1.0'?><Error><Code>SignatureDoesNotMatch</Code>"
    "<Message>No match.</Message></Error>\n\nDebug source: ..."
)
SAID = [  # by obstore, and what we say about it; nothing: asking again may be enough
    ("s3", "http://169.254.169.254", r"Profiles in ~/\.aws are not read.*aws configure export-cred.* exports one"),
    ("s3", "<Code>InvalidToken</Code>", "nothing renews those in variables: start this again with new ones"),
    ("s3", "<Code>RequestTimeTooSkewed</Code>", "Set the clock of this machine"),
    ("az", "<Code>ContainerNotFound</Code>", "Create the bucket first, or correct its name"),
    ("az", "status code: 401", "The credentials may lack a permission: the role Storage Blob Data Contributor"),
    ("gs", "status code: 403", "permission: storage.objects.create, and storage.objects.delete to overwrite"),
    ("gs", "status code: 404", "Check the address, and the variables for credentials and endpoint"),
    ("gs", "status code: 505", "Check the address, and the variables for credentials and endpoint"),
    ("s3", f"PUT /x in 2ms - {XML}", r"used: PUT /x: 403 Forbidden: No match \(SignatureDoesNotMatch\)\. Check .*"),
    ("s3", "status code: 400 <Code>RequestTimeout</Code>", ""),
    ("s3", "status code: 429", ""),
    ("s3", "status code: 500", ""),
]


@pytest.mark.parametrize(("kind", "said", "remedy"), SAID)
def test_what_a_store_says_comes_with_what_to_do_about_it(kind, said, remedy, monkeypatch):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    board = replace(bucket_at(f"{kind}://bucket/run"), is_strict=True)
    assert "bucket" in board.quick.config.values()
    ask = mock.Mock(side_effect=[errors.GenericError(f"Error performing {said}"), 1])
    with pytest.raises(Unreachable, match=rf"{remedy}\.$") if remedy else nullcontext():
        assert board.ask(ask, "write") == 1


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


@pytest.mark.parametrize("num_bytes", [0, 1, 256 * 1024, 256 * 1024 + 1, 13_000_000])
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
