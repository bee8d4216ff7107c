# SPDX-License-Identifier: Apache-2.0
"""`gather_for_metrics`: each sample once, in the order of the data set, whatever a batch is made of."""

import itertools
import re
from collections import defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator
from farflung.base.errors import CollectiveMismatch, StateError
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration
from tests.accelerator.conftest import on_ranks

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


def pairs(words, tensors):
    return [int(word) for word, number in zip(words, tensors.tolist(), strict=True) if int(word) == number]


def words(b):
    return [str(i) for i in b.tolist()]


# How a batch of numbers is dressed, how what comes back is read, and whether it goes as objects even if it is tensors.
FORMS = {
    "tensor": (lambda b: b, lambda g: g.tolist(), False),
    "nested": (lambda b: {"a": [b, (b * 2,)], "b": b.float()}, lambda g: [int(x) // 2 for x in g["a"][1][0]], False),
    "named tuple": (lambda b: Pair(b, -b), lambda g: (-g.second).tolist(), False),
    "dataclass": (lambda b: Output(b[:, None].float(), [b]), lambda g: [int(x) for x in g.logits[:, 0]], False),
    "strings": (lambda b: [f"w{i}" for i in b.tolist()], lambda g: [int(word[1:]) for word in g], False),
    "objects": (lambda b: [{"id": i, "set": {i}} for i in b.tolist()], lambda g: [item["id"] for item in g], False),
    "ragged": (lambda b: [torch.full((i % 3 + 1,), i) for i in b.tolist()], lambda g: [int(x[0]) for x in g], True),
    "mixed plain tuple": (lambda b: (words(b), {"t": b}, b), lambda g: pairs(g[0], g[1]["t"]), False),
    "mixed tuple": (lambda b: Pair(words(b), b), lambda g: pairs(g.first, g.second), False),
    "mixed dataclass": (lambda b: Output(b, words(b)), lambda g: pairs(g.hidden, g.logits), False),
    "mixed": (lambda b: {"t": b, "w": words(b)}, lambda g: pairs(g["w"], g["t"]), False),
}


def prepared(length, streams, even, drop_last, dispatch):
    config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    data = Stream(length) if streams else range(length)
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))


def collect(form, *case):
    accelerator, loader = prepared(*case)
    make, read, as_objects = FORMS[form]
    return [i for batch in loader for i in read(accelerator.gather_for_metrics(make(batch), as_objects))]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_each_sample_comes_once_in_the_order_of_the_data(num_ranks):
    lengths = [0, 1, 3, 8, 9, 13]  # none, fewer than ranks, whole rounds, and rests of every kind
    for form, length, streams, dispatch in itertools.product(FORMS, lengths, (False, True), (False, True)):
        case = (length, streams, True, False, dispatch)
        assert collect(form, *case) == list(range(length)), (form, case)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_uneven_last_batches_and_dropped_ones(num_ranks):
    round_size = 2 * num_ranks
    cases = [(2 * round_size - 1, streams, False, False, streams) for streams in (False, True)]
    lengths = (2 * round_size + 1, round_size - 1)
    cases += [(n, streams, True, True, d) for n, streams, d in itertools.product(lengths, *[(False, True)] * 2)]
    for case in cases:
        kept = case[0] - case[0] % round_size if case[3] else case[0]
        assert collect("tensor", *case) == list(range(kept)), case


def gathered_after_the_loop(cases):
    """What is left to do where ranks have different numbers of batches: a gather in the loop is not for all of them."""
    outcome = []
    for case in cases:
        accelerator, loader = prepared(*case)
        mine = [i for batch in loader for i in batch.tolist()]
        tensors = accelerator.gather_for_metrics(torch.tensor(mine, dtype=torch.int64)).tolist()
        both = {"t": torch.tensor(mine, dtype=torch.int64), "deep": defaultdict(list, w=[str(i) for i in mine])}
        mixed = accelerator.gather_for_metrics(both)
        assert mixed["t"].tolist() == tensors
        assert mixed["deep"].default_factory is list
        outcome.append((len(mine), tensors, mixed["deep"]["w"]))
        assert accelerator.gather_for_metrics([str(i) for i in mine]) == mixed["deep"]["w"]
    return outcome


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_of_any_size_are_gathered_after_the_loop(num_ranks):
    lengths = [0, 1, 3, 9, 13]
    cases = [
        (n, streams, False, False, d) for n, streams, d in itertools.product(lengths, (False, True), (False, True))
    ]
    ranks = run_ranks(gathered_after_the_loop, num_ranks, cases, connect=num_ranks > 1)
    for outcome in ranks:
        for case, (_, tensors, words) in zip(cases, outcome, strict=True):
            assert sorted(tensors) == sorted(map(int, words)) == list(range(case[0])), case
    assert num_ranks == 1 or any(outcome[4][0] == 0 < ranks[0][4][0] for outcome in ranks)  # somebody had nothing


