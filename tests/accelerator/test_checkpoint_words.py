# SPDX-License-Identifier: Apache-2.0
"""What `save_state` and `load_state` promise beside the resume: names, hooks, limits, errors that change nothing."""

import gc
import os
import shutil
import threading
import time
from importlib.metadata import version
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.accelerator.session import opened_session
from farflung.base.errors import CheckpointError, ConfigError, StateError, Unsupported
from farflung.checkpoint.manifest import Manifest
from farflung.config import environ
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import ProjectConfiguration
from tests.accelerator.program import Counter
from tests.accelerator.test_checkpoints import Training
from tests.faults import disk_is_full, writing


def automatic(folder, **kwargs):
    return ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **kwargs)


def picture(training):
    """All that a load could change."""
    return (
        training.weights(),
        str(training.optimizers[0].state_dict()),
        str(training.schedulers[0].state_dict()),
        str([p.grad for p in training.model.parameters()]),
        str(training.loader.state_dict()),
        str(opened_session().loop.state_dict([training.model])),
        training.counter.epoch,
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
    )


def test_the_files_are_those_of_accelerate_and_our_own(tmp_path):
    training = Training(mixed_precision="fp16")
    training.epochs(num_epochs=1)
    folder = tmp_path / "a"
    assert training.accelerator.save_state(folder) == str(folder)
    names = {"custom_checkpoint_0.pkl", "farflung.json", "loop_state/rank_0.bin", "model.safetensors", "optimizer.bin"}
    names |= {"random_states_0.pkl", "scaler.pt", "scheduler.bin"}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} == names
    training.accelerator.save_state(folder, safe_serialization=False)
    assert (folder / "pytorch_model.bin").exists()
    assert not (folder / "model.safetensors").exists(), "two kinds of weights would be one too many"
    manifest = Manifest.read(folder)
    assert (manifest.world_size, manifest.iteration, manifest.step) == (1, 1, training.accelerator.step)
    assert manifest.versions["torch"] == version("torch")  # the release; torch.__version__ may name its build, too


def test_loaders_may_be_prepared_between_saving_and_loading(tmp_path, capsys):
    training = Training()
    training.epochs(num_epochs=1)
    training.accelerator.save_state(tmp_path / "one")
    place = training.loader.state_dict()["epoch"]
    training.epochs(num_epochs=1)
    evaluation = training.accelerator.prepare(DataLoader(range(4), 2))
    assert [batch.tolist() for batch in evaluation] == [[0, 1], [2, 3]]
    training.accelerator.save_state(tmp_path / "two")
    before = str(evaluation.state_dict())
    training.accelerator.load_state(tmp_path / "one")
    assert training.loader.state_dict()["epoch"] == place
    assert str(evaluation.state_dict()) == before
    assert "written with 1 prepared loader: the later ones stay as they are" in capsys.readouterr().err
    again = Training()
    again.accelerator.load_state(tmp_path / "two")
    assert again.loader.state_dict()["epoch"] == 0
    assert "written with 2 prepared loaders, but here there are 1: they stay as they are" in capsys.readouterr().err


