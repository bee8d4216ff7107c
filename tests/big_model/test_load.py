# SPDX-License-Identifier: Apache-2.0
"""Loading weights into models: whole or sharded, to the CPU or to the disk; what is missing is never left empty."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from farflung.base.errors import CheckpointError, ConfigError, Unsupported
from farflung.big_modeling import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from farflung.checkpoint.export import save_sharded
from farflung.hooks import remove_hook_from_submodules
from farflung.testing.ranks import run_ranks
from farflung.utils.modeling import find_tied_parameters, load_offloaded_weights, load_state_dict
from farflung.utils.offload import offload_weight
from tests.big_model.models import IDS, Tied, made


def empty():
    with init_empty_weights():
        return Tied().eval()


def output(model):
    with torch.no_grad():
        return model(IDS)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["1GB", "300B"])
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"": "disk"}, {"blocks": "disk", "": "cpu"}, None])
def test_a_model_without_memory_is_loaded_and_runs(device_map, size, safe, tmp_path):
    model, expected = made()
    save_sharded(model.state_dict(), tmp_path / "weights", size, safe)
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "weights", device_map, offload_folder=tmp_path / "away")
    assert torch.equal(output(loaded), expected)
    assert find_tied_parameters(loaded) == [["embed.weight", "head.weight"]]
    assert not (tmp_path / "away" / "norm.running_mean.dat").exists()


def test_a_file_or_an_index_may_be_named(tmp_path):
    model, expected = made()
    save_sharded(model.state_dict(), tmp_path, "300B")
    loaded = empty()
    load_checkpoint_in_model(loaded, tmp_path / "model.safetensors.index.json", {"": "cpu"}, strict=True)
    assert torch.equal(output(loaded), expected)
    torch.save(model.state_dict(), tmp_path / "all.bin")
    loaded = empty()
    load_checkpoint_in_model(loaded, str(tmp_path / "all.bin"), strict=True)
    assert torch.equal(output(loaded), expected)


def test_without_a_map_weights_are_copied_to_where_they_are(tmp_path):
    model, expected = made()
    save_sharded(model.state_dict(), tmp_path)
    other = Tied().eval()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(output(other), expected)
    assert optimizer.param_groups[0]["params"][0] is next(other.parameters())


def test_weights_are_converted_also_without_a_map(tmp_path):
    save_sharded(made()[0].state_dict(), tmp_path)
    other = Tied()
    load_checkpoint_in_model(other, tmp_path, dtype="bfloat16")
    assert other.head.weight.dtype == torch.bfloat16
    assert other.embed.weight is other.head.weight
    assert other.norm.num_batches_tracked.dtype == torch.int64
    kept = empty()
    load_checkpoint_in_model(kept, tmp_path, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"])
    assert kept.norm.weight.dtype == torch.float32
    assert kept.blocks[1].up.weight.dtype == torch.float16


def test_what_is_on_the_disk_has_the_dtype_that_was_asked_for(tmp_path):
    model, _ = made()
    save_sharded(model.state_dict(), tmp_path / "weights")
    loaded = load_checkpoint_and_dispatch(
        empty(), tmp_path / "weights", {"": "disk"}, offload_folder=tmp_path, dtype=torch.bfloat16
    )
    assert loaded.head.weight.dtype == torch.bfloat16
    index = json.loads((tmp_path / "index.json").read_text())
    assert {info["dtype"] for info in index.values()} == {"bfloat16"}


def test_a_checkpoint_that_lacks_what_the_model_has_no_values_for_is_refused_before_anything_changes(tmp_path):
    state = made()[0].state_dict()
    del state["blocks.1.up.bias"]
    save_sharded(state, tmp_path)
    model = empty()
    with pytest.raises(CheckpointError, match=r"lacks \['blocks\.1\.up\.bias'\], which the model has on the meta"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_names_that_differ_are_said_and_under_strict_refused(tmp_path, caplog):
    state = made()[0].state_dict()
    del state["norm.bias"]
    state["extra"] = torch.ones(1)
    save_sharded(state, tmp_path, "300B")
    model = Tied()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert "norm.bias" in caplog.text
    assert "extra" in caplog.text
    with pytest.raises(CheckpointError, match=r"lacks \['norm\.bias'\], and has \['extra'\] too many"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True)


def test_a_sharded_checkpoint_is_loaded_strictly(tmp_path):
    model, expected = made()
    save_sharded(model.state_dict(), tmp_path, "300B")
    other = Tied().eval()
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(output(other), expected)


@pytest.mark.parametrize(
    ("change", "kwargs", "error", "words"),
    [
        (lambda folder: None, {"device_map": {"embed": "cpu"}}, ConfigError, "no device for"),
        (lambda folder: None, {"device_map": {"": "disk"}}, ConfigError, "no offload_folder"),
        (lambda folder: None, {"offload_8bit_bnb": True}, Unsupported, "torchao"),
        (lambda folder: None, {"full_state_dict": False}, ConfigError, "process group"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, CheckpointError, "has 0 files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 20), {}, CheckpointError, "damaged"),
    ],
)
def test_what_cannot_be_loaded_is_refused(change, kwargs, error, words, tmp_path):
    save_sharded(made()[0].state_dict(), tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=words):
        load_checkpoint_in_model(Tied(), tmp_path, **kwargs)


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path):
    (tmp_path / "a.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        load_checkpoint_in_model(Tied(), tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint_in_model(Tied(), tmp_path / "nothing.bin")


def test_files_that_lack_what_their_index_names_are_noticed(tmp_path):
    save_sharded({"weight": torch.ones(2, 2)}, tmp_path)
    index = {"weight_map": dict.fromkeys(("weight", "bias"), "model.safetensors")}
    (tmp_path / "all.index.json").write_text(json.dumps(index))
    with init_empty_weights():
        layer = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"names \['bias'\], and the files lack them"):
        load_checkpoint_in_model(layer, tmp_path / "all.index.json", {"": "cpu"})


def test_eight_bit_weights_and_other_frameworks_are_refused(tmp_path):
    save_file(
        {"weight": torch.ones(2, 2, dtype=torch.int8), "weight.SCB": torch.ones(2)}, tmp_path / "8bit.safetensors"
    )
    with pytest.raises(Unsupported, match="transformers"):
        load_checkpoint_in_model(nn.Linear(2, 2, bias=False), tmp_path / "8bit.safetensors")
    save_file({"weight": torch.ones(1)}, tmp_path / "tf.safetensors", metadata={"format": "tf"})
    with pytest.raises(ConfigError, match="for 'tf'"):
        load_state_dict(tmp_path / "tf.safetensors")


def test_a_file_is_read_to_the_devices_of_a_map(tmp_path):
    save_sharded({"a.x": torch.ones(1), "b.x": torch.ones(2)}, tmp_path)
    found = load_state_dict(tmp_path / "model.safetensors", {"a": "meta", "b": "disk"})
    assert {name: value.device.type for name, value in found.items()} == {"a.x": "meta", "b.x": "cpu"}


def test_offloaded_weights_come_back_into_a_model(tmp_path):
    model, expected = made()
    index = {}
    for name, value in model.state_dict().items():
        offload_weight(value, name, tmp_path, index)
    loaded = empty()
    load_offloaded_weights(loaded, index, tmp_path)
    remove_hook_from_submodules(loaded)
    assert torch.equal(output(loaded), expected)


def load_from_the_first(path):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    return model.weight.tolist()


def test_the_first_rank_reads_for_all(tmp_path):
    weights = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    save_sharded(weights, tmp_path)
    assert run_ranks(load_from_the_first, 2, str(tmp_path)) == [weights["weight"].tolist()] * 2
