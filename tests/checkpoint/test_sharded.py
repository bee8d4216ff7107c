# SPDX-License-Identifier: Apache-2.0
"""Folders of shards: torch's DCP reads what we write, we read what it writes, and code in one is never run."""

import enum
import io
import os
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from farflung.base.errors import CheckpointError, ConfigError, Unsupported
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.entries import Staging
from farflung.checkpoint.manifest import Manifest
from farflung.checkpoint.sharded import ShardPlanner, ShardReader, merge_shards
from farflung.utils import merge_fsdp_weights, save_fsdp_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
STATE = {
    "model": {"a.weight": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0, 3), "half": torch.ones(2).bfloat16()},
    "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}, {"lr": torch.tensor(2.0), "names": ["x", "y"]}],
}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = os.fspath(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def torchs(tmp_path):
    """A folder that torch wrote."""
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"), no_dist=True)
    return tmp_path / "torchs"


def assert_same(found, state):
    assert str(found) == str(state)
    assert all(torch.equal(found["model"][name], value) for name, value in state["model"].items())


@pytest.mark.long
def test_dcp_reads_what_is_written(tmp_path):
    planner = ShardPlanner("folder", STATE, leads=True)
    (entry,) = Staging().copied([planner.entry([planner.plan], 0)])
    entry.finish(tmp_path, [entry.write(tmp_path)])
    like = {"model": {name: torch.empty_like(value) for name, value in STATE["model"].items()}}
    dcp.load(like, storage_reader=dcp.FileSystemReader(tmp_path / "folder"), no_dist=True)
    assert_same({**like, "groups": STATE["groups"]}, STATE)
    assert_same(ShardReader(tmp_path / "folder").read_whole(), STATE)


class ByName(pickle.Pickler):
    """Pickles members of an enum as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_what_dcp_writes_is_read_whole_though_another_python_has_pickled_its_index(torchs):
    assert_same(ShardReader(torchs).read_whole(), STATE)
    index = torchs / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    with open(index, "wb") as file:
        ByName(file).dump(metadata)
    assert b"getattr" in index.read_bytes()
    assert_same(ShardReader(torchs).read_whole(), STATE)


def test_code_in_the_index_is_not_run(torchs, tmp_path):
    for bomb in (Bomb(tmp_path / "ran"), {"state_dict_metadata": Bomb(tmp_path / "ran")}, torch.compile):
        (torchs / ".metadata").write_bytes(pickle.dumps(bomb))
        with pytest.raises(CheckpointError, match=r"names (posix|nt|torch).(mkdir|compile), which is not part of"):
            ShardReader(torchs)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_value_is_neither_written_nor_run(tmp_path, torchs):
    with pytest.raises(ConfigError, match=r"^x holds something that can't be loaded .*tensors, numbers"):
        ShardPlanner("folder", {"x": Bomb(tmp_path / "ran")}, leads=True)
    dcp.save({"x": Bomb(tmp_path / "ran")}, storage_writer=dcp.FileSystemWriter(tmp_path / "bad"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"bad was not loaded: .*mkdir"):
        ShardReader(tmp_path / "bad").read({"x": None})
    assert not (tmp_path / "ran").exists()


FIRST = MetadataIndex("model.a.weight", (0, 0))


def changed_index(folder, change):
    """Unpickle the index as torch does, change it, and put it back."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_index_that_leads_elsewhere_or_leaves_something_out_is_refused(torchs):
    changed_index(torchs, lambda metadata: metadata.state_dict_metadata["model.a.weight"].chunks.clear())
    with pytest.raises(CheckpointError, match=r"0 of the 6 numbers of model\.a\.weight"):
        ShardReader(torchs).read_whole()
    changed_index(torchs, lambda metadata: setattr(metadata.storage_data[FIRST], "relative_path", "../../secret"))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        ShardReader(torchs)
    (torchs / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match=r"\.metadata can't be read, .*: a Metadata was expected, not list"):
        ShardReader(torchs)
    (torchs / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata does not exist: the checkpoint is not complete"):
        ShardReader(torchs)


def test_an_index_of_other_things_is_refused_with_its_reason(torchs):
    metadata = pickle.loads((torchs / ".metadata").read_bytes())
    tensor, place = metadata.state_dict_metadata[FIRST.fqn], vars(metadata.storage_data[FIRST])
    for part, name, value, words in [
        (vars(tensor.properties), "dtype", "x", "'x' is no type of a tensor"),
        (vars(tensor), "size", (2, -3), "-3 is no size"),
        (place, "length", "9", "'9' is no size"),
        (place, "relative_path", 5, "5 is no name"),
        (place, "transform_descriptors", ["zstd"], "its files are compressed"),
        *((metadata.planner_data, FIRST.fqn, path, f"{path!r} is no place") for path in ((0.5,), (), "xy")),
    ]:
        before, part[name] = part.get(name), value
        (torchs / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=re.escape(f".metadata can't be read, so it is damaged: {words}")):
            ShardReader(torchs)
        part[name] = before
    metadata.planner_data = None  # then values are named by themselves
    (torchs / ".metadata").write_bytes(pickle.dumps(metadata))
    assert FIRST.fqn in ShardReader(torchs).read_whole()


def test_a_damaged_file_of_shards_is_named(torchs):
    (path,) = torchs.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"torchs can't be read"):
        ShardReader(torchs).read_whole()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks the file __0_0\.distcp"):
        ShardReader(torchs).read_whole()


def test_shards_become_one_file(tmp_path):
    state = {"model": {"w": torch.arange(4.0), "b": torch.ones(1)}}
    planner = ShardPlanner("pytorch_model_fsdp_0", state, leads=True)
    entry = planner.entry([planner.plan], 0)
    records = entry.finish(tmp_path, [entry.write(tmp_path)])
    assert set(records) == {f"pytorch_model_fsdp_0/{name}" for name in (".metadata", "__0_0.distcp")}
    Checkpoint(tmp_path, Manifest(records)).verify()
    assert str(tmp_path).encode() not in (tmp_path / "pytorch_model_fsdp_0" / ".metadata").read_bytes()
    other = ShardPlanner("pytorch_model_fsdp_0", state, leads=False)
    assert other.entry([planner.plan, other.plan], 1).write(tmp_path) == ({}, []), "no file without any shard"
    (tmp_path / "optimizer_0").mkdir()
    with pytest.raises(
        ConfigError, match=r"There are no shards in .* Name .*pytorch_model_fsdp_0 or .*optimizer_0 instead"
    ):
        merge_fsdp_weights(tmp_path, tmp_path / "out")
    merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out", safe_serialization=False)
    assert torch.load(io.BytesIO((tmp_path / "out" / "pytorch_model.bin").read_bytes())).keys() == {"w", "b"}
    with pytest.raises(Unsupported, match="use_dcp=False"):
        save_fsdp_model(None, None, torch.nn.Linear(1, 1), tmp_path, use_dcp=False)
    path = merge_shards(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out", remove=True)
    assert torch.equal(load_file(path)["w"], state["model"]["w"])
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()
