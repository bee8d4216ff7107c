# SPDX-License-Identifier: Apache-2.0
"""Models over devices, CPU and disk: the same output, the same weights afterwards."""

import copy

import accelerate
import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError, StateError
from farflung.big_modeling import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from farflung.checkpoint.export import save_sharded
from farflung.hooks import remove_hook_from_submodules
from farflung.utils import offload_state_dict
from farflung.utils.modeling import find_tied_parameters, get_state_dict_from_offload, get_state_dict_offloaded_model
from tests.big_model.models import IDS, Tied, empty, made, output

MAPS = [
    {"": "disk"},
    {"embed": "cpu", "head": "cpu", "norm": "disk", "blocks": "disk"},
    {"embed": "disk", "head": "disk", "norm": "cpu", "blocks.0": "cpu", "blocks.1": "disk"},
    {"embed": "disk", "head": "cpu", "norm": "cpu", "blocks": "cpu"},
    {"embed": torch.device("cpu"), "head": "cpu", "norm": "cpu", "blocks": "disk"},
]


@pytest.mark.parametrize("size", ["10GB", 300], ids=["one file", "shards"])
def test_a_model_is_saved_into_the_folder_that_it_is_offloaded_from(model, size, tmp_path):
    state = copy.deepcopy(model.state_dict())
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path, max_shard_size=size)
    again = load_checkpoint_and_dispatch(made()[0], tmp_path, device_map=MAPS[1], offload_folder=tmp_path)
    (tmp_path / ".model.safetensors.writing-1234").touch()  # as a killed process leaves it
    accelerator.save_model(accelerator.prepare(again), tmp_path, max_shard_size=size)
    assert not list(tmp_path.glob(".*"))
    fresh = Tied()
    load_checkpoint_in_model(fresh, tmp_path, strict=True)
    for found in (fresh.state_dict(), get_state_dict_offloaded_model(again)):
        assert all(torch.equal(found[name], value) for name, value in state.items())


class Noting(nn.Linear):
    """A layer with extra state that is no tensor."""

    def get_extra_state(self):
        return {"noted": getattr(self, "noted", 0), "at": torch.ones(1)}

    def set_extra_state(self, state):
        self.noted = state["noted"]


@pytest.mark.parametrize("offload", [disk_offload, lambda model, folder: cpu_offload(model)])
def test_a_module_in_two_places_with_extra_state_is_offloaded_saved_and_loaded(offload, tmp_path):
    layer = Noting(2, 2)
    layer.noted = 3
    model = nn.Sequential(layer, nn.ReLU(), layer)
    x, state = torch.ones(1, 2), copy.deepcopy(model.state_dict())
    expected = model(x)
    offload(model, tmp_path / "away")
    accelerator = Accelerator(cpu=True)
    assert torch.equal(accelerator.prepare(model)(x), expected)
    torch.testing.assert_close(accelerator.get_state_dict(model), dict(state))
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    for device_map in ({"": "disk"}, {"0": "cpu", "1": "cpu", "2": "disk"}, {"": "cpu"}, None):
        layer = Noting(2, 2)
        loaded = nn.Sequential(layer, nn.ReLU(), layer)
        load_checkpoint_and_dispatch(loaded, tmp_path, device_map, offload_folder=tmp_path / "loaded")
        assert layer.noted == 3
        assert torch.equal(loaded(x), expected)


def test_extra_state_in_a_state_dict_for_the_cpu_is_left_to_its_module():
    model, x = nn.Sequential(Noting(2, 2)), torch.ones(1, 2)
    expected = model(x)
    dispatch_model(model, {"": "cpu"}, state_dict=model.state_dict(), force_hooks=True)
    assert torch.equal(model(x), expected)


def offloaded(way, model, folder):
    if way == "dispatch_model":
        return dispatch_model(model, {"": "disk"}, offload_dir=folder)
    if way == "disk_offload":
        return disk_offload(model, folder)
    weights = folder.with_name(f"weights {id(model)}")
    save_sharded(model.state_dict(), weights)
    return load_checkpoint_and_dispatch(model, weights, {"": "disk"}, offload_folder=folder)


