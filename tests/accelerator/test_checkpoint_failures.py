# SPDX-License-Identifier: Apache-2.0
"""Kills, full disks, folders that can't be written: the last checkpoint stays, and training can continue."""

import importlib.util
import os
import random
import re
import shutil
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from farflung import Accelerator
from farflung.base.errors import CheckpointError, ConfigError, StateError
from farflung.checkpoint import atomic
from farflung.resume import models
from farflung.testing.ranks import fork_context
from farflung.utils import FullyShardedDataParallelPlugin, ProjectConfiguration
from tests.accelerator.conftest import on_ranks
from tests.accelerator.program import Counter
from tests.accelerator.test_checkpoints import Training
from tests.errors import error_of
from tests.faults import disk_is_full, writing

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak_checkpoint.py"


def soak():
    """The program that makes kills by the dozen, on one and two processes, beside the benchmarks."""
    spec = importlib.util.spec_from_file_location("soak_checkpoint", SOAK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(way, folder, words):
    torch.set_num_threads(1)
    soak().train(way, Path(folder), Path(words))


@pytest.mark.parametrize("way", ["new", "numbers", "same", "limit", "background"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(way, tmp_path):
    """A few kills; each start must find the last checkpoint that was said to be written, or a later one."""
    context = fork_context()
    chance = random.Random(way)

    def runs(name, num_steps=None):
        """Run to the end, or until a moment after so many more steps were seen; say whether it came to its end."""
        words = tmp_path / f"{name}.txt"
        before = len(words.read_text().splitlines()) if words.exists() else 0
        run = context.Process(target=train, args=(way, tmp_path / name, words))
        run.start()
        while run.exitcode is None:
            if num_steps and words.exists() and len(words.read_text().splitlines()) >= before + num_steps:
                time.sleep(chance.uniform(0, 0.02))
                run.kill()
            run.join(0.001)
        assert run.exitcode in (0, -9)
        return run.exitcode == 0

    assert runs("whole")
    kills = sum(not runs("killed", chance.choice([1, 2])) for _ in range(3))
    assert runs("killed")
    whole, killed = (set((tmp_path / f"{name}.txt").read_text().splitlines()) for name in ("whole", "killed"))
    assert whole == killed
    assert kills


def go_on_after(training, folder):
    """Saving fails; training goes on."""
    words = error_of(CheckpointError, training.accelerator.save_state, folder)
    training.epochs(num_epochs=1)
    return words


@pytest.fixture
def disk(request, tmp_path):
    """A disk of its own, with these options of `mount`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("disk", "values"), [("size=300k", 100_000), ("size=12m", 5_000_000)], indirect=["disk"])
def test_a_full_disk_is_one_clear_error(disk, values):
    training = Training()
    training.accelerator.save_state(disk / "ckpt")
    files = sorted(path.name for path in (disk / "ckpt").iterdir())
    training.counter.seen = torch.zeros(values)
    words = go_on_after(training, disk / "ckpt")
    assert "No space left on device" in words
    assert "nothing else has changed" in words
    found = re.search(r"this rank writes ([\d.]+) ([kM])B; ([\d.]+) ([kM])B were free", words)
    units = {"k": 1e3, "M": 1e6}
    needed, free = (float(found[k]) * units[found[k + 1]] for k in (1, 3))
    usage = shutil.disk_usage(disk)
    assert 4 * values <= needed <= 4 * values + 1e5
    assert abs(free - usage.free) < 0.1 * usage.total
    assert sorted(path.name for path in (disk / "ckpt").iterdir()) == files
    training.accelerator.load_state(disk / "ckpt")
    assert training.counter.seen.numel() == 1


@pytest.mark.parametrize("disk", ["ro"], indirect=True)
def test_a_read_only_folder_is_one_clear_error(disk):
    assert "Read-only file system" in go_on_after(Training(), disk / "ckpt")


def replaced(folder, other, stop_at):
    """Put the files of another checkpoint in the place of `folder`, as `save_state` of another process does."""
    staged = atomic.StagedDir(folder, "another")
    staged.begin()
    shutil.copytree(other, staged.folder, dirs_exist_ok=True)
    moved = iter(range(100))

    def replace(old, new, really=os.replace):
        if next(moved) == stop_at:
            raise CheckpointError("it goes on later")
        really(old, new)

    with pytest.MonkeyPatch.context() as patch, suppress(CheckpointError):
        patch.setattr(atomic.os, "replace", replace)
        staged.commit()


def load_while_it_is_replaced(folder, stop_at, sharded):
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Linear(2, 2))
    weight = get_model_state_dict(model)["weight"]
    for name, value in (("a", 1.0), ("b", 2.0)):
        with torch.no_grad():
            weight.fill_(value)
        accelerator.save_state(folder / name)
    read = models.read_model

    def read_late(*args):
        if accelerator.is_main_process:
            replaced(folder / "a", folder / "b", stop_at)
        accelerator.wait_for_everyone()
        return read(*args)

    with torch.no_grad():
        weight.fill_(3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "read_model", read_late)
        with pytest.raises(CheckpointError, match=r"was replaced .* by another process while it was read"):
            accelerator.load_state(folder / "a")
    kept = weight.mean().item()
    accelerator.load_state(folder / "a")
    return [kept, weight.mean().item()]


@pytest.mark.parametrize("stop_at", [None, 1], ids=["wholly", "in part"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_loaded(stop_at, tmp_path):
    assert load_while_it_is_replaced(tmp_path, stop_at, False) == [3.0, 2.0]


@on_ranks(2, each=[3.0, 2.0])
def test_shards_that_are_replaced_while_they_are_read_are_not_loaded(tmp_path):
    return load_while_it_is_replaced(tmp_path, 2, True)


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_names_it(tmp_path):
    training = Training()
    training.accelerator.save_state(tmp_path / "first")
    accelerator = training.accelerator
    removing = mock.patch.object(shutil, "rmtree", wraps=shutil.rmtree)
    with writing(disk_is_full) if accelerator.process_index == 1 else nullcontext(), removing as removed:
        found = [error_of(CheckpointError, accelerator.save_state, tmp_path / "second")]
        accelerator.save_state(tmp_path / "second", block=False)
        found.append(error_of(CheckpointError, accelerator.end_training))
    assert removed.called is accelerator.is_main_process, "the first rank takes away what was written"
    accelerator.wait_for_everyone()
    for words in found:
        assert "rank 1: OSError: [Errno 28] No space left on device" in words, words
        assert "rank 0" not in words
    assert os.listdir(tmp_path) == ["first"]


@on_ranks(2)
def test_a_path_that_is_too_long_is_an_error_on_all_ranks(tmp_path):
    project = ProjectConfiguration(project_dir=tmp_path / ("x" * 300), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    named, path = Training().accelerator, tmp_path / ("x" * 300)
    acts = accelerator.save_state, lambda: accelerator.load_state("latest"), lambda: named.save_state(path)
    for act in acts:
        with pytest.raises(CheckpointError, match=r"rank 0: OSError: \[Errno 36\] File name too long"):
            act()


@on_ranks(2, timeout_s=30)
def test_what_one_rank_can_not_do_in_time_or_at_all_is_the_same_error_on_all(tmp_path):
    """The first rank still writes when the others ask again; then a rank can't copy its state."""
    training = Training()
    accelerator = training.accelerator
    go = threading.Event()
    with writing(go.wait) if accelerator.process_index == 0 else nullcontext():
        accelerator.save_state(tmp_path / "first", block=False)
        if accelerator.process_index == 1:
            accelerator._checkpointer.saver._thread = None  # as if it were further than the other: a race
        late = error_of(StateError, accelerator.save_state, tmp_path / "second", busy="refuse")
        go.set()
    accelerator.save_state(tmp_path / "second")
    uncopied = Counter()  # as long as it has a lock
    uncopied.seen = threading.Lock() if accelerator.process_index == 0 else None
    accelerator.register_for_checkpointing(uncopied)
    failed = error_of(CheckpointError, accelerator.save_state, tmp_path / "third", block=False)
    uncopied.seen = None
    failing = mock.Mock(side_effect=(ConfigError, StateError)[accelerator.process_index]("mine"))
    hook = accelerator.register_save_state_pre_hook(failing)
    both = error_of(CheckpointError, accelerator.save_state, tmp_path / "third")
    hook.remove()
    accelerator.save_state(tmp_path / "fourth")
    assert "rank 0: ConfigError: mine; rank 1: StateError: mine" in both
    assert "rank 0: StateError: save_state: the previous checkpoint is still being written" in late
    assert "rank 0: TypeError: cannot pickle '_thread.lock' object" in failed
    assert sorted(os.listdir(tmp_path)) == ["first", "fourth", "second"]


@on_ranks(2)
def test_saves_in_the_background_and_training_share_the_ranks(tmp_path):
    """Background saves and collectives of the training at the same time."""
    training = Training(n=24)
    accelerator = training.accelerator
    (seen,) = training.epochs(lambda k: accelerator.save_state(tmp_path / f"step_{k}", block=False), num_epochs=1)
    at_the_end = training.weights()
    accelerator.load_state(tmp_path / "step_3")
    assert training.epochs(num_epochs=1) == [seen[3:]]
    assert training.weights() == at_the_end


@on_ranks(2)
def test_a_file_that_one_rank_needs_is_named_to_all(tmp_path):
    training = Training()
    training.accelerator.save_state(tmp_path)
    if training.accelerator.is_main_process:
        path = tmp_path / "loop_state" / "rank_1.bin"
        path.write_bytes(path.read_bytes()[:-3])
    training.accelerator.wait_for_everyone()
    before = training.weights()
    with pytest.raises(CheckpointError, match=r"loop_state/rank_1\.bin has"):
        training.accelerator.load_state(tmp_path)
    assert training.weights() == before


def ends_at_once(folder):
    Training().accelerator.save_state(folder / "ckpt", block=False)


def test_the_end_of_the_program_waits_for_a_save_in_the_background(tmp_path):
    run = fork_context().Process(target=ends_at_once, args=(tmp_path,))
    run.start()
    run.join(60)
    assert run.exitcode == 0
    assert os.listdir(tmp_path) == ["ckpt"]
    assert (tmp_path / "ckpt" / "farflung.json").exists()
