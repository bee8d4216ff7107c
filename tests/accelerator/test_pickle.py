# SPDX-License-Identifier: Apache-2.0
"""What can be pickled: an `Accelerator` with what it has prepared, and the parts that scripts pickle alone."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator, skip_first_batches
from farflung.accelerator.operations import extract_model_from_parallel
from farflung.compat.free_functions import convert_outputs_to_fp32
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def batches(loader):
    return [batch.tolist() for batch in loader]


def loaders_come_back():
    """Prepared loaders of an Accelerator and of its pickled copy hand out the same, in each way to share data."""
    for data, flags in (
        (range(10), {}),
        (range(10), {"even_batches": False}),
        (range(10), {"use_seedable_sampler": True}),
        (range(10), {"dispatch_batches": True}),
        (Stream(), {"dispatch_batches": False}),
    ):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**flags))
        torch.manual_seed(0)
        shuffle = data.__class__ is range and not flags.get("dispatch_batches")
        loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=shuffle))
        loaders = [loader, pickled(accelerator)._dataloaders[0], pickled(loader)]
        assert {type(one) for one in loaders} == {type(loader)}
        found = []
        for one in loaders:
            torch.manual_seed(1)
            found.append(batches(one))
        assert found == [found[0]] * 3
        skipping = skip_first_batches(loader, 1)
        assert len(batches(pickled(skipping))) == len(batches(skipping))
        accelerator.free_memory()
    return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()


def test_prepared_loaders_are_pickled():
    assert loaders_come_back() == [0]


def test_prepared_loaders_are_pickled_on_ranks():
    assert run_ranks(loaders_come_back, 2) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_copy_of_an_accelerator_trains_a_model_of_its_own(has_folder, tmp_path, monkeypatch):
    if has_folder:
        monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    parts = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(6, 2), 2))
    for x in parts[2]:  # in the middle of a window and of the data
        with accelerator.accumulate(parts[0]):
            accelerator.backward(parts[0](x).sum())
        break
    before = copy.deepcopy(parts[0].state_dict())
    other, (model2, optimizer, loader) = pickled((accelerator, parts))
    assert other._models[0] is model2
    assert other._optimizers[0] is optimizer
    assert other._dataloaders[0] is loader
    for x in loader:
        with other.accumulate(model2):
            other.backward(model2(x).sum())
            optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in parts[0].state_dict().items())
    assert not torch.equal(before["weight"], model2.weight)
    assert other.state.process_index == accelerator.state.process_index


class Half(nn.Module):
    def forward(self, x):
        return x.half()


def test_models_whose_outputs_are_converted_are_pickled_and_copied():
    model = Half()
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    for other in (model, pickled(model), copy.deepcopy(model), pickled(model.forward).model_forward.__self__):
        assert other(torch.ones(1)).dtype is torch.float32
    assert pickled(model.forward)(torch.ones(1)).dtype is torch.float32
    assert copy.deepcopy(model).forward.model_forward.__self__ is not model
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert plain is model
    assert not {"forward", "_original_forward"} & set(vars(model))
    assert model(torch.ones(1)).dtype is torch.float16
