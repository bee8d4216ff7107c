# SPDX-License-Identifier: Apache-2.0
"""What ranks are told when they bring different things: the operation, who brought what, and what to do."""

from collections import OrderedDict

import pytest
import torch

from farflung.base.errors import CollectiveMismatch, ConfigError
from farflung.base.tree import flatten
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.mismatch import called, calls_differ, require_alike
from farflung.comm.packet import Header, encode_header
from farflung.testing.sim import run_replicas


def header(tree, call=("gather",)):
    leaves, spec = flatten(tree)
    return Header(encode_header(call, spec, leaves))


def message(*trees, advice="Do this."):
    with pytest.raises(CollectiveMismatch) as caught:
        require_alike([header(tree) for tree in trees], advice)
    return str(caught.value)


def test_shapes_are_shown_with_the_advice_of_the_operation():
    trees = [torch.zeros(8, 10), torch.zeros(8, 10), torch.zeros(8, 10), torch.zeros(6, 10)]
    assert message(*trees) == "gather: ranks 0, 1 and 2 brought [8, 10] float32, rank 3 [6, 10] float32. Do this."


def test_a_leaf_inside_a_tree_is_named_by_its_path():
    trees = [{"out": [torch.zeros(2), torch.zeros(n)]} for n in (2, 3)]
    assert message(*trees) == "gather: at ['out'][1], rank 0 brought [2] float32, rank 1 [3] float32. Do this."


def test_dtypes_and_devices_have_an_advice_of_their_own():
    assert message(torch.zeros(2), torch.zeros(2).half()).endswith(
        "rank 1 [2] float16. Convert them to the same dtype on all ranks."
    )
    told = message(torch.zeros(2), torch.zeros(2, device="meta"))
    assert told.endswith(
        "[2] float32 on cpu, rank 1 [2] float32 on meta. Move them to the same type of device on all ranks."
    )


def test_structures_are_sketched():
    told = message({"a": torch.zeros(1)}, OrderedDict(a=torch.zeros(1)), [torch.zeros(1), ()])
    assert "rank 0 brought dict('a': tensor), rank 1 OrderedDict('a': tensor), rank 2 list(tensor, tuple())" in told


def test_only_what_must_be_alike_is_compared():
    headers = [header(torch.zeros(n, 4)) for n in (1, 2)]
    require_alike(headers, "", lambda kind: kind.shape[1:])
    with pytest.raises(CollectiveMismatch):
        require_alike(headers, "", lambda kind: kind.shape[0])


def test_many_ranks_are_counted():
    told = message(torch.zeros(1), *[torch.zeros(2) for _ in range(20)])
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more [2] float32" in told


def test_calls_are_written_as_they_were_made():
    assert called(("broadcast", ("from_process", 1))) == "broadcast(from_process=1)"
    told = str(calls_differ([("gather",), ("reduce", ("scale", 1.0)), ("gather",)]))
    assert told == (
        "ranks 0 and 2 called gather, rank 1 reduce(scale=1.0). All ranks must make the same calls in the same order."
    )


def test_different_calls_raise_one_error_whose_argument_is_its_text():
    def call(group):
        exchange = Exchange(group)
        with pytest.raises(CollectiveMismatch) as caught:
            collectives.gather(exchange, torch.zeros(1)) if group.rank else collectives.wait_for_everyone(exchange)
        return caught.value.args

    told = "rank 0 called wait_for_everyone, rank 1 gather. All ranks must make the same calls in the same order."
    assert run_replicas(call, 2) == [(told,), (told,)]


def test_what_the_first_rank_finds_out_or_fails_with_reaches_all_ranks():
    def find(group):
        exchange = Exchange(group)
        found = collectives.from_first(exchange, lambda: f"by rank {group.rank}")
        with pytest.raises(ConfigError, match=r"^raised by rank 0$"):
            collectives.from_first(exchange, fail)
        return found

    def fail():
        raise ConfigError("raised by rank 0")

    assert run_replicas(find, 2) == ["by rank 0", "by rank 0"]