def test_numbers_limits_and_the_newest(tmp_path, capsys):
    training, folders = Training(project_config=automatic(tmp_path, total_limit=2)), []
    training.accelerator.register_save_state_pre_hook(lambda models, weights, folder: folders.append(folder))
    for _ in range(4):
        training.accelerator.save_state()
    assert {Path(folder).parents[1] for folder in folders} == {tmp_path}, "where nobody looks for numbers alone"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints"], "nothing is left beside it"
    assert training.accelerator.save_iteration == 4
    with open(tmp_path / "checkpoints" / "checkpoint_3" / "optimizer.bin", "r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    training.accelerator.load_state("latest")
    said = capsys.readouterr().err
    assert "passed over" in said
    assert "checkpoint_3 is not a complete checkpoint: optimizer.bin is damaged" in said
    assert f"loaded {tmp_path / 'checkpoints' / 'checkpoint_2'}" in said
    other = Training(project_config=automatic(tmp_path))
    other.accelerator.project_configuration.iteration = 3
    with pytest.raises(ConfigError, match="already has checkpoint_3 of another run"):
        other.accelerator.save_state()
    other.accelerator.project_configuration.iteration = 0
    other.accelerator.load_state()
    assert other.accelerator.save_iteration == 4, "the next number is free"
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is damaged"):
        training.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_3")


def test_a_fresh_run_in_the_folder_of_an_older_one_is_refused_at_its_first_save(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_7").mkdir(parents=True)
    words = rf"^{folder} already has checkpoint_7 of another run, and checkpoint_0 would .*load_state\(\), .* or delete"
    with pytest.raises(ConfigError, match=words):
        Training(project_config=automatic(tmp_path)).accelerator.save_state()
    assert os.listdir(folder) == ["checkpoint_7"]
    project = accelerate.utils.ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerate.Accelerator(cpu=True, project_config=project).save_state()  # which does not refuse it
    assert sorted(os.listdir(folder)) == ["checkpoint_0", "checkpoint_7"]


def test_hooks_take_models_out_and_their_files_belong_to_the_checkpoint(tmp_path, monkeypatch):
    training, synced, sync = Training(), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: sync(file) or synced.append(os.readlink(f"/proc/self/fd/{file}")))
    accelerator, ckpt, seen = training.accelerator, tmp_path / "ckpt", []

    def on_save(models, weights, folder):
        assert models[0] is training.model
        weights.pop()
        seen.append(Path(folder).name)
        (Path(folder) / "net").mkdir()
        torch.save(models[0].state_dict(), Path(folder) / "net" / "weights.pt")

    def on_load(models, folder):
        models.pop().load_state_dict(torch.load(Path(folder) / "net" / "weights.pt", weights_only=True))

    register = accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook
    handles = [add(hook) for add, hook in zip(register, (on_save, on_load), strict=True)]
    accelerator.save_state(ckpt)
    before = training.weights()
    assert seen == ["ckpt"], "hooks may read the name of the checkpoint from its folder"
    assert not (ckpt / "model.safetensors").exists()
    assert "net/weights.pt" in Manifest.read(ckpt).files
    assert any(name.endswith("/ckpt/net/weights.pt") for name in synced), "on the disk before the checkpoint counts"
    training.epochs(num_epochs=1)
    accelerator.load_state(ckpt)
    assert training.weights() == before
    for handle in handles:
        handle.remove()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        accelerator.load_state(ckpt)


class Stubborn(Counter):
    """A registered object that can be saved, but not loaded."""

    def load_state_dict(self, state):
        raise RuntimeError("I will not")


def cut(path, by=-1):
    path.write_bytes(path.read_bytes()[:by])


def flipped(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def without_manifest(folder, damage):
    (folder / "farflung.json").unlink()
    damage()


def of_another_model(path):
    Accelerator(cpu=True).save(nn.Linear(3, 1).state_dict(), path, safe_serialization=True)


DAMAGES = {
    r"loop_state/rank_0\.bin has \d+ bytes": lambda at: cut(at / "loop_state" / "rank_0.bin"),
    r"scheduler\.bin can't be found": lambda at: (at / "scheduler.bin").unlink(),
    r"model\.safetensors is damaged: .* Nothing was loaded": lambda at: flipped(at / "model.safetensors"),
    r"optimizer\.bin has": lambda at: os.replace(at / "scheduler.bin", at / "optimizer.bin"),
    r"optimizer\.bin can't be read, so it is damaged": lambda at: without_manifest(
        at, lambda: cut(at / "optimizer.bin", 200)
    ),
    r"model\.safetensors is of another model": lambda at: without_manifest(
        at, lambda: of_another_model(at / "model.safetensors")
    ),
    "the state of 1 registered object, but here there are 2": lambda at: None,
    "I will not": lambda at: None,
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_failed_load_changes_nothing(words, tmp_path):
    training = Training(accumulate=2)
    if words == "I will not":
        training.accelerator.register_for_checkpointing(Stubborn())
    training.accelerator.save_state(tmp_path)
    if "registered" in words:
        training.accelerator.register_for_checkpointing(Stubborn())
    DAMAGES[words](tmp_path)
    called = []
    for batch in training.loader:
        training.see(batch)
        break
    before = picture(training)
    for _ in range(2):  # without a hook, and with one: then all is verified before it is called
        with pytest.raises((CheckpointError, RuntimeError), match=words):
            training.accelerator.load_state(tmp_path)
        assert picture(training) == before
        training.accelerator.register_load_state_pre_hook(lambda models, folder: called.append(folder))
    assert "Nothing was loaded" not in words or called == []


def test_errors_of_saving_are_clear_and_training_goes_on(tmp_path):
    def content():
        return {path.name: path.read_bytes() for path in (tmp_path / "ckpt").iterdir() if path.is_file()}

    training = Training()
    training.accelerator.save_state(tmp_path / "ckpt")
    before = content()
    said = r"Writing the checkpoint .* nothing else has changed.*No space left"
    for target in ("ckpt", "new"):
        with writing(disk_is_full), pytest.raises(CheckpointError, match=said):
            training.accelerator.save_state(tmp_path / target)
    assert os.listdir(tmp_path) == ["ckpt"]
    assert content() == before
    with writing(lambda: os.stat(tmp_path / "nothing")), pytest.raises(CheckpointError, match=r"\[Errno 2\] ") as found:
        training.accelerator.save_state(tmp_path / "new")
    assert " free" not in str(found.value)
    hook = training.accelerator.register_save_state_pre_hook(lambda models, weights, folder: shutil.rmtree(folder))
    with pytest.raises(CheckpointError, match=rf"does not see {tmp_path}/\..*save_on_each_node=True"):
        training.accelerator.save_state(tmp_path / "new")
    hook.remove()
    assert os.listdir(tmp_path) == ["ckpt"]
    training.epochs(num_epochs=1)
    training.accelerator.save_state(tmp_path / "new")
    with pytest.raises(Unsupported):
        training.accelerator.save_state(tmp_path / "x", exclude_frozen_parameters=True)
    with pytest.raises(Unsupported):
        training.accelerator.load_state(tmp_path / "new", load_kwargs={"weights_only": False})


def saved_from_behind(training, tmp_path, **kwargs):
    started, go = threading.Event(), threading.Event()
    with writing(lambda: (started.set(), go.wait(20))):
        training.accelerator.save_state(tmp_path, block=False, **kwargs)
        assert started.wait(20)
    return go


def test_a_save_in_the_background_is_of_the_moment_and_one_at_a_time(tmp_path):
    training = Training()
    training.epochs(num_epochs=1)
    training.accelerator.save_state(tmp_path / "now")
    before = training.weights()
    go = saved_from_behind(training, tmp_path / "later")
    assert not (tmp_path / "later").exists()
    training.epochs(num_epochs=2)
    with pytest.raises(StateError, match="still being written"):
        training.accelerator.save_state(tmp_path / "x", busy="refuse")
    go.set()
    training.accelerator.save_state(tmp_path / "after")
    assert training.weights() != before
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("now", "later"))
    assert all(torch.equal(one[name], other[name]) for name in one), "what was saved is what was when it was asked for"
    training.accelerator.load_state(tmp_path / "later")
    assert training.weights() == before


def test_a_folder_may_be_named_in_any_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("inner").mkdir()
    training = Training(n=2)
    for seen, (name, at) in enumerate([(".", "."), (".", "."), ("inner/..", "."), ("~nobody-of-this-name/x", None)]):
        training.counter.seen = torch.tensor(seen)
        assert training.accelerator.save_state(name) == name
        assert Path(at or name, "farflung.json").exists()
        training.counter.seen = torch.tensor(-1)
        training.accelerator.load_state(name)
        assert training.counter.seen == seen
    assert sorted(os.listdir("inner")) == []


def test_a_save_in_the_background_stays_in_its_folder_when_the_script_changes_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = Training()
    go = saved_from_behind(training, "later")
    Path("other").mkdir()
    monkeypatch.chdir("other")
    go.set()
    training.accelerator.end_training()
    assert (tmp_path / "later" / "farflung.json").exists()
    assert os.listdir() == []


def test_an_old_checkpoint_that_can_not_be_removed_is_a_warning_and_goes_later(tmp_path, monkeypatch):
    accelerator = Training(n=2, project_config=automatic(tmp_path, total_limit=1)).accelerator
    accelerator.save_state()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
        with pytest.warns(UserWarning, match="checkpoint_0 could not be removed: .*Directory not empty"):
            accelerator.save_state()
    accelerator.save_state()
    assert os.listdir(tmp_path) == ["checkpoints"]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]


def test_numbers_go_on_from_a_checkpoint_that_is_named_in_another_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Training(project_config=automatic("run")).accelerator.save_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    training = Training(project_config=automatic("run"))
    training.accelerator.load_state(tmp_path / "run" / "checkpoints" / "checkpoint_0")
    assert training.accelerator.save_state() == "run/checkpoints/checkpoint_1"


def test_a_failure_in_the_background_is_raised_by_the_next_call_once(tmp_path):
    training, before = Training(), threading.active_count()
    with writing(disk_is_full):
        training.accelerator.save_state(tmp_path / "a", block=False)
        while threading.active_count() > before:
            time.sleep(0.01)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="No space left"):
        training.accelerator.save_state(tmp_path / "b")
    training.accelerator.save_state(tmp_path / "b", block=False)
    training.accelerator.end_training()
    assert (tmp_path / "b" / "farflung.json").exists(), "the end of training waits"


