# SPDX-License-Identifier: Apache-2.0
"""Weights that wait on the disk: what one library writes, the other reads."""

import accelerate.utils.offload as theirs
import pytest
import torch
from safetensors.torch import save_file

import farflung.utils.offload as ours
from farflung.base.errors import CheckpointError, ConfigError

STATE = {
    "layer.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "layer.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "layer.eight": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7),
    "flag": torch.tensor([True, False]),
}


@pytest.mark.parametrize(("writer", "reader"), [(ours, ours), (ours, theirs), (theirs, ours)])
def test_weights_come_back_bit_for_bit_from_either_library(writer, reader, tmp_path):
    writer.offload_state_dict(tmp_path, STATE)
    loader = reader.OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(loader) == list(STATE)
    for name, value in STATE.items():
        assert loader[name].dtype == value.dtype
        assert torch.equal(loader[name].to(torch.float64), value.to(torch.float64))


def test_a_tensor_without_values_can_be_written_and_one_on_the_meta_device_cannot(tmp_path):
    ours.offload_state_dict(tmp_path, {"empty": torch.ones(0, 3)})
    assert ours.OffloadedWeightsLoader(save_folder=tmp_path)["empty"].shape == (0, 3)
    with pytest.raises(ConfigError, match="no values to offload"):
        ours.offload_state_dict(tmp_path, {"x": torch.ones(1, device="meta")})


def test_writing_a_weight_again_whose_name_may_have_a_slash_does_not_change_what_was_read_before(tmp_path):
    ours.offload_state_dict(tmp_path, {"a/b": torch.ones(4)})
    before = ours.OffloadedWeightsLoader(save_folder=tmp_path)["a/b"]
    ours.offload_state_dict(tmp_path, {"a/b": torch.zeros(4), "y": torch.zeros(1)})
    assert before.tolist() == [1] * 4
    assert len(ours.OffloadedWeightsLoader(save_folder=tmp_path)) == 2


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(CheckpointError, match="outside of its folder"):
        ours.offload_state_dict(tmp_path / "in", {name: torch.ones(1)})
    ours.offload_state_dict(tmp_path, {"x": torch.ones(1)})
    loader = ours.OffloadedWeightsLoader(save_folder=tmp_path / "in", index={name: {"dtype": "float32", "shape": [1]}})
    with pytest.raises(CheckpointError, match="outside of its folder"):
        loader[name]


def test_weights_come_from_memory_from_safetensors_and_under_another_name(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "some.safetensors")
    index = {"b": {"safetensors_file": str(tmp_path / "some.safetensors"), "weight_name": "a", "dtype": "float16"}}
    loader = ours.OffloadedWeightsLoader({"a": torch.zeros(2)}, index=index, device="cpu")
    assert sorted(loader) == ["a", "b"]
    assert (loader["a"].sum(), loader["b"].dtype) == (0, torch.float16)
    assert "c" not in loader


def test_a_part_of_the_weights_goes_by_short_names():
    part = ours.PrefixedDataset(STATE, "layer.")
    assert list(part) == ["weight", "half", "eight"]  # Accelerate: full names, by which nothing is found
    assert len(part) == 3
    assert set(dict(part)) == {"weight", "half", "eight"}
    assert "scalar" not in part
    chosen = ours.extract_submodules_state_dict(STATE, ["layer", "scal", "flag"])
    assert list(chosen) == [name for name in STATE if name != "scalar"]


def test_damage_is_named(tmp_path):
    ours.offload_state_dict(tmp_path, STATE)
    (tmp_path / "scalar.dat").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"scalar\.dat does not hold"):
        ours.OffloadedWeightsLoader(save_folder=tmp_path)["scalar"]
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json can't be read"):
        ours.OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ConfigError, match="needs a state_dict"):
        ours.OffloadedWeightsLoader()
