# SPDX-License-Identifier: Apache-2.0
"""The `.metadata` of a folder that torch's DCP wrote: a pickle, which is read as plain data.

`torch.distributed.checkpoint` unpickles it without any limit, so that whoever wrote it could run code. Here its classes
stand for empty records without behaviour, and what is in them is checked while DCP's own are made from it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from farflung.base.errors import CheckpointError
from farflung.checkpoint import paths
from farflung.checkpoint.files import inside, is_file
from farflung.checkpoint.reader import damage_as

_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("TensorProperties", "StorageMeta", "_StorageInfo"),
)
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def read_metadata(folder: Path) -> Metadata:
    """Return what stands in `folder/.metadata`; CheckpointError where there is none, or it is something else."""
    path = folder / paths.SHARDS_INDEX
    if not is_file(path):
        raise CheckpointError(f"{path} does not exist: the checkpoint is not complete, or it is none of DCP.")
    with damage_as(f"{path} can't be read, so it is damaged"), open(path, "rb") as file:
        try:
            return _metadata(_Unpickler(file).load())
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} was not loaded: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Knows the names that stand in such a file alone; all are made anew for each file, as a pickle may change them."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known: dict[str, Any] = {name: type(name, (_Record,), {}) for name in _CLASSES}
        self._nothing = lambda *_: None
        sizes = {"Size": lambda numbers=(): tuple(numbers)}
        self._known.update(sizes, _get_layout=self._nothing, _MEM_FORMAT_ENCODING=self._nothing)

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name in self._known:
            return self._known[name]
        if (module, name) in {("torch", "Size"), ("torch.serialization", "_get_layout")}:
            return self._known[name]
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return self._nothing
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a description of tensors.")


class _Record:
    """Stands for an object of a class of DCP: holds what was said of it."""

    def __setstate__(self, state: Any) -> None:
        self.said = state


def _metadata(record: Any) -> Metadata:
    said = _said(record, "Metadata")
    stored = {_text(name): _storage(one) for name, one in said["state_dict_metadata"].items()}
    where = {_index(index): _place(place) for index, place in said["storage_data"].items()}
    paths = {_text(name): _path(path) for name, path in (said.get("planner_data") or {}).items()}
    return Metadata(stored, {name: paths.get(name, (name,)) for name in stored}, where)


def _said(record: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a record of a class; TypeError where it is something else."""
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise TypeError(f"a {kind} was expected, not {type(record).__name__}")
    said = vars(record).get("said")
    if said is not None and not isinstance(said, (dict, tuple)):
        raise TypeError(f"a {kind} holds a {type(said).__name__}")
    return said or {}  # type: ignore[return-value]


def _storage(record: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    said = _said(record, "TensorStorageMetadata")
    dtype = next(iter(_said(said["properties"], "TensorProperties")))  # the first of a tuple
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no type of a tensor")
    chunks = [_said(chunk, "ChunkStorageMetadata") for chunk in said["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(said["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    said = _said(record, "MetadataIndex")
    offset = said.get("offset")
    return MetadataIndex(_text(said["fqn"]), None if offset is None else _size(offset), said.get("index"))


def _place(record: Any) -> SimpleNamespace:
    said = _said(record, "_StorageInfo")
    if said.get("transform_descriptors"):
        raise TypeError("its files are compressed")
    return SimpleNamespace(
        relative_path=inside(_text(said["relative_path"])),
        offset=_number(said["offset"]),
        length=_number(said["length"]),
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
