# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at addresses: old or new after a kill, refused if damaged; what fails of store or disk costs one save."""

import os
import random
import re
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from farflung import Accelerator
from farflung.address import object_store, objects
from farflung.address.schemes import objects_at
from farflung.base.checks import Address
from farflung.base.errors import CheckpointError
from farflung.checkpoint import paths, remote
from farflung.checkpoint.remote import RemoteCheckpoints
from farflung.testing.ranks import fork_context, run_ranks
from tests.accelerator.conftest import on_ranks
from tests.accelerator.weight import Weight, names_at
from tests.faults import disk_is_full
from tests.s3_server import given_variables
from tests.waits import until


@pytest.fixture
def impatient(monkeypatch):
    """Requests that fail are not repeated for long."""
    monkeypatch.setattr(remote, "_RETRIES", 0)
    made = remote.objects_at
    monkeypatch.setattr(remote, "objects_at", lambda *args, **options: made(*args, **options).patient(0))


class Killed(BaseException):
    pass


def kill_at(monkeypatch, number, is_done):
    """Let request `number` be the last one, and carry it out if it `is_done`; return how many are left."""
    left, asked, lock = [number], object_store.BucketBoard.ask, threading.Lock()

    def dying(self, request, act="read"):
        with lock:
            left[0] -= 1
            is_last = left[0] == -1
        if left[0] < 0 and not (is_last and is_done):
            raise Killed
        found = asked(self, request, act)
        if is_last:
            raise Killed
        return found

    monkeypatch.setattr(object_store.BucketBoard, "ask", dying)
    return left


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("way", ["same name", "numbers"])
def test_killed_at_any_request_the_old_or_the_new_one_is_complete_and_what_is_left_goes(
    way, is_done, bucket, monkeypatch
):
    project = {"project_dir": bucket, "automatic_checkpoint_naming": True, "total_limit": 1}
    run = Weight(**(project if way == "numbers" else {}))
    at = None if way == "numbers" else f"{bucket}/x"
    run.save(0, at)
    outcomes, old = [], 0
    for number in range(60):
        with monkeypatch.context() as patch:
            left = kill_at(patch, number, is_done)
            with suppress(Killed):
                run.save(old + 1, at)
            is_over = left[0] >= 0
        found = Weight(**(project if way == "numbers" else {})).load(at)
        outcomes.append(found - old)
        if is_over:
            break
        old += 2
        numbers = RemoteCheckpoints(Address(f"{bucket}/checkpoints")).numbers()
        run.accelerator.project_configuration.iteration = 1 + max(numbers, default=0)
        run.save(old, at)
        assert len({name.rpartition("/loop_state")[0] for name in names_at(bucket) if "loop_state" in name}) == 1
        assert len({name.split("-")[1].split("/")[0] for name in names_at(bucket)}) == 1
    assert is_over
    assert set(outcomes) == {0, 1}
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 8


