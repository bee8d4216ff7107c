# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is whole or not there, whichever call to the system is the last one before a kill."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest

from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint import atomic, files, paths
from farflung.checkpoint.checkpoint import Checkpoint, candidates, newest, resolve
from farflung.checkpoint.manifest import FileRecord, Manifest


class Killed(BaseException):
    pass


def write(target, text, names=("model.safetensors", "loop_state/rank_0.bin"), token="0"):
    staged = atomic.StagedDir(target, token)
    staged.begin()
    entries = {}
    for name in names:
        path = staged.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}")
        entries[name] = FileRecord(*files.sums_of(path))
    Manifest(entries, written_at=float(len(text))).write(staged.folder / paths.MANIFEST)
    staged.commit()


def content(folder):
    """The texts of a checkpoint, once it has been opened as load_state does."""
    found = Checkpoint.open(folder).verify()
    return {(found.folder / name).read_text().split(" ")[0] for name in found.manifest.files}


def kill_at(monkeypatch, number):
    """Let call `number` to anything that changes folders be the last."""
    left = [number]

    def dying(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    for owner, names in ((os, ("rename", "replace", "fsync")), (shutil, ("rmtree",)), (Path, ("mkdir", "unlink"))):
        for name in names:
            monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    return left


@pytest.mark.parametrize("kind", ["new folder", "same folder again", "folder of the script's"])
def test_killed_anywhere_the_old_or_the_new_one_is_complete(kind, tmp_path, monkeypatch):
    outcomes = []
    for number in range(200):
        target = tmp_path / f"run{number}" / "ckpt"
        if kind == "same folder again":
            write(target, "old", names=("model.safetensors", "random_states_1.pkl"))
        elif kind == "folder of the script's":
            target.mkdir(parents=True)
        if kind != "new folder":
            (target / "notes.txt").write_text("mine")
        with monkeypatch.context() as patch:
            left = kill_at(patch, number)
            with suppress(Killed):
                write(target, "new", token="a")
            finished = left[0] > 0
        try:
            outcomes.append(content(target) if target.exists() else "nothing")
        except CheckpointError:
            outcomes.append("nothing")
        allowed = [{"new"}, {"old"} if kind == "same folder again" else "nothing"]
        assert outcomes[-1] in allowed, f"killed at call {number}"
        write(target, "next", token="b")
        assert content(target) == {"next"}
        found = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
        mine = [] if kind == "new folder" else ["notes.txt"]
        assert found == sorted(["farflung.json", "loop_state/rank_0.bin", "model.safetensors", *mine])
        assert [path.name for path in target.parent.iterdir()] == ["ckpt"], "nothing is left of the attempt"
        if finished:
            break
    assert finished
    assert {"new"} in outcomes[:-1], "some kills come after the rename"
    assert outcomes[0] != {"new"}


def test_files_of_a_checkpoint_that_accelerate_wrote_give_way_and_others_stay(tmp_path):
    old = ("custom_checkpoint_0.pkl", "model_1.safetensors", "loop_state/rank_1.bin", "optimizer_0/.metadata")
    mine = ["config.json", "model-00001-of-00002.safetensors", "optimizer_1", "optimizer_2/notes.txt"]
    for name in (*old, *mine, "farflung.json"):  # a damaged one
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    write(tmp_path, "new")
    new = ["farflung.json", "loop_state/rank_0.bin", "model.safetensors"]
    assert sorted(atomic.names_in(tmp_path)) == sorted([*mine, *new])
    assert not (tmp_path / "optimizer_0").exists()


def test_all_is_on_the_disk_before_the_rename_that_makes_it_count(tmp_path, monkeypatch):
    calls, sync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: sync(file) or calls.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(os, "rename", lambda one, other: rename(one, other) or calls.append(other))
    for place, shell in ((tmp_path / "a", ".a.writing-0"), (tmp_path / "a" / ".ready", "a/.writing-0")):
        calls.clear()
        write(tmp_path / "a", "new", names=("model.safetensors", "b/c/x.bin"))
        calls = list(map(str, calls))
        placed = calls.index(str(place))
        assert {str(tmp_path / shell / folder) for folder in ("", "a", "a/b", "a/b/c")} <= set(calls[:placed])
        assert calls[placed + 1] == str(place.parent)
    assert (set(calls[placed + 2 : -1]), calls[-1]) == ({f"{tmp_path}/a", f"{tmp_path}/a/b/c"}, f"{tmp_path}/a")


def test_a_ready_checkpoint_that_cannot_be_moved_up_is_an_error(tmp_path):
    (tmp_path / "x").touch()
    with mock.patch.object(atomic, "finish"):
        write(tmp_path, "new")
    words = rf"^{tmp_path}: .* in {tmp_path}/\.ready is complete, but its files could not be moved up: not yours\. Move"
    refuse = mock.patch.object(os, "replace", side_effect=PermissionError("not yours"))
    with refuse, pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path).verify()
    with mock.patch.object(fcntl, "flock", side_effect=OSError("a file system without locks")) as lock:
        write(tmp_path, "next")
    assert [call.args[1] for call in lock.call_args_list] == [fcntl.LOCK_EX, fcntl.LOCK_UN] * 2
    assert content(tmp_path) == {"next"}


