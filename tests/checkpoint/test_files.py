# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: written whole, with their sums; read as plain data; damage is named and code never run."""

import json
import os
import pickle
import random
import re
import shutil
import sys
import zlib
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from farflung.base.errors import CheckpointError, ConfigError
from farflung.big_model.load import load_checkpoint_in_model
from farflung.big_model.offload import OffloadedWeightsLoader, offload_state_dict
from farflung.checkpoint import paths, rng
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.entries import Entry, Staging
from farflung.checkpoint.export import save_sharded
from farflung.checkpoint.files import sums_of
from farflung.checkpoint.manager import SaveRequest
from farflung.checkpoint.manifest import FileRecord, Manifest
from farflung.checkpoint.reader import damage_as, read_torch, read_weights, reading
from farflung.checkpoint.writer import FileWriter, save_object, write_safetensors
from farflung.compat.free_functions import clean_state_dict_for_safetensors

KINDS = [torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
KINDS += [getattr(torch, f"{kind}{bits}") for kind in ("float", "int", "uint") for bits in (16, 32, 64)]


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    transposed=st.booleans(),
)
def test_safetensors_reads_what_we_write(shapes, transposed, tmp_path_factory):
    path = tmp_path_factory.mktemp("safe") / "x.safetensors"
    tensors = {f't.{k} "ü"': torch.randn(shape).to(kind) for k, (kind, shape) in enumerate(shapes)}
    if transposed:
        tensors = {name: x.mT if x.dim() >= 2 else x for name, x in tensors.items()}
    with FileWriter(path) as writer:
        write_safetensors(tensors, writer)
    read, length = load_file(path), int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all((8 + length + header[name]["data_offsets"][0]) % x.itemsize == 0 for name, x in tensors.items())
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == x.dtype and read[name].tolist() == x.tolist() for name, x in tensors.items())
    assert (writer.num_bytes, writer.crc32) == sums_of(path)


def test_tied_weights_are_written_once_and_views_of_one_memory_each(tmp_path):
    base = torch.arange(4.0)
    square, words = base.view(2, 2), base.view(torch.int32)
    with FileWriter(tmp_path / "x.safetensors") as writer:
        write_safetensors({"a": base, "b": base, "c": base[:3], "d": square, "e": square.t(), "f": words}, writer)
    assert set(load_file(tmp_path / "x.safetensors")) == set("acdef")


Z = torch.tensor([1 + 2j, 3 - 4j])
LAZY = {"base": Z, "conjugate": Z.conj(), "negated": torch._neg_view(Z), "both": torch._neg_view(Z).conj()}


@pytest.mark.parametrize("way", ["safetensors", "cleaned", "torch", "staged", "offloaded"])
def test_conjugate_and_negated_views_are_not_taken_for_their_base(way, tmp_path):
    path = tmp_path / "x"
    if way == "safetensors":
        save_object(LAZY, path, safe_serialization=True)
    elif way == "cleaned":
        save_file(clean_state_dict_for_safetensors(LAZY), path)
    elif way == "offloaded":
        offload_state_dict(tmp_path, LAZY)
    else:
        (entry,) = Staging().copied([Entry("x", LAZY)]) if way == "staged" else [Entry("x", LAZY)]
        entry.write(tmp_path)
    readers = {"torch": read_torch, "staged": read_torch, "offloaded": lambda _: OffloadedWeightsLoader(None, tmp_path)}
    read = readers.get(way, load_file)(path)
    assert {name: x.tolist() for name, x in read.items()} == {name: x.tolist() for name, x in LAZY.items()}


def test_a_type_that_safetensors_lacks_is_refused(tmp_path):
    for x, layout in (torch.eye(2).to_sparse(), "sparse_coo"), (torch.ones(1, dtype=torch.complex128), "strided"):
        words = rf"x is a {x.dtype} tensor \(torch\.{layout}\), which"
        with pytest.raises(ConfigError, match=words), FileWriter(tmp_path / "x") as writer:
            write_safetensors({"x": x}, writer)
    with pytest.raises(ConfigError, match="b is on the meta device"):
        save_sharded({"a": torch.ones(1), "b": torch.ones(1, device="meta")}, tmp_path / "y")
    (tmp_path / "z").touch()
    for act in (lambda: save_sharded({}, tmp_path / "z"), SaveRequest(tmp_path / "z", {}).check):
        with pytest.raises(ConfigError, match=r"z is a file\. Name a "):
            act()
    assert os.listdir(tmp_path) == ["z"]


