# SPDX-License-Identifier: Apache-2.0
"""Small programs with both libraries: where their numbers differ, docs/migrating.md has a row that names the test."""

import json
import warnings

import accelerate
import accelerate.utils
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

import farflung
import farflung.state
import farflung.utils
from farflung.process.bootstrap import RankInfo, choose_device
from farflung.testing.ranks import run_ranks
from tests.compat.differential import Rotated

LIBRARIES = {"accelerate": accelerate, "farflung": farflung}


def on_ranks(program, size=2):
    """The values of each rank, with Accelerate and with Farflung."""
    return tuple(run_ranks(program, size, name, connect=False) for name in LIBRARIES)


class Modules(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, size, bias=False) for size in sizes)


def program(name):
    """What one rank sees of many small things, by their names."""
    warnings.simplefilter("ignore")
    library = LIBRARIES[name]
    seen = {}
    accelerator = library.Accelerator(cpu=True, split_batches=True)
    values = torch.tensor([1.0, 2.0]) * (1 + accelerator.process_index)
    for reduction in ("sum", "mean"):
        seen[f"scaled {reduction}"] = accelerator.reduce(values.clone(), reduction, scale=10.0).tolist()
    seen["should_save_model"] = accelerator.should_save_model
    try:
        with accelerator.split_between_processes((1, 2, 3), apply_padding=True) as mine:
            seen["padded tuple"] = mine
    except TypeError:
        seen["padded tuple"] = TypeError
    loader = accelerator.prepare(DataLoader(range(8), batch_size=4))
    seen["split_batches"] = [batch.tolist() for batch in loader]
    accelerator = fresh(library, use_seedable_sampler=True)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(8), 2, sampler=SubsetRandomSampler(range(8))))
    seen["seedable, another sampler"] = sorted(x for batch in loader for x in batch.tolist())
    library.utils.set_seed(0, device_specific=True)
    loader = accelerator.prepare(DataLoader(range(8), 2, shuffle=True))
    seen["seedable, another seed"] = sorted(x for batch in loader for x in batch.tolist())
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(torch.arange(7), 2)), 1)
    seen["metrics of the rest"] = [accelerator.gather_for_metrics(batch).tolist() for batch in rest]
    accelerator = fresh(library, dispatch_batches=True)
    generator = torch.Generator().manual_seed(3)
    loader = accelerator.prepare(DataLoader(range(8), 2, shuffle=True, generator=generator))
    seen["dispatched, with a generator"] = [batch.tolist() for _ in range(2) for batch in loader]
    loader = accelerator.prepare(DataLoader(range(8), 1))
    seen["dispatched, skipped"] = [batch.item() for batch in library.skip_first_batches(loader, 2)]
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.arange(7), batch_size=2))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        seen["dispatched, joined"] = [batch.tolist() for batch in loader]
    accelerator = fresh(library, split_batches=True, dispatch_batches=True)
    try:
        seen["split in two, batches of one"] = [batch.tolist() for batch in accelerator.prepare(DataLoader(Stream()))]
    except ValueError as error:
        seen["split in two, batches of one"] = str(error)
    return seen


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def fresh(library, **loading):
    """An accelerator that takes over nothing from the one before."""
    library.state.AcceleratorState._reset_state()
    library.state.GradientState._reset_state()
    return library.Accelerator(cpu=True, dataloader_config=library.utils.DataLoaderConfiguration(**loading))


@pytest.fixture(scope="module")
def seen():
    theirs, ours = on_ranks(program)

    def both(name):
        return [rank[name] for rank in theirs], [rank[name] for rank in ours]

    return both


def test_reduce_multiplies_by_its_scale(seen):
    assert seen("scaled sum") == ([[3.0, 6.0]] * 2, [[30.0, 60.0]] * 2)
    assert seen("scaled mean") == ([[1.5, 3.0]] * 2, [[15.0, 30.0]] * 2)


def test_split_batches_as_an_argument(seen):
    theirs, ours = seen("split_batches")
    assert theirs == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert ours == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_each_process_is_told_to_save_as_saving_is_called_by_all(seen):
    assert seen("should_save_model") == ([True, False], [True, True])


def test_skipping_a_dispatched_loader_counts_what_this_process_gets(seen):
    theirs, ours = seen("dispatched, skipped")
    assert theirs == [[2, 4, 6], [3, 5, 7]]
    assert ours == [[4, 6], [5, 7]]


def test_batches_of_one_sample_are_not_split(seen):
    theirs, ours = seen("split in two, batches of one")
    assert theirs == [[[], [], [2]], [[], [], [0]]]
    assert all("a batch size (1) that is a round multiple of 2" in said for said in ours)


