# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at addresses: resumed bit by bit on any ranks, kept to a limit, copied here and from there."""

import io
import os
import re
import shutil
import signal
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.address.schemes import objects_at
from farflung.base.checks import Address
from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.launch.codes import REQUEUE
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.accelerator.test_checkpoints import Training, resumes
from tests.accelerator.test_preemption import run
from tests.accelerator.test_sharded_checkpoints import Run, check_windows
from tests.accelerator.weight import Weight, names_at


def test_a_resumed_run_is_the_run(place):
    assert resumes(place, 3) == 10


@on_ranks(2)
def test_a_resumed_run_of_two_ranks_is_the_run(place):
    resumes(place, 5)


def test_sharded_models_go_on_in_other_layouts_each_rank_having_sent_its_shards(bucket):
    check_windows(Address(bucket))


@on_ranks(4)
def test_shards_are_sent_in_the_background_too(bucket):
    run = Run(2)
    run.accelerator.save_state(f"{bucket}/x", block=False)
    seen = run.train(range(3))
    run.accelerator.end_training()
    assert Run(4, load=f"{bucket}/x").train(range(3)) == pytest.approx(seen, abs=1e-6)


@pytest.mark.parametrize("block", [True, False])
def test_numbered_ones_are_kept_to_a_limit_and_the_newest_is_taken(block, place, scratch):
    run = Weight(project_dir=place, automatic_checkpoint_naming=True, total_limit=2)
    for number in range(4):
        assert run.save(number, block=block) == f"{place}/checkpoints/checkpoint_{number}"
    run.accelerator.end_training()
    assert {name.split("/")[1] for name in names_at(place)} == {"checkpoint_2", "checkpoint_3"}
    assert list(scratch.iterdir()) == []
    again = Weight(project_dir=place, automatic_checkpoint_naming=True)
    assert again.load("latest") == again.load(f"{place}/checkpoints") == 3
    assert again.said == f"farflung: loaded {place}/checkpoints/checkpoint_3\n"
    assert again.save(4).endswith("checkpoint_4")
    assert list(scratch.iterdir()) == []
    with pytest.raises(ConfigError, match=r"already has checkpoint_4 of another run"):
        Weight(project_dir=place, automatic_checkpoint_naming=True).save(0)