@settings(max_examples=12)
@example(sizes=[], limit=1)
@example(sizes=[1, 1], limit=2)
@given(sizes=st.lists(st.integers(1, 6), max_size=6), limit=st.integers(1, 8))
def test_weights_are_divided_as_huggingface_hub_does_and_earlier_ones_go(sizes, limit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "deep" / "er"
    state = {f"w{k}": torch.ones(size, dtype=torch.uint8) for k, size in enumerate(sizes)}
    save_sharded(state, folder, 1)
    for name in ("notes.txt", ".model.safetensors.writing-0"):
        (folder / name).touch()
    expected = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    names = save_sharded(state, folder, float(limit))
    assert names == ([*expected.filename_to_tensors] or ["model.safetensors"])
    assert all(load_file(folder / name).keys() == {*held} for name, held in expected.filename_to_tensors.items())
    index = ["model.safetensors.index.json"] if len(names) > 1 else []
    assert sorted(os.listdir(folder)) == sorted([*names, *index, "notes.txt"])
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": expected.tensor_to_filename}
    assert [json.loads((folder / name).read_bytes()) for name in index] == [content] * len(index)


def test_random_states_come_back_from_a_file_without_unpickling(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    Entry("states.pkl", rng.read()).write(tmp_path)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    states = read_torch(tmp_path / "states.pkl")
    rng.check(states)
    assert random.random() != drawn[0], "checking changes nothing"
    assert rng.write(states) == []
    random.random()
    rng.write(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
    there, written = {"is_available": lambda: True, "get_rng_state_all": lambda: [1, 2], "device_count": lambda: 2}, []
    with mock.patch.multiple(torch.xpu, **there, set_rng_state_all=written.append):
        assert rng.write(rng.read()) == []
        (note,) = rng.write({**states, "torch_xpu_manual_seed": [1]})
        assert note == "random states of 1 xpu device were saved, but this machine has 2"
        assert "states of 0 xpu devices were" in rng.write(states)[0]
    assert written == [[1, 2]]


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_code_in_a_file_is_never_run(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if form == "torch":
        torch.save({"x": Trap()}, "optimizer.bin")
    else:
        (tmp_path / "optimizer.bin").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(
        CheckpointError, match=r"optimizer\.bin was not loaded: .*mkdir.* Only tensors, .*add_safe_glob"
    ):
        read_torch(tmp_path / "optimizer.bin")
    assert not (tmp_path / "sprung").exists()


class Keeper:
    def __reduce__(self):
        return Trap, ()


def test_what_could_not_be_loaded_again_is_refused_while_it_is_saved(tmp_path):
    for origin, named in ("a Counter", "a Counter"), ("", r"deep/er\.pkl"):
        with pytest.raises(ConfigError, match=rf"The state of {named} holds .*Trap.*add_safe_globals"):
            Entry("deep/er.pkl", {"x": Keeper()}, origin=origin).write(tmp_path)


def test_what_is_no_file_of_weights_is_named(tmp_path):
    torch.save([1], tmp_path / "list.bin")
    torch.save({1: torch.ones(1)}, tmp_path / "numbers.bin")
    for name, words in [
        ("list.bin", "list.bin holds a list, not weights"),
        ("numbers.bin", "numbers.bin holds a dict, not weights"),
        ("list.bin/x", "list.bin/x does not exist"),
        ("none.safetensors", "none.safetensors does not exist"),
        ("x" * 300, "x can't be read (File name too"),
    ]:
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read_weights(tmp_path / name)


def damage(data, path, most=1):
    """Cut a file off, or flip some of its bits."""
    content = bytearray(path.read_bytes())
    places = st.integers(0, len(content) - 1)
    if data.draw(st.booleans()):
        content = content[: data.draw(places)]
    else:
        for _ in range(data.draw(st.integers(1, most))):
            content[data.draw(places)] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_of_any_kind_is_an_error_of_ours(data, tmp_path_factory):
    """Without any manifest: what the readers of torch and safetensors raise is told apart from nothing else."""
    folder = tmp_path_factory.mktemp("fuzz")
    name = data.draw(st.sampled_from(["model.safetensors", "pytorch_model.bin"]))
    Entry(name, {"a": torch.arange(12.0), "b": torch.ones(2, 3)}, safe=name.startswith("model")).write(folder)
    damage(data, folder / name, most=8)
    try:
        weights = read_weights(folder / name)
    except CheckpointError as error:
        assert name in str(error)  # noqa: PT017  some damage does no harm
    else:
        assert isinstance(weights, dict)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_no_damage(kind, tmp_path):
    for block in (damage_as("x"), reading(tmp_path)):
        with pytest.raises(kind), block:
            raise kind


def test_the_reason_of_damage_is_the_first_line_that_says_something():
    errors = KeyError("a"), OSError(), ValueError("\n a \n b"), ValueError("x" * 400)
    for error, reason in zip(errors, (r"KeyError\('a'\)", "OSError", "a", "x" * 300), strict=True):
        with pytest.raises(CheckpointError, match=f"^x: {reason}$"), damage_as("x"):
            raise error


def a_manifest(folder, names=("model.safetensors", "deep/er.bin")):
    entries = {}
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(name.encode() * 50)
        entries[name] = FileRecord(*sums_of(path))
    manifest = Manifest(entries, step=3, iteration=2, world_size=4, written_at=1.25, versions={"farflung": "0"})
    manifest.write(folder / paths.MANIFEST)
    return manifest


def test_a_manifest_comes_back_and_says_that_all_is_there(tmp_path):
    manifest = a_manifest(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert Checkpoint.open(tmp_path).verify().manifest == manifest
    assert Manifest.read(tmp_path / "deep") is None
    assert manifest.num_bytes == 50 * len("model.safetensorsdeep/er.bin")
    assert replace(manifest, optimizer_steps=[3, None, 5]).completed_steps == 5
    replace(manifest, optimizer_steps=[1, "2"]).write(tmp_path / paths.MANIFEST)
    with pytest.raises(CheckpointError, match=r"optimizer_steps is \[1, '2'\]"):
        Manifest.read(tmp_path)
    content = {"format": 2, "files": {}}
    summed = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (tmp_path / paths.MANIFEST).write_text(json.dumps({**content, "crc32": f"{summed:08x}"}))
    with pytest.raises(CheckpointError, match=r"has format 2; this version of Farflung reads format 1\."):
        Manifest.read(tmp_path)


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_and_any_missing_byte_is_noticed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    manifest = a_manifest(folder)
    name = data.draw(st.sampled_from([*manifest.files, paths.MANIFEST]))
    damage(data, folder / name)
    try:
        read = Manifest.read(folder)
    except CheckpointError as error:
        assert paths.MANIFEST in str(error)  # noqa: PT017  a bit in white space does no harm
    else:
        if name == paths.MANIFEST:
            assert read == manifest
        else:
            with pytest.raises(CheckpointError, match=re.escape(name)):
                Checkpoint.open(folder).verify()


def test_swapped_and_missing_files_are_named(tmp_path):
    a_manifest(tmp_path, ("optimizer.bin", "scheduler.bin"))
    os.replace(tmp_path / "optimizer.bin", tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin can't be found \(No such file or directory\)"):
        Checkpoint.open(tmp_path)
    os.replace(tmp_path / "scheduler.bin", tmp_path / "optimizer.bin")
    os.replace(tmp_path / "x", tmp_path / "scheduler.bin")
    found = Checkpoint.open(tmp_path)  # both names are equally long, and so are the files
    sums = [one.crc32 for one in found.manifest.files.values()][::-1]
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is damaged: .* is {:08x}, but {:08x} was".format(*sums)):
        found.verify()
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin can't be read \(No such file"):
        found.verify()
    (tmp_path / paths.MANIFEST).write_text("x")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="was replaced or removed"):
            found.verify()
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a//b", "./a", "a\\b", "a\0b"])
def test_a_path_that_climbs_out_is_an_error(name, tmp_path):
    Manifest({name: FileRecord(1, 1)}).write(tmp_path / paths.MANIFEST)
    with pytest.raises(CheckpointError, match="outside of its folder"):
        Manifest.read(tmp_path)


def test_a_copy_is_not_changed_by_training_and_uses_its_memory_again():
    weight = torch.ones(3)
    tied = {"model": {"a": weight, "b": weight}, "lr": [0.1], "n": {"x": (1, None)}}
    staging = Staging()
    (first,) = staging.copied([Entry("p", tied)])
    weight.add_(1), tied["lr"].append(0.2)
    assert first.content["model"]["a"].tolist() == [1, 1, 1]
    assert first.content["model"]["a"] is first.content["model"]["b"], "tied weights stay tied"
    assert first.content["lr"] == [0.1]
    assert first.content["n"] == {"x": (1, None)}
    (second,) = staging.copied([Entry("p", tied)])
    assert second.content["model"]["a"].data_ptr() == first.content["model"]["a"].data_ptr()
    assert second.content["model"]["a"].tolist() == [2, 2, 2]
    sparse = torch.eye(2).to_sparse()
    for changed in (torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(0), sparse):
        copies = [one.content for one in staging.copied([Entry("p", changed), Entry("q", changed)])]
        for tensor, factor in (changed, 2), (copies[1], 3):
            tensor.mul_(factor)
        assert copies[0].dtype == changed.dtype
        assert torch.equal(copies[0].to_dense() * 2, changed.to_dense())


def test_a_copy_of_a_dictionary_is_of_its_kind_and_has_what_belongs_to_it():
    ordered, lists = OrderedDict(a=torch.ones(1)), defaultdict(list, a=[1])
    (copy,) = Staging().copied([Entry("p", [ordered, lists])])
    assert [type(one) for one in copy.content] == [OrderedDict, defaultdict]
    assert copy.content == [ordered, lists]
    assert copy.content[1]["b"] == []
    assert "b" not in lists


def test_names_are_those_of_accelerate():
    from accelerate.utils import constants as theirs

    assert paths.model(0) == theirs.SAFE_WEIGHTS_NAME
    assert paths.model(0, safe=False) == theirs.WEIGHTS_NAME
    assert paths.model(2) == f"{theirs.SAFE_MODEL_NAME}_2.safetensors"
    assert paths.model_index() == theirs.SAFE_WEIGHTS_INDEX_NAME
    assert paths.optimizer(1) == f"{theirs.OPTIMIZER_NAME}_1.bin"
    assert paths.scheduler(0) == f"{theirs.SCHEDULER_NAME}.bin"
    assert theirs.SCALER_NAME == paths.SCALER
    assert paths.random_states(3) == f"{theirs.RNG_STATE_NAME}_3.pkl"


def test_entries_that_are_written_at_a_time_don_t_disallow_each_other_s_arrays(tmp_path):
    state = {"numpy": np.random.get_state(), "number": np.float64(3), "python": random.getstate()}
    state["kinds"] = [np.zeros(1, kind) for kind in "?bhilqBHILQefdFD"]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda k: Entry(f"{k}.pkl", state).write(tmp_path), range(100)))
    with torch.serialization.safe_globals([np.ndarray]):
        assert read_torch(tmp_path / "0.pkl")["kinds"] == state["kinds"]
        assert np.ndarray in torch.serialization.get_safe_globals(), "as the script has allowed it"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_what_stands_below_a_name_that_is_no_utf8_is_read_too(tmp_path):
    """safetensors says of such a path that it is not valid, which was taken for damage."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    weights = {"weight": torch.arange(4.0).reshape(1, 4)}
    for name in ("model.safetensors", "model.bin"):
        save_object(weights, folder / name, safe_serialization=name.endswith("s"))
        model = torch.nn.Linear(4, 1, bias=False)
        load_checkpoint_in_model(model, folder / name)
        assert model.weight.equal(weights["weight"])
    lazy = OffloadedWeightsLoader(index={"weight": {"safetensors_file": str(folder / "model.safetensors")}})
    assert lazy["weight"].equal(weights["weight"])
