# SPDX-License-Identifier: Apache-2.0
"""Where a pass over the data ends, replicas are equal, and what is validated there is what is saved."""

import copy
import io
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung.base.errors import RankFailure
from farflung.integrations.data_parallel import DDPTakeover
from farflung.integrations.training_data import TrainingData
from farflung.outer.arguments import OuterConfig
from farflung.outer.driver import EpochTracker
from farflung.testing.ranks import run_ranks

CONFIGS = {every: OuterConfig("diloco", every=every, report="off") for every in (3, 1000)}
STEPS = 5  # of a pass, on each rank


def are_equal(model):
    """Whether all ranks have the same weights in memory and in the state dict, and these are the same."""
    live = {name: one.detach().tolist() for name, one in model.named_parameters()}
    saved = {name: one.tolist() for name, one in model.state_dict().items()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, live)
    return all(each == live for each in everyone), saved == live


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


def taken_over(every, workers):
    """For each way to read: whether replicas are equal after the last step, after `set_epoch`, and at the end."""
    takeover = DDPTakeover(CONFIGS[every])
    takeover.install()
    outcomes = []
    for reader in READERS:
        takeover.forget()
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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
            seen.append(are_equal(model))
        del loader
        outcomes.append(seen)
    return outcomes


@pytest.mark.parametrize(("every", "workers"), [(3, 0), (1000, 0), (3, 1)])
def test_a_pass_of_a_script_ends_with_equal_replicas_that_are_what_is_saved(every, workers):
    both = (True, True)
    for outcomes in run_ranks(taken_over, 2, every, workers):
        for when, (first, between, last) in zip(READERS.values(), outcomes, strict=True):
            assert between == both, when
            if when == "last batch":
                assert (first, last) == (both, both)


def followed():
    """A model of DDP whose loop no round of its own ends, its optimizer, and data."""
    takeover = DDPTakeover(CONFIGS[1000])
    takeover.install()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    model.takeover = takeover
    return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(torch.randn(2 * STEPS, 4))


def left_early():
    """Whether replicas are equal after a pass that was left in its middle, and after a barrier that follows it."""
    model, optimizer, data = followed()
    loader = DataLoader(data, 1, sampler=DistributedSampler(data))
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


def test_a_pass_that_is_left_is_made_up_for_at_a_barrier_of_all_ranks():
    assert run_ranks(left_early, 2) == [((False, False), (True, True))] * 2


def evaluated_from_train_mode():
    """Whether replicas are equal after steps around an evaluation that began in train mode, as Lightning begins it."""
    model, optimizer, data = followed()
    samplers = [DistributedSampler(data, shuffle=shuffle) for shuffle in (True, False)]
    train, test = (DataLoader(data, 1, sampler=sampler) for sampler in samplers)
    seen = []
    for number, (batch,) in enumerate(train, 1):
        trained(model, optimizer, batch)
        if number == 2:
            batches = iter(test)
            model.eval()
            list(batches)
            model.train()
        samplers[1].set_epoch(number)  # of no pass that was trained on
        seen.append(are_equal(model)[0])
    return seen


def test_an_evaluation_is_none_of_the_training_though_it_began_in_train_mode():
    assert run_ranks(evaluated_from_train_mode, 2) == [[False] * (STEPS - 1) + [True]] * 2


def evaluated_in_part(mode):
    """Whether replicas are equal after steps that came after an evaluation which is left open, and began in `mode`."""
    model, optimizer, data = followed()
    train, test = (DataLoader(data, 1, sampler=DistributedSampler(data, shuffle=each)) for each in (True, False))
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


@pytest.mark.parametrize("mode", [True, False])
def test_steps_are_of_the_pass_whose_batch_came_in_train_mode(mode):
    assert run_ranks(partial(evaluated_in_part, mode), 2) == [[False] * (STEPS - 1) + [True]] * 2


def planned_lengths():
    """The lengths of loaders of two replicas of an elastic run, once a first fit has trained, and evaluated."""
    takeover = DDPTakeover(CONFIGS[3])
    data, is_training = TrainingData(lambda: is_training, takeover), True
    share = SimpleNamespace(begin=lambda epoch: None, is_shared=True, hands_out=lambda: True, close=lambda: None)
    data.slots = SimpleNamespace(
        shared_as_it_is=lambda loader, parts: (DataLoader(loader.dataset, 1), share), expected=2
    )
    data.install()
    tensors = TensorDataset(torch.zeros(8, 4))
    trained, evaluated, of_next_fit, in_order = (
        DataLoader(tensors, 1, sampler=DistributedSampler(tensors, 1, 0, shuffle=shuffle))
        for shuffle in (True, True, True, False)
    )
    for _ in trained:
        data.stepped()
    is_training = False
    list(evaluated)
    return [len(one) for one in (trained, evaluated, of_next_fit, in_order)]


def test_the_loader_of_a_second_fit_has_the_length_of_a_share_too():
    assert run_ranks(planned_lengths, 1) == [[4, 8, 4, 8]]


def looked_into():
    """What torch's iterator says of a share of the data and of all of it, after two batches."""
    data = TrainingData(lambda: True, DDPTakeover(CONFIGS[3]))
    share = SimpleNamespace(begin=lambda epoch: None, is_shared=True, hands_out=lambda: True, close=lambda: None)
    slots = SimpleNamespace(shared_as_it_is=lambda loader, parts: (DataLoader(loader.dataset, 1), share))
    data.install()
    tensors = TensorDataset(torch.zeros(5, 4))
    seen = []
    for data.slots in (None, slots):
        batches = iter(DataLoader(tensors, 1, sampler=DistributedSampler(tensors, 1, 0)))
        list(zip(range(2), batches, strict=False))
        seen.append((batches._num_yielded, batches._dataset is tensors))
    return seen