@pytest.mark.parametrize("way", ["dispatch_model", "disk_offload", "load_checkpoint_and_dispatch"])
def test_two_models_that_live_are_not_offloaded_into_one_folder(way, tmp_path):
    folder = tmp_path / "away"
    (first, expected), (equal, _), (second, _), (third, _) = made(), made(), made(), made()
    for model in (second, third):
        torch.nn.init.constant_(model.norm.weight, 2.0)
    after = output(third)
    offloaded(way, first, folder)
    offloaded(way, equal, folder)  # nothing changes for the first one
    words = r"Another model is offloaded to .*away and in use: it reads norm\.weight\.dat"
    with pytest.raises(ConfigError, match=words):
        offloaded(way, second, folder)
    with pytest.raises(ConfigError, match="Another model is offloaded"):
        offload_state_dict(folder, {"norm.weight": torch.zeros(4)})
    assert torch.equal(output(first), expected)
    del first, equal
    assert torch.equal(output(offloaded(way, third, folder)), after)


def test_a_model_is_dispatched_again_with_other_weights_into_its_folder(tmp_path):
    model = offloaded("load_checkpoint_and_dispatch", made()[0], tmp_path / "away")
    other, _ = made()
    torch.nn.init.constant_(other.norm.weight, 2.0)
    save_sharded(other.state_dict(), tmp_path / "other")
    load_checkpoint_and_dispatch(model, tmp_path / "other", {"": "disk"}, offload_folder=tmp_path / "away")
    assert torch.equal(output(model), output(other))


