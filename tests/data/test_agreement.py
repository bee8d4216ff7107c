# SPDX-License-Identifier: Apache-2.0
"""Ranks with random numbers of their own draw one order, and it is that of Accelerate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, SubsetRandomSampler, WeightedRandomSampler

from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.data.slot_board import agreed_order
from farflung.data.torch_loaders import Source
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.data.support import Seat, gathered, prepared, values, walk, world

LOADERS = {
    "shuffled": lambda: DataLoader(range(11), 2, shuffle=True),
    "own generator": lambda: DataLoader(range(11), 2, shuffle=True, generator=torch.Generator()),
    "subset": lambda: DataLoader(range(11), 2, sampler=SubsetRandomSampler(range(11))),
    "no batches": lambda: DataLoader(torch.arange(11), None, shuffle=True),
}


class Shuffled(IterableDataset):
    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(11, generator=self.generator).tolist())


def walk_with_own_seeds(cases):
    """Two epochs of each loader, on ranks whose generators all begin elsewhere."""
    group = world()
    found = []
    for name, settings in cases:
        torch.manual_seed(group.rank)
        if name == "stream":
            raw = DataLoader(Shuffled(torch.Generator().manual_seed(group.rank)), 2)
            settings = {**settings, "dispatch_batches": False}
        else:
            raw = LOADERS[name]()
        if raw.generator is not None:
            raw.generator.manual_seed(group.rank)
        loader = prepared(raw, group, **settings)
        found.append((walk(loader), walk(loader)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_draw_the_order_of_rank_0(size):
    cases = [(name, {}) for name in (*LOADERS, "stream")]
    cases += [("shuffled", {"use_seedable_sampler": True, "data_seed": seed}) for seed in (None, 2**64 - 1)]
    ranks = run_ranks(walk_with_own_seeds, size, cases)
    for k, case in enumerate(cases):
        orders = [gathered([rank[k][epoch] for rank in ranks]) for epoch in range(2)]
        assert all(sorted(order) == list(range(11)) for order in orders), case
        assert orders[0] != orders[1], case


class Drawn(Sampler):
    """A sampler that draws with numpy."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.generator.permutation(8).tolist())

    def __len__(self):
        return 8


@on_ranks(2)
def test_a_sampler_may_have_a_generator_of_another_kind():
    loader = prepared(DataLoader(range(8), 2, sampler=Drawn()), world())
    mine = walk(loader)
    assert sorted(gathered(collectives.gather_object(Exchange(world()), [mine]))) == list(range(8))


def test_orders_are_drawn_on_torchs_default_device(monkeypatch):
    asked = []

    class Asked(torch.Generator):
        def __new__(cls, device="cpu"):
            asked.append(torch.device(device))
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Asked)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cpu:3"))
    for seedable in (False, True):
        next(iter(prepared(LOADERS["shuffled"](), Seat(0, 2), use_seedable_sampler=seedable)))
    source = Source(LOADERS["shuffled"]())
    agreed_order(source.indices, source, 0, 0)
    source.set_generators([torch.get_rng_state()])
    assert asked == [torch.device("cpu:3")] * 4


def share_torch_states():
    group = world()
    torch.manual_seed(group.rank)
    list(prepared(DataLoader(range(4)), group, rng_types=["torch", "generator"]))
    return torch.rand(1).item()


def test_other_random_states_are_shared_on_request():
    assert len(set(run_ranks(share_torch_states, 2))) == 1


SETTINGS = [
    {},
    {"split_batches": True},
    {"even_batches": False},
    {"use_seedable_sampler": True},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks(connect=True)
def test_batches_and_random_numbers_are_those_of_accelerate(num_ranks):
    """Those of two epochs, and the next random number, from the same seed."""
    from accelerate import Accelerator as Peer  # not at the top: each rank imports this file, and that takes a second
    from accelerate.utils import DataLoaderConfiguration as PeerConfiguration

    group = world()
    for settings in SETTINGS:
        found = []
        peer = Peer(cpu=True, dataloader_config=PeerConfiguration(**settings))
        for prepare in (peer.prepare, lambda loader, settings=settings: prepared(loader, group, **settings)):
            torch.manual_seed(9)
            raw = [DataLoader(range(22), 4, shuffle=True)]
            if "use_seedable_sampler" not in settings:  # with it Accelerate lets other samplers draw what they like
                raw.append(DataLoader(range(22), 4, sampler=WeightedRandomSampler([1.0] * 22, 14)))
            loaders = [prepare(loader) for loader in raw]
            batches = [[values(batch) for batch in loader] for loader in loaders for _ in range(2)]
            found.append((batches, torch.rand(1).item()))
        assert found[0] == found[1], settings