def test_a_folder_that_appears_while_the_checkpoint_is_written_gets_it(tmp_path, monkeypatch):
    sync = atomic.sync_folder

    def appear(folder):
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        (tmp_path / "ckpt" / "notes.txt").write_text("mine")
        sync(folder)

    monkeypatch.setattr(atomic, "sync_folder", appear)
    write(tmp_path / "ckpt", "new")
    assert content(tmp_path / "ckpt") == {"new"}
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["farflung.json", "loop_state", "model.safetensors", "notes.txt"]
    assert os.listdir(tmp_path) == ["ckpt"]
    rename = mock.patch.object(os, "rename", side_effect=[PermissionError("not yours"), None])
    with rename, pytest.raises(PermissionError, match="not yours"):
        write(tmp_path / "other", "new")


def test_who_looks_at_a_folder_does_not_disturb_who_writes_into_it(tmp_path):
    write(tmp_path, "first")
    num_open = len(os.listdir("/proc/self/fd"))
    done = threading.Event()

    def look():
        while not done.is_set():
            with suppress(CheckpointError):  # it may come between two files
                Checkpoint.open(tmp_path)

    with ThreadPoolExecutor(2) as readers, ExitStack() as end:
        end.callback(done.set)
        looks = [readers.submit(look) for _ in range(2)]
        for number in range(20):
            write(tmp_path, f"t{number}", names=("model.safetensors", f"random_states_{number}.pkl"))
            assert content(tmp_path) == {f"t{number}"}
    for one in looks:
        one.result()
    assert len(os.listdir("/proc/self/fd")) < num_open + 20, "no file stays open"


def test_names_are_not_patterns(tmp_path):
    (tmp_path / ".other.writing-a").mkdir()
    write(tmp_path / "*", "new", names=["x"])
    assert sorted(os.listdir(tmp_path)) == ["*", ".other.writing-a"]
    for name in (".other.writing-a/y", "*/.ready", "*/.writing-a"):
        (tmp_path / name / "z").mkdir(parents=True)
        (tmp_path / name / "z" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert atomic.names_in(tmp_path) == ["*/farflung.json", "*/x", "link"], "of no attempt, and nothing twice"


@pytest.mark.parametrize("name", ["model.safetensors", "ckpt/model.safetensors"])
def test_what_is_no_checkpoint_is_never_removed(tmp_path, name):
    path = tmp_path / atomic.READY / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"\.ready/\w+.* is not a checkpoint, so nothing was moved out of it"):
        Checkpoint.open(tmp_path)
    assert path.read_text() == "mine"


def test_the_newest_complete_one_is_taken_and_the_others_are_named(tmp_path):
    for number in (2, 9, 10):
        write(tmp_path / f"checkpoint_{number}", f"t{number}")
    assert newest(tmp_path).folder.name == "checkpoint_10", "numbers, not letters"
    (tmp_path / "checkpoint_10" / "model.safetensors").write_text("x")
    (tmp_path / "checkpoint_11").mkdir()
    found = newest(tmp_path)
    assert found.folder.name == "checkpoint_9"
    assert "checkpoint_11 is not a complete checkpoint" in found.passed[0]
    assert "model.safetensors has 1 bytes" in found.passed[1]
    shutil.rmtree(tmp_path / "checkpoint_9")
    shutil.rmtree(tmp_path / "checkpoint_2")
    with pytest.raises(CheckpointError, match=r"There is no complete checkpoint in .*\n.*checkpoint_11"):
        newest(tmp_path)


