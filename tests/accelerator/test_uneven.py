# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other in a model's passes have the same number of batches, or all hear at once who has not.

What ranks with different numbers of batches may do is elsewhere: join under DDP, train on in an outer loop, evaluate.
"""

import itertools
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator
from farflung.comm.presence import PresenceStore
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.outer import diloco
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration, TorchDynamoPlugin


class Stream(IterableDataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        return iter(torch.ones(sum(self.lengths), 4))


class Files(Stream):
    """A stream in files, of which each rank reads its own."""

    @property
    def num_shards(self):
        return len(self.lengths)

    def shard(self, num_shards, index):
        return Files(self.lengths[index::num_shards])


def train(layout, data, compiled=False, grad=True):
    """Train for two epochs, and say which error ended it, and after how long."""
    layouts = {
        "ddp": {},
        "islands": {"island_size": 2},
        "fsdp": {
            "fsdp_plugin": FullyShardedDataParallelPlugin(),
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        },
    }
    settings = {"dynamo_plugin": TorchDynamoPlugin(backend="eager")} if compiled else {}
    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config, **layouts[layout], **settings)
    model = nn.Linear(4, 4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 2 if isinstance(data, Stream) else 1)
    )
    began = time.monotonic()
    try:
        with nullcontext() if layout == "ddp" else accelerator.outer(model, diloco(every=2)):
            for batch in itertools.chain(loader, loader):
                with torch.set_grad_enabled(grad):
                    loss = model(batch).sum()
                if grad:
                    accelerator.backward(loss)
                    optimizer.step()
        accelerator.wait_for_everyone()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(
    ("layout", "data", "more"),
    [
        ("fsdp", torch.ones(9, 4), ()),
        ("fsdp", torch.ones(13, 4), (False, False)),
        ("fsdp", torch.ones(13, 4), (True,)),
        ("islands", torch.ones(9, 4), ()),
        ("islands", Stream([1]), ()),
        ("ddp", torch.ones(5, 4), ()),
        ("ddp", Stream([9]), ()),
        ("ddp", Files([10, 2, 2, 2]), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_uneven_data_is_an_error_on_all_ranks_at_once(layout, data, more):
    told = run_ranks(train, 4, layout, data, *more, timeout_s=90)
    first, *others = (text for text, _ in told)
    assert first.startswith("CollectiveMismatch: Rank 0 has batch")
    assert "even_batches=True" in first
    assert all("rank 0 left (CollectiveMismatch: Rank 0 has batch" in text for text in others), others
    assert max(seconds for _, seconds in told) < patience(20)


def look_and_train():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(already_sharded=True))
    model, loader = accelerator.prepare(nn.Linear(4, 4), DataLoader(torch.ones(2, 4), 1))
    if accelerator.is_main_process:
        next(iter(loader))
    return [accelerator.backward(model(batch).sum()) for batch in itertools.chain(loader, loader)]


def test_a_rank_may_look_at_a_batch_of_its_own_share_before_all_train():
    assert run_ranks(look_and_train, 2, timeout_s=90) == [[None] * 4] * 2


def none_for_ones(rows):
    return None if rows[0].min() == 1 else torch.stack(rows)


def asked_of_the_store(even, train_it, is_none=False):
    """Iterate once, and return how often a loader's end was published and asked for.

    `is_none`: its first and its last batch are None.
    """
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PresenceStore, "post", lambda _, text, kind, *name: calls.append(("published", kind)))
        patch.setattr(PresenceStore, "posts", lambda _, kind, *name, ranks: calls.append(("asked", kind)) or {})
        config = DataLoaderConfiguration(even_batches=even)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = torch.ones(8, 4) * torch.tensor([1, 1, 2, 2, 2, 2, 1, 1])[:, None]
        loader = DataLoader(data, 1, collate_fn=none_for_ones if is_none else None)
        model, loader = accelerator.prepare(nn.Linear(4, 4), loader)
        for batch in loader:
            if batch is None:
                continue
            if train_it:
                accelerator.backward(model(batch).sum())
            else:
                with torch.no_grad():
                    model(batch)
    return [what for what, kind in calls if kind == "data"]


def test_the_store_is_asked_once_an_epoch_and_only_where_ranks_may_be_uneven_and_wait():
    asked = [run_ranks(asked_of_the_store, 2, even, way)[0] for even in (True, False) for way in (True, False)]
    assert asked == [[], [], ["published", "published", "asked"], ["published"] * 2]
    assert run_ranks(asked_of_the_store, 2, False, False, True)[0] == ["published"] * 2
