# SPDX-License-Identifier: Apache-2.0
"""The members of Accelerate's classes answer as there."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import accelerate
import accelerate.data_loader
import accelerate.optimizer
import accelerate.scheduler
import accelerate.state
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import farflung
import farflung.data_loader
import farflung.optimizer
import farflung.scheduler
import farflung.state
from farflung import Accelerator
from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from farflung.optimizer import AcceleratedOptimizer
from farflung.scheduler import AcceleratedScheduler
from farflung.state import AcceleratorState, GradientState, PartialState
from farflung.testing.ranks import run_ranks
from farflung.utils import DistributedType

LIBRARIES = ("accelerate", "farflung")


def test_an_accelerator_takes_the_same_arguments():
    """What else its classes have is compared in tests/compat."""
    theirs, ours = (inspect.signature(library.Accelerator).parameters for library in (accelerate, farflung))
    named = [name for name, each in theirs.items() if each.kind is not each.VAR_KEYWORD]
    assert list(ours)[: len(named)] == named
    # None: nothing was said, in place of a private mark; and the first Accelerator's, or 1.
    others = {"split_batches", "gradient_accumulation_steps"}
    assert {name for name in named if theirs[name].default != ours[name].default} == others


def test_each_attribute_of_an_accelerator_is_here():
    theirs, ours = accelerate.Accelerator(cpu=True), farflung.Accelerator(cpu=True)
    assert not [name for name in vars(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    assert not [name for name in vars(theirs.state) if not name.startswith("_") and not hasattr(ours.state, name)]


def test_what_computes_in_fp8_is_said():
    accelerator = farflung.Accelerator(cpu=True)
    assert (accelerator.fp8_backend, accelerator.fp8_enabled, accelerator.fp8_recipe_handler) == ("NO", False, None)
    accelerator._precision = SimpleNamespace(name="fp8", recipe="a recipe")
    assert (accelerator.fp8_backend, accelerator.has_fp8_handler) == ("AO", True)
    assert accelerator.ao_recipe_handler == "a recipe"


def test_engines_and_axes_that_are_not_there_are_answered_as_accelerate_answers_without_them():
    accelerator = farflung.Accelerator(cpu=True)
    for state in (accelerator, accelerator.state):
        plugins = (state.deepspeed_plugin, state.fsdp_plugin, state.megatron_lm_plugin, state.parallelism_config)
        assert plugins == (None, None, None, None)
        assert state.is_fsdp2 is False
    assert (accelerator.torch_device_mesh, accelerator.state.device_mesh) == (None, None)
    assert accelerator.should_save_model
    assert accelerator.state.dynamo_plugin.backend == "NO"
    assert (accelerator.state.debug, accelerator.state.fork_launched) == (False, False)
    loader = DataLoader(range(2))
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, None) is loader
    with accelerator.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        pass
    for name, error in (("tensor_parallel_rank", StateError), ("context_parallel_rank", StateError)):
        with pytest.raises(error, match=name):
            getattr(accelerator, name)
    with pytest.raises(Unsupported, match="LOMO"):
        accelerator.lomo_backward(torch.ones(1), learning_rate=0.1)
    with pytest.raises(Unsupported, match="DeepSpeed"):
        AcceleratorState(deepspeed_plugin=object())


def test_a_device_map_over_several_devices_is_found():
    accelerator, model = farflung.Accelerator(cpu=True), nn.Sequential(nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    assert accelerator.verify_device_map(model)


class Quantized(nn.Linear):
    """Stands for a model that transformers loaded with bitsandbytes: in 8 bits, old versions refuse to be moved."""

    is_loaded_in_8bit = True

    def to(self, *args, **kwargs):
        raise ValueError("`.to` is not supported for 8-bit models.")


def test_quantized_weights_stay_where_they_were_loaded_and_are_not_trained_elsewhere():
    accelerator, model = farflung.Accelerator(cpu=True), Quantized(1, 1)
    for devices in ({"": 0}, {"": "disk"}, {"a": "cpu", "b": "disk"}, {"": torch.device("cuda", 1)}):
        model.hf_device_map = devices
        with pytest.raises(ConfigError, match=r"quantized weights on .* trains on cpu"):
            accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    for device in ("cpu", torch.device("cpu")):
        model = Quantized(1, 1)
        model.hf_device_map = {"": device}
        assert accelerator.prepare(model) is model


def test_states_say_whether_they_are_there_and_what_is_in_them():
    assert (farflung.state.is_initialized(), PartialState._shared_state) == (False, {})
    accelerator = farflung.Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    assert farflung.state.is_initialized()
    assert PartialState._shared_state["num_processes"] == 1
    assert AcceleratorState._shared_state["mixed_precision"] == "bf16"
    assert AcceleratorState().dynamo_plugin.backend == "EAGER"
    assert str(accelerator.distributed_type) == f"{accelerator.distributed_type}" == "DistributedType.NO"
    PartialState().set_device()
    assert PartialState().device == torch.device("cpu")


def test_a_loop_that_counts_by_itself_says_when_gradients_are_synchronized():
    accelerator = farflung.Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for complete in (False, True):
        GradientState()._set_sync_gradients(complete)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert (accelerator.sync_gradients, model.weight.item()) == (True, -2.0)


def seen(accelerator, loader):
    state, gathered = accelerator.gradient_state, accelerator.gather_for_metrics
    return [(batch.tolist(), state.end_of_dataloader, gathered(batch).tolist()) for batch in loader]


def rows_of_ranks(name):
    library = {"accelerate": accelerate, "farflung": farflung}[name]
    loaders = library.data_loader
    accelerator = library.Accelerator(cpu=True)
    own = torch.Generator().manual_seed(accelerator.process_index)
    options = {"rng_types": ["torch", "generator"], "synchronized_generator": own, "iteration": 3}
    shard = loaders.DataLoaderShard(range(5), batch_size=2, skip_batches=1, **options)
    dispatched = loaders.DataLoaderDispatcher(torch.arange(6), batch_size=2, skip_batches=1)
    split = loaders.DataLoaderDispatcher(torch.arange(6), split_batches=True, batch_size=2, _drop_last=True)
    if library is farflung:  # there the two that dispatch have no such number
        size = accelerator.num_processes
        assert (dispatched.total_batch_size, split.total_batch_size) == (2 * size, 2)
    sampler = loaders.BatchSamplerShard(BatchSampler(SequentialSampler(range(6)), 2, False), 2, 1)
    prepared = loaders.prepare_data_loader(DataLoader(range(7), batch_size=2), put_on_device=True)
    if library is farflung:
        shard, dispatched, split = accelerator.prepare(shard, dispatched, split)
    found = [seen(accelerator, loader) for loader in (dispatched, split, prepared)]
    rows = [batch.tolist() for batch in shard], torch.rand(1, generator=own).item()
    return found, rows, shard.iteration, list(sampler), shard.total_batch_size


@pytest.mark.parametrize("size", [1, 2])
def test_loaders_are_constructed_as_accelerates_are(size):
    theirs, ours = (run_ranks(rows_of_ranks, size, name, connect=size > 1) for name in LIBRARIES)
    assert theirs == ours


def test_a_constructed_loader_reports_to_the_loop_once_it_is_prepared():
    accelerator = farflung.Accelerator(cpu=True)
    loader = DataLoaderShard(range(3), batch_size=2)
    for expected in ([False, False], [False, True]):
        assert [accelerator.gradient_state.end_of_dataloader for _ in loader] == expected
        assert accelerator.prepare(loader) is loader


class Modal(torch.optim.SGD):
    """An optimizer without a schedule: it is told whether the model trains."""

    mode = None

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_optimizers_and_schedulers_are_constructed_as_accelerates_are():
    weight = nn.Parameter(torch.zeros(1))
    inner = Modal([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(inner, device_placement=True, scaler=scaler)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(inner, 1), optimizer, True, False)
    for factor, skipped in ((1.0, False), (float("inf"), True)):
        scaler.scale(weight * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == optimizer._is_overflow == skipped  # the latter is Accelerate's own name
    assert (weight.item(), scaler.get_scale(), scheduler.get_last_lr()) == (-1.0, 2.0**15, [0.1])
    for mode in ("train", "eval"):
        getattr(optimizer, mode)()
        assert inner.mode == mode
    AcceleratedOptimizer(torch.optim.SGD([weight])).train()  # which most need not be told
    with pytest.raises(Unsupported, match="mesh"):
        DataLoaderDispatcher([], torch_device_mesh=type("Mesh", (), {"mesh_dim_names": ("tp",)})())


def test_the_state_of_an_optimizer_moves_to_its_parameters_and_its_counts_of_steps_stay(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")  # which stands for a GPU
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    Accelerator().prepare(optimizer)
    kinds = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert kinds == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_a_sampler_can_be_read_and_replaced():
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2), num_processes=2, process_index=1)
    assert type(loader.get_sampler()) is SequentialSampler
    loader.set_sampler([3, 2, 1, 0])
    assert [batch.tolist() for batch in loader] == [[1, 0]]
    with pytest.raises(Unsupported, match="set_sampler"):
        prepare_data_loader(DataLoader(range(4), batch_size=None)).set_sampler([0])


def test_a_constructed_optimizer_follows_windows_once_it_is_prepared():
    accelerator = farflung.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    alone = AcceleratedOptimizer(torch.optim.SGD(model.parameters()))
    prepared = accelerator.prepare(alone)
    complete = []
    for _ in range(2):
        with accelerator.accumulate(model):
            complete.append((alone.window_is_complete, prepared.window_is_complete))
    assert complete == [(True, False), (True, True)]
    assert prepared.optimizer is alone.optimizer


def test_a_script_may_name_another_kind_of_distribution():
    accelerator = farflung.Accelerator(cpu=True)
    accelerator.state.distributed_type = "FSDP"
    assert accelerator.distributed_type is accelerator.state.distributed_type is DistributedType.FSDP
    with pytest.warns(UserWarning, match="only supported for multi-GPU"), accelerator.join_uneven_inputs([object()]):
        pass
    accelerator.state.distributed_type = DistributedType.NO
    with accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)]):
        pass
    AcceleratorState._reset_state()
    assert farflung.Accelerator(cpu=True).distributed_type is DistributedType.NO