def test_without_numbers_the_time_of_writing_decides(tmp_path):
    write(tmp_path / "best", "aaa")
    write(tmp_path / "last", "a")
    write(tmp_path / "damaged", "aaaa")
    (tmp_path / "damaged" / paths.MANIFEST).write_text("x")
    for name in ("theirs/model.safetensors", "data/notes.txt", ".checkpoint_5.trash-0/model.safetensors"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    os.utime(tmp_path / "theirs", (2, 2))  # without a manifest, it is as old as its folder
    assert [path.name for path in candidates(tmp_path)] == ["best", "theirs", "last", "damaged"]
    assert newest(tmp_path).folder.name == "best"


def test_what_a_script_says_is_a_checkpoint_or_a_folder_of_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "checkpoints" / "checkpoint_0", "a")
    automatic = tmp_path / "checkpoints"
    assert resolve("checkpoints", None) == (Path("checkpoints"), True)
    assert resolve(tmp_path / "checkpoints" / "checkpoint_0", None)[1] is False
    assert resolve("latest", automatic) == resolve(None, automatic) == (automatic, True)
    (tmp_path / "latest").mkdir()
    assert resolve("latest", automatic) == (Path("latest"), False), "a folder of that name, in which nothing is"
    os.rmdir("latest")
    for given, where, words in [
        ("nowhere", None, "there is no folder nowhere"),
        ("latest", None, "but automatic naming is off"),
        (None, None, "but automatic naming is off"),
        (None, tmp_path / "nothing", "nothing was saved yet"),
    ]:
        with pytest.raises(ConfigError, match=words):
            resolve(given, where)


def test_the_oldest_go_beyond_the_limit_and_what_attempts_have_left_goes_too(tmp_path):
    folder = tmp_path / "checkpoints"
    left = [f".checkpoints.checkpoint_{name}" for name in ("3.writing-a", "4.trash-b", "5.mine")]
    for name in (*left, *(f"checkpoints/checkpoint_{number}" for number in (2, 9, 10, 11))):
        (tmp_path / name).mkdir(parents=True)
    (folder / "checkpoint_1").touch()
    with mock.patch.object(shutil, "rmtree", side_effect=Killed), pytest.raises(Killed):
        atomic.remove(folder / "checkpoint_2", tmp_path)  # by a rename
    for limit, there in [(None, [9, 10, 11]), (4, [9, 10, 11]), (2, [10, 11]), (1, [11])]:
        atomic.prune(folder / "checkpoint_11", limit)
        assert [atomic.number_of(path) for path in atomic.numbered(folder)] == there
    assert sorted(os.listdir(tmp_path)) == [".checkpoints.checkpoint_5.mine", "checkpoints"]
    with mock.patch.object(os, "access", return_value=False):
        assert atomic.aside_of(folder) == folder, "nothing can be written next to it"
    with mock.patch.object(Path, "stat", lambda path: mock.Mock(st_dev=path.name)):
        assert atomic.aside_of(folder) == folder, "what is next to it is on another disk"


def test_series_next_to_each_other_leave_each_others_attempts_alone(tmp_path):
    begun = []
    for name in "ab":
        (tmp_path / name).mkdir()
        begun.append(atomic.StagedDir(tmp_path / name / "checkpoint_1", name, atomic.aside_of(tmp_path / name)))
        begun[-1].begin()
    atomic.prune(tmp_path / "c" / "checkpoint_1", None)
    assert all(staged.folder.is_dir() for staged in begun)
    atomic.prune(tmp_path / "a" / "checkpoint_1", None)
    assert [staged.folder.is_dir() for staged in begun] == [False, True]


def test_a_file_system_that_cannot_sync_folders_gets_a_checkpoint_and_a_warning(tmp_path, monkeypatch):
    def sync(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")  # as CIFS and sshfs answer

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.warns(UserWarning, match=r"on the disk on request \(fsync: Invalid argument\)") as warned:
        write(tmp_path / "a", "new")
    assert content(tmp_path / "a") == {"new"}
    assert len({str(one.message) for one in warned}) == 1  # which Python shows once


def test_an_old_checkpoint_of_an_images_lower_layer_is_removed(tmp_path, monkeypatch):
    """Overlayfs refuses to rename such a folder."""
    write(tmp_path / "a", "old")
    monkeypatch.setattr(os, "rename", mock.Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    atomic.remove(tmp_path / "a", tmp_path)
    assert not list(tmp_path.iterdir())


SAVES = """
import sys
from pathlib import Path
from farflung import Accelerator
from farflung.utils import ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
for _ in range(2):
    accelerator.save_state()
"""


@pytest.mark.namespace
def test_numbered_checkpoints_go_to_a_folder_of_the_same_disk_that_is_mounted(tmp_path):
    out, disk = tmp_path / "my out", tmp_path / "disk"
    (out / "checkpoints").mkdir(parents=True)
    disk.mkdir()
    mounts = 'mount --bind "$1" "$2/checkpoints" && exec "$0" -c "$3" "$2"'
    subprocess.run(["unshare", "-m", "sh", "-c", mounts, sys.executable, disk, out, SAVES], check=True)
    assert sorted(path.name for path in disk.iterdir()) == ["checkpoint_0", "checkpoint_1"]
    assert [path.name for path in out.iterdir()] == ["checkpoints"]
