# SPDX-License-Identifier: Apache-2.0
"""What a prepared loader promises, whatever its settings: all replicas of a run as threads of one process."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, RandomSampler

from farflung.data.prepare import skip_first_batches
from farflung.testing.sim import run_replicas
from tests.data.support import SizedStream, Stream, gathered, prepared, walk


class Case(SimpleNamespace):
    """A loader, its settings, and the batch at which training is taken up again (`skip`).

    The order is `given`, `seedable`, or by `generator`: ranks have generators of their own, each with another seed.
    """

    def loader(self, group):
        """Prepare a loader that begins with the case's epoch."""
        data = {"map": range, "stream": Stream, "sized": SizedStream}[self.data](self.length)
        raw = DataLoader(data, self.batch_size, drop_last=self.drop_last, sampler=self.sampler(group.rank))
        settings = {"split_batches": self.split, "even_batches": self.even, "dispatch_batches": self.dispatch}
        if self.order == "seedable":
            settings |= {"use_seedable_sampler": True, "data_seed": 3}
        loader = prepared(raw, group, **settings)
        loader.set_epoch(self.epoch)
        return loader

    def sampler(self, seed):
        if self.order == "given":
            return None
        return RandomSampler(range(self.length), generator=torch.Generator().manual_seed(seed))

    def orders(self):
        """The samples of two epochs, in order, and how many of each are kept."""
        if self.order == "seedable":
            orders = [list(self.sampler(3 + self.epoch + number)) for number in range(2)]
        elif self.order == "generator":
            sampler = self.sampler(0)  # rank 0's order, and its next one, are everyone's
            orders = [list(sampler) for _ in range(2)]
        else:
            orders = [list(range(self.length))] * 2
        per_round = self.batch_size * (1 if self.split else self.size)
        kept = self.length // per_round * per_round if self.drop_last else self.length
        return [order[:kept] for order in orders]


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 2, 3, 4]))
    split = draw(st.booleans())
    data = draw(st.sampled_from(["map", "map", "stream", "sized"]))
    length = draw(st.integers(0, 30))
    return Case(
        size=size,
        length=length,
        batch_size=draw(st.integers(1, 3)) * (size if split else 1),
        data=data,
        order=draw(st.sampled_from(["given", "seedable", "generator"])) if data == "map" and length else "given",
        split=split,
        even=draw(st.booleans()),
        drop_last=draw(st.sampled_from([False, False, True])),
        dispatch=draw(st.booleans()),
        epoch=draw(st.integers(0, 5)),
        skip=draw(st.integers(0, 7)),
    )


def walks_of(group, case):
    """Two epochs; the same with the first one taken up after `skip` batches; and what `len` says of both."""
    whole, again = case.loader(group), case.loader(group)
    lengths = []
    if case.data != "stream":
        lengths = [len(whole), len(skip_first_batches(again, case.skip))]
        assert whole.total_dataset_length == case.length
    assert whole.total_batch_size == case.batch_size * (1 if case.split else case.size)
    assert whole.batch_size == case.batch_size // (case.size if case.split and not case.dispatch else 1)
    return [walk(whole), walk(whole)], [walk(skip_first_batches(again, case.skip)), walk(again)], lengths


@settings(max_examples=150)
@given(case=cases())
def test_shares_partition_the_data_in_a_known_order_and_training_goes_on_where_it_was_left(case):
    ranks = run_replicas(walks_of, case.size, case)
    for epoch, order in enumerate(case.orders()):
        walks = [whole[epoch] for whole, _, _ in ranks]
        assert gathered(walks) == order
        if case.even:
            assert len({len(one) for one in walks}) == 1
            assert all(len({len(numbers) for numbers, _, _ in step}) == 1 for step in zip(*walks, strict=True))
    for whole, again, lengths in ranks:
        assert again == [whole[0][case.skip :], whole[1]]
        assert [last for _, last, _ in whole[0]] == [False] * (len(whole[0]) - 1) + [True] * bool(whole[0])
        if lengths and (case.even or not case.dispatch):
            assert lengths == [len(whole[0]), len(again[0])]
