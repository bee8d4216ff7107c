# SPDX-License-Identifier: Apache-2.0
"""The command that looks at checkpoints: what it shows is so, and what it converts can be loaded."""

import pytest
import torch
from click.testing import CliRunner

from farflung import Accelerator
from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.former_name import FORMER_NAME
from farflung.checkpoint import layout
from farflung.launch.checkpoint import checkpoint
from farflung.state import AcceleratorState


@pytest.fixture
def folder(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for number in range(2):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state(tmp_path / f"checkpoint_{number}")
    AcceleratorState._reset_state(reset_partial_state=True)
    return tmp_path


def said(*arguments):
    result = CliRunner().invoke(checkpoint, [str(word) for word in arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_checkpoints_and_files_are_listed(folder):
    lines = said("ls", folder).splitlines()
    assert [line.split(":")[0] for line in lines] == ["checkpoint_1", "checkpoint_0"]
    assert "step 0, 1 processes" in lines[0]
    assert "model.safetensors" in said("ls", folder / "checkpoint_0")
    (folder / "checkpoint_1" / "model.safetensors").unlink()
    assert "checkpoint_1: NOT COMPLETE: model.safetensors can't be found" in said("ls", folder)


def test_damage_is_found_and_named(folder):
    assert said("verify", folder).count("whole") == 2
    path = folder / "checkpoint_0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        said("verify", folder)


def test_differences_are_said(folder):
    words = said("diff", folder / "checkpoint_0", folder / "checkpoint_1")
    assert "model.safetensors: weight: values are up to 1 apart" in words
    assert "bias" not in words
    assert words.endswith("files are the same\n")


def test_other_forms_can_be_loaded(folder, tmp_path):
    one = folder / "checkpoint_1"
    said("convert", one, tmp_path / "w.safetensors", "--to", "state-dict")
    said("convert", one, tmp_path / "theirs", "--to", "accelerate")
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["model.safetensors", "random_states_0.pkl"]
    assert "no more can be said" in said("verify", tmp_path / "theirs")
    said("convert", tmp_path / "theirs", tmp_path / "ours", "--to", "farflung")
    assert said("verify", tmp_path / "ours").endswith("whole\n")
    said("convert", tmp_path / "ours", tmp_path / "w.pt", "--to", "state-dict")
    assert torch.load(tmp_path / "w.pt", weights_only=True)["weight"].tolist() == [[1.0, 1.0]]
    with pytest.raises(ConfigError, match="is there already"):
        said("convert", one, tmp_path / "ours", "--to", "farflung")


def test_a_checkpoint_under_the_former_name_is_verified_loaded_and_replaced(folder, capsys):
    """Its manifest counts as ever; the next save into the same folder leaves no trace of the old one."""
    one = folder / "checkpoint_1"
    (one / layout.MANIFEST).rename(one / layout.FORMER_MANIFEST)
    assert "whole" in said("verify", one)
    assert "1 process" in said("ls", folder)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.load_state(one)
    assert torch.equal(model.weight, torch.ones(1, 2))
    assert capsys.readouterr().err.count(f"called {FORMER_NAME}") == 1
    accelerator.save_state(one)
    assert (one / layout.MANIFEST).is_file()
    assert not (one / layout.FORMER_MANIFEST).exists()
    (one / layout.MANIFEST).rename(one / layout.FORMER_MANIFEST)
    (one / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        accelerator.load_state(one)
    AcceleratorState._reset_state(reset_partial_state=True)