def check_removed(model, expected, state):
    remove_hook_from_submodules(model)
    assert torch.equal(output(model), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert not any({"forward", "to", "_hf_hook"} & vars(module).keys() for module in model.modules())


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_a_dispatched_model_gives_the_same_and_is_itself_again_without_its_hooks(model, expected, device_map, tmp_path):
    state = copy.deepcopy(model.state_dict())
    assert dispatch_model(model, device_map, offload_dir=tmp_path) is model
    assert model.hf_device_map == device_map
    assert all(torch.equal(output(model), expected) for _ in range(2))
    saved = get_state_dict_offloaded_model(model)
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    check_removed(model, expected, state)


@pytest.mark.parametrize(
    "device_map",
    [
        MAPS[2],
        # The meta device stands for a GPU, next to which weights wait on the CPU.
        {"embed": "meta", "head": "meta", "norm": "meta", "blocks.0": "meta", "blocks.1": "cpu"},
        {"embed": "cpu", "head": "cpu", "norm": "meta", "blocks.0": "disk", "blocks.1": "cpu"},
    ],
    ids=str,
)
def test_hooks_and_weights_are_where_accelerate_puts_them(device_map, tmp_path):
    mine, theirs = made(with_scale=False)[0], made(with_scale=False)[0]
    dispatch_model(mine, device_map, offload_dir=tmp_path / "mine")
    accelerate.dispatch_model(theirs, device_map, offload_dir=tmp_path / "theirs")
    with torch.no_grad():
        outputs = [model(IDS.to("meta" if "meta" in device_map.values() else "cpu")) for model in (mine, theirs)]
    assert outputs[0].device == outputs[1].device
    for (name, one), (_, other) in zip(mine.named_modules(), theirs.named_modules(), strict=True):
        assert repr(getattr(one, "_hf_hook", None)) == repr(getattr(other, "_hf_hook", None)), name
        assert [t.device for t in own_tensors(one)] == [t.device for t in own_tensors(other)], name


def own_tensors(module):
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def test_a_model_for_one_device_gets_no_hooks_unless_they_are_asked_for(model, expected):
    dispatch_model(model, {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(output(model), expected)


def test_weights_that_only_the_index_has_are_loaded_to_where_the_map_wants_them(model, expected, tmp_path):
    save_sharded(model.state_dict(), tmp_path)
    other = empty()
    load_checkpoint_in_model(other, tmp_path, {"": "disk"}, offload_folder=tmp_path / "away")
    file = str(tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": file} for name in model.state_dict() if name != "head.weight"}
    dispatch_model(other, MAPS[3], offload_index=index)
    assert not other.blocks[0].up.weight.is_meta
    assert torch.equal(output(other), expected)


def test_parameters_beside_submodules_go_where_the_map_sends_them(model, expected, tmp_path):
    assert hasattr(model.blocks[0], "scale")
    names = dict.fromkeys(("embed", "head", "norm", "blocks.1", "blocks.0.up", "blocks.0.down"), "cpu")
    device_map = {**names, "blocks.0.norm": "disk", "blocks.0.scale": "disk"}
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert model.blocks[0].scale.is_meta
    assert not model.blocks[0].up.weight.is_meta
    assert torch.equal(output(model), expected)
    top = nn.Module()
    top.loose, top.inner = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    top.forward = lambda x: top.inner(x) * top.loose
    wanted = top.forward(torch.ones(1, 2))
    dispatch_model(top, {"loose": "disk", "inner": "cpu"}, offload_dir=tmp_path)
    assert top.loose.is_meta
    assert torch.equal(top(torch.ones(1, 2)), wanted)
    assert set(get_state_dict_offloaded_model(top)) == {"loose", "inner.weight", "inner.bias"}


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_model_is_offloaded_whole(model, expected, offload, tmp_path):
    state = copy.deepcopy(model.state_dict())
    cpu_offload(model) if offload == "cpu" else disk_offload(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(output(model), expected)
    assert torch.equal(output(copy.deepcopy(model)), expected)
    assert (tmp_path / "embed.weight.dat").exists() is (offload == "disk")
    assert not (tmp_path / "head.weight.dat").exists()  # a shared weight is written once
    found = get_state_dict_from_offload(model.norm, "norm.weight", {"norm.weight": "", "norm.running_mean": ""})
    assert torch.equal(found["norm.weight"], state["norm.weight"])
    check_removed(model, expected, state)


def test_weights_of_an_earlier_run_in_the_folder_are_not_taken_for_the_models(tmp_path):
    earlier, _ = made()
    disk_offload(earlier, tmp_path)
    del earlier
    torch.manual_seed(1)
    model = Tied().eval()
    expected = output(model)
    disk_offload(copy.deepcopy(model), tmp_path)
    disk_offload(model, tmp_path)
    assert torch.equal(output(model), expected)


def test_a_model_with_offloaded_weights_is_not_moved(model, tmp_path, caplog):
    dispatch_model(model, MAPS[1], offload_dir=tmp_path)
    with pytest.raises(StateError, match="can't be moved"):
        model.to("cpu")
    whole, _ = made()
    dispatch_model(whole, {"": "cpu"}, force_hooks=True)
    whole.to(torch.float32)
    assert not caplog.records
    whole.to("cpu")
    (record,) = caplog.records
    assert (record.name, "is moved" in record.message) == ("farflung.big_modeling", True)


def test_what_cannot_be_dispatched_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="no device for"):
        dispatch_model(model, {"embed": "cpu"})
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"no device for blocks\..*, norm\.weight"):
        load_checkpoint_and_dispatch(model, tmp_path / "saved", {"embed": "cpu", "head": "cpu"})
    with pytest.raises(ConfigError, match="no offload_dir"):
        dispatch_model(model, {"": "disk"})
    with pytest.raises(ConfigError, match="no values"):
        disk_offload(model.to("meta"), tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_dispatched_model_is_compiled_in_pieces(tmp_path):
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    with torch.no_grad():
        expected = model(x)
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
        compiled = torch.compile(model, backend="eager")
        assert all(torch.equal(compiled(x), expected) for _ in range(2))


@pytest.mark.gpu
@pytest.mark.parametrize("waiting", ["cpu", "disk"])
def test_what_waits_elsewhere_is_computed_on_the_gpu(model, expected, waiting, tmp_path):
    state = copy.deepcopy(model.state_dict())
    device_map = {"embed": 0, "head": 0, "norm": 0, "blocks.0": 0, "blocks.1": waiting}
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.is_cuda
    assert model.blocks[1].up.weight.is_meta
    result = output(model)
    assert not result.is_cuda
    assert torch.allclose(result, expected, atol=1e-5)
    remove_hook_from_submodules(model)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_a_map_for_the_gpus_that_are_here_is_inferred(model, expected):
    dispatch_model(model, infer_auto_device_map(model))
    assert torch.allclose(output(model.cpu()), expected, atol=1e-5)
