# SPDX-License-Identifier: Apache-2.0
"""Data that the script shares out by rank itself: nothing is lost with the setting, nor silently without it."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from farflung import Accelerator
from farflung.base.errors import ConfigError, RankFailure
from farflung.data.shares import shares_of
from farflung.data_loader import prepare_data_loader
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration

LENGTH = 24


class Own(IterableDataset):
    """A stream that takes every n-th sample by rank, in an order of its epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(LENGTH), LENGTH)
        yield from order[dist.get_rank() :: dist.get_world_size()]


class Part(IterableDataset):
    """A stream that shows nothing of its share."""

    def __init__(self):
        self.numbers = range(dist.get_rank(), LENGTH, dist.get_world_size())

    def __iter__(self):
        return iter(self.numbers)


class OwnOrder:
    """A sampler that takes its part of an order by rank, or draws another order on each rank."""

    def __init__(self, is_random=False):
        self.is_random = is_random

    def __iter__(self):
        if self.is_random:
            return iter(random.Random(dist.get_rank()).sample(range(LENGTH), LENGTH))
        return iter(range(dist.get_rank(), LENGTH, dist.get_world_size()))

    def __len__(self):
        return LENGTH // dist.get_world_size()


def epochs(accelerator, loader):
    """Two passes: what this rank read, and what metrics saw of all ranks."""
    read, metrics = [], []
    for _ in range(2):
        read.append([batch.tolist() for batch in loader])
        metrics.append([accelerator.gather_for_metrics(batch).tolist() for batch in loader])
    return read, metrics


def reads_all(folder):
    """Each kind of data, with the setting for all loaders or for one; saved in the middle of an epoch."""
    whole = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(already_sharded=True))
    kinds = {
        "stream": whole.prepare(DataLoader(Own(), batch_size=4)),
        "hidden stream": whole.prepare(DataLoader(Part(), batch_size=4)),
        "sampler": whole.prepare(DataLoader(range(LENGTH), batch_size=4, sampler=OwnOrder())),
        "torch's": whole.prepare(DataLoader(range(LENGTH), 4, sampler=DistributedSampler(range(LENGTH), shuffle=True))),
    }
    plain = Accelerator(cpu=True)
    kinds["one of them"] = plain.prepare_data_loader(DataLoader(Own(), batch_size=4), already_sharded=True)
    found = {name: epochs(whole, loader) for name, loader in kinds.items()}
    free = prepare_data_loader(DataLoader(Own(), batch_size=4), already_sharded=True)
    found["function"] = epochs(whole, free)
    total = {name: loader.total_batch_size for name, loader in kinds.items()}

    whole.free_memory()
    loader = whole.prepare(DataLoader(Own(), batch_size=2))
    model = whole.prepare(nn.Linear(1, 1))
    rest = []
    for k, batch in enumerate(loader):
        whole.backward(model(batch.float()[:, None]).sum())
        if k == 1:
            whole.save_state(folder)
        elif k > 1:
            rest.append(batch.tolist())
    whole.load_state(folder)
    return found, total, rest, [batch.tolist() for batch in loader]


def test_with_the_setting_each_sample_comes_once_and_a_resumed_run_goes_on(tmp_path, capsys):
    ranks = run_ranks(reads_all, 2, tmp_path / "c", connect=False)
    (found, total, rest, resumed), (other, *_) = ranks
    assert set(total.values()) == {8}
    for name, (_, metrics) in found.items():
        for k in range(2):
            mine, theirs = ([x for batch in each[name][0][k] for x in batch] for each in (found, other))
            assert sorted(mine + theirs) == list(range(LENGTH)), name
            assert sorted(x for batch in metrics[k] for x in batch) == list(range(LENGTH)), name
    first, second = found["stream"][0]
    assert first != second  # another epoch, another order
    for _, _, rest, resumed in ranks:
        assert rest == resumed
    alone = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(already_sharded=True))
    alone.prepare(DataLoader(Own(), batch_size=2), nn.Linear(1, 1))
    alone.load_state(tmp_path / "c")
    assert "the script shares out its data, now among 1: which samples come twice" in capsys.readouterr().err


def attempt(kind, already_sharded=None):
    """What a loader is told that shares out what is shared out already, and nobody says so."""
    settings = {"dispatch_batches": False if kind == "hidden stream" else None, "already_sharded": already_sharded}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    made = {
        "asks": lambda: DataLoader(Own(), batch_size=2),
        "hidden stream": lambda: DataLoader(Part(), batch_size=2),
        "sampler": lambda: DataLoader(range(LENGTH), batch_size=2, sampler=OwnOrder()),
        "orders": lambda: DataLoader(range(LENGTH), batch_size=2, sampler=OwnOrder(is_random=True)),
        "torch's": lambda: DataLoader(range(LENGTH), sampler=DistributedSampler(range(LENGTH))),
    }[kind]()
    model = nn.Linear(1, 1)
    try:
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), made)
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            optimizer.step()
        accelerator.wait_for_everyone()
    except (ConfigError, RankFailure, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["asks", "hidden stream", "sampler", "orders", "torch's"])
def test_without_it_an_error_names_the_setting_where_it_can_be_seen(kind):
    said = run_ranks(attempt, 2, kind)
    assert "nothing" not in said
    assert any(text.startswith("ConfigError") and "already_sharded=True" in text for text in said)
    named = "This loader's DistributedSampler already gives each rank a share of its own: num_replicas=2, rank="
    assert kind != "torch's" or all(f"{named}{rank}" in text for rank, text in enumerate(said))


@pytest.mark.parametrize("kind", ["hidden stream", "orders"])
def test_data_that_differ_by_chance_are_allowed_by_saying_so(kind):
    assert run_ranks(attempt, 2, kind, False) == ["nothing"] * 2


def test_what_shows_a_share():
    half = SimpleNamespace(rank=1, world_size=2)
    split = SimpleNamespace(_distributed=half)  # as Hugging Face's data sets
    assert shares_of(split, 1, 2) == "_distributed.world_size=2, _distributed.rank=1"
    assert shares_of(SimpleNamespace(_distributed=None), 1, 2) is None
    assert shares_of(half, 1, 2) == "world_size=2, rank=1"
    assert shares_of(half, 1, 4) is None  # of something else
    assert shares_of(SimpleNamespace(num_processes=2, process_index=1), 1, 2) == "num_processes=2, process_index=1"
    assert shares_of(SimpleNamespace(num_replicas=4, rank=0), 1, 2) == "num_replicas=4, rank=0"
    assert shares_of(SimpleNamespace(num_replicas=1, rank=0), 1, 2) is None
    assert shares_of(split, 1, 4) is not None
    assert shares_of(Own(), 0, 2) == "its __iter__ asks for get_rank"

    class Inside(IterableDataset):
        def __iter__(self):
            def share():
                return torch.distributed.get_rank() or os.environ["RANK"] or self.process_index

            return iter([share()])

    assert shares_of(Inside(), 0, 2) == "its __iter__ asks for RANK and get_rank and process_index"


def test_one_process_needs_no_setting():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(already_sharded=True))
    loader = accelerator.prepare(DataLoader(range(7), batch_size=2))
    assert [accelerator.gather_for_metrics(batch).tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]
