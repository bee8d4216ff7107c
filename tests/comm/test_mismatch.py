# SPDX-License-Identifier: Apache-2.0
"""What ranks are told when they bring different things: the operation, who brought what, and what to do."""

from collections import OrderedDict, defaultdict
from itertools import pairwise

import pytest
import torch

from farflung.base.errors import CollectiveMismatch, ConfigError
from farflung.base.tree import flatten
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.packet import Header, encode_header, require_alike
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


CALLS = {
    "gather(at='line 1')": lambda one: collectives.gather(one, TWO, at="line 1"),
    "metrics(at='line 2')": lambda one: collectives.gather_object(one, [], at="line 2", name="metrics"),
    "outer loop(items=1)": lambda one: collectives.from_first(one, int),
    "broadcast_object_list(from_process=0, items=2)": lambda one: collectives.broadcast_object_list(one, [0, 1]),
    "gather(ragged=True)": lambda one: collectives.gather(one, TWO, ragged=True),
    "iter": lambda one: collectives.gather(one, TWO, within="iter"),
    "reduce(reduction='max', scale=2.0)": lambda one: collectives.reduce(one, TWO, "max", 2),
    "log": lambda one: collectives.reduce(one, TWO, within="log"),
    "broadcast(from_process=1)": lambda one: collectives.broadcast(one, TWO, 1),
    "prepare": lambda one: collectives.broadcast(one, TWO, within="prepare"),
    "wait_for_everyone": collectives.wait_for_everyone,
    "save_state": lambda one: collectives.wait_for_everyone(one, "save_state"),
    "trackers": lambda one: collectives.gather_object(one, [], within="trackers"),
    "pad_across_processes(dim=1)": lambda one: collectives.pad_across_processes(one, TWO, 1),
}


@pytest.mark.parametrize(("first", "second"), list(pairwise(CALLS)))
def test_different_calls_raise_one_error_whose_argument_is_its_text(first, second):
    def call(group):
        with pytest.raises(CollectiveMismatch) as caught:
            CALLS[second if group.rank else first](Exchange(group))
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
