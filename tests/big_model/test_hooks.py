# SPDX-License-Identifier: Apache-2.0
"""Hooks around forward passes: their order, what they change, and that nothing is left of them."""

import copy
import inspect
import pickle
from dataclasses import dataclass, field
from functools import partial

import accelerate.hooks as theirs
import pytest
import torch
from torch import nn

import farflung.hooks as ours
from farflung.base.errors import ConfigError, StateError
from farflung.big_modeling import attach_layerwise_casting_hooks, cpu_offload_with_hook
from farflung.utils.modeling import align_module_device, find_tied_parameters, has_offloaded_params
from tests.big_model.models import IDS, made, output


def note_calls(library, calls):
    """A hook of either library that notes what it is called for."""

    class Noting(library.ModelHook):
        def __init__(self, name):
            self.name = name

        def init_hook(self, module):
            calls.append(f"init {self.name}")
            return module

        def pre_forward(self, module, *args, **kwargs):
            calls.append(f"pre {self.name} {len(args)} {sorted(kwargs)}")
            return tuple(arg + 1 for arg in args), kwargs

        def post_forward(self, module, output):
            calls.append(f"post {self.name}")
            return output * 2

        def detach_hook(self, module):
            calls.append(f"detach {self.name}")
            return module

    return Noting


def run_with(library):
    calls, module = [], nn.Identity()
    hook = note_calls(library, calls)
    library.add_hook_to_module(module, hook("first"))
    library.add_hook_to_module(module, hook("second"), append=True)
    assert isinstance(module._hf_hook, library.SequentialHook)
    output = module(torch.zeros(1))
    library.remove_hook_from_module(module)
    return calls, output.item(), module(torch.zeros(1)).item()


def test_hooks_are_called_in_accelerates_order():
    assert run_with(ours) == run_with(theirs)


def test_a_hook_that_is_replaced_is_detached():
    calls, module = [], nn.Identity()
    for name in ("first", "second"):
        ours.add_hook_to_module(module, note_calls(ours, calls)(name))
    assert calls == ["init first", "detach first", "init second"]


def test_a_hooked_module_is_described_copied_and_pickled_as_before_and_nothing_is_left_when_hooks_are_removed(
    model, expected
):
    before = dict(vars(model))
    signature = inspect.signature(model.forward)
    ours.add_hook_to_module(model, ours.ModelHook())
    assert inspect.signature(model.forward) == signature
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    nn.init.zeros_(model.embed.weight)
    assert torch.equal(output(copied), expected)
    assert torch.equal(output(loaded), expected)
    ours.remove_hook_from_module(model)
    assert vars(model).keys() == before.keys()


def test_a_hook_may_run_a_module_without_gradients():
    class Quiet(ours.ModelHook):
        no_grad = True

    layer = nn.Linear(2, 2)
    ours.add_hook_to_module(layer, Quiet())
    assert not layer(torch.ones(1, 2)).requires_grad
    ours.remove_hook_from_module(layer)
    assert layer(torch.ones(1, 2)).requires_grad


@pytest.mark.parametrize(
    ("offload_buffers", "remove"),
    [(False, ours.remove_hook_from_submodules), (True, partial(ours.remove_hook_from_module, recurse=True))],
)
def test_offloaded_weights_are_there_for_the_forward_pass_alone(model, expected, offload_buffers, remove):
    ours.attach_align_device_hook(model, execution_device="cpu", offload=True, offload_buffers=offload_buffers)
    assert model.norm.running_mean.is_meta is offload_buffers
    assert not model.blocks[0].shift.is_meta  # which is not saved
    assert (has_offloaded_params(model.head), has_offloaded_params(model)) == (True, False)
    for _ in range(2):
        assert all(parameter.is_meta for parameter in model.parameters())
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
        assert torch.equal(output(model), expected)
    remove(model)
    assert model.embed.weight is model.head.weight
    assert torch.equal(output(model), expected)


def test_gradients_of_offloaded_weights_are_refused_because_they_would_be_lost():
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    ours.attach_align_device_hook(frozen, execution_device="cpu", offload=True)
    trained(frozen(torch.ones(1, 2))).sum().backward()  # as an adapter is trained
    assert trained.weight.grad is not None
    ours.attach_align_device_hook(trained, execution_device="cpu", offload=True)
    loss = trained(frozen(torch.ones(1, 2))).sum()
    with pytest.raises(StateError, match="would be lost"):
        loss.backward()