def goes_on_alone(others_call):
    """Rank 0 gathers its last batch, while the others have none any more and make another call."""
    accelerator, loader = prepared(2 * dist.get_world_size() + 1, False, False, False, False)
    try:
        for _ in range(2):
            for batch in loader:
                accelerator.gather_for_metrics(batch)
            if others_call == "metrics":
                accelerator.gather_for_metrics(torch.zeros(1, dtype=torch.int64))
            elif others_call == "objects":
                accelerator.gather_for_metrics(["mean"])
            elif others_call == "waiting":
                accelerator.wait_for_everyone()
    except CollectiveMismatch as error:
        return str(error)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_batch_that_not_all_ranks_have_is_mixed_with_nothing_else(num_ranks):
    for others_call, wording in {
        "metrics": r"called gather_for_metrics\(at='batch \d of epoch 0'\), .* gather_for_metrics\.",
        "objects": r"called gather_for_metrics\(at='batch \d of epoch 0'\), .* gather_for_metrics of objects",
        "waiting": r"called gather_for_metrics\(at='batch \d of epoch 0'\), .* wait_for_everyone",
        "the next epoch": r"at='batch \d of epoch 0'\), .* gather_for_metrics\(at='batch 1 of epoch 1'\)",
    }.items():
        first, *others = run_ranks(goes_on_alone, num_ranks, others_call)
        assert re.search(wording, first), first
        assert others == [first] * (num_ranks - 1)


@on_ranks(2)
def test_widths_that_differ_are_the_same_error_on_every_rank_and_nothing_is_swallowed():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CollectiveMismatch):
        accelerator.gather_for_metrics(torch.ones(2, 3 + accelerator.process_index))


@on_ranks(1, each=([4, 3], [2.0, 2.0]))
def test_alone_what_is_repeated_for_each_sample_of_a_batch_is_cut_to_a_short_one():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(7), batch_size=4))
    repeated = [len(accelerator.gather_for_metrics(torch.zeros(1).repeat(4))) for _ in loader]
    numbers = [accelerator.gather_for_metrics(torch.tensor(2.0)).item() for _ in loader]
    return repeated, numbers


@pytest.mark.parametrize("workers", [0, 1])
def test_alone_samples_are_not_counted_by_a_tensor_that_is_one_of_them(workers):
    accelerator = Accelerator(cpu=True)
    images = [torch.full((3, 2, 2), float(number)) for number in range(10)]
    loader = accelerator.prepare(DataLoader(images, batch_size=5, collate_fn=tuple, num_workers=workers))
    boxes = [len(accelerator.gather_for_metrics([*batch, torch.zeros(7, 4)])[-1]) for batch in loader]
    assert boxes == [7, 7]
    found = [image for batch in loader for image in accelerator.gather_for_metrics(batch, use_gather_object=True)]
    assert len(found) == 10


class Closed:
    """A batch that does not say how many samples it has."""

    def __init__(self, samples):
        self.numbers = torch.tensor(samples)


@on_ranks(2)
def test_padding_that_can_not_be_told_from_samples_is_an_error():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(Stream(8), 3, collate_fn=Closed))
    *_, last = loader
    assert last.numbers.tolist() == [6, 7]
    batches = iter(loader)
    assert accelerator.gather_for_metrics(next(batches).numbers).tolist() == [0, 1, 2, 3, 4, 5]
    short = next(batches)
    with pytest.raises(StateError, match="nothing in them says how many samples they have"):
        accelerator.gather_for_metrics(short.numbers)
