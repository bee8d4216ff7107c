# SPDX-License-Identifier: Apache-2.0
"""Weights that wait in a folder, one file each, until a forward pass needs them."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from farflung.base.checks import check_path
from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.files import atomic_file, utf8_name
from farflung.big_model.tensors import Device, as_dtype
from farflung.checkpoint.files import inside
from farflung.checkpoint.reader import reading
from farflung.comm.tensor_memory import host_bytes
from farflung.process import world

Index: TypeAlias = dict[str, dict[str, Any]]
Folder: TypeAlias = "str | os.PathLike[str]"

INDEX = "index.json"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None, *, own: Sequence[Any] = ()
) -> Index | None:
    """Write a tensor's bytes to `<weight_name>.dat`, and its dtype and shape into `index`, which is returned.

    Raises ConfigError for a tensor on the meta device, which has no values, and where another model that is alive has
    offloaded another tensor to that file: one that is not among `own`, the weights of this tensor's model.
    """
    if weight.is_meta:
        raise ConfigError(f"{weight_name} is on the meta device, so it has no values to offload. Load them first.")
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    path, content = _file_of(offload_folder, weight_name), host_bytes(weight)
    _check_unused(path, content, own)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as beside:  # a tensor may still read the old file
        content.tofile(beside)
    return index


def _file_of(folder: Folder, weight_name: str) -> Path:
    """Return the file of a weight, which stays in the folder whatever the name is."""
    return Path(os.path.realpath(check_path("offload_folder", folder)), inside(f"{weight_name}.dat"))


def _check_unused(path: Path, content: np.ndarray[Any, Any], own: Sequence[Any]) -> None:
    """Check that no other model reads a file, unless writing `content` would not change it."""

    def others() -> list[Any]:
        return [
            reader for reader in world.readers() if path in reader.files and not any(reader is mine for mine in own)
        ]

    is_same = others() and path.is_file() and path.stat().st_size == content.nbytes
    if not others() or (is_same and np.array_equal(np.fromfile(path, np.uint8), content)):
        return
    gc.collect()  # a model and its hooks refer to each other, so one that is gone may still be there
    for other in others():
        raise ConfigError(
            f"Another model is offloaded to {path.parent} and in use: it reads {path.name} and "
            f"{len(other.files) - 1} other files there. Offload this model to a folder of its own, or delete that one."
        )


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """Return the tensor in a file that `offload_weight` wrote, of the `dtype` and `shape` in `weight_info`.

    Its pages are read when they are used. Raises CheckpointError if the file is not there or too short.
    """
    shape = torch.Size(weight_info["shape"])
    dtype = as_dtype(weight_info["dtype"])
    path = Path(weight_file)
    if not path.is_file() or path.stat().st_size < shape.numel() * dtype.itemsize:
        raise CheckpointError(f"{path} does not hold {dtype} of shape {list(shape)}: it is missing or too short.")
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=shape.numel(), dtype=dtype).reshape(shape)


def read_offload_index(folder: Folder) -> Index:
    """Return what is offloaded to a folder by name; nothing if it has no index."""
    path = check_path("offload_folder", folder) / INDEX
    if not path.is_file():
        return {}
    with reading(path):
        index: Index = json.loads(path.read_text(encoding="utf-8"))
    return index


def save_offload_index(index: Index | None, offload_folder: Folder) -> None:
    """Add `index` to the index of a folder; without entries, nothing happens."""
    if index:
        merged = {**read_offload_index(offload_folder), **index}
        with atomic_file(check_path("offload_folder", offload_folder) / INDEX) as path:
            path.write_text(json.dumps(merged, indent=2), encoding="utf-8")


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor], *, own: Sequence[Any] = ()) -> None:
    """Write tensors into a folder, one file each, and an index. Arguments and errors are those of `offload_weight`."""
    check_path("save_dir", save_dir).mkdir(parents=True, exist_ok=True)
    index: Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index, own=own)
    save_offload_index(index, save_dir)


def with_shared_names(index: Mapping[str, Any], ties: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Return an index that has every name of each shared weight in it."""
    shared = dict(index)
    for group in ties:
        for known in [name for name in group if name in index][:1]:
            shared.update({name: {"weight_name": known, **index[known]} for name in group if name not in index})
    return shared


class PrefixedDataset(Mapping[str, Tensor]):
    """The entries of a mapping whose names begin with `prefix`, by the rest of their names."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name: those of a state dict from memory, the others from where they are on the disk.

    Args:
        save_folder: where `offload_state_dict` wrote them.
        index: what is on the disk: `dtype` and `shape` for a file in the folder, or `safetensors_file`; `weight_name`
            where its name there is another one. By default the folder's own index.
        device: where weights from safetensors files are put.

    Raises:
        ConfigError: there is neither a state dict nor a folder nor an index.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.all_keys = list({**self.state_dict, **self.index})
        self.device = device

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        file = info.get("safetensors_file")
        if file is None:
            if self.save_folder is None:
                raise ConfigError(f"{key} was offloaded to a folder, and no save_folder says which.")
            return load_offloaded_weight(_file_of(self.save_folder, info.get("weight_name", key)), info)
        with utf8_name(file) as name, safe_open(name, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(info.get("weight_name", key))
        tensor = tensor.to(as_dtype(info["dtype"])) if "dtype" in info else tensor
        return tensor if self.device is None else tensor.to(self.device)

    @cached_property
    def files(self) -> frozenset[Path]:
        names = {
            info.get("weight_name", key)
            for key, info in self.index.items()
            if key not in self.state_dict and "safetensors_file" not in info
        }
        return frozenset() if self.save_folder is None else frozenset(_file_of(self.save_folder, n) for n in names)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Return what a state dict has of some modules, parameters and buffers; `''` is the whole model."""
    names = list(submodule_names)
    return {
        key: value
        for key, value in state_dict.items()
        if any(name in ("", key) or key.startswith(f"{name}.") for name in names)
    }