def test_a_module_that_uses_weights_of_others_gets_them_all_at_once():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.inner[1].weight = self.inner[0].weight
            self.inner[0].register_buffer("once", torch.ones(2), persistent=False)

        def forward(self, x):
            assert self.inner[0].weight is self.inner[1].weight  # it takes its memory once
            return x @ self.inner[0].weight + self.inner[1].bias @ self.inner[1].weight + self.inner[0].once

    odd, x = Odd(), torch.ones(1, 2)
    expected = odd(x)
    options = {"offload": True, "offload_buffers": True, "preload_module_classes": ["Odd"]}
    ours.attach_align_device_hook(odd, execution_device="cpu", **options)
    assert odd.inner[0].weight is odd.inner[1].weight
    assert odd.inner[0].weight.is_meta
    assert torch.equal(odd(x), expected)
    assert odd.inner[1].weight.is_meta


def test_weights_that_nobody_has_are_refused_when_the_hook_is_attached():
    layer = nn.Linear(2, 2, device="meta")
    hook = ours.AlignDevicesHook("cpu", offload=True, weights_map={"weight": torch.ones(2, 2)})
    with pytest.raises(ConfigError, match="bias of Linear is on the meta device"):
        ours.add_hook_to_module(layer, hook)


def test_outputs_go_back_to_where_inputs_were():
    layer = nn.Linear(2, 2)
    ours.add_hook_to_module(layer, ours.AlignDevicesHook("meta", io_same_device=True, skip_keys="kept"))
    assert layer(torch.ones(1, 2, device="meta")).is_meta
    hook = layer._hf_hook
    _, moved = hook.pre_forward(layer, kept=torch.ones(1), other=torch.ones(1))
    assert (moved["kept"].device.type, moved["other"].device.type) == ("cpu", "meta")


@dataclass
class Cache:
    """What layers write into, to read it in their next call."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.mark.parametrize("library", [theirs, ours])
@pytest.mark.parametrize("kind", ["AlignDevicesHook", "CpuOffload"])
def test_state_that_layers_write_into_a_dataclass_is_kept(library, kind):
    class Counting(nn.Linear):
        def forward(self, x, caches, cache):
            for one in (*caches["all"], cache):
                one.values["seen"] = one.values.get("seen", 0) + len(x)
            return super().forward(x)

    layer, caches = Counting(2, 2), [Cache(), Cache()]
    library.add_hook_to_module(layer, getattr(library, kind)(execution_device="cpu"))
    for _ in range(2):
        layer(torch.ones(3, 2), {"all": caches[:1]}, cache=caches[1])
    assert [cache.values for cache in caches] == [{"seen": 6}, {"seen": 6}]


def test_a_modules_own_weights_are_on_a_device_for_the_length_of_a_block(model):
    with align_module_device(model.norm, "meta"):
        assert model.norm.weight.is_meta
    # A weight without values stays so; with an offloading hook the values come from its map.
    ours.attach_align_device_hook(model.head, execution_device="cpu", offload=True)
    with align_module_device(model.head):
        assert not model.head.weight.is_meta
    assert model.head.weight.is_meta


def test_layers_store_weights_in_one_dtype_and_compute_in_another(model):
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="head")
    assert model.blocks[0].up.weight.dtype == torch.float8_e4m3fn
    assert model.head.weight.dtype == model.norm.weight.dtype == torch.float32
    assert model(IDS).dtype == torch.float32
    assert model.blocks[0].up.weight.dtype == torch.float8_e4m3fn
    skipped, _ = made()
    attach_layerwise_casting_hooks(skipped, torch.bfloat16, torch.float32, skip_modules_classes=(nn.Linear,))
    assert {parameter.dtype for parameter in skipped.parameters()} == {torch.float32}


def test_a_pipeline_keeps_models_where_they_run_until_they_are_sent_back():
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=first_hook)
    assert second(first(torch.ones(1, 2))).shape == (1, 2)
    second_hook.offload()
    second_hook.remove()
    assert not hasattr(second, "_hf_hook")


@pytest.mark.gpu
def test_a_pipeline_on_a_gpu_holds_one_model_there():
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2))
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), prev_module_hook=first_hook)
    hidden = first(torch.ones(1, 2))
    assert first.weight.is_cuda
    assert second(hidden).is_cuda
    assert not first.weight.is_cuda
    second_hook.offload()
    assert not second.weight.is_cuda
