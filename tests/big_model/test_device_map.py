# SPDX-License-Identifier: Apache-2.0
"""Device maps and sizes: Accelerate's, wherever it gives one."""

import random
import warnings

import accelerate.utils.modeling as theirs
import pytest
import torch
from torch import nn

import farflung.utils.modeling as ours
from farflung.base.errors import ConfigError
from farflung.big_model.device_map import CustomDtype
from tests.big_model.models import Random, Tied


def drawn(seed):
    """A model, limits for some devices, and arguments."""
    model, draw = Random(seed), random.Random(seed)
    total = int(ours.compute_module_sizes(model)[""])
    memory = {gpu: draw.randint(0, total) for gpu in range(draw.randint(0, 3))}
    if draw.random() < 0.9:
        memory["cpu"] = draw.randint(0, total)
    split = draw.choice([None, ["Block"], "Block"])
    return model, memory, {"no_split_module_classes": split, "dtype": draw.choice([None, "float16", torch.bfloat16])}


def answer(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*args, **kwargs)
        except IndexError:  # Accelerate's, where weights are shared with a module that it has placed
            return None


def test_models_are_measured_as_accelerate_does():
    for seed in range(20):
        model = Random(seed)
        for name in ("compute_module_sizes", "calculate_maximum_sizes", "find_tied_parameters"):
            assert getattr(ours, name)(model) == getattr(theirs, name)(model)
        assert ours.compute_module_sizes(model, "float16") == theirs.compute_module_sizes(model, "float16")


@pytest.mark.long
def test_maps_and_balanced_limits_are_those_of_accelerate():
    same = 0
    for seed in range(300):
        model, memory, kwargs = drawn(seed)
        low = {**kwargs, "low_zero": seed % 3 == 0 and 0 in memory}
        limits = [answer(one.get_balanced_memory, model, dict(memory), **low) for one in (theirs, ours)]
        assert limits[0] == limits[1], seed
        more = {**kwargs, "clean_result": seed % 2 == 0, "fallback_allocation": seed % 5 == 0}
        maps = [answer(one.infer_auto_device_map, model, dict(memory), **more) for one in (theirs, ours)]
        assert maps[1] is not None
        if maps[0] is not None:
            assert maps[0] == maps[1], seed
            same += 1
    assert same > 280


def test_a_map_covers_buffers_beside_modules_that_were_split():
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.first, model.inner.second = nn.Linear(4, 4), nn.Linear(4, 4)
    model.inner.register_buffer("mean", torch.zeros(4))
    found = ours.infer_auto_device_map(model, {0: 165, "cpu": 10_000})
    assert found == {"inner.first": 0, "inner.second": 0, "inner.mean": "cpu"}
    ours.check_device_map(model, found)
    model.last = nn.Linear(4, 4, bias=False)
    theirs_map, found = (one.infer_auto_device_map(model, {0: 165, 1: 150, "cpu": 10_000}) for one in (theirs, ours))
    assert theirs_map == {"inner.first": 0, "inner.second": 1, "last": 1}
    assert found == {"inner.first": 0, "inner.second": 1, "inner.mean": 1, "last": "cpu"}


def test_a_name_that_ends_like_another_is_not_taken_for_it():
    model = nn.Module()
    model.lin, model.block = nn.Linear(4, 4, bias=False), nn.Module()
    model.block.lin = nn.Linear(4, 4, bias=False)
    model.block.lin.weight = model.lin.weight
    assert ours.infer_auto_device_map(model, {0: 200, "cpu": 1000}) == {"": 0}

    model = nn.Module()
    model.lin, model.last = nn.Linear(4, 4), nn.Linear(4, 4)
    model.block = nn.ModuleDict({"lin": nn.Linear(4, 4, bias=False), "other": nn.Linear(4, 4, bias=False)})
    model.block.other.weight = model.block.lin.weight
    arguments = model, {0: 190, 1: 1000}, "ModuleDict"
    assert theirs.infer_auto_device_map(*arguments) == {"": 1}
    assert ours.infer_auto_device_map(*arguments) == {"lin": 0, "last": 1, "block": 1}


def test_sizes_of_dtypes_are_those_of_torch_and_of_quantized_weights():
    assert ours.dtype_byte_size(torch.bool) == 1  # Accelerate: an eighth
    assert [ours.dtype_byte_size(kind) for kind in CustomDtype] == [1, 0.5, 0.25]
    assert ours.dtype_byte_size(torch.float8_e4m3fn) == 1
    with pytest.raises(ConfigError, match="no dtype"):
        ours.dtype_byte_size("float32")


def test_limits_may_be_texts_and_are_replaced_by_bytes():
    asked = {"cpu": "1GiB", 1: 5, 0: "0GB"}
    assert list(ours.get_max_memory(asked).items()) == [(0, 0), (1, 5), ("cpu", 2**30)]
    assert asked == {"cpu": 2**30, 1: 5, 0: 0}  # transformers reads it afterwards
    assert ours.get_max_memory()["cpu"] > 0
    with pytest.raises(ConfigError, match="'tpu' is no device"):
        ours.get_max_memory({"tpu": 1})


def test_a_map_that_leaves_out_a_weight_is_refused_and_unknown_names_are_named(model):
    with pytest.raises(ConfigError, match=r"no device for norm\.weight"):
        ours.check_device_map(model, {"embed": 0, "blocks": 0, "head": 0})
    with pytest.warns(UserWarning, match="nothing"):
        ours.check_device_map(model, {"": "cpu", "nothing": 0})
    ours.check_device_map(model, {"embed": 0, "blocks.0.scale": 0, "blocks": 0, "head": 0, "norm": 0})


def test_a_warning_says_when_no_gpu_has_room_for_buffers_of_offloaded_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(1000))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        ours.infer_auto_device_map(model, {0: 16_050, "cpu": 10**6})


def test_decisions_can_be_read(capsys):
    ours.infer_auto_device_map(Tied(), {0: 300, "cpu": 10_000}, verbose=True)
    said = capsys.readouterr().out
    assert all(words in said for words in ("does not fit on 0", "-> cpu"))


def test_sizes_with_shared_weights_are_those_of_accelerate():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("one", "two", "three")})
    sizes = ours.compute_module_sizes(model)
    waiting = [(name, module) for name, module in model.named_children() if name != "one"]
    for tied in ([], ["two.weight"], ["two.weight", "three.weight"]):
        arguments = (tied, sizes["one"], sizes, waiting)
        assert ours.get_module_size_with_ties(*arguments) == theirs.get_module_size_with_ties(*arguments)
