# SPDX-License-Identifier: Apache-2.0
"""What ranks are told when they bring different things: the operation, who brought what, and what to do."""

from collections import OrderedDict, defaultdict

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


TWO = torch.zeros(2)
MESSAGES = {
    "shapes are shown with the advice of the operation": (
        [*3 * [torch.zeros(8, 10)], torch.zeros(6, 10)],
        "gather: ranks 0, 1 and 2 brought [8, 10] float32, rank 3 [6, 10] float32. Do this.",
    ),
    "a leaf inside a tree is named by its path": (
        [defaultdict(list, out=[TWO, torch.zeros(n)]) for n in (2, 3)],
        "gather: at ['out'][1], rank 0 brought [2] float32, rank 1 [3] float32. Do this.",
    ),
    "dtypes have an advice of their own": (
        [TWO, TWO.half()],
        "gather: rank 0 brought [2] float32, rank 1 [2] float16. Convert them to the same dtype on all ranks.",
    ),
    "devices too": (
        [TWO, torch.zeros(2, device="meta")],
        "gather: rank 0 brought [2] float32 on cpu, rank 1 [2] float32 on meta. "
        "Move them to the same type of device on all ranks.",
    ),
    "structures are sketched": (
        [{"a": TWO}, OrderedDict(a=TWO), [TWO, ()]],
        "gather: rank 0 brought dict('a': tensor), rank 1 OrderedDict('a': tensor), rank 2 list(tensor, tuple()). "
        "All ranks must pass the same structure, with keys in the same order.",
    ),
    "many ranks are counted": (
        [torch.zeros(1), *[TWO] * 20],
        "gather: rank 0 brought [1] float32, ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more [2] float32. Do this.",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_what_differs_is_said_with_who_brought_it(case):
    trees, words = MESSAGES[case]
    with pytest.raises(CollectiveMismatch) as caught:
        require_alike([header(tree) for tree in trees], "Do this.")
    assert str(caught.value) == words


def test_only_what_must_be_alike_is_compared():
    headers = [header(torch.zeros(n, 4)) for n in (1, 2)]
    require_alike(headers, "", lambda kind: kind.shape[1:])
    with pytest.raises(CollectiveMismatch):
        require_alike(headers, "", lambda kind: kind.shape[0])


def test_calls_are_written_as_they_were_made():
    assert called(("broadcast", ("from_process", 1))) == "broadcast(from_process=1)"
    told = str(calls_differ([("gather",), ("reduce", ("scale", 1.0)), ("gather",)]))
    assert told == (
        "ranks 0 and 2 called gather, rank 1 reduce(scale=1.0). All ranks must make the same calls in the same order."
    )


CALLS = [
    (
        lambda one: collectives.gather(one, TWO, at="line 1"),
        lambda one: collectives.gather_object(one, [], at="line 2", name="metrics"),
        "gather(at='line 1')",
        "metrics(at='line 2')",
    ),
    (
        lambda one: collectives.from_first(one, int),
        lambda one: collectives.broadcast_object_list(one, [0, 1]),
        "outer loop(items=1)",
        "broadcast_object_list(from_process=0, items=2)",
    ),
]


@pytest.mark.parametrize(("of_first", "of_second", "first", "second"), CALLS)
def test_different_calls_raise_one_error_whose_argument_is_its_text(of_first, of_second, first, second):
    def call(group):
        with pytest.raises(CollectiveMismatch) as caught:
            (of_second if group.rank else of_first)(Exchange(group))
        return caught.value.args

    told = f"rank 0 called {first}, rank 1 {second}. All ranks must make the same calls in the same order."
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
