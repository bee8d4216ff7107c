# SPDX-License-Identifier: Apache-2.0
"""Loading weights into models: whole or sharded, to the CPU or to the disk; what is missing is never left empty."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from farflung.base.errors import CheckpointError, ConfigError, Unsupported
from farflung.big_modeling import load_checkpoint_and_dispatch, load_checkpoint_in_model
from farflung.checkpoint import export
from farflung.checkpoint.export import save_sharded
from farflung.checkpoint.writer import save_object
from farflung.hooks import remove_hook_from_submodules
from farflung.utils.modeling import find_tied_parameters, load_offloaded_weights, load_state_dict
from farflung.utils.offload import offload_weight
from tests.accelerator.conftest import on_ranks
from tests.big_model.models import Tied, empty, made, output


def saved(folder, size="1GB", lacks=None, **more):
    """Save what a model has, but for one name; return the model, and what it gives."""
    model, expected = made()
    state = model.state_dict() | more
    state.pop(lacks, None)
    save_sharded(state, folder, size)
    return model, expected


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["1GB", "300B"])
@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"": "disk"}, {"blocks": "disk", "": "cpu"}, None])
def test_a_model_without_memory_is_loaded_and_runs(model, expected, device_map, size, safe, tmp_path):
    save_sharded(model.state_dict(), tmp_path / "weights", size, safe)
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "weights", device_map, offload_folder=tmp_path / "away")
    assert torch.equal(output(loaded), expected)
    assert find_tied_parameters(loaded) == [["embed.weight", "head.weight"]]
    assert not (tmp_path / "away" / "norm.running_mean.dat").exists()


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json", "all.bin"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_folder_an_index_or_a_file_is_loaded_strictly(name, device_map, tmp_path):
    model, expected = saved(tmp_path, "300B")
    torch.save(model.state_dict(), tmp_path / "all.bin")
    for loaded in (empty(), Tied().eval()):
        load_checkpoint_in_model(loaded, str(tmp_path / name), device_map, strict=True)
        assert torch.equal(output(loaded), expected)


def test_without_a_map_weights_are_copied_to_where_they_are(tmp_path):
    _, expected = saved(tmp_path)
    other = Tied().eval()
    weight = other.embed.weight
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(output(other), expected)
    assert other.embed.weight is weight


def test_weights_are_converted_also_without_a_map(tmp_path):
    saved(tmp_path)
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
    saved(tmp_path / "weights")
    options = {"offload_folder": tmp_path, "dtype": torch.bfloat16}
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "weights", {"": "disk"}, **options)
    assert loaded.head.weight.dtype == torch.bfloat16
    index = json.loads((tmp_path / "index.json").read_text())
    assert {info["dtype"] for info in index.values()} == {"bfloat16"}


def test_a_checkpoint_that_lacks_what_the_model_has_no_values_for_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path, lacks="blocks.1.up.bias")
    model = empty()
    with pytest.raises(CheckpointError, match=r"lacks \['blocks\.1\.up\.bias'\], which the model has on the meta"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_names_that_differ_are_said_and_under_strict_refused(tmp_path, caplog):
    saved(tmp_path, "300B", lacks="norm.bias", extra=torch.ones(1))
    load_checkpoint_in_model(Tied(), tmp_path, {"": "cpu"})
    assert "norm.bias" in caplog.text
    assert "extra" in caplog.text
    with pytest.raises(CheckpointError, match=r"lacks \['norm\.bias'\], and has \['extra'\] too many"):
        load_checkpoint_in_model(Tied(), tmp_path, {"": "cpu"}, strict=True)


@pytest.mark.parametrize(
    ("change", "kwargs", "error", "words"),
    [
        (lambda folder: None, {"device_map": {"embed": "cpu"}}, ConfigError, "no device for"),
        (lambda folder: None, {"device_map": {"": "disk"}}, ConfigError, "no offload_folder"),
        (lambda folder: None, {"offload_8bit_bnb": True}, Unsupported, "torchao"),
        (lambda folder: None, {"full_state_dict": False}, ConfigError, "process group"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, CheckpointError, "has 0 files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 20), {}, CheckpointError, "damaged"),
        (lambda folder: None, {"checkpoint": "nothing.bin"}, CheckpointError, "does not exist"),
    ],
)
def test_what_cannot_be_loaded_is_refused(change, kwargs, error, words, tmp_path):
    saved(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=words):
        load_checkpoint_in_model(Tied(), **{"checkpoint": tmp_path} | kwargs)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("x", "../x.safetensors", "outside of its folder"),
        ("bias", "model.safetensors", r"names \['bias'\], and the files lack them"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(name, file, words, tmp_path):
    save_sharded({"weight": torch.ones(2, 2)}, tmp_path)
    index = {"weight_map": {"weight": "model.safetensors", name: file}}
    (tmp_path / "all.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint_in_model(nn.Linear(2, 2, device="meta"), tmp_path / "all.index.json", {"": "cpu"})


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu"}, None])
@pytest.mark.parametrize("make", [empty, Tied])
def test_a_weight_of_another_shape_is_refused(make, device_map, tmp_path):
    saved(tmp_path, **{"norm.bias": torch.ones(5)})
    with pytest.raises(ConfigError, match=r"norm\.bias has shape \[4\], and the value for it \[5\]"):
        load_checkpoint_in_model(make(), tmp_path, device_map, offload_folder=tmp_path / "away")


def test_eight_bit_weights_and_other_frameworks_are_refused(tmp_path):
    eight = {"weight": torch.ones(2, 2, dtype=torch.int8), "weight.SCB": torch.ones(2)}
    save_file(eight, tmp_path / "8bit.safetensors")
    with pytest.raises(Unsupported, match="transformers"):
        load_checkpoint_in_model(nn.Linear(2, 2, bias=False), tmp_path / "8bit.safetensors")
    save_file({"weight": torch.ones(1)}, tmp_path / "tf.safetensors", metadata={"format": "tf"})
    with pytest.raises(ConfigError, match="for 'tf'"):
        load_state_dict(tmp_path / "tf.safetensors")


def test_a_file_is_read_to_the_devices_of_a_map(tmp_path):
    save_sharded({"a.x": torch.ones(1), "b.x": torch.ones(2)}, tmp_path)
    found = load_state_dict(tmp_path / "model.safetensors", {"a": "meta", "b": "disk"})
    assert {name: value.device.type for name, value in found.items()} == {"a.x": "meta", "b.x": "cpu"}


def test_offloaded_weights_come_back_into_a_model(model, expected, tmp_path):
    index = {}
    for name, value in model.state_dict().items():
        offload_weight(value, name, tmp_path, index)
    loaded = empty()
    load_offloaded_weights(loaded, index, tmp_path)
    remove_hook_from_submodules(loaded)
    assert torch.equal(output(loaded), expected)


@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_save_that_was_killed_over_an_earlier_one_is_not_loaded_as_a_whole(num_written, tmp_path, monkeypatch):
    model = nn.Sequential(*[nn.Linear(2, 1, bias=False) for _ in range(3)])
    save_sharded({name: torch.zeros(1, 2) for name in model.state_dict()}, tmp_path, 8)

    def killed(shard, path, safe):
        if shard.keys() == {f"{num_written}.weight"}:
            raise KeyboardInterrupt
        save_object(shard, path, safe)

    monkeypatch.setattr(export, "save_object", killed)
    with pytest.raises(KeyboardInterrupt):
        save_sharded({name: torch.ones(1, 2) for name in model.state_dict()}, tmp_path, 8)
    with pytest.raises(CheckpointError, match="has 0 files"):
        load_checkpoint_in_model(model, tmp_path)


@on_ranks(2)
def test_what_the_first_rank_can_not_read_for_all_is_an_error_on_all(tmp_path):
    model = nn.Linear(3, 2)
    for folder, act in (("none", os.mkdir), ("damaged", damaged)):
        if dist.get_rank() == 0:
            act(tmp_path / folder)
        words = f"^{tmp_path / folder}" if dist.get_rank() == 0 else f"Rank 0 .*CheckpointError: {tmp_path / folder}"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint_in_model(model, tmp_path / folder, broadcast_from_rank0=True)


def damaged(folder):
    """Save weights in two files, the second of which is damaged."""
    save_sharded({"bias": torch.zeros(2), "weight": torch.zeros(2, 3)}, folder, 8)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"?")


@on_ranks(2)
def test_the_first_rank_reads_for_all(tmp_path):
    weights = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    if dist.get_rank() == 0:
        save_sharded(weights, tmp_path)
    dist.barrier()
    model = nn.Linear(3, 2)
    load_checkpoint_in_model(model, tmp_path, broadcast_from_rank0=True)
    assert model.weight.tolist() == weights["weight"].tolist()


@on_ranks(2)
def test_a_model_that_is_whole_wrapped_or_sharded_is_loaded_in_a_process_group(tmp_path):
    folder = tmp_path / str(dist.get_rank())
    _, expected = saved(folder)
    model = empty().bfloat16()
    model.norm.to_empty(device="cpu")
    load_checkpoint_in_model(model, folder)
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.head.weight is model.embed.weight
    assert torch.allclose(output(model).float(), expected, atol=0.1)
    for wrapped in (nn.parallel.DistributedDataParallel(Tied()), torch.compile(Tied(), backend="eager")):
        load_checkpoint_in_model(wrapped, folder)
        assert torch.equal(output(wrapped.eval()), expected)
    sharded = fully_shard(Tied())
    load_checkpoint_in_model(sharded, folder)
    assert torch.equal(sharded.norm.weight.full_tensor(), wrapped.norm.weight)
    assert torch.allclose(output(sharded.eval()), expected)
    model.norm = nn.BatchNorm1d(5)
    with pytest.raises(ConfigError, match=r"norm\.weight has shape \[5\], and the value for it \[4\]"):
        load_checkpoint_in_model(model, folder)
