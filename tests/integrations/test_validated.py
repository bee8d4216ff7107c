# SPDX-License-Identifier: Apache-2.0
"""Where a pass over the data ends, replicas are equal, and what is validated there is what is saved."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung.base.errors import RankFailure
from farflung.hosts.data_parallel import DDPTakeover
from farflung.hosts.driver import EpochTracker
from farflung.hosts.training_data import TrainingData
from farflung.methods.arguments import OuterConfig
from tests.accelerator.conftest import on_ranks
from tests.integrations.takeover import installed, is_the_same

CONFIGS = {every: OuterConfig("diloco", every=every, report="off") for every in (3, 1000)}
STEPS = 5  # of a pass, on each rank


def are_equal(model):
    """Whether all ranks have the same weights in memory, and whether an evaluation has those of the state dict."""
    is_equal = is_the_same({name: one.detach().tolist() for name, one in model.named_parameters()})
    saved = {name: one.tolist() for name, one in model.state_dict().items()}
    was_training = model.training
    model.eval()
    live = {name: one.detach().tolist() for name, one in model.named_parameters()}
    model.train(was_training)
    return is_equal, saved == live


def followed(every=1000):
    """A model of DDP whose loop has a round after so many steps, its optimizer, and data."""
    takeover = installed(CONFIGS[every])
    return *made_again(takeover), TensorDataset(torch.randn(2 * STEPS, 4))


def made_again(takeover):
    takeover.forget()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    model.takeover = takeover
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader_of(data, **options):
    return DataLoader(data, 1, sampler=DistributedSampler(data, **options))


def of_this_rank():
    return torch.full((2, 4), 1.0 + dist.get_rank())


def trained(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def simple(loader):
    yield from loader


def left_on_its_last_batch(loader):
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == STEPS:
            break


def read_ahead(loader):
    """As prefetchers do: the next batch is fetched before the one in hand is used."""
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def without_a_loader(loader):
    data = loader.dataset.tensors[0]
    for index in loader.sampler:
        yield (data[index : index + 1],)


READERS = {
    simple: "last batch",
    left_on_its_last_batch: "last batch",
    read_ahead: "set_epoch",
    without_a_loader: "set_epoch",
}


@pytest.mark.parametrize(("every", "workers"), [(3, 0), (1000, 0), (3, 1)])
@on_ranks(2)
def test_a_pass_of_a_script_ends_with_equal_replicas_that_are_what_is_saved(every, workers):
    """After the last step, after `set_epoch` and at the end."""
    takeover = installed(CONFIGS[every])
    for reader, when in READERS.items():
        model, optimizer = made_again(takeover)
        data = TensorDataset(torch.randn(2 * STEPS, 4))
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 1, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            if epoch:
                seen.append(are_equal(model))
            for (batch,) in reader(loader):
                trained(model, optimizer, batch)
            if when == "last batch":
                seen.append(are_equal(model))
        del loader
        assert {*seen} == {(True, True)}, (reader, seen)


@on_ranks(2, each=((False, True), (True, True)))
def test_a_pass_that_is_left_is_made_up_for_at_a_barrier_of_all_ranks():
    model, optimizer, data = followed()
    loader = loader_of(data)
    if dist.get_rank() == 0:
        list(loader)  # alone, in train mode, before there is a loop: nothing may wait for the others
    dist.barrier()
    for number, (batch,) in enumerate(loader, 1):
        trained(model, optimizer, batch)
        if number == 3:
            break
    before = are_equal(model)
    dist.barrier()
    return before, are_equal(model)


@on_ranks(2, each=[False] * (STEPS - 1) + [True])
def test_an_evaluation_is_none_of_the_training_though_it_began_in_train_mode():
    """As Lightning begins it."""
    model, optimizer, data = followed()
    train, test = loader_of(data), loader_of(data, shuffle=False)
    seen = []
    for number, (batch,) in enumerate(train, 1):
        trained(model, optimizer, batch)
        if number == 2:
            batches = iter(test)
            model.eval()
            list(batches)
            model.train()
        test.sampler.set_epoch(number)  # of no pass that was trained on
        seen.append(are_equal(model)[0])
    return seen


@pytest.mark.parametrize("mode", [True, False])
@on_ranks(2, each=[False] * (STEPS - 1) + [True])
def test_steps_are_of_the_pass_whose_batch_came_in_train_mode(mode):
    """They come after an evaluation which is left open, and began in `mode`."""
    model, optimizer, data = followed()
    train, test = loader_of(data), loader_of(data, shuffle=False)
    model.train(mode)
    batches = iter(test)
    model.eval()
    next(batches)
    model.train()
    seen = []
    for (batch,) in train:
        trained(model, optimizer, batch)
        test.sampler.set_epoch(1)  # of no pass that was trained on
        seen.append(are_equal(model)[0])
    next(batches)  # it was open until here
    return seen


def shares():
    """What hands out a share of a replica's data, as slots of an elastic run do."""
    calls = {"begin": lambda epoch: None, "hands_out": lambda: True, "shows_one": lambda frame: False}
    share = SimpleNamespace(is_shared=True, is_unused=False, close=lambda: None, **calls)
    return SimpleNamespace(shared_as_it_is=lambda loader, parts: (DataLoader(loader.dataset, 1), share), expected=2)


