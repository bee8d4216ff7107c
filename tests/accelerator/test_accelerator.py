# SPDX-License-Identifier: Apache-2.0
"""The Accelerator in one process: what it settles, refuses, prepares and gives back."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator, PartialState
from farflung.base.errors import ConfigError, StateError, StateReset, WrongType
from farflung.config import environ
from farflung.state import AcceleratorState, GradientState
from farflung.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    extract_model_from_parallel,
    get_mixed_precision_context_manager,
    is_compiled_module,
)


def test_one_process_has_no_group_and_says_so():
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert all((accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process))
    assert not accelerator.use_distributed
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert (accelerator.device, accelerator.mixed_precision) == (torch.device("cpu"), "no")
    assert not torch.distributed.is_initialized()


def test_a_second_accelerator_joins_and_one_with_another_precision_is_refused():
    first = Accelerator(cpu=True, mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"'fp16'.*'bf16'"):
        Accelerator(mixed_precision="fp16")
    assert first.mixed_precision == "bf16"


def test_each_accelerator_keeps_its_own_accumulation_and_registry():
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    second = Accelerator(gradient_accumulation_steps=3)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert GradientState().num_steps == 3
    assert Accelerator().gradient_accumulation_steps == 2
    assert GradientState().num_steps == 2
    assert Accelerator(gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    assert Accelerator().gradient_accumulation_steps == 2
    assert second.gradient_accumulation_steps == 3
    first.gradient_accumulation_steps = 4
    assert Accelerator().gradient_accumulation_steps == 4
    with environ.patched({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}):
        told = [Accelerator(gradient_accumulation_steps=steps).gradient_accumulation_steps for steps in (None, 1, 2)]
    assert told == [4, 4, 2]
    model = nn.Linear(1, 1)
    first.prepare(model)
    assert second._models == []


def test_an_accelerator_made_before_a_reset_can_end_and_goes_on_with_the_next():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    AcceleratorState._reset_state()
    with pytest.raises(StateReset, match=r"AcceleratorState._reset_state\(\)` was called"):
        accelerator.num_processes  # noqa: B018
    assert (accelerator.is_main_process, accelerator.state.is_main_process) == (True, True)
    assert accelerator.gather(torch.ones(1)).tolist() == [1]
    assert "rank 0 of 1, cpu, bf16" in repr(accelerator)
    Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert (accelerator.mixed_precision, accelerator.sync_gradients, accelerator.num_processes) == ("bf16", False, 1)
    AcceleratorState._reset_state()
    accelerator.end_training()


def test_handlers_refuse_what_nothing_would_read():
    with pytest.raises(ConfigError, match="PowerSGD"):
        DistributedDataParallelKwargs(comm_state_option={"matrix_approximation_rank": 2})
    assert DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs() == {"find_unused_parameters": True}
    assert InitProcessGroupKwargs().to_kwargs() == {}


def test_a_handler_of_a_class_of_your_own_is_read():
    @dataclass
    class Scaled(GradScalerKwargs):
        init_scale: float = 32.0

    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler := Scaled()])
    assert accelerator.scaler_handler is handler
    assert accelerator.scaler.get_scale() == 32.0
    with pytest.raises(ConfigError, match="two GradScalerKwargs"):
        Accelerator(mixed_precision="fp16", kwargs_handlers=[handler, GradScalerKwargs()])


def test_what_a_script_sets_in_a_handler_counts_and_is_checked_where_it_is_used():
    scaler, autocast, profile = GradScalerKwargs(), AutocastKwargs(), ProfileKwargs()
    dynamo, accumulation = TorchDynamoPlugin(backend="no"), GradientAccumulationPlugin(num_steps=2)
    given = {"cpu": True, "mixed_precision": "fp16", "kwargs_handlers": [scaler, autocast, profile]}
    given |= {"dynamo_plugin": dynamo, "gradient_accumulation_plugin": accumulation}
    scaler.growth_interval = 7
    accelerator = Accelerator(**given)
    assert accelerator.scaler.get_growth_interval() == 7
    accumulation.num_steps = 3
    assert (accelerator.gradient_accumulation_steps, Accelerator(**given).gradient_accumulation_steps) == (2, 3)
    autocast.outputs_to_fp32, dynamo.backend = False, "eager"
    model = accelerator.prepare(nn.Linear(2, 1))
    assert is_compiled_module(model)
    assert model(torch.ones(1, 2)).dtype == torch.float16
    profile.activities = ["cpu"]
    assert profile.build().activities == {torch.profiler.ProfilerActivity.CPU}
    for handler, name, wrong, use in (
        (scaler, "init_scale", -1.0, lambda: Accelerator(**given)),
        (accumulation, "num_steps", 0, lambda: Accelerator(**given)),
        (accumulation, "num_steps", 0, lambda: GradientState(accumulation)),
        (autocast, "enabled", "no", accelerator.autocast),
        (autocast, "cache_enabled", 3, lambda: accelerator.prepare(nn.Linear(2, 1))),
        (autocast, "enabled", "no", lambda: get_mixed_precision_context_manager(True, autocast)),
        (dynamo, "backend", "inductr", lambda: accelerator.prepare(nn.Linear(2, 1))),
        (profile, "activities", ["cpuu"], accelerator.profile().__enter__),
    ):
        before = getattr(handler, name)
        setattr(handler, name, wrong)
        with pytest.raises(ConfigError, match=name):
            use()
        setattr(handler, name, before)


def parts():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(list(range(8)), batch_size=2), LambdaLR(optimizer, lambda step: 1.0)


def test_prepare_keeps_the_order_and_passes_on_what_it_does_not_know():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = parts()
    other = SimpleNamespace(step=print)  # such as a schedule of another library
    ours = accelerator.prepare(scheduler, loader, other, optimizer, None, model)
    found = ours[0].scheduler, ours[2], ours[3].optimizer, *ours[4:]
    assert all(one is mine for one, mine in zip(found, (scheduler, other, optimizer, None, model), strict=True))
    assert len(ours[1]) == 4
    assert ours[0].optimizers == [ours[3]]


def test_a_loader_that_is_a_pipeline_and_so_a_dataset_comes_back_as_it_is():
    class WebLoader(IterableDataset):  # as webdataset's
        def __init__(self):
            self.pipeline = [DataLoader([1, 2]), print]

        def __iter__(self):
            yield from self.pipeline[0]

    accelerator, loader = Accelerator(cpu=True), WebLoader()
    assert accelerator.prepare(loader) is loader
    loader.pipeline = [print]
    with pytest.raises(WrongType, match="a DataLoader over that data set"):
        accelerator.prepare(loader)


def test_a_scheduler_that_is_prepared_before_its_optimizer_follows_it():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, scheduler = parts()
    stranger = SimpleNamespace(last_epoch=0, step=lambda: rates.append(1))  # which does not say what it was made for
    rates, prepared = [], [accelerator.prepare_scheduler(one) for one in (scheduler, stranger)]
    other, optimizer, model = accelerator.prepare(parts()[1], optimizer, model)
    assert prepared[0].optimizers == [optimizer]
    assert prepared[1].optimizers == [other, optimizer]
    for _ in range(4):
        with accelerator.accumulate(model):
            optimizer.step()
            for one in prepared:
                one.step()
    assert (scheduler.last_epoch, len(rates)) == (2, 2)


def test_preparing_twice_gives_the_same_object_and_registers_once():
    accelerator = Accelerator(cpu=True)
    things = parts()
    once = accelerator.prepare(*things)
    assert all(a is b for a, b in zip(once, accelerator.prepare(*things), strict=True))
    assert all(a is b for a, b in zip(once, accelerator.prepare(*once), strict=True))
    kinds = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
    assert [len(kind) for kind in kinds] == [1] * 4


def test_scripts_may_set_the_lists_of_what_is_prepared():
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(scheduler := parts()[3])
    assert accelerator._custom_objects == [scheduler]
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        setattr(accelerator, name, [])
        assert getattr(accelerator, name) == []
    accelerator._models = [model]
    assert accelerator._run.trained == [model]  # what checkpoints and hooks read


def test_scripts_may_set_where_the_loop_stands():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, *_ = accelerator.prepare(*parts())
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    accelerator.gradient_state.sync_gradients = True
    assert accelerator.sync_gradients
    assert optimizer.window_is_complete
    accelerator.step = 1
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients


@pytest.mark.parametrize("how", ["item", "update", "dictionary", "plugin"])
def test_what_a_script_sets_in_the_gradient_state_holds_in_the_loop(how):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, loader, _ = accelerator.prepare(*parts())
    state = accelerator.gradient_state
    accelerator.gradient_accumulation_steps = 3
    assert state.plugin_kwargs == {"num_steps": 3}
    if how == "item":
        state.plugin_kwargs["sync_with_dataloader"] = False
    elif how == "update":
        state.plugin_kwargs.update(sync_with_dataloader=False)
    elif how == "dictionary":
        state.plugin_kwargs = {"num_steps": 3, "sync_with_dataloader": False}
    else:
        GradientState(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))
    complete = []
    for _ in loader:
        with accelerator.accumulate(model):
            complete.append(accelerator.sync_gradients)
    assert complete == [False, False, True, False]  # the fourth batch is the last
    state.plugin_kwargs["num_steps"] = 1
    assert accelerator.gradient_accumulation_steps == 1
    assert not state.sync_with_dataloader


def test_a_name_that_no_plugin_has_is_refused_in_the_gradient_state():
    state = Accelerator(cpu=True).gradient_state
    with pytest.raises(ConfigError, match=r"plugin_kwargs is 'num_step'.*`num_steps`"):
        state.plugin_kwargs["num_step"] = 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_script_may_turn_autocast_off(precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, x = accelerator.prepare(nn.Linear(4, 4)), torch.randn(8, 4)
    exact = nn.functional.linear(x, model.weight, model.bias)
    accelerator.native_amp = True  # as it is
    assert not torch.equal(model(x), exact)
    accelerator.native_amp = False
    assert not accelerator.native_amp
    with accelerator.autocast():
        assert torch.equal(model(x), exact)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_script_may_set_a_scaler_that_is_off(precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    off = torch.amp.GradScaler("cpu", enabled=False)
    for scaler in (None, off, off):
        accelerator.scaler = scaler
        assert accelerator.scaler is scaler
    with pytest.raises(ConfigError, match=r"scaler was set to .*GradScalerKwargs"):
        accelerator.scaler = torch.amp.GradScaler("cpu")


def test_under_fp16_a_script_may_give_the_scaler():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer = accelerator.prepare(layer := nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), 1.0))
    gradients = []
    for scale in (4.0, 16.0):
        accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        gradients.append(layer.bias.grad.item())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.scaler = accelerator.scaler
        assert accelerator.scaler is scaler
    assert gradients == [4.0, 16.0]
    for other in (None, 5):
        with pytest.raises(ConfigError, match=r"scaler was set to .*GradScalerKwargs"):
            accelerator.scaler = other


def test_autocast_can_not_be_turned_on_without_mixed_precision():
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = False
    with pytest.raises(ConfigError, match="mixed_precision is 'no'"):
        accelerator.native_amp = True


def test_unwrapping_undoes_precision_and_compilation_as_asked():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    prepared = accelerator.prepare(compiled)
    assert accelerator.unwrap_model(prepared) is compiled
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    plain = accelerator.prepare(nn.Linear(2, 2))
    half = accelerator.unwrap_model(plain, keep_fp32_wrapper=False)
    assert half is not plain
    assert "forward" not in vars(half)
    assert half.weight is plain.weight
    x = torch.randn(8, 2)
    assert torch.equal(half(x), nn.functional.linear(x, plain.weight, plain.bias))
    assert not torch.equal(half(x), plain(x))  # which still computes in bf16
    assert accelerator.unwrap_model(half, keep_fp32_wrapper=False) is half


@pytest.mark.parametrize(
    "wrapped", [nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model), backend="eager")]
)
def test_unwrapping_recursively_unwraps_the_modules_inside_under_each_of_their_names(wrapped):
    inner = nn.Linear(2, 2)
    block = nn.Sequential(nn.DataParallel(nn.DataParallel(inner)))
    part = nn.DataParallel(block)
    model = nn.ModuleDict({"a": part, "b": part, "c": nn.ModuleList([nn.ReLU(), block[0]])})
    unwrapped = extract_model_from_parallel(nn.DataParallel(model), recursive=True)
    assert unwrapped is model
    assert model["a"] is model["b"] is block
    assert block[0] is model["c"][1] is inner
    model = nn.Sequential(nn.DataParallel(inner), None)
    extract_model_from_parallel(wrapped(model), keep_torch_compile=False, recursive=True)
    assert (model[0], model[1]) == (inner, None)
    assert extract_model_from_parallel(inner, recursive=True) is inner


def test_a_freed_model_is_gone():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for _ in loader:
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step()
    watched = weakref.ref(model.weight)
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    gc.collect()
    assert (model, optimizer, loader, scheduler) == (None,) * 4
    assert watched() is None


def test_an_optimizer_that_is_prepared_again_after_memory_was_freed_steps_on_unscaled_gradients():
    precision = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=64.0)]}
    accelerator = Accelerator(cpu=True, **precision)
    optimizer = torch.optim.SGD((layer := nn.Linear(1, 1)).parameters(), 1.0)
    for _ in range(2):
        model, prepared = accelerator.prepare(layer, optimizer)
        prepared.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        accelerator.unscale_gradients(prepared)
        accelerator.free_memory()
    assert layer.weight.grad.item() == 1.0


def test_views_need_a_session_and_read_it():
    with pytest.raises(StateError, match="Accelerator"):
        GradientState().num_steps  # noqa: B018
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert AcceleratorState().mixed_precision == "no"
    assert PartialState().num_processes == 1
    assert not GradientState().in_dataloader
    for _ in accelerator.prepare(DataLoader([1, 2, 3])):
        assert GradientState().in_dataloader
    assert "num_steps" in repr(GradientState())
    assert "cpu" in repr(accelerator.state)


def test_project_directories():
    accelerator = Accelerator(cpu=True, project_dir="here")
    assert (accelerator.project_dir, accelerator.logging_dir) == ("here", "here")
    config = ProjectConfiguration(project_dir="there", logging_dir="logs")
    assert Accelerator(project_config=config).logging_dir == "logs"
    with pytest.raises(ConfigError, match="project_dir is here, and that of project_config is there"):
        Accelerator(project_dir="here", project_config=config)


def test_save_writes_both_forms_for_everyone_to_read(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    weight = torch.randn(3, 2)
    accelerator.save({"a": weight, "tied": weight, "t": weight.t()}, tmp_path / "s", safe_serialization=True)
    loaded = load_file(tmp_path / "s")
    assert set(loaded) == {"a", "t"}
    assert "other names have what is in tied." in caplog.text
    assert torch.equal(loaded["t"], weight.t())
    accelerator.save({"step": 3}, tmp_path / "p")
    assert torch.load(tmp_path / "p", weights_only=True) == {"step": 3}
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "p").stat().st_mode
    with pytest.raises(ConfigError, match="can only save a dictionary of tensors by name"):
        accelerator.save([1], tmp_path / "x", safe_serialization=True)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # says torch 2.11 of every profile
def test_profiling_writes_a_trace(tmp_path):
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))) as profiler:
        torch.ones(2) + 1
    assert "aten::add" in {event.key for event in profiler.key_averages()}
    assert (tmp_path / "profile_0.json").exists()


def test_a_profile_of_a_schedule_calls_back_and_says_when_it_has_recorded_nothing(tmp_path):
    accelerator = Accelerator(cpu=True)
    ready = []
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    handler = ProfileKwargs(schedule_option=schedule, on_trace_ready=ready.append, output_trace_dir=str(tmp_path))
    with accelerator.profile(handler) as profiler:
        for _ in range(6):
            torch.ones(2) + 1
            profiler.step()
    assert ready == [profiler]
    assert sum(event.count for event in profiler.key_averages() if event.key == "aten::add") == 2
    late = ProfileKwargs(schedule_option={**schedule, "wait": 5}, output_trace_dir=str(tmp_path))
    with pytest.raises(StateError, match=r"no step was recorded.*in 1 step"), accelerator.profile(late) as profiler:
        profiler.step()
    with pytest.raises(ConfigError, match="lacks warmup and active"):
        ProfileKwargs(schedule_option={"wait": 1})


def test_fp16_trains_without_a_loss_scaler_too(tmp_path):
    handlers = [GradScalerKwargs(enabled=False)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    nn.init.zeros_((layer := nn.Linear(1, 1, bias=False)).weight)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1.0))
    for _ in range(2):
        accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 3.0
        optimizer.step()
        optimizer.zero_grad()
        assert not accelerator.optimizer_step_was_skipped
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert (accelerator.scaler.get_scale(), round(layer.weight.item(), 4)) == (1.0, -2.0)


def test_unscaling_inside_a_window_leaves_gradients_that_others_are_added_to():
    precision = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=64.0)]}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **precision)
    model, optimizer = accelerator.prepare(layer := nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), 1.0))
    gradients = []
    for factor in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), factor)).sum())
            accelerator.unscale_gradients(optimizer)
            gradients.append(layer.weight.grad.item())
    assert gradients == [32.0, 2.0]
