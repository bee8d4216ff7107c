# SPDX-License-Identifier: Apache-2.0
"""Sharded states in the files of torch's DCP: each rank writes its shards, and reads what its new ones are cut from.

The planners, the writer and the reader are DCP's. What it does with process groups goes through a checkpoint's own
group here, so that errors, background saves and the manifest are those of all other files.

What DCP would unpickle without any limit, so that whoever wrote it could run code, is read as plain data: what is no
tensor, and the `.metadata` of a folder, whose classes stand for empty records without behaviour here. What is in them
is checked while DCP's own are made from it.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from farflung.base.bars import Bar, bar
from farflung.base.errors import CheckpointError, ConfigError
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Fetch
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.files import inside, is_file
from farflung.checkpoint.manifest import FileRecord
from farflung.checkpoint.reader import load, reading
from farflung.checkpoint.writer import FileWriter, save_object
from farflung.comm.shards import is_sharded, local

Path_ = str | os.PathLike[str]
# What stands in a `.metadata`.
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta", "_StorageInfo"),
)
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class ShardPlanner:
    """A state that ranks will write together, before they know who writes what; ConfigError if it is no plain data.

    Args:
        name: of the folder to be, such as `optimizer_0`; nothing if that is the checkpoint's own.
        state: nested dictionaries and lists of tensors and plain data. Shards of one tensor are on several ranks; what
            is whole is written by the leader. Ranks also bring shards that others write too: the work is
            divided among them.
        takes_part: False: its shards are not written, as where another replica's are.
    """

    def __init__(self, name: str, state: dict[str, Any], leads: bool, takes_part: bool = True) -> None:
        self.name = name
        self._planner = DefaultSavePlanner()
        mine = state if leads else _shards_of(state) if takes_part else {}
        self._planner.set_up_planner(mine, StorageMeta(), leads)
        self.plan: SavePlan = self._planner.create_local_plan()
        for item in self.plan.items:
            if item.type == WriteItemType.BYTE_IO:
                _check(self._planner.resolve_data(item), item.index.fqn)

    def entry(self, plans: Sequence[SavePlan], rank: int) -> ShardedEntry:
        planned, metadata = self._planner.create_global_plan(list(plans))
        mine = self._planner.finish_plan(FileSystemWriter("").prepare_global_plan(planned)[rank])
        content: dict[MetadataIndex, Any] = {}
        for item in mine.items:
            data = self._planner.resolve_data(item)
            content[item.index] = data if isinstance(data, Tensor) else data.getvalue()
        return ShardedEntry(self.name, content, plan=mine, metadata=metadata)


def _shards_of(state: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _shards_of(value) if isinstance(value, dict) else value for name, value in state.items()}
    return {name: value for name, value in nested.items() if (isinstance(value, dict) and value) or _are_sharded(value)}


def _are_sharded(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_are_sharded, value))
    return isinstance(value, Tensor) and is_sharded(value)


def _check(data: Any, name: str) -> None:
    data.seek(0)
    try:
        load(data)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{name} holds something that can't be loaded without running code. Have the optimizer and the model keep "
            "tensors, numbers, strings and their lists and dictionaries."
        ) from error


class WrittenShards(NamedTuple):
    """What a rank has written of a folder: its files, and where in them each value is."""

    files: dict[str, FileRecord]
    results: list[Any]


@dataclass(frozen=True)
class ShardedEntry(Entry):
    """One rank's part of a folder that DCP's reader reads: tensors by DCP's index, and what is none as bytes."""

    plan: SavePlan = field(kw_only=True)  # of this rank
    metadata: Metadata = field(kw_only=True)  # of the whole folder

    def write(self, folder: Path, threaded: bool = True, bar: Bar | None = None) -> WrittenShards:
        writer = _Writer(folder / self.name, threaded, bar)
        if not self.plan.items:
            return WrittenShards({}, [])
        results = writer.write_data(self.plan, _Given(self.content)).wait()
        return WrittenShards(writer.fs.records, results)

    def finish(self, folder: Path, written: Sequence[WrittenShards]) -> dict[str, FileRecord]:
        writer = _Writer(folder / self.name, threaded=False)
        writer.finish(self.metadata, [part.results for part in written])
        records = [writer.fs.records, *(part.files for part in written)]
        prefix = f"{self.name}/" if self.name else ""
        return {prefix + name: record for found in records for name, record in found.items()}