@on_ranks(1, each=[4, 8, 4, 8])
def test_the_loader_of_a_second_fit_has_the_length_of_a_share_too():
    """Of loaders of two replicas of an elastic run, once a first fit has trained, and evaluated."""
    takeover = installed(CONFIGS[3])
    data, is_training = TrainingData(lambda: is_training, takeover), True
    data.slots = shares()
    data.install()
    tensors = TensorDataset(torch.zeros(8, 4))
    loaders = [loader_of(tensors, num_replicas=1, rank=0, shuffle=shuffle) for shuffle in (True, True, True, False)]
    for _ in loaders[0]:
        data.stepped()
    is_training = False
    list(loaders[1])
    return [len(one) for one in loaders]


@on_ranks(1, each=[(2, True), (0, True)])  # a share has no first batches to be skipped again
def test_an_iterator_has_what_libraries_look_for_in_torchs_own():
    data = TrainingData(lambda: True, DDPTakeover(CONFIGS[3]))
    data.install()
    tensors = TensorDataset(torch.zeros(5, 4))
    seen = []
    for data.slots in (None, shares()):
        batches = iter(loader_of(tensors, num_replicas=1, rank=0))
        list(zip(range(2), batches, strict=False))
        seen.append((batches._num_yielded, batches._dataset is tensors))
    return seen


@on_ranks(2, by_rank=[("RankFailure", True), ("ValueError", True)])
def test_an_error_that_destroys_the_group_on_its_way_ends_no_run_as_if_it_were_done():
    """As frameworks do."""
    model, optimizer, _ = followed(3)
    try:
        try:
            for step in range(6):
                if step == 4 and dist.get_rank() == 1:
                    raise ValueError("step 4")
                trained(model, optimizer, torch.randn(2, 4))
        finally:
            dist.destroy_process_group()
    except (ValueError, RankFailure) as error:
        return type(error).__name__, "step 4" in str(error)


@on_ranks(2, each=[(True, True), True] * 2)
def test_an_evaluation_in_mid_epoch_has_the_weights_that_are_saved_on_every_rank():
    model, optimizer, _ = followed(3)
    torch.manual_seed(dist.get_rank())
    seen = []
    for step in range(8):
        trained(model, optimizer, torch.randn(2, 4))
        if step in (1, 4):
            before = model.module.weight.clone()
            if step == 4 and dist.get_rank() == 0:  # one rank alone may evaluate, and waits for nobody
                model.eval()
            dist.barrier()
            model.eval()
            seen.append(are_equal(model))
            for module in model.module.modules() if step == 4 else ():  # as Lightning goes back
                module.training = True
            model.train() if step == 1 else model(torch.randn(1, 4))
            seen.append(torch.equal(before, model.module.weight))  # each rank has its own again
    model.eval()
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    model.train()
    assert (model.module.weight == 0.5).all()
    return seen