def test_a_copy_that_stays_here_is_a_checkpoint_and_spares_fetching_it(place, s3, tmp_path):
    copies = tmp_path / "copies"
    project = {"project_dir": place, "automatic_checkpoint_naming": True, "total_limit": 2, "keep_local": str(copies)}
    run = Weight(**project)
    for number in range(3):
        run.save(number)
    assert sorted(path.name for path in copies.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert Weight().load(copies / "checkpoint_2") == Weight().load(copies) == 2
    before = s3.counts().get("GET", 0)
    assert Weight(**project).load() == 2
    assert s3.counts().get("GET", 0) - before <= 2  # the manifest, at the gateway and where it leads
    (copies / "checkpoint_2" / "model.safetensors").write_bytes(b"x")
    shutil.rmtree(copies / "checkpoint_1")
    assert Weight(**project).load() == 2
    assert Weight(**project).load(f"{place}/checkpoints/checkpoint_1") == 1
    assert [Checkpoint.open(copies / f"checkpoint_{number}").verify().manifest.world_size for number in (1, 2)] == [
        1,
        1,
    ]
    other = project | {"project_dir": place / "other"}
    Weight(**other).save(5)  # copies of another run are no reason to refuse it
    assert Weight(**other).load() == 5


@on_ranks(2)
def test_two_ranks_share_the_copy_that_stays(bucket, tmp_path):
    project = {"project_dir": bucket, "automatic_checkpoint_naming": True, "keep_local": str(tmp_path / "copies")}
    Weight(**project).save(1)
    assert Weight(**project).load() == Weight().load(tmp_path / "copies") == 1


def on_two_machines(bucket, folder, keep_local):
    rank = int(os.environ["RANK"])
    here = folder / str(rank)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (here / "scratch").mkdir(parents=True)
    tempfile.tempdir, seen = str(here / "scratch"), []
    run, name = (Weight(keep_local=str(here / "copies")), "kept") if keep_local else (Weight(), "x")
    run.save(1, f"{bucket}/{name}")
    run.accelerator.register_load_state_pre_hook(lambda models, where: seen.append(Path(where)))
    assert run.load(f"{bucket}/{name}") == 1
    assert seen[0].is_relative_to(here)
    assert list((here / "scratch").iterdir()) == []


def test_each_machine_sends_what_its_ranks_have_and_fetches_what_they_need(bucket, tmp_path):
    run_ranks(on_two_machines, 2, bucket, tmp_path / "temporary", False)
    assert sum("random_states" in name for name in names_at(bucket)) == 2
    run_ranks(on_two_machines, 2, bucket, tmp_path / "kept", True)
    for rank in range(2):
        assert Weight().load(tmp_path / "kept" / str(rank) / "copies" / "kept") == 1


class Rows(nn.Module):
    """8 MB of weights, which Adam keeps three times."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2.0**21).view(2**11, 2**10))

    def forward(self, x):
        return (self.weight * x).sum()


def trained_rows(number, load=""):
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Rows()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    if load:
        accelerator.load_state(load)
    for _ in range(number):
        accelerator.backward(model(torch.tensor(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def of_other_layout(place, folder, expected):
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    tempfile.tempdir = str(folder / str(rank))
    Path(tempfile.tempdir).mkdir()
    accelerator, model = trained_rows(1, load=place / "x")
    assert torch.equal(accelerator.get_state_dict(model).get("weight", expected), expected)


def save_rows(at):
    accelerator, _ = trained_rows(1)
    accelerator.save_state(at)


def load_rows(at):
    trained_rows(0, load=at)


def test_of_shards_each_machine_fetches_the_blocks_that_its_ranks_read(place, s3, tmp_path):
    run_ranks(save_rows, 2, place / "x")
    accelerator, model = trained_rows(2)
    whole = accelerator.get_state_dict(model)["weight"]
    before = s3.bytes_sent()
    run_ranks(of_other_layout, 4, place, tmp_path, whole)
    assert s3.bytes_sent() - before < 2.5 * 3 * whole.nbytes  # and not four times


def damage(place, name):
    board = objects_at(place)
    content = bytearray(board.read_name(name, lambda file, _: file.read()))
    content[5 * 2**20] ^= 1
    board.write_name(name, [bytes(content)], is_new=False)


def of_shards(place, checkpoint):
    return next(name for name in names_at(place) if checkpoint in name and name.endswith(".distcp"))


def test_ranks_of_one_machine_fetch_a_block_once(place, s3, tmp_path):
    run_ranks(save_rows, 2, place / "x")
    before = s3.bytes_sent()
    run_ranks(load_rows, 3, place / "x")
    assert s3.bytes_sent() - before < 1.5 * 3 * 8 * 2**20


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_checkpoint_with_a_file_of_shards_that_is_not_whole_is_passed_over(place, how):
    for number in range(2):
        run_ranks(save_rows, 2, place / f"checkpoints/checkpoint_{number}")
    name = of_shards(place, "checkpoint_1")
    if how == "damaged":
        damage(place, name)
    else:
        objects_at(place).delete_names([name])
    with redirect_stderr(io.StringIO()) as said:
        trained_rows(0, load=place / "checkpoints")
    assert re.search(rf"passed over: .*__\d_0\.distcp is {how}", said.getvalue())


def write_notes(where, rank):
    (Path(where) / f"notes of {rank}, é#?.txt").write_text(str(rank))
    (Path(where) / "shared.txt").write_text(f"by {rank}")
    (Path(where) / "empty.txt").touch()


@on_ranks(2)
def test_what_hooks_write_and_read_goes_along_from_every_rank(place):
    program = Training()
    rank, found = program.accelerator.process_index, {}
    program.accelerator.register_save_state_pre_hook(lambda models, weights, where: write_notes(where, rank))
    program.accelerator.save_state(place / "x")
    program.accelerator.register_load_state_pre_hook(
        lambda models, where: found.update((path.name, path.read_text()) for path in Path(where).glob("*.txt"))
    )
    program.accelerator.load_state(place / "x")
    notes = {"notes of 0, é#?.txt": "0", "notes of 1, é#?.txt": "1"}
    assert found == {**notes, "shared.txt": "by 0", "empty.txt": ""}


def test_a_folder_that_was_copied_from_or_to_a_bucket_is_a_checkpoint(bucket, tmp_path):
    Weight().save(1, f"{bucket}/x")
    board = objects_at(bucket)
    for name in names_at(bucket):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(board.read_name(name, lambda file, size: file.read()))
    (copied,) = (tmp_path / "x").iterdir()
    assert Weight().load(copied) == 1
    Weight().save(2, tmp_path / "mine")
    for path in (tmp_path / "mine").rglob("*"):
        if path.is_file():
            board.write_name(f"copied/{path.relative_to(tmp_path / 'mine')}", [path.read_bytes()], is_new=True)
    assert Weight().load(f"{bucket}/copied") == 2
    assert Weight().load(bucket) == 2  # the newer one of two with other names
    Weight().save(3, f"{bucket}/copied")
    assert Weight().load(f"{bucket}/copied") == 3


def test_a_run_that_a_signal_stops_saves_to_an_address_and_continues(bucket, s3, tmp_path):
    whole = run(tmp_path / "whole", None, None)
    stopped = run(f"{bucket}/saved", {(1, 5): [signal.SIGUSR1]}, None, pace=(0.03, 0.03))
    assert [one["code"] for one in stopped] == [REQUEUE] * 2
    last = run(f"{bucket}/saved", None, None)
    assert [one["digest"] for one in last] == [one["digest"] for one in whole]
    s3.set(denied=["Put"])
    with pytest.raises(ConfigError, match=r"save_on_signal is 's3:.*, which can't be used.*s3:PutObject"):
        Accelerator(cpu=True, save_on_signal=f"{bucket}/other")


def test_a_save_leaves_alone_what_is_not_its_own(bucket):
    others = ["notes.txt", "checkpoint_7/0001-00000000/model.safetensors", "x/0001-00000000/model.safetensors"]
    for name in others:
        objects_at(bucket).write_name(name, [b"1"], is_new=True)
    for number in range(2):
        Weight().save(number, bucket)
    assert set(others) < set(names_at(bucket))
    assert len(names_at(bucket)) == len(others) + 4


def test_addresses_that_lead_nowhere_say_so(bucket, tmp_path, monkeypatch):
    run = Weight()
    with pytest.raises(CheckpointError, match=r"There is no complete checkpoint at s3://"):
        run.load(f"{bucket}/none")
    for wrong in ("ftp://host/x", "s3://", "http://host/x"):
        with pytest.raises(ConfigError, match=r"an address is s3://, gs://, az://, hf:// or file://"):
            run.save(1, wrong)
    run.save(1, (tmp_path / "with space").as_uri())
    assert run.load(tmp_path / "with space") == 1
    assert run.load(Path(f"{bucket}/y") if run.save(2, Path(bucket) / "y") else None) == 2  # a Path joins slashes
    with pytest.raises(ConfigError, match=r"save_on_each_node=True .* one place for all of them"):
        Weight(save_on_each_node=True).save(1, bucket)
