# SPDX-License-Identifier: Apache-2.0
"""One tensor of a module set elsewhere, models without memory, and weights that are shared."""

import pytest
import torch
from torch import nn

from farflung.base.errors import ConfigError, Unsupported, WrongType
from farflung.big_model.tensors import TiedWeights
from farflung.big_modeling import init_empty_weights, init_on_device
from farflung.utils.modeling import (
    check_device_same,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from tests.big_model.models import Tied, empty, made


def test_models_made_without_memory_have_shapes_and_keep_what_is_shared(monkeypatch):
    model = empty()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.norm.running_mean.is_meta
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    with init_empty_weights(include_buffers=True):
        assert Tied().norm.running_mean.is_meta
    assert not Tied().embed.weight.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    assert empty().norm.running_mean.is_meta


def test_a_parameter_that_is_registered_twice_without_memory_is_shared():
    given = nn.Parameter(torch.ones(2))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Parameter(torch.ones(3))
            self.third, self.fourth = given, given

    with init_empty_weights():
        model, other = Twice(), Twice()
    assert find_tied_parameters(model) == [["first", "second"], ["fourth", "third"]]
    assert model.third is other.third
    assert other.first is not model.first
    assert not given.is_meta


def test_parameters_keep_their_class_attributes_and_requires_grad():
    class Own(nn.Parameter):
        pass

    weight, layer = Own(torch.ones(2), requires_grad=False), nn.Module()
    weight.tag = "here"
    with init_on_device(torch.device("meta")):
        layer.weight = weight
    set_module_tensor_to_device(layer, "weight", "cpu", torch.zeros(2))
    assert type(layer.weight) is Own
    assert (layer.weight.tag, layer.weight.requires_grad) == ("here", False)


def test_a_parameter_as_value_is_not_shared_with_its_owner():
    layer, other = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    set_module_tensor_to_device(layer, "weight", "cpu", other.weight)
    assert torch.equal(layer.weight, other.weight)
    assert layer.weight is not other.weight
    assert not layer.weight.requires_grad


def test_a_tensor_moves_with_another_value_and_dtype(model):
    kept = model.norm
    set_module_tensor_to_device(model, "blocks.0.up.weight", "meta")
    assert model.blocks[0].up.weight.is_meta
    set_module_tensor_to_device(model, "blocks.0.up.weight", "cpu", torch.ones(8, 4, dtype=torch.float16))
    assert model.blocks[0].up.weight.dtype == torch.float32
    set_module_tensor_to_device(model, "blocks.0.up.weight", "cpu", torch.ones(8, 4), dtype="float16")
    assert model.blocks[0].up.weight.dtype == torch.float16
    set_module_tensor_to_device(model, "norm.running_mean", "cpu", torch.ones(4))
    assert dict(kept.named_buffers())["running_mean"].tolist() == [1, 1, 1, 1]
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", torch.tensor(5), dtype=torch.float16)
    assert kept.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "words"),
    [
        ("nothing", {}, ConfigError, "no parameter and no buffer"),
        ("head.bias", {}, ConfigError, "no parameter and no buffer"),
        ("x.weight", {}, ConfigError, "no tensor 'x.weight'"),
        ("head.weight", {"value": torch.ones(1)}, ConfigError, r"shape \[12, 4\], and the value for it \[1\]"),
        ("norm.weight", {"fp16_statistics": torch.ones(1)}, Unsupported, "torchao"),
        ("norm.weight", {"tied_params_map": {1: {}}}, WrongType, "TiedWeights"),
    ],
)
def test_what_cannot_be_set_is_refused(model, name, kwargs, error, words):
    with pytest.raises(error, match=words):
        set_module_tensor_to_device(model, name, "cpu", **kwargs)


def test_a_tensor_without_values_needs_one():
    with pytest.raises(ConfigError, match="needs a value"):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), "weight", "cpu")


def test_shared_weights_move_together_and_are_forgotten_with_the_model():
    model, _ = made()
    ties = TiedWeights(model)
    set_module_tensor_to_device(model, "embed.weight", "meta", tied_params_map=ties)
    assert not model.head.weight.is_meta
    assert ties.groups(model) == [["embed.weight", "head.weight"]]
    set_module_tensor_to_device(model, "head.weight", "meta", tied_params_map=ties)
    assert model.head.weight is model.embed.weight
    device = torch.device("cpu")
    set_module_tensor_to_device(model, "embed.weight", device, torch.ones(12, 4), tied_params_map=ties)
    set_module_tensor_to_device(model, "head.weight", device, torch.zeros(12, 4), tied_params_map=ties)
    assert model.head.weight is model.embed.weight
    stand_in = nn.Parameter(torch.empty(12, 4, device="meta"))
    ties.note(model.embed.weight, stand_in)
    del model
    assert ties.copy_on(stand_in, device) is None


def test_names_share_a_weight_again(model):
    groups = find_tied_parameters(model)
    set_module_tensor_to_device(model, "embed.weight", "meta")
    retie_parameters(model, groups)
    assert model.embed.weight is model.head.weight
    assert not model.embed.weight.is_meta


def test_shared_weights_for_two_devices_are_named(model, caplog):
    check_tied_parameters_on_same_device(find_tied_parameters(model), {"embed": 0, "head": 0, "blocks": 1})
    assert not caplog.records
    check_tied_parameters_on_same_device(find_tied_parameters(model), {"embed": 0, "": "cpu"})
    assert "embed.weight" in caplog.text
    with pytest.raises(ConfigError, match=r"no device for head\.weight"):
        check_tied_parameters_on_same_device(find_tied_parameters(model), {"embed": 0})


def test_buffers_that_are_not_saved_are_left_out_at_any_depth(model):
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"blocks.0.shift", "blocks.1.shift"}
    names = {name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)}
    assert names == set(model.state_dict()) - {"head.weight"}
    assert dict(named_module_tensors(model)) == {}


def test_buffers_that_are_not_saved_are_left_out_under_each_name_of_a_module(model):
    model.again = model.blocks[0]
    names = get_non_persistent_buffers(model, recurse=True, fqns=True)
    assert names == {"blocks.0.shift", "blocks.1.shift", "again.shift"}


def test_devices_and_memory_are_identified():
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda"))
    x = torch.zeros(4)
    assert id_tensor_storage(x) == id_tensor_storage(x[1:])
    assert id_tensor_storage(x) != id_tensor_storage(x.clone())
    assert id_tensor_storage(x.to("meta")) == (torch.device("meta"), 0, 16)
