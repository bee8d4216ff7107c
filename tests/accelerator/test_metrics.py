# SPDX-License-Identifier: Apache-2.0
"""`gather_for_metrics`: each sample once, in the order of the data set, whatever a batch is made of."""

import itertools
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from laconic import Accelerator
from laconic.base.errors import RankFailure
from laconic.testing.ranks import run_ranks
from laconic.utils import DataLoaderConfiguration

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


FORMS = {
    "tensor": (lambda b: b, lambda g: g.tolist()),
    "nested": (lambda b: {"a": [b, (b * 2,)], "b": b.float()}, lambda g: [int(x) // 2 for x in g["a"][1][0]]),
    "named tuple": (lambda b: Pair(b, -b), lambda g: (-g.second).tolist()),
    "dataclass": (lambda b: Output(b[:, None].float(), [b]), lambda g: [int(x) for x in g.logits[:, 0]]),
    "strings": (lambda b: [f"w{i}" for i in b.tolist()], lambda g: [int(word[1:]) for word in g]),
    "objects": (lambda b: [{"id": i, "set": {i}} for i in b.tolist()], lambda g: [item["id"] for item in g]),
    "mixed": (
        lambda b: {"t": b, "w": [str(i) for i in b.tolist()]},
        lambda g: [int(w) for w, t in zip(g["w"], g["t"].tolist(), strict=True) if int(w) == t],
    ),
}


def collect(form, length, streams, even, drop_last, dispatch):
    config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    data = Stream(length) if streams else range(length)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
    make, read = FORMS[form]
    return [i for batch in loader for i in read(accelerator.gather_for_metrics(make(batch)))]


def everything(form, cases):
    out = [collect(form, *case) for case in cases]
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_each_sample_comes_once_in_the_order_of_the_data(form, num_ranks):
    lengths = [0, 1, 3, 8, 9, 13]  # none, fewer than ranks, whole rounds, and rests of every kind
    cases = [(n, streams, True, False, d) for n, streams, d in itertools.product(lengths, (False, True), (False, True))]
    for outcome in run_ranks(everything, num_ranks, form, cases):
        for case, seen in zip(cases, outcome, strict=True):
            assert seen == list(range(case[0])), case


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_uneven_last_batches_and_dropped_ones(num_ranks):
    round_size = 2 * num_ranks
    cases = [(2 * round_size - 1, streams, False, False, streams) for streams in (False, True)]
    cases += [(2 * round_size + 1, streams, True, True, d) for streams, d in itertools.product((False, True), repeat=2)]
    for outcome in run_ranks(everything, num_ranks, "tensor", cases):
        for case, seen in zip(cases, outcome, strict=True):
            kept = case[0] - case[0] % round_size if case[3] else case[0]
            assert seen == list(range(kept)), case


def ragged():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    rows = accelerator.gather_for_metrics([torch.full((rank + n,), n) for n in (1, 2)], use_gather_object=True)
    empty = accelerator.gather_for_metrics(torch.arange(3) if rank == 0 else torch.arange(0))
    return [row.tolist() for row in rows], empty.tolist()


def test_ragged_rows_come_as_objects_and_an_empty_share_is_a_share():
    for rows, empty in run_ranks(ragged, 2):
        assert rows == [[1], [2, 2], [1, 1], [2, 2, 2]]
        assert empty == [0, 1, 2]


def different_widths():
    accelerator = Accelerator(cpu=True)
    accelerator.gather_for_metrics(torch.ones(2, 3 + accelerator.process_index))


def test_widths_that_differ_are_the_same_error_on_every_rank_and_nothing_is_swallowed():
    with pytest.raises(RankFailure, match=r"rank 0: (.|\n)*CollectiveMismatch(.|\n)*rank 1: (.|\n)*CollectiveMismatch"):
        run_ranks(different_widths, 2)


def inside_another_loop():
    """The evaluation's padding is cut by the evaluation's loader, the training's by its own."""
    accelerator = Accelerator(cpu=True)
    train, evaluate = accelerator.prepare(DataLoader(range(5), batch_size=2), DataLoader(range(100, 103), batch_size=2))
    seen, evaluated = [], []
    for batch in train:
        for other in evaluate:
            evaluated += accelerator.gather_for_metrics(other).tolist()
        seen += accelerator.gather_for_metrics(batch).tolist()
    return seen, evaluated


def test_the_right_loader_says_what_is_padding():
    for seen, evaluated in run_ranks(inside_another_loop, 2):
        assert seen == list(range(5))
        assert evaluated == [100, 101, 102] * 2
