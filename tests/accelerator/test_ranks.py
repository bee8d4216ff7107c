# SPDX-License-Identifier: Apache-2.0
"""The Accelerator on real gloo ranks: wrapping, talking, metrics, and loops by hand."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, DDPCommunicationHookType as Hook
from farflung.base.errors import ConfigError, StateError
from farflung.state import AcceleratorState
from farflung.utils import AutocastKwargs, DataLoaderConfiguration, DistributedDataParallelKwargs, DistributedType
from tests.accelerator.conftest import on_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_what_ranks_know_of_each_other_and_that_preparing_again_changes_nothing(num_ranks):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = nn.Linear(2, 1)
    frozen = nn.Linear(2, 1).requires_grad_(False)
    wrapped, teacher = accelerator.prepare(model, frozen)
    evaluated = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.static_graph
    assert teacher is frozen
    assert not isinstance(evaluated, DistributedDataParallel)
    assert accelerator.unwrap_model(wrapped) is model
    assert accelerator.get_state_dict(wrapped).keys() == model.state_dict().keys()
    assert accelerator.prepare(wrapped) is wrapped
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert (accelerator.use_distributed, accelerator.multi_device) == (True, False)
    assert accelerator.prepare(model) is wrapped
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))  # after its model, and by itself
    assert accelerator.prepare(optimizer) is accelerator.prepare(optimizer.optimizer) is optimizer
    assert (len(accelerator._models), len(accelerator._optimizers)) == (3, 1)
    rank = torch.distributed.get_rank()
    assert (accelerator.process_index, accelerator.num_processes) == (rank, num_ranks)
    assert (accelerator.is_main_process, accelerator.is_last_process) == (rank == 0, rank == num_ranks - 1)


@on_ranks(2, each=(True, [1.0], True))
def test_what_is_set_on_an_accelerator_counts_for_what_is_prepared_afterwards():
    accelerator = Accelerator(cpu=True)
    for name in ("ddp_handler", "device_placement", "step_scheduler_with_optimizer", "rng_types"):
        with pytest.raises(ConfigError, match=name):
            setattr(accelerator, name, 3)
    accelerator.ddp_handler = DistributedDataParallelKwargs(bucket_cap_mb=2)
    accelerator.ddp_handler.bucket_cap_mb = 0
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        accelerator.prepare(nn.Linear(2, 1))
    accelerator.ddp_handler.bucket_cap_mb, accelerator.ddp_handler.find_unused_parameters = 2, True
    accelerator.step_scheduler_with_optimizer = accelerator.device_placement = False
    accelerator.rng_types = ["torch"]
    wrapped, optimizer = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler, loader = accelerator.prepare(LambdaLR(optimizer, lambda step: step), DataLoader(torch.ones(4)))
    optimizer.step_was_skipped = True
    scheduler.step()
    torch.manual_seed(accelerator.process_index)
    list(loader)
    drawn = accelerator.gather(torch.rand(1))
    return wrapped.find_unused_parameters, scheduler.get_last_lr(), drawn[0] == drawn[1]


@on_ranks(2, each=(True, 1))
def test_a_model_that_was_prepared_for_evaluation_can_be_prepared_for_training():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    wrapped = accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is accelerator.prepare(model) is wrapped
    return isinstance(wrapped, DistributedDataParallel), len(accelerator._models)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks(each=[torch.float32, torch.bfloat16])
def test_what_is_computed_in_half_comes_out_in_fp32_or_as_it_is(num_ranks):
    seen = []
    for handlers in ([], [AutocastKwargs(outputs_to_fp32=False)]):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
        seen.append(accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2)).dtype)
    return seen


@on_ranks(2, by_rank=[[1.0, -1.0], [1.0, 1.0]])
def test_gather_reduce_pad_and_trigger():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    gathered = accelerator.gather({"a": torch.full((2,), rank), "b": [torch.tensor(float(rank))]})
    assert (gathered["a"].tolist(), gathered["b"][0].tolist()) == ([0, 0, 1, 1], [0.0, 1.0])
    assert accelerator.reduce(torch.tensor([rank + 1.0]), "sum", scale=2.0).item() == 6.0
    assert accelerator.reduce(torch.tensor(rank + 1.0), reduction="mean").item() == 1.5
    if rank == 1:
        accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    return accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist()


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [
        (Hook.NO, Hook.NO),
        (Hook.BF16, Hook.NO),
        (Hook.FP16, Hook.NO),
        (Hook.POWER_SGD, Hook.NO),
        (Hook.POWER_SGD, Hook.FP16),
        (Hook.POWER_SGD, Hook.BF16),
    ],
)
@on_ranks(2, by_rank=[(1.0, 3.0), (2.0, 3.0)])
def test_no_sync_keeps_gradients_at_home_and_hooks_average_them(hook, wrapper):
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = nn.Linear(2, 1, bias=False)
    wrapped = accelerator.prepare(model)
    with accelerator.no_sync(wrapped):
        accelerator.backward(wrapped(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
    alone = model.weight.grad.clone()
    accelerator.backward(wrapped(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
    return alone[0, 0].item(), model.weight.grad[0, 0].item()


@on_ranks(2, by_rank=[[1.0, 1.0], [2.0, 2.0]])
def test_no_sync_takes_a_model_that_was_compiled_or_unwrapped_after_it_was_prepared():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1, bias=False)
    wrapped = accelerator.prepare(model)
    found = []
    compiled = torch.compile(wrapped, backend="eager")
    assert accelerator.prepare(compiled) is compiled
    assert accelerator._models == [wrapped]
    for named in (compiled, model):
        with accelerator.no_sync(named):
            accelerator.backward(wrapped(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
        found.append(model.weight.grad[0, 0].item())
        model.zero_grad()
    return found


@pytest.mark.parametrize("is_wholly_frozen", [True, False])
@on_ranks(2)
def test_weights_that_are_unfrozen_after_prepare_are_refused_before_they_differ_between_ranks(is_wholly_frozen):
    accelerator = Accelerator()
    bare = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    bare[slice(None) if is_wholly_frozen else slice(1)].requires_grad_(False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    x = torch.full((1, 1), 1.0 + accelerator.process_index)
    if not is_wholly_frozen:
        accelerator.backward(model(x).sum())
        optimizer.step()
    bare.requires_grad_(True)
    accelerator.backward(model(x).sum())
    with pytest.raises(StateError, match=r"\(0\.weight, 0\.bias.* required no gradient.*unwrap_model"):
        optimizer.step()
    bare = accelerator.unwrap_model(model)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    accelerator.backward(model(x).sum())
    optimizer.step()
    first, second = accelerator.gather(bare[0].weight.detach())
    assert first == second


@on_ranks(2, by_rank=[(1.0, 16.5), (2.0, 16.5)])
def test_gradients_of_forward_passes_inside_no_sync_can_be_synchronized_in_their_backward():
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    wrapped = accelerator.prepare(model)
    x = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(wrapped):
        losses = [wrapped(factor * x).sum() for factor in (1, 10)]
    accelerator.backward(losses[0])
    alone = model.weight.grad.item()
    with accelerator.trigger_sync_in_backward(wrapped):
        accelerator.backward(losses[1])
    return alone, model.weight.grad.item()


@on_ranks(2)
def test_what_torch_can_not_synchronize_in_a_backward_is_refused_before_it():
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    wrapped = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.no_sync(wrapped):
        loss = wrapped(torch.ones(1, 1)).sum()
    with pytest.raises(ConfigError, match="find_unused_parameters"), accelerator.trigger_sync_in_backward(wrapped):
        accelerator.backward(loss)
    accelerator.backward(loss)  # which nothing has used up


@pytest.mark.parametrize(
    ("even_batches", "is_compiled", "counts"), [(False, False, (3, 2)), (None, False, (3, 3)), (False, True, (3, 2))]
)
@on_ranks(2, timeout_s=30)
def test_uneven_inputs_are_joined(even_batches, is_compiled, counts):
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(5, 1)), batch_size=1))
    count = 0
    named = torch.compile(model, backend="eager") if is_compiled else model
    with accelerator.join_uneven_inputs([named], even_batches=even_batches):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            count += 1
    assert count == counts[accelerator.process_index]


def horizon(ticks, split):
    accelerator = Accelerator(
        cpu=True, scheduler_ticks=ticks, dataloader_config=DataLoaderConfiguration(split_batches=split)
    )
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, LambdaLR(optimizer, lambda step: step))
    plateau = accelerator.prepare(ReduceLROnPlateau(optimizer.optimizer, patience=1, factor=0.5))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    rate = scheduler.get_last_lr()[0]
    for loss in (1.0, 2.0, 3.0):  # the second bad one is one too many
        optimizer.step()
        plateau.step(loss)
    AcceleratorState._reset_state()
    return rate, optimizer.param_groups[0]["lr"] / rate


@on_ranks(2, each=(True, True, 2.0))
def test_a_scheduler_that_another_accelerator_prepared_ticks_as_often_as_before():
    first = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer, scheduler = first.prepare(optimizer, LambdaLR(optimizer, lambda step: step))
    second = Accelerator()
    optimizer, again = second.prepare(optimizer, scheduler)
    second.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    again.step()
    return again is scheduler, again.optimizers == [optimizer], again.get_last_lr()[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_a_scheduler_ticks_for_every_process_or_once(num_ranks):
    assert horizon("per_process", False) == (num_ranks, 0.5)
    assert horizon("per_process", True) == horizon("per_update", False) == (1, 0.5)


@on_ranks(2, by_rank=[("hello\n", True), ("", False)])
def test_only_the_main_process_prints_and_saves(tmp_path):
    accelerator = Accelerator(cpu=True)
    printed, saved = (tmp_path / f"{name}_{accelerator.process_index}" for name in ("printed", "saved"))
    with printed.open("w") as file:
        accelerator.print("hello", file=file)
    accelerator.save({"x": 1}, saved)
    return printed.read_text(), saved.exists()