class _Given(DefaultSavePlanner):
    """A planner whose plan is made, with the values at hand."""

    def __init__(self, content: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._content = content

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = self._content[write_item.index]
        return data if isinstance(data, Tensor) else io.BytesIO(data)


class _Files(FileSystem):
    """The files of a folder, whose sizes and sums are known once they are written."""

    def __init__(self, threaded: bool, bar: Bar | None) -> None:
        self.records: dict[str, FileRecord] = {}
        self._threaded, self._bar = threaded, bar

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        name, blocks = Path(path).name, list[int]()
        with FileWriter(path, self._threaded, self._bar, blocks if name.endswith(DEFAULT_SUFFIX) else None) as writer:
            yield writer
        self.records[name] = FileRecord(writer.num_bytes, writer.crc32, tuple(blocks))

    def rename(self, path: Path_, new_path: Path_) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(FileSystemWriter):
    fs: _Files

    def __init__(self, folder: Path, threaded: bool, bar: Bar | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, sync_files=False)  # leaving a FileWriter syncs
        self.fs = _Files(threaded, bar)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # not the path at which the folder stands while it is written


class ShardReader:
    """A folder that DCP wrote, open for reading, if its `.metadata` describes a state. Ranks exchange nothing.

    Args:
        fetch: called with a file and the spans of it, as start and length, that are read next; see `LazyFiles`.
    """

    def __init__(self, folder: Path, fetch: Fetch | None = None) -> None:
        self.folder, self._fetch = folder, fetch
        self._metadata = read_metadata(folder)
        stored = self._metadata.state_dict_metadata
        self.paths: dict[str, tuple[Any, ...]] = self._metadata.planner_data
        tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
        self.sizes = {name: one.size for name, one in tensors.items()}
        self.dtypes = {name: one.properties.dtype for name, one in tensors.items()}

    def like(self, name: str, device: str = "cpu") -> Tensor | None:
        """Return an empty tensor of the shape and type of a value; None: it is no tensor."""
        return torch.empty(self.sizes[name], dtype=self.dtypes[name], device=device) if name in self.sizes else None

    def read(self, names: Mapping[str, Tensor | None], bar: Bar | None = None) -> dict[str, Any]:
        """Return values by flat name, on the CPU; CheckpointError if one is not there, or has another shape.

        Args:
            names: for each, a sharded tensor of its shape, whose local part alone is read; None: all of it.
            bar: counts the bytes of tensors that were read.
        """
        wanted = {name: self.like(name) if given is None else given for name, given in names.items()}
        planner = _Filler(wanted, self.dtypes, bar)
        reader = FileSystemReader(self.folder)
        with reading(self.folder):
            planner.set_up_planner(dict(wanted), self._metadata)
            reader.set_up_storage_reader(self._metadata, False)
            plan = planner.create_local_plan()
            planner.check(plan)
            spans = defaultdict[str, list[tuple[int, int]]](list)
            for place in (self._metadata.storage_data[item.storage_index] for item in plan.items):
                spans[place.relative_path].append((place.offset, place.length))
            for name, some in spans.items():
                if not is_file(self.folder / name):
                    raise CheckpointError(f"{self.folder} lacks the file {name}.")
                if self._fetch is not None:
                    self._fetch(self.folder / name, some)
            reader.read_data(plan, planner).wait()
        return planner.found

    @property
    def num_bytes(self) -> int:
        return sum(size.numel() * self.dtypes[name].itemsize for name, size in self.sizes.items())

    def read_whole(self) -> Any:
        with bar(f"Reading {self.folder.name}", self.num_bytes) as shown:
            values = self.read(dict.fromkeys(self.paths), shown)
        return nested({self.paths[name]: value for name, value in values.items()})


def nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return values as dictionaries in dictionaries; those whose keys are 0, 1, 2 ... are lists."""
    if () in values:
        return values[()]
    inner: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    made = {key: nested(below) for key, below in inner.items()}
    if made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


def merge_shards(folder: Path, target: Path, safe: bool = True, remove: bool = False) -> Path:
    """Write the whole model whose shards are in `folder` into one file in `target`, and return its path."""
    if not (folder / paths.SHARDS_INDEX).exists():
        inner = [name for name in (paths.model_shards(0), paths.optimizer_shards(0)) if (folder / name).is_dir()]
        where = f" Name {' or '.join(str(folder / name) for name in inner)} instead." if inner else ""
        raise ConfigError(f"There are no shards in {folder}.{where}")
    if remove and target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{target} lies in {folder}, which is to be removed. Name another folder for the result.")
    reader = ShardReader(folder)
    whole = reader.read_whole()
    if isinstance(whole, dict) and len(whole) == 1:  # {"model": {...}}
        whole = next(iter(whole.values()))
    target.mkdir(parents=True, exist_ok=True)
    path = target / paths.model(0, safe)
    with bar(f"Writing {path.name}", reader.num_bytes) as shown:
        save_object(whole, path, safe, shown)
    if remove:
        shutil.rmtree(folder)
    return path


class _Filler(DefaultLoadPlanner):
    """Reads into memory of its own, so that what is there stays as it is until all has been read."""

    def __init__(self, wanted: Mapping[str, Tensor | None], dtypes: Mapping[str, torch.dtype], bar: Bar | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._bar = bar
        self.found: dict[str, Any] = {
            name: torch.empty(local(like).shape, dtype=dtypes.get(name, like.dtype), device="cpu")
            for name, like in wanted.items()
            if like is not None
        }

    def check(self, plan: LoadPlan) -> None:
        """Raise CheckpointError if files have not all of a value: the rest of its memory holds anything."""
        read = dict.fromkeys(self.found, 0)
        for item in plan.items:
            if item.dest_index.fqn in read:
                read[item.dest_index.fqn] += item.lengths.numel()
        for name, number in read.items():
            if number != self.found[name].numel():
                raise CheckpointError(f"It has {number} of the {self.found[name].numel()} numbers of {name}.")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._bar is not None:
            self._bar.advance(tensor.nbytes)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = load(value, map_location="cpu")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.found[index.fqn]
        return tensor


def read_metadata(folder: Path) -> Metadata:
    """Return what stands in `folder/.metadata`; CheckpointError if there is none, or it is something else."""
    path = folder / paths.SHARDS_INDEX
    if not is_file(path):
        raise CheckpointError(f"{path} does not exist: the checkpoint is not complete, or it is none of DCP.")
    with reading(path), open(path, "rb") as file:
        return _metadata(_Unpickler(file).load())


class _Unpickler(pickle.Unpickler):
    """Knows only the names that stand in such a file, made again for each file, as a pickle may change them."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known: dict[str, Any] = {name: type(name, (_Record,), {}) for name in _CLASSES}
        self._nothing = lambda *_: None
        sizes = {"Size": lambda numbers=(): tuple(numbers)}
        self._known.update(sizes, _get_layout=self._nothing, _MEM_FORMAT_ENCODING=self._nothing)
        self._known["getattr"] = self._nothing  # by which Python 3.11.0 to 3.11.3 pickle the members of an enum

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name in self._known:
            return self._known[name]
        if (module, name) in {("torch", "Size"), ("torch.serialization", "_get_layout"), ("builtins", "getattr")}:
            return self._known[name]
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return self._nothing
        member = getattr(torch, name, None) if module == "torch" else None
        if isinstance(member, torch.dtype):
            return member
        raise TypeError(f"it names {module}.{name}, which is not part of a description of tensors")


class _Record:
    """A placeholder for an object of one of DCP's classes; `said` is the state that it was pickled with."""

    def __setstate__(self, state: Any) -> None:
        self.said = state


def _metadata(record: Any) -> Metadata:
    content = _said(record, "Metadata")
    stored = {_text(name): _storage(one) for name, one in content["state_dict_metadata"].items()}
    where = {_index(index): _place(place) for index, place in content["storage_data"].items()}
    places = {_text(name): _path(path) for name, path in (content.get("planner_data") or {}).items()}
    return Metadata(stored, {name: places.get(name, (name,)) for name in stored}, where)


def _said(record: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a record of a class; TypeError if it is something else."""
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise TypeError(f"a {kind} was expected, not {type(record).__name__}")
    return vars(record).get("said") or {}


def _storage(record: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    content = _said(record, "TensorStorageMetadata")
    dtype = next(iter(_said(content["properties"], "TensorProperties")))  # the first of a tuple
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no type of a tensor")
    chunks = [_said(chunk, "ChunkStorageMetadata") for chunk in content["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(content["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    content = _said(record, "MetadataIndex")
    offset = content.get("offset")
    return MetadataIndex(_text(content["fqn"]), None if offset is None else _size(offset))


def _place(record: Any) -> SimpleNamespace:
    content = _said(record, "_StorageInfo")
    if content.get("transform_descriptors"):
        raise TypeError("its files are compressed")
    return SimpleNamespace(
        relative_path=inside(_text(content["relative_path"])),
        offset=_number(content["offset"]),
        length=_number(content["length"]),
        transform_descriptors=None,
    )


def _path(path: Any) -> tuple[Any, ...]:
    if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
        raise TypeError(f"{path!r:.80} is no place in a state")
    return path


def _size(numbers: Any) -> torch.Size:
    return torch.Size([_number(number) for number in tuple(numbers)])


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.80} is no name")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no size")
    return value