class Square(torch.nn.Module):
    """Weights that take several parts of an upload."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1500, 1500))


def save_on_and_on(address, variables, words, scratch):
    os.environ |= variables
    tempfile.tempdir = str(scratch)
    accelerator, model = Accelerator(cpu=True), Square()
    accelerator.prepare(model)
    for number in range(1 + int(words.read_text().split()[-1]), 1000):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state(f"{address}/x", block=number % 2 == 0)
        accelerator.end_training()
        with words.open("a") as file:
            file.write(f"{number}\n")


def test_a_process_that_is_killed_while_it_sends_has_the_last_checkpoint_that_it_spoke_of_or_the_next(
    bucket, tmp_path, scratch, monkeypatch
):
    monkeypatch.setattr(remote, "_YOUNG_S", -1.0)
    words, chance = tmp_path / "words", random.Random(1)
    words.write_text("0\n")
    accelerator, model = Accelerator(cpu=True), Square()
    accelerator.prepare(model)
    accelerator.save_state(f"{bucket}/x")
    for _ in range(4):
        before = int(words.read_text().split()[-1])
        process = fork_context().Process(target=save_on_and_on, args=(bucket, given_variables(), words, scratch))
        process.start()
        until(lambda before=before: int(words.read_text().split()[-1]) > before)
        time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        process.join()
        last = int(words.read_text().split()[-1])
        accelerator.load_state(f"{bucket}/x")
        assert model.weight.unique().item() in (last, last + 1)
    accelerator.save_state(f"{bucket}/x")
    assert len({name.split("/")[1] for name in names_at(bucket)}) == 1
    assert list(scratch.glob(f"{remote._SCRATCH}*")) == []


FAULTS = [
    ({"denied": ["Put"]}, r"403 Forbidden.*may lack a permission: s3:PutObject"),
    ({"denied": ["List"]}, r"may lack a permission: s3:ListBucket"),
    ({"then": "NoSuchBucket", "for_s": 99}, r"404.*Create the bucket first"),
    ({"then": "SlowDown", "for_s": 99}, r"503.*reduce your request rate"),
    ({"then": "InternalError", "for_s": 99, "only": "safetensors"}, r"PUT .*safetensors: 500"),
    ({"create": "NotImplemented"}, r"can't create an object only if there is none"),
]


@pytest.mark.parametrize(("manners", "why"), FAULTS, ids=[str(manners) for manners, _ in FAULTS])
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.usefixtures("impatient")
def test_a_store_that_fails_costs_that_save_alone(block, manners, why, bucket, s3, scratch):
    run = Weight()
    run.save(1, f"{bucket}/x")
    s3.set(**manners)
    with pytest.raises(CheckpointError, match=why):  # noqa: PT012 - raised by this call, or by the next one
        run.save(2, f"{bucket}/x", block=block)
        run.save(2, f"{bucket}/x")
    s3.set()
    assert list(scratch.iterdir()) == []
    assert Weight().load(f"{bucket}/x") == 1
    run.save(3, f"{bucket}/x", block=block)
    run.accelerator.end_training()
    assert Weight().load(f"{bucket}/x") == 3


@pytest.mark.parametrize("manners", [{"storm": 0.3}, {"lost": 0.1}, {"loses": 3}, {"late_s": 0.02}], ids=str)
def test_a_store_that_is_busy_slow_or_loses_answers_is_asked_again(manners, place, s3, monkeypatch):
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.01)
    s3.set(**manners)
    run = Weight()
    for number in range(3):
        run.save(number, place / "x")
    assert Weight().load(place / "x") == 2
    s3.set()
    assert len({name.split("/")[1] for name in names_at(place)}) == 1


def test_files_of_many_parts_arrive_whole_from_a_store_that_is_busy(place, s3):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3000, 2000))
    s3.set(storm=0.2)
    accelerator.save_state(place)
    expected = model.weight.clone()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(place)
    assert torch.equal(model.weight, expected)


def peak_of(act):
    """By how many bytes this process grew at most."""

    def memory(name):
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    act()
    return memory("VmHWM") - before


def peaks(bucket):
    Weight().save(1, f"{bucket}/imports")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(8000, 8000))  # 256 MB
    sent = peak_of(lambda: accelerator.save_state(f"{bucket}/x"))
    with ExitStack() as stack:
        return sent, peak_of(lambda: RemoteCheckpoints(Address(f"{bucket}/x")).newest(stack, None, False))


def test_what_is_sent_and_fetched_is_never_in_memory_as_a_whole(bucket, s3):
    ((sent, fetched),) = run_ranks(peaks, 1, bucket, connect=False)
    s3.set(vanish=["/x/"])
    assert max(sent, fetched) < 128e6


def test_a_disk_that_is_full_is_no_fault_of_the_store(bucket, scratch, monkeypatch):
    run = Weight()
    run.save(1, f"{bucket}/x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: disk_is_full())
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.save(2, f"{bucket}/x")
        with pytest.raises(CheckpointError, match=r"can't be written \(No space left.*Set TMPDIR"):
            run.load(f"{bucket}/x")
    assert list(scratch.iterdir()) == []
    assert run.load(f"{bucket}/x") == 1


def test_files_that_go_while_a_save_is_on_its_way_are_missed_before_it_counts(bucket, monkeypatch):
    run = Weight()
    run.save(1, f"{bucket}/x")
    complete = RemoteCheckpoints.complete

    def after_a_loss(self, folder, manifest, save):
        self._board.delete_names([f"{save}model.safetensors"])
        complete(self, folder, manifest, save)

    monkeypatch.setattr(RemoteCheckpoints, "complete", after_a_loss)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was sent, and is gone: another process saves there"):
        run.save(2, f"{bucket}/x")
    assert Weight().load(f"{bucket}/x") == 1


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "manifest"])
def test_what_is_not_what_was_written_is_refused_or_passed_over_by_its_name(damage, place):
    run = Weight(project_dir=place, automatic_checkpoint_naming=True)
    run.save(0), run.save(1)
    board = objects_at(place)
    (name,) = (one for one in names_at(place) if "checkpoint_1" in one and one.endswith("model.safetensors"))
    if damage == "manifest":
        name = name.replace("model.safetensors", paths.MANIFEST)
    content = bytearray(board.read_name(name, lambda file, size: file.read()))
    content[-20 if damage == "manifest" else -1] ^= 1
    board.delete_names([name])
    if damage != "gone":
        board.write_name(name, [bytes(content[:-1] if damage == "cut" else content)], is_new=True)
    reason = r"is damaged" if damage != "gone" else r"model\.safetensors is missing"
    fresh = Weight()
    with pytest.raises(CheckpointError, match=rf"{reason}.*Nothing was loaded"):
        fresh.load(f"{place}/checkpoints/checkpoint_1")
    assert fresh.load(f"{place}/checkpoints") == 0
    assert f"loaded {place}/checkpoints/checkpoint_0" in fresh.said
    assert "passed over: " in fresh.said


@on_ranks(2)
def test_what_one_rank_can_not_send_fails_the_save_on_all(bucket, s3):
    run = Weight()
    run.save(1, f"{bucket}/x")
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        s3.set(denied=["Put"], only="rank_1")
    run.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"nothing else has changed\. rank 1: CheckpointError.*s3:PutObject"):
        run.save(2, f"{bucket}/x")
    assert run.load(f"{bucket}/x") == 1


def test_what_a_killed_process_left_in_temporary_folders_goes_and_what_a_live_one_has_stays(scratch, monkeypatch):
    with ExitStack() as live:
        folders = [remote.TemporaryStagedDir("x") for _ in range(2)]
        for one in folders:
            one.begin()
            live.callback(one.discard)
        monkeypatch.setattr(remote, "_YOUNG_S", -1.0)
        left = scratch / f"{remote._SCRATCH}left"
        left.mkdir()
        remote.TemporaryStagedDir("y").begin()
        assert not left.exists()
        assert all(one.folder.is_dir() for one in folders)
