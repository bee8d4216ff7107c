# SPDX-License-Identifier: Apache-2.0
"""Dispatching, on real ranks: rank 0 reads, and everyone gets a part of every round."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from farflung.base.errors import ConfigError, RankFailure
from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.loop.state import LoopState
from farflung.testing.ranks import run_ranks
from tests.data.support import Seat, Stream, gathered, prepared, values, walk, world


def dispatched(loader, group, **settings):
    return prepared(loader, group, dispatch_batches=True, **settings)


def walk_both():
    """Ours and Accelerate's batches, for the settings in which Accelerate hands out each sample."""
    from accelerate import PartialState  # not at the top: each rank imports this file, and that takes a second
    from accelerate.data_loader import prepare_data_loader as peer_prepare

    state = PartialState(cpu=True)
    group = world()
    pairs = []
    for length, batch_size, split, drop_last in [
        (24, 3, 0, 0),
        (23, 4, 0, 0),
        (23, 4, 1, 0),
        (23, 4, 0, 1),
        (9, 2, 0, 0),
    ]:
        data = [(torch.tensor([float(k)]), k) for k in range(length)]
        both = []
        for prepare in ("ours", "peers"):
            raw = DataLoader(data, batch_size, drop_last=bool(drop_last))
            if prepare == "ours":
                loader = dispatched(raw, group, split_batches=bool(split))
            else:
                loader = peer_prepare(
                    raw, state.device, split_batches=bool(split), put_on_device=True, dispatch_batches=True
                )
            both.append([(values(x), values(y)) for x, y in loader])
        pairs.append(both)
    return pairs


def test_batches_are_those_of_accelerate():
    for pairs in run_ranks(walk_both, 2):
        assert all(ours == peers for ours, peers in pairs)


def read_with_workers(workers):
    group = world()
    context = "fork" if workers else None
    loader = dispatched(DataLoader(Stream(23), 3, num_workers=workers, multiprocessing_context=context), group)
    walks = [walk(loader), walk(loader)]
    return walks, torch.rand(1).item()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_rank_0_alone_read_the_data(workers):
    ranks = run_ranks(read_with_workers, 2, workers)
    for epoch in range(2):
        assert sorted(gathered([walks[epoch] for walks, _ in ranks])) == list(range(23))


def read_where_only_rank_0_can():
    group = world()

    class Private(Dataset):
        def __getitem__(self, index):
            assert group.rank == 0
            return index

        def __len__(self):
            return 9

    torch.manual_seed(2)
    loader = dispatched(DataLoader(Private(), 2, shuffle=True, generator=torch.Generator().manual_seed(1)), group)
    return walk(loader), walk(loader), torch.rand(1).item()


def test_other_ranks_read_nothing_and_random_numbers_stay_aligned():
    ranks = run_ranks(read_where_only_rank_0_can, 2)
    orders = [gathered([rank[epoch] for rank in ranks]) for epoch in range(2)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert orders[0] != orders[1]
    assert ranks[0][2] == ranks[1][2]


def read_mixed():
    group = world()

    def collate(items):
        return {"x": torch.tensor(items), "text": [f"t{k}" for k in items], "scale": 0.5, "all": torch.tensor(3)}

    loader = dispatched(DataLoader(range(7), 2, collate_fn=collate), group)
    return [{**batch, "x": values(batch["x"]), "all": batch["all"].item()} for batch in loader]


def test_texts_are_shared_out_with_their_tensors():
    for rank, batches in enumerate(run_ranks(read_mixed, 2)):
        numbers = [[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 0]]
        assert [batch["x"] for batch in batches] == numbers
        assert [batch["text"] for batch in batches] == [[f"t{k}" for k in part] for part in numbers]
        assert all((batch["scale"], batch["all"]) == (0.5, 3) for batch in batches)


def read_ragged():
    """Batches padded to their longest sample, so that no two of them can be joined."""
    group = world()

    def collate(items):
        return torch.tensor(items).view(-1, 1).expand(-1, max(items) + 1)

    loader = dispatched(DataLoader(range(5), 2, collate_fn=collate), group)
    return [(batch[:, 0].tolist(), batch.shape[1], loader.remainder) for batch in loader]


def test_batches_of_other_shapes_are_handed_out_whole():
    assert run_ranks(read_ragged, 2) == [
        [([0, 1], 2, 0), ([4], 5, 1)],
        [([2, 3], 4, 0), ([4], 5, 1)],
    ]


def read_words():
    class Words(IterableDataset):
        def __iter__(self):
            return iter(["a", "b", "c"])

    group = world()
    whole = dispatched(DataLoader(Words(), batch_size=None, collate_fn=lambda word: {"word": word}), group)
    seen = [(batch["word"], whole.end_of_dataloader, whole.remainder) for batch in whole]
    with pytest.raises((ConfigError, RankFailure), match="split_batches"):
        list(dispatched(DataLoader(Words(), None, collate_fn=lambda word: {"w": word}), group, split_batches=True))
    return seen


def test_objects_without_a_length_are_handed_out_whole():
    assert run_ranks(read_words, 2) == [[("a", False, 0), ("c", True, 1)], [("b", False, 0), ("c", True, 1)]]


def read_with_slice_fn():
    def interleaved(batch, part, process_index, num_processes):
        assert part == slice(process_index * 2, process_index * 2 + 2)
        return batch[process_index::num_processes]

    return walk(dispatched(DataLoader(range(4), 2), world(), slice_fn=interleaved))


def test_a_slice_function_decides_who_gets_what():
    assert run_ranks(read_with_slice_fn, 2) == [[([0, 2], True, 0)], [([1, 3], True, 0)]]


def read_failing():
    class Failing(IterableDataset):
        def __iter__(self):
            yield from range(6)
            raise OSError("disk on fire")

    state = LoopState()
    seen = []
    try:
        for batch in dispatched(DataLoader(Failing(), 1), world(), state=state):
            seen.append(values(batch))
    except (OSError, RankFailure) as error:
        return seen, f"{type(error).__name__}: {error}", state.loaders
    return None


def test_every_rank_learns_that_rank_0_cannot_read_on():
    zero, one = run_ranks(read_failing, 2)
    assert zero == ([[0], [2]], "OSError: disk on fire", [])
    assert one[0] == [[1], [3]]
    assert one[1].startswith("RankFailure: rank 0 ")
    assert "disk on fire" in one[1]
    assert one[2] == []


def break_off():
    state = LoopState()
    loader = dispatched(DataLoader(range(12), 2, shuffle=True), world(), state=state, use_seedable_sampler=True)
    orders = []
    for _ in range(3):
        for batch in loader:
            orders.append(values(batch))
            break
    assert state.loaders == []
    return orders


def test_leaving_the_loop_starts_a_new_epoch_on_all_ranks():
    ranks = run_ranks(break_off, 2)
    assert len({tuple(zero + one) for zero, one in zip(*ranks, strict=True)}) == 3


def test_a_dispatcher_looks_like_its_loader():
    raw = DataLoader(range(10), 4, num_workers=2)
    loader = dispatched(raw, Seat(0, 2), split_batches=True)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderDispatcher)
    assert (loader.batch_sampler, loader.num_workers, loader.dataset) == (raw.batch_sampler, 2, range(10))
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (3, 4, 10)
    with pytest.raises(ConfigError, match=r"batch size \(3\)"):
        dispatched(DataLoader(range(10), 3), Seat(0, 2), split_batches=True)