def test_an_epoch_of_which_batches_were_skipped_counts_as_one():
    def orders(library):
        loader = library.Accelerator(cpu=True).prepare(DataLoader(range(4), sampler=Rotated(range(4))))
        epochs = (library.skip_first_batches(loader, 2) if number == 1 else loader for number in range(3))
        return [[batch.item() for batch in each] for each in epochs]

    assert orders(accelerate) == [[0, 1, 2, 3], [3, 0], [1, 2, 3, 0]]
    assert orders(farflung) == [[0, 1, 2, 3], [3, 0], [2, 3, 0, 1]]


class Counted(Dataset):
    """Its samples are the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch

    def __len__(self):
        return 2


def test_persistent_workers_see_the_epoch():
    def epochs(library):
        loader = DataLoader(Counted(), num_workers=1, persistent_workers=True)
        loader = library.Accelerator(cpu=True).prepare(loader)
        return [[batch.item() for batch in loader] for _ in range(3)]

    assert epochs(accelerate) == [[0, 0], [0, 0], [0, 0]]
    assert epochs(farflung) == [[0, 0], [1, 1], [2, 2]]


def test_a_checkpoint_brings_back_the_number_of_the_epoch(tmp_path):
    def orders(library):
        accelerator = library.Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(4), sampler=Rotated(range(4))))
        accelerator.save_state(tmp_path / library.__name__)
        first = [batch.item() for batch in loader]
        accelerator.load_state(tmp_path / library.__name__)
        return first, [batch.item() for batch in loader]

    assert orders(accelerate) == ([0, 1, 2, 3], [1, 2, 3, 0])
    assert orders(farflung) == ([0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["dispatched, with a generator", "dispatched, joined"])
def test_a_dispatching_loader_draws_the_same_order_from_a_generator_and_joining_leaves_it_as_it_is(seen, name):
    theirs, ours = seen(name)
    assert theirs == ours


def test_any_sampler_is_shared_among_ranks_under_the_seedable_sampler(seen):
    theirs, ours = seen("seedable, another sampler")
    assert sorted(theirs[0] + theirs[1]) != list(range(8))
    assert sorted(ours[0] + ours[1]) == list(range(8))


def test_processes_with_seeds_of_their_own_share_one_order_under_the_seedable_sampler(seen):
    theirs, ours = seen("seedable, another seed")
    assert sorted(theirs[0] + theirs[1]) != list(range(8))
    assert sorted(ours[0] + ours[1]) == list(range(8))


def test_a_tuple_is_shared_out_with_padding(seen):
    assert seen("padded tuple") == ([TypeError] * 2, [(1, 2), (3, 3)])


def test_metrics_of_a_loader_whose_first_batches_are_skipped_have_each_sample_once(seen):
    assert seen("metrics of the rest") == ([[[4, 5, 6, 0]]] * 2, [[[4, 5, 6]]] * 2)


def test_metrics_of_a_batch_sampler_that_drops_its_last_batch_have_all_other_samples():
    def gathered(library):
        accelerator = library.Accelerator(cpu=True)
        batches = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=True)
        loader = accelerator.prepare(DataLoader(torch.arange(5), batch_sampler=batches))
        return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]

    assert gathered(accelerate) == [[0, 1], [2]]
    assert gathered(farflung) == [[0, 1], [2, 3]]


def test_a_window_that_follows_the_end_of_data_drawn_inside_accumulate():
    def gradients(library):
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
        layer = nn.Linear(1, 1, bias=False)
        model, loader = accelerator.prepare(layer, DataLoader(torch.ones(3, 1)))
        optimizer = accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.0))
        cycle, found = (batch for _ in range(3) for batch in loader), []
        for _ in range(7):
            with accelerator.accumulate(model):
                accelerator.backward(model(next(cycle)).sum())
                if accelerator.sync_gradients:
                    found.append(layer.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert gradients(accelerate) == [1.0, 1.0, 1.0, 0.5]
    assert gradients(farflung) == [1.0, 1.0, 1.0, 1.0]


def test_a_device_that_a_variable_names_is_taken_without_accelerators(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert str(accelerate.PartialState().device) == "meta"
    if not torch.accelerator.is_available():
        assert str(choose_device(RankInfo(0, 1, 0, 1), cpu=False)) == "meta"
    assert str(choose_device(RankInfo(0, 1, 0, 1), cpu=True)) == "cpu"


@pytest.mark.parametrize("sizes", [(10, 600, 10), (100, 100, 100), (600, 600), (10, 240, 10, 240, 500)])
def test_a_model_is_saved_in_the_same_files(sizes, tmp_path):
    names = []
    for name, library in LIBRARIES.items():
        library.Accelerator(cpu=True).save_model(Modules(*sizes), tmp_path / name, max_shard_size=1000)
        index = tmp_path / name / "model.safetensors.index.json"
        names.append(json.loads(index.read_text())["weight_map"] if index.exists() else None)
    assert names[0] == names[1]
