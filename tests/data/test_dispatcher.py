# SPDX-License-Identifier: Apache-2.0
"""Dispatching, on real ranks: rank 0 reads, and everyone gets a part of every round."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from farflung.base.errors import ConfigError, RankFailure
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.data.prepare import prepare_data_loader
from farflung.loop.state import LoopState
from tests.accelerator.conftest import on_ranks
from tests.data.support import Seat, Stream, gathered, prepared, values, walk, world


def dispatched(loader, group, **settings):
    return prepared(loader, group, dispatch_batches=True, **settings)


CASES = [(24, 3, False, False), (23, 4, False, False), (23, 4, True, False), (23, 4, False, True), (9, 2, False, False)]


@on_ranks(2)
def test_batches_are_those_of_accelerate():
    """In the settings in which Accelerate hands out each sample."""
    from accelerate import PartialState  # not at the top: each rank imports this file, and that takes a second
    from accelerate.data_loader import prepare_data_loader as peer_prepare

    device = PartialState(cpu=True).device
    for length, batch_size, split, drop_last in CASES:
        raw = DataLoader([(torch.tensor([float(k)]), k) for k in range(length)], batch_size, drop_last=drop_last)
        ours = dispatched(raw, world(), split_batches=split)
        peers = peer_prepare(raw, device, split_batches=split, put_on_device=True, dispatch_batches=True)
        ours, peers = ([(values(x), values(y)) for x, y in loader] for loader in (ours, peers))
        assert ours == peers


def of_all_ranks(walk):
    """What gathering for metrics returns over an iteration of all ranks."""
    return gathered(collectives.gather_object(Exchange(world()), [walk]))


@pytest.mark.parametrize("workers", [0, 2])
@on_ranks(2)
def test_workers_of_rank_0_alone_read_the_data(workers):
    context = "fork" if workers else None
    loader = dispatched(DataLoader(Stream(23), 3, num_workers=workers, multiprocessing_context=context), world())
    for _ in range(2):
        assert sorted(of_all_ranks(walk(loader))) == list(range(23))


@on_ranks(2)
def test_other_ranks_read_nothing_and_random_numbers_stay_aligned():
    group = world()

    class Private(Dataset):
        def __getitem__(self, index):
            assert group.rank == 0
            return index

        def __len__(self):
            return 9

    torch.manual_seed(2)
    loader = dispatched(DataLoader(Private(), 2, shuffle=True, generator=torch.Generator().manual_seed(1)), group)
    first, second = (of_all_ranks(walk(loader)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second
    assert len(set(collectives.gather_object(Exchange(group), [torch.rand(1).item()]))) == 1


@on_ranks(2)
def test_random_numbers_stay_aligned_where_workers_persist():
    torch.manual_seed(2)
    loader = DataLoader(range(9), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    loader = dispatched(loader, world())
    for _ in range(3):
        assert sorted(of_all_ranks(walk(loader))) == list(range(9))
        assert len(set(collectives.gather_object(Exchange(world()), [torch.rand(1).item()]))) == 1


@on_ranks(2)
def test_a_stream_that_workers_share_out_has_as_many_rounds_as_it_says():
    loader = dispatched(DataLoader(Sized(30), 4, num_workers=3, multiprocessing_context="fork"), world())
    assert len(loader) == sum(1 for _ in loader)


class Sized(Stream):
    """A stream with a length, which workers share out sample by sample."""

    def __len__(self):
        return 30

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, 30, worker.num_workers))


@on_ranks(2)
def test_texts_are_shared_out_with_their_tensors():
    group = world()

    def collate(items):
        return {"x": torch.tensor(items), "text": [f"t{k}" for k in items], "scale": 0.5, "all": torch.tensor(3)}

    loader = dispatched(DataLoader(range(7), 2, collate_fn=collate), group)
    parts = [[2, 3], [6, 0]] if group.rank else [[0, 1], [4, 5]]
    for batch, part in zip(loader, parts, strict=True):
        assert (values(batch["x"]), batch["text"]) == (part, [f"t{k}" for k in part])
        assert (batch["scale"], batch["all"].item()) == (0.5, 3)


@on_ranks(2)
def test_batches_of_other_shapes_are_handed_out_whole():
    """Batches padded to their longest sample, so that no two of them can be joined."""
    group = world()

    def collate(items):
        return torch.tensor(items).view(-1, 1).expand(-1, max(items) + 1)

    for n, last in ((5, ([4], 5, 1)), (7, ([6], 7, 0) if group.rank else ([4, 5], 6, 0))):
        loader = dispatched(DataLoader(range(n), 2, collate_fn=collate), group)
        found = [(batch[:, 0].tolist(), batch.shape[1], loader.remainder) for batch in loader]
        assert found == [([2, 3], 4, 0) if group.rank else ([0, 1], 2, 0), last]


@on_ranks(2)
def test_objects_without_a_length_are_handed_out_whole():
    class Words(IterableDataset):
        def __iter__(self):
            return iter(["a", "b", "c"])

    group = world()
    loader = DataLoader(Words(), batch_size=None, collate_fn=lambda word: {"word": word})
    whole = dispatched(loader, group)
    seen = [(batch["word"], whole.end_of_dataloader, whole.remainder) for batch in whole]
    assert seen == [("b" if group.rank else "a", False, 0), ("c", True, 1)]
    uneven = dispatched(loader, group, even_batches=False)
    assert [batch["word"] for batch in uneven] == (["b"] if group.rank else ["a", "c"])
    batched = dispatched(DataLoader(Words(), collate_fn=lambda words: {"word": words[0]}), group)
    assert [batched.remainder for _ in batched] == [0, -1], "nobody knows how many"
    with pytest.raises((ConfigError, RankFailure), match=r"split_batches needs .* but got \{'word': 'a'\}"):
        list(dispatched(loader, group, split_batches=True))


@on_ranks(2)
def test_a_slice_function_decides_who_gets_what():
    group = world()

    def interleaved(batch, part, process_index, num_processes):
        assert part == slice(process_index * 2, process_index * 2 + 2)
        return batch[process_index::num_processes]

    for first, loader in (
        (0, dispatched(DataLoader(range(4), 2), group, slice_fn=interleaved)),
        (4, DataLoaderDispatcher(range(10), batch_size=2, skip_batches=1, _drop_last=True, slice_fn=interleaved)),
        (0, prepare_data_loader(DataLoader(range(4), 2), dispatch_batches=True, slice_fn_for_dispatch=interleaved)),
    ):
        assert len(loader) == 1
        assert walk(loader) == [([first + group.rank, first + group.rank + 2], True, 0)]


@on_ranks(2)
def test_every_rank_learns_that_rank_0_cannot_read_on():
    class Failing(IterableDataset):
        def __iter__(self):
            yield from range(6)
            raise OSError("disk on fire")

    group, state, seen = world(), LoopState(), []
    error, words = (RankFailure, "^rank 0 .*its data loader raised .*disk on") if group.rank else (OSError, "^disk on")
    with pytest.raises(error, match=words):
        seen += map(values, dispatched(DataLoader(Failing(), 1), group, state=state))
    assert seen == [[group.rank], [2 + group.rank]]
    assert state.loaders == []


@on_ranks(2)
def test_leaving_the_loop_starts_a_new_epoch_on_all_ranks():
    state, orders = LoopState(), set()
    loader = dispatched(DataLoader(range(12), 2, shuffle=True), world(), state=state, use_seedable_sampler=True)
    for _ in range(3):
        for batch in loader:
            orders.add(tuple(collectives.gather_object(Exchange(world()), values(batch))))
            break
    assert state.loaders == []
    assert len(orders) == 3


def test_a_dispatcher_looks_like_its_loader():
    raw = DataLoader(range(10), 4, num_workers=2)
    loader = dispatched(raw, Seat(0, 2), split_batches=True)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderDispatcher)
    assert (loader.batch_sampler, loader.num_workers, loader.dataset) == (raw.batch_sampler, 2, range(10))
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (3, 4, 10)
    with pytest.raises(ConfigError, match=r"batch size \(3\)"):
        dispatched(DataLoader(range(10), 3), Seat(0, 2), split_batches=True)
