# SPDX-License-Identifier: Apache-2.0
"""The command that looks at checkpoints: what it shows is so, and what it converts can be loaded."""

import json
import os
import shutil
import zlib
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from farflung import Accelerator
from farflung.address.schemes import objects_at
from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.manifest import Manifest
from farflung.checkpoint.sharded import ShardPlanner
from farflung.launch.checkpoint import checkpoint
from farflung.state import AcceleratorState
from farflung.utils import save_fsdp_model
from tests.python import call_farflung


@pytest.fixture
def folder(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for number in range(2):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state(tmp_path / f"checkpoint_{number}")
    AcceleratorState._reset_state(reset_partial_state=True)
    return tmp_path


def run(*arguments):
    """What the command says, and the exit code that `main` would end with; its errors are raised."""
    result = CliRunner().invoke(checkpoint, [str(word) for word in arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output, result.return_value or 0


def said(*arguments):
    return run(*arguments)[0]


def test_checkpoints_and_files_are_listed(folder):
    lines = said("ls", folder).splitlines()
    assert [line.split(":")[0] for line in lines] == ["checkpoint_1", "checkpoint_0"]
    assert "checkpoint_1: no optimizer, 1 process, " in lines[0]
    assert "model.safetensors" in said("ls", folder / "checkpoint_0")
    (folder / "checkpoint_1" / "model.safetensors").unlink()
    assert "checkpoint_1: NOT COMPLETE: model.safetensors can't be found" in said("ls", folder)
    (folder / "checkpoint_0" / paths.MANIFEST).write_text("x")
    assert f"checkpoint_0: NOT COMPLETE: {folder / 'checkpoint_0' / paths.MANIFEST} is damaged" in said("ls", folder)


def trained(folder, steps, resume=None):
    """An Accelerator whose optimizer steps after each second micro-batch, saved after `steps` optimizer steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_step_is_that_of_the_optimizer_and_goes_on_over_a_resume(tmp_path):
    trained(tmp_path / "checkpoint_0", 3)
    trained(tmp_path / "checkpoint_1", 1, resume=tmp_path / "checkpoint_0")
    lines = said("ls", tmp_path).splitlines()
    assert [line.split(",")[0] for line in lines] == ["checkpoint_1: step 4", "checkpoint_0: step 3"]
    one = tmp_path / "checkpoint_0"
    before = Manifest.read(one)
    content = json.loads((one / paths.MANIFEST).read_bytes())
    del content["optimizer_steps"], content["crc32"]  # as it was written before optimizer steps were counted
    content["crc32"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    (one / paths.MANIFEST).write_text(json.dumps(content))
    assert Manifest.read(one) == replace(before, optimizer_steps=None)
    trained(tmp_path / "checkpoint_2", 1, resume=one)
    steps = {line.split(":")[0]: line.split(": ")[1].split(",")[0] for line in said("ls", tmp_path).splitlines()}
    unknown = "steps not recorded"
    assert steps == {"checkpoint_2": unknown, "checkpoint_1": "step 4", "checkpoint_0": unknown}


def test_a_project_is_searched_and_a_folder_without_any_is_said(folder, tmp_path):
    (folder / "empty").mkdir()
    (folder / "project" / "checkpoints").mkdir(parents=True)
    for command, name in product(("ls", "verify"), ("empty", "project")):
        why = rf"^There is no checkpoint in .*{name}\. Name a checkpoint, or the folder"
        with pytest.raises(CheckpointError, match=why):
            said(command, folder / name)
    (folder / "checkpoint_0").rename(folder / "project" / "checkpoints" / "checkpoint_0")
    assert said("ls", folder / "project").startswith("checkpoint_0: ")
    assert said("verify", folder / "project").endswith("checkpoint_0: complete\n")


def test_a_checkpoint_that_lacks_its_model_says_so(folder):
    one, sentence = folder / "checkpoint_1", "it has no model weights"
    assert sentence not in said("ls", folder) + said("ls", one) + said("verify", one)
    said("convert", one, folder / "checkpoint_2", "--to", "accelerate")
    (folder / "checkpoint_2" / "model.safetensors").unlink()
    assert f"checkpoint_2: {sentence}, without a manifest" in said("ls", folder)
    assert said("ls", folder / "checkpoint_2").endswith(f"{sentence}\n")
    assert said("verify", folder / "checkpoint_2").endswith(f"{sentence}\n")


def test_damage_is_found_and_named(folder):
    assert said("verify", folder).count(": complete") == 2
    path = folder / "checkpoint_0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged") as caught:
        said("verify", folder)
    assert "loaded" not in str(caught.value), "nobody asked for that"


def test_differences_are_said_and_are_the_exit_code(folder):
    words, code = run("diff", folder / "checkpoint_0", folder / "checkpoint_1")
    assert code == 1
    assert "model.safetensors: weight: values are up to 1 apart" in words
    assert "bias" not in words
    assert words.endswith("Identical files: 2 of 3\n")
    for number in range(2):
        (folder / f"checkpoint_{number}" / "notes.txt").write_text(f"mine {number}")
    words = said("diff", folder / "checkpoint_0", folder / "checkpoint_1")
    assert "notes.txt: b'mine 0' and b'mine 1'\nIdentical files: 2 of 4\n" in words
    said("convert", folder / "checkpoint_0", folder / "copy", "--to", "farflung")
    assert run("diff", folder / "checkpoint_0", folder / "copy") == ("Identical files: 4 of 4\n", 0)
    (folder / "copy" / "model.safetensors").unlink()
    words, code = run("diff", folder / "checkpoint_0", folder / "copy")
    assert (words.splitlines()[0], code) == (f"model.safetensors: only in {folder / 'checkpoint_0'}", 1)


def test_every_value_of_an_array_is_compared_and_whole_numbers_however_large(tmp_path):
    values = np.arange(2000.0)
    values[0] = np.nan
    changed = values.copy()
    changed[1000] = -5
    saved = {"one": values, "same": values, "changed": changed, "single": values.astype("f4")}
    saved |= {f"number {k}": torch.tensor([2**60 + k]) for k in range(2)}
    saved |= {"list": [1.0, 2.0]} | {f"{word}s": {f"{word} {k}": k for k in range(12)} for word in ("key", "name")}
    for name, value in saved.items():
        accelerator = Accelerator(cpu=True)
        kept = SimpleNamespace(state_dict=lambda value=value: {"value": value}, load_state_dict=None)
        accelerator.register_for_checkpointing(kept)
        accelerator.save_state(tmp_path / name)
        AcceleratorState._reset_state(reset_partial_state=True)
    one, file = tmp_path / "one", "custom_checkpoint_0.pkl"
    (tmp_path / "same" / file).write_bytes((one / file).read_bytes() + b"\0" * 8)  # other bytes, the same values
    assert run("diff", one, tmp_path / "same")[1] == 0
    assert f"{file}: value: values are up to 1e+03 apart" in said("diff", one, tmp_path / "changed")
    assert f"{file}: value: [2000] torch.float64 and [2000] torch.float32" in said("diff", one, tmp_path / "single")
    assert f"{file}: value: the structures differ\n" in said("diff", one, tmp_path / "list")
    words = said("diff", tmp_path / "keys", tmp_path / "names").splitlines()
    assert words[-12] == f"{file}: value: key 0 is only in the first"
    assert words[-2] == f"{file}: and 14 more"
    words = said("diff", tmp_path / "names", tmp_path / "keys")
    assert f"{file}: value: key 0 is only in the second\n" in words
    words, code = run("diff", tmp_path / "number 0", tmp_path / "number 1")
    assert (f"{file}: value: " in words, code) == (True, 1)


def test_a_checkpoint_whose_save_was_interrupted_is_finished_before_it_is_shown(tmp_path):
    for name, steps in [("old", 1), ("new", 2)]:
        trained(tmp_path / name, steps)
    shutil.copytree(tmp_path / "new", tmp_path / "expected")
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "old", tmp_path / name)
        shutil.copytree(tmp_path / "new", tmp_path / name / ".ready" / name)
    assert run("diff", tmp_path / "a", tmp_path / "expected")[1] == 0
    assert "b: step 2" in said("ls", tmp_path)


def test_what_is_no_checkpoint_is_not_compared(folder):
    for one, other in [(folder, folder / "checkpoint_0"), (folder / "checkpoint_0", folder)]:
        with pytest.raises(CheckpointError, match=r"^There is no checkpoint in .*, so it can't be compared\. Name two"):
            said("diff", one, other)
    assert call_farflung("checkpoint", "diff", folder / "checkpoint_0", folder / "checkpoint_1") == 1


def test_other_forms_can_be_loaded(folder, tmp_path):
    one = folder / "checkpoint_1"
    words = said("convert", one, tmp_path / "w.safetensors", "--to", "state-dict")
    assert words == f"Written to {tmp_path / 'w.safetensors'}: 2 tensors, 172 B.\n"
    words = said("convert", one, tmp_path / "theirs", "--to", "accelerate").splitlines()
    assert words[0].startswith(f"Written to {tmp_path / 'theirs'}: model.safetensors, random_states_0.pkl (")
    assert words[1] == "Left out: farflung.json, loop_state/rank_0.bin."
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["model.safetensors", "random_states_0.pkl"]
    assert "it can't be verified without a manifest" in said("verify", tmp_path / "theirs")
    said("convert", tmp_path / "theirs", tmp_path / "ours", "--to", "farflung")
    assert said("verify", tmp_path / "ours").endswith(": complete\n")
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    accelerator.prepare(model)
    accelerator.load_state(tmp_path / "ours")
    assert model.weight.tolist() == [[1.0, 1.0]]
    said("convert", tmp_path / "ours", tmp_path / "w.pt", "--to", "state-dict")
    assert torch.load(tmp_path / "w.pt", weights_only=True)["weight"].tolist() == [[1.0, 1.0]]
    with pytest.raises(ConfigError, match="already exists"):
        said("convert", one, tmp_path / "ours", "--to", "farflung")


def write_shards(folder, name, **weights):
    """The shards of one model, as one process writes them; the names of their files, for a manifest."""
    planner = ShardPlanner(name, {"model": weights}, leads=True)
    entry = planner.entry([planner.plan], 0)
    return entry.finish(folder, [entry.write(folder)])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("gathered", [False, True])
def test_each_model_becomes_a_file_where_some_are_sharded(tmp_path, gathered):
    one = tmp_path / "checkpoint_0"
    one.mkdir()
    if gathered:
        torch.save({"weight": torch.zeros(1)}, one / "pytorch_model_fsdp.bin")
    else:
        write_shards(one, "pytorch_model_fsdp_0", weight=torch.zeros(1))
    save_file({"weight": torch.full((1,), 1.0)}, one / "model.safetensors")
    torch.save({"weight": torch.full((1,), 2.0)}, one / "pytorch_model_1.bin")
    for index in range(3):
        said("convert", one, tmp_path / f"{index}.pt", "--to", "state-dict", "--model", index)
        assert torch.load(tmp_path / f"{index}.pt")["weight"].tolist() == [index]
    with pytest.raises(CheckpointError, match=r"no weights of model 3: neither model_2\.safetensors nor"):
        said("convert", one, tmp_path / "3.pt", "--to", "state-dict", "--model", 3)


def test_the_shards_of_a_model_are_a_checkpoint_until_it_is_saved_with_the_rest(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    parts = tmp_path / "parts"
    shards = parts / "pytorch_model_fsdp_0"
    save_fsdp_model(None, accelerator, model, parts)
    for folder in (parts, shards):
        assert said("verify", folder) == f"{folder}: complete\n"
        assert "no model" not in said("ls", folder)
    said("convert", shards, tmp_path / "w.pt", "--to", "state-dict")
    assert torch.equal(torch.load(tmp_path / "w.pt")["weight"], model.weight)
    accelerator.save_state(parts)
    assert not shards.exists()
    assert said("verify", parts) == f"{parts}: complete\n"
    accelerator.load_state(parts)


def test_all_that_can_not_be_read_is_named(folder):
    for number in range(2):
        (folder / f"checkpoint_{number}" / paths.MANIFEST).unlink()
        (folder / f"checkpoint_{number}" / "model.safetensors").write_bytes(b"x")
    said("convert", folder / "checkpoint_0", folder / "checkpoint_2", "--to", "farflung")
    result = CliRunner().invoke(checkpoint, ["verify", str(folder)])
    assert result.output == f"{folder / 'checkpoint_2'}: complete\n"
    assert all(f"checkpoint_{number}/model.safetensors" in str(result.exception) for number in range(2))


def test_only_the_names_of_a_wrapper_are_shortened(tmp_path):
    """Accelerate saves a DDP model under `module.weight`; Farflung saves the names of the bare model."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1)}))
    ours, theirs, copy = tmp_path / "ours", tmp_path / "theirs", tmp_path / "copy"
    accelerator.save_state(ours)
    AcceleratorState._reset_state(reset_partial_state=True)
    said("convert", ours, theirs, "--to", "accelerate")
    said("convert", theirs, copy, "--to", "farflung")
    short = ["bias", "weight"]
    for folder, names in (ours, ["module.bias", "module.weight"]), (theirs, short), (copy, short):
        said("convert", folder, tmp_path / f"{folder.name}.pt", "--to", "state-dict")
        assert sorted(torch.load(tmp_path / f"{folder.name}.pt")) == names


@pytest.mark.timeout(30)
def test_a_sharded_checkpoint_is_compared_and_becomes_one_file(tmp_path):
    for number in range(2):
        weights = {"weight": torch.full((2,), float(number)), "unset": torch.full((2,), torch.nan)}
        folder = tmp_path / f"checkpoint_{number}"
        Manifest(write_shards(folder, "pytorch_model_fsdp_0", **weights)).write(folder / paths.MANIFEST)
    one, other = tmp_path / "checkpoint_0", tmp_path / "checkpoint_1"
    assert run("diff", one, one)[1] == 0
    words, code = run("diff", one, other)
    assert ("pytorch_model_fsdp_0: model: weight: values are up to 1 apart" in words, code) == (True, 1)
    assert "no model" not in said("ls", one)
    run("convert", other, tmp_path / "w.pt", "--to", "state-dict")
    assert torch.load(tmp_path / "w.pt")["weight"].tolist() == [1.0, 1.0]
    assert "complete" in said("verify", tmp_path)


def test_what_is_no_file_is_never_opened_and_nothing_is_left(folder):
    one = folder / "checkpoint_1"
    os.mkfifo(one / "notes.txt")  # not in the manifest
    for words in (["convert", one, folder / "new", "--to", "farflung"], ["diff", one, one]):
        with pytest.raises(CheckpointError, match=r"notes\.txt is a named pipe, not a file"):
            said(*words)
    (one / "notes.txt").unlink()
    full = OSError(28, "No space left on device")
    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(OSError, match="No space left"):
        said("convert", one, folder / "new", "--to", "farflung")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_1"]


def test_checkpoints_at_an_address_are_looked_at_as_those_in_a_folder(bucket, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for number in range(2):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state(f"{bucket}/checkpoints/checkpoint_{number}")
    lines = said("ls", bucket).splitlines()
    assert [line.split(":")[0] for line in lines] == ["checkpoint_1", "checkpoint_0"]
    assert "checkpoint_1: no optimizer, 1 process, " in lines[0]
    one, other = (f"{bucket}/checkpoints/checkpoint_{number}" for number in range(2))
    assert "model.safetensors" in said("ls", one)
    assert said("verify", bucket) == f"{other}: complete\n{one}: complete\n"
    output, code = run("diff", one, other)
    assert code == 1
    assert "weight: values are up to 1 apart" in output
    assert run("diff", one, one)[1] == 0
    said("convert", other, tmp_path / "here", "--to", "farflung")
    assert Checkpoint.open(tmp_path / "here").verify().manifest.world_size == 1
    board = objects_at(bucket)
    (name,) = (name for name in board.names_below("") if "checkpoint_0" in name and name.endswith(".safetensors"))
    board.delete_names([name])
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        said("verify", bucket)
