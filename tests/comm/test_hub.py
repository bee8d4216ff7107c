# SPDX-License-Identifier: Apache-2.0
"""Storage Buckets of Hugging Face: whose keys, which addresses, and what a gateway that redirects may answer."""

import pytest

from farflung.address.object_store import _PART, BucketTransport, bucket_at
from farflung.address.schemes import objects_at, transport_at
from farflung.base.errors import ConfigError, Unreachable
from tests.s3_server import NAMESPACE

KEYS = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
PAGE = "https://huggingface.co/settings/tokens"


def test_objects_lie_below_their_namespace_at_the_gateway_whatever_region_and_style_are_set(hub, s3, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    board = transport_at(hub).board
    board.put("a/b", b"1")
    monkeypatch.delenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
    assert objects_at(hub.replace(f"hf://{NAMESPACE}/", "s3://")).get("a/b") == b"1"
    with pytest.raises(Unreachable, match="NoSuchBucket"):
        objects_at(hub.replace(NAMESPACE, "another")).patient(0).get("a/b")


def test_reads_follow_to_another_host_whole_and_in_parts(hub):
    board = transport_at(hub).board
    large = bytes(range(256)) * (_PART // 100)
    for content in (b"", b"1", large):
        board.put("object", content)
        assert board.get("object") == content
    assert board.get("missing") is None


@pytest.mark.parametrize("how", ["AccessDenied", "404", "429", "SlowDown"])
def test_what_the_other_host_says_is_neither_about_the_object_nor_about_the_keys(hub, s3, how):
    board = transport_at(hub).board
    board.put("there", b"1")
    s3.set(edge=how)
    with pytest.raises(Unreachable):
        board.patient(0).get("there")
    assert board.get("missing") is None
    s3.set()
    assert board.get("there") == b"1"


@pytest.mark.parametrize("act", ["Put", "List", "Delete"])
def test_keys_that_may_not_do_all_of_it_are_refused_at_the_start_with_the_page_that_makes_others(hub, s3, act):
    s3.set(denied=[act])
    with pytest.raises(ConfigError, match=rf"can't meet at {hub}.*of a token that may not \w+ objects.*{PAGE}"):
        BucketTransport(hub)


def test_keys_come_from_the_environment_or_a_profile_and_else_the_error_says_how_to_make_some(hub, home, monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=rf"no keys for {hub}, nor a profile \[hf\] .*{PAGE}, .*Generate S3"):
        bucket_at(hub)
    (home / ".aws").mkdir()
    profile = "aws_access_key_id = HFAK1\naws_secret_access_key = a%b\n"
    (home / ".aws" / "credentials").write_text(f"[hf]\n{profile}[half]\naws_access_key_id = HFAK2\n")
    transport_at(hub)
    monkeypatch.setenv("AWS_PROFILE", "half")
    with pytest.raises(ConfigError, match=r"\[half\]"):
        bucket_at(hub)
    (home / ".aws" / "credentials").write_text(profile)
    with pytest.raises(ConfigError, match="credentials can't be read"):
        bucket_at(hub)


@pytest.mark.parametrize("where", ["someone", "someone/runs", "someone/runs/", "someone//run", "someone/runs/a//b"])
def test_an_address_names_a_namespace_a_bucket_and_a_run(hub, where):
    with pytest.raises(ConfigError, match="is not hf://NAMESPACE/BUCKET/RUN"):
        transport_at(f"hf://{where}")
