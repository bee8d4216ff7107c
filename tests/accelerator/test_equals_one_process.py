# SPDX-License-Identifier: Apache-2.0
"""Training on 1, 2 and 4 processes gives the weights of a plain loop on whole batches; metrics see each sample once."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from farflung import Accelerator
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration

NUM, GLOBAL_BATCH, EPOCHS = 23, 8, 2


def sample(index):
    generator = torch.Generator().manual_seed(index)
    return {"index": torch.tensor(index), "x": torch.randn(4, generator=generator), "y": torch.tensor(index % 3 - 1.0)}


class Rows(Dataset):
    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return sample(index)


class Stream(IterableDataset):
    def __iter__(self):
        return map(sample, range(NUM))


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def losses(model, batch):
    return (model(batch["x"]).squeeze(-1) - batch["y"]) ** 2


def plain_training(even, accumulation, clip):
    """The reference: one process, whole batches, the last one filled up from the start where batches are made even."""
    rows = [*range(NUM), *(range(-NUM % GLOBAL_BATCH) if even else ())]
    batches = [rows[at : at + GLOBAL_BATCH] for at in range(0, len(rows), GLOBAL_BATCH)]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _, (number, batch) in itertools.product(range(EPOCHS), enumerate(batches, 1)):
        stacked = {key: torch.stack([sample(i)[key] for i in batch]) for key in ("x", "y")}
        left = len(batches) % accumulation  # micro-batches in a last window that is short
        in_window = left if left and number > len(batches) - left else accumulation
        (losses(model, stacked).mean() / in_window).backward()
        if number % accumulation == 0 or number == len(batches):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def training(data, split, dispatch, even, accumulation, clip):
    config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch, even_batches=even)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config)
    size = GLOBAL_BATCH if split else GLOBAL_BATCH // accelerator.num_processes
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader = DataLoader(data(), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                each = losses(model, batch)
                count = accelerator.reduce(torch.tensor(float(len(each))))
                accelerator.backward(each.sum() * accelerator.num_processes / count)
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics(batch["index"]))
    weights = [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]
    return weights, torch.cat(seen).tolist()


SHARING = [
    (data, split, dispatch, even)
    for data, split, dispatch, even in itertools.product((Rows, Stream), (False, True), (False, True), (True, False))
    # A stream that each rank reads for itself is always made even: that is what its shard does in Accelerate too.
    if not (data is Stream and not dispatch and not even)
]


WINDOWS = [(Rows, False, False, True, accumulation, clip) for accumulation in (1, 3) for clip in (None, 0.1)]


def trainings(cases):
    return [training(*case) for case in cases]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_weights_equal_those_of_one_process_on_the_whole_batch(num_ranks):
    cases = [(*sharing, 2, 0.5) for sharing in SHARING] + WINDOWS
    ranks = run_ranks(trainings, num_ranks, cases, connect=num_ranks > 1)
    for number, case in enumerate(cases):
        # One process fills nothing up, nor does it need to; a dispatching loader fills up unless it drops.
        expected = plain_training(case[3] and num_ranks > 1, *case[4:])
        for weights, seen in (outcome[number] for outcome in ranks):
            for ours, reference in zip(weights, expected, strict=True):
                assert torch.allclose(ours, reference, atol=1e-6, rtol=0), case
            assert seen == list(range(NUM)) * EPOCHS, case