# ---- the peer


def both_ways(library, folder, act):
    """One program of Accelerate's and of ours: train and save, or begin with other values and load."""
    if library == "accelerate":
        environ.export({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})  # else it leaves the ranks unconnected
    accelerator = {"accelerate": accelerate.Accelerator, "farflung": Accelerator}[library](cpu=True)
    torch.manual_seed(3 if act == "save" else 4)
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if act == "save" else 0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if act == "save":
        for k in range(3):
            x = torch.full((2, 2), float(k + 1 + accelerator.process_index))
            accelerator.backward(model(x).mean())
            optimizer.step(), scheduler.step(), optimizer.zero_grad()
        counter.epoch = 7
        accelerator.step = 3
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    inner = accelerator.unwrap_model(model)
    seen = (
        {name: value.tolist() for name, value in inner.state_dict().items()},
        [{k: v.tolist() for k, v in state.items()} for state in optimizer.state_dict()["state"].values()],
        optimizer.param_groups[0]["lr"],
        scheduler.get_last_lr(),
        counter.epoch,
        accelerator.step,
        torch.rand(2).tolist(),
        np.random.rand(),
    )
    gc.collect()
    return seen


@pytest.mark.parametrize(("writer", "reader"), [("accelerate", "farflung"), ("farflung", "accelerate")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_accelerate_is_read_and_ours_by_it(size, writer, reader, tmp_path):
    saved = run_ranks(both_ways, size, writer, tmp_path / "ckpt", "save", connect=False)
    loaded = run_ranks(both_ways, size, reader, tmp_path / "ckpt", "load", connect=False)
    assert loaded == saved


def test_places_of_loaders_that_torchdata_wrote_are_not_read_and_it_is_said(tmp_path, capsys):
    accelerate.Accelerator(cpu=True).save_state(tmp_path)
    (tmp_path / "dl_state_dict.bin").touch()
    Accelerator(cpu=True).load_state(tmp_path)
    assert "torchdata's and is not read, so their data start over. Use skip_first_batches" in capsys.readouterr().err