def test_an_iterator_has_what_libraries_look_for_in_torchs_own():
    assert run_ranks(looked_into, 1) == [[(2, True), (0, True)]]  # a share has no first batches to be skipped again


def failing():
    """What each rank sees if rank 1 fails, and the group is destroyed on the way of the error, as frameworks do."""
    takeover = DDPTakeover(CONFIGS[3])
    takeover.install()
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    return None


def test_an_error_that_destroys_the_group_on_its_way_ends_no_run_as_if_it_were_done():
    assert run_ranks(failing, 2) == [("RankFailure", True), ("ValueError", True)]


def evaluated():
    """Whether memory and state dict are the same on all ranks in `eval()`, and each rank has its own after it."""
    takeover = DDPTakeover(CONFIGS[3])
    takeover.install()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(8):
        trained(
            model, optimizer, torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        )
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
            seen.append(torch.equal(before, model.module.weight))
    model.eval()
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.train()
    return seen, bool((model.module.weight == 0.5).all())


def test_an_evaluation_in_mid_epoch_has_the_weights_that_are_saved_on_every_rank():
    assert run_ranks(evaluated, 2) == [([(True, True), True] * 2, True)] * 2


def averaged_afterwards():
    """What a model has in a state dict, in an evaluation and after a barrier, once a script has set it after a pass."""
    model, optimizer, data = followed()
    for (batch,) in DataLoader(data, 1, sampler=DistributedSampler(data)):
        trained(model, optimizer, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    dist.barrier()
    return are_equal(model.eval()), {name: one.unique().tolist() for name, one in model.state_dict().items()}


def test_weights_that_a_callback_sets_at_the_end_of_a_fit_are_evaluated_and_saved():
    for equal, found in run_ranks(averaged_afterwards, 2):
        assert equal == (True, True)
        assert set(map(tuple, found.values())) == {(1.0,)}


def copied():
    """Whether copies and files of a model in `eval()`, with the agreed weights, have these, and no hook of its own."""
    takeover = DDPTakeover(CONFIGS[3])
    takeover.install()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        trained(model, optimizer, torch.full((2, 4), 1.0 + dist.get_rank()))
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


def test_a_model_can_be_copied_and_written_as_a_whole_while_it_is_evaluated():
    assert run_ranks(copied, 2) == [[True] * 6] * 2


def wrapped_twice():
    """Whether replicas are equal where a second DDP is made of a model, as each fit of a framework does, and later.

    And whether that brought the steps of the other rank into these weights: DDP alone would broadcast those of rank 0.
    """
    takeover = DDPTakeover(CONFIGS[1000])
    takeover.install()
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 2), []
    for number in range(2):
        before = net.weight.detach().clone()
        model = DistributedDataParallel(net)
        seen.append(are_equal(model)[0] and (number == 0 or not torch.equal(net.weight, before)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            trained(model, optimizer, torch.full((2, 4), 1.0 + dist.get_rank()))
    dist.barrier()
    takeover.close()
    return [*seen, *are_equal(model)]


def test_a_model_that_is_wrapped_again_begins_where_its_replicas_agree():
    assert run_ranks(wrapped_twice, 2) == [[True] * 4] * 2


def read_ahead_in_turns(share):
    """Flushes of replicas of an elastic run that read ahead, in an epoch with a share of so many batches."""
    flushes, steps = [], 0
    one = EpochTracker(lambda: flushes.append(steps))
    epoch = SimpleNamespace(base_dataloader=object(), share=None)
    passes = [SimpleNamespace(loader=epoch, num_batches=number, end_of_dataloader=False) for number in (2, share)]
    for this in passes:  # the first pass makes the loader known
        one.iteration_starts(epoch)
        for _ in range(this.num_batches - 1):
            steps += 1
            one.step_attempted(this, is_open=False)
        one.iteration_ended(this, at_end=True, may_train=True, is_ahead=True)
        if this.num_batches:
            steps += 1
            one.step_attempted(None, is_open=False)
        one.flush_owed()  # where the framework ends its epoch
    return flushes


@pytest.mark.parametrize("share", [0, 1, 2, 3])
def test_each_epoch_that_is_read_ahead_ends_in_one_flush_after_its_last_step_however_small_the_share(share):
    assert read_ahead_in_turns(share) == [2, 2 + share]


def logged_with_a_barrier():
    """Whether replicas are equal after an epoch that is read ahead, with a barrier before each backward pass."""
    model, optimizer, data = followed()
    loader = DataLoader(data, 1, sampler=DistributedSampler(data))
    model.takeover._data.read_ahead.add(loader.sampler)
    for (batch,) in read_ahead(loader):
        loss = model(batch).square().mean()
        dist.barrier()
        loss.backward()
        optimizer.step()
    before = are_equal(model)
    model.takeover._flush_all(if_behind=True)  # where the framework ends its epoch
    return before, are_equal(model)


def test_a_barrier_in_the_last_step_of_an_epoch_that_is_read_ahead_changes_no_weights():
    assert run_ranks(logged_with_a_barrier, 2) == [((False, False), (True, True))] * 2