@on_ranks(2, each=((True, True), [1.0]))
def test_weights_that_a_callback_sets_at_the_end_of_a_fit_are_evaluated_and_saved():
    model, optimizer, data = followed()
    for (batch,) in loader_of(data):
        trained(model, optimizer, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    dist.barrier()
    return are_equal(model.eval()), torch.cat([one.flatten() for one in model.state_dict().values()]).unique().tolist()


@on_ranks(2, each=[True] * 6)
def test_a_model_can_be_copied_and_written_as_a_whole_while_it_is_evaluated():
    """Copies and files have the agreed weights, and no hook of the model's."""
    model, optimizer, _ = followed(3)
    for _ in range(5):
        trained(model, optimizer, of_this_rank())
    own = model.module.weight.clone()
    model.eval()
    torch.save(model.module, written := io.BytesIO())
    written.seek(0)
    agreed, seen = model.module.weight.clone(), []
    for one in (copy.deepcopy(model.module), torch.load(written, weights_only=False)):
        seen.append(torch.equal(one.weight, agreed) and torch.equal(one.state_dict()["weight"], agreed))
        one.load_state_dict({name: value + 1 for name, value in one.state_dict().items()})
        seen.append(torch.equal(model.module.weight, agreed))  # the model is evaluated as before
    model.train()
    return [*seen, torch.equal(model.module.weight, own), not torch.equal(own, agreed)]


@on_ranks(2, each=[True] * 4)
def test_a_model_that_is_wrapped_again_begins_where_its_replicas_agree():
    """As each fit of a framework does: replicas are equal where a second DDP is made of a model, and at the end.

    That brings the steps of the other rank into these weights: DDP alone would broadcast those of rank 0.
    """
    takeover = installed(CONFIGS[1000])
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 2), []
    for number in range(2):
        before = net.weight.detach().clone()
        model = DistributedDataParallel(net)
        seen.append(are_equal(model)[0] and (number == 0 or not torch.equal(net.weight, before)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            trained(model, optimizer, of_this_rank())
    dist.barrier()
    takeover.close()
    return [*seen, *are_equal(model)]


@pytest.mark.parametrize("share", [0, 1, 2, 3])
def test_each_epoch_that_is_read_ahead_ends_in_one_flush_after_its_last_step_however_small_the_share(share):
    """In replicas of an elastic run, in an epoch with a share of so many batches."""
    flushes, steps = [], 0
    one = EpochTracker(lambda: flushes.append(steps))
    epoch = SimpleNamespace(base_dataloader=object(), share=None)
    for number in (2, share):  # the first pass makes the loader known
        this = SimpleNamespace(loader=epoch, num_batches=number, end_of_dataloader=False, is_beside=False)
        one.iteration_starts(epoch)
        for _ in range(number - 1):
            steps += 1
            one.step_attempted(this, is_open=False)
        one.iteration_ended(this, at_end=True, may_train=True, is_ahead=True)
        if number:
            steps += 1
            one.step_attempted(None, is_open=False)
        one.flush_owed()  # where the framework ends its epoch
    assert flushes == [2, 2 + share]


@on_ranks(2, each=((False, True), (True, True)))
def test_a_barrier_in_the_last_step_of_an_epoch_that_is_read_ahead_changes_no_weights():
    model, optimizer, data = followed()
    loader = loader_of(data)
    model.takeover._data.read_ahead.add(loader.sampler)
    for (batch,) in read_ahead(loader):
        loss = model(batch).square().mean()
        dist.barrier()
        loss.backward()
        optimizer.step()
    before = are_equal(model)
    model.takeover._flush_all(if_behind=True)  # where the framework ends its epoch
    return before, are_equal(model)
