# SPDX-License-Identifier: Apache-2.0
"""A model's weights for others to load: in one file, or in several and an index that says what is where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farflung.base.errors import ConfigError
from farflung.base.files import WRITING
from farflung.base.sizes import num_bytes
from farflung.checkpoint import paths
from farflung.checkpoint.manifest import names_of
from farflung.checkpoint.writer import FileWriter, save_object, tensor_bytes, without_aliases


def save_sharded(
    state: Mapping[str, Any], directory: Path, max_shard_size: int | str = "10GB", safe: bool = True
) -> list[str]:
    """Write weights as `model.safetensors` (or `pytorch_model.bin`), in several files if need be; return their names.

    Files of an earlier save into the directory that are not written again are removed, once the new ones are there.
    Those of a checkpoint in it stay. A single tensor may be larger than `max_shard_size`.
    """
    if directory.is_file():
        raise ConfigError(f"save_model: {directory} is a file. Name a directory.")
    size = int(max_shard_size) if isinstance(max_shard_size, float) else max_shard_size
    limit = num_bytes(size, "max_shard_size", has_bits=False)  # `5gb` counts bytes, as in `huggingface_hub`
    meta = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if meta:
        raise ConfigError(f"save_model: {meta[0]} is on the meta device, so it has no values to save.")
    kept: dict[str, Any] = dict(without_aliases(state)) if safe else dict(state)
    shards = _shards(kept, limit)
    directory.mkdir(parents=True, exist_ok=True)
    stem, ending = paths.model(0, safe).split(".")
    names = [f"{stem}-{k + 1:05d}-of-{len(shards):05d}.{ending}" for k in range(len(shards))]
    if len(shards) == 1:
        names = [paths.model(0, safe)]
    index = directory / paths.model_index(safe)
    if any((directory / name).exists() for name in names):
        index.unlink(missing_ok=True)  # or a process that is killed would leave it over files of two saves
    for name, shard in zip(names, shards, strict=True):
        save_object(shard, directory / name, safe)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = tensor_bytes(kept)
        with FileWriter(index) as file:
            file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n")
    else:
        index.unlink(missing_ok=True)
    # Whole files of earlier saves, and parts of them that a killed process has left.
    old = re.compile(rf"\.?{stem}(-\d{{5}}-of-\d{{5}})?\.{ending}({re.escape(WRITING)}\w+)?")
    kept_names = {*names, *names_of(directory)}
    for path in directory.iterdir():
        if old.fullmatch(path.name) and path.name not in kept_names:
            path.unlink()
    return names


def _shards(state: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """Divide `state` as `huggingface_hub` does: in order, and a tensor over `limit` in a file of its own."""
    shards: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    filled = 0
    for name, value in state.items():
        size = tensor_bytes(value)
        if size > limit:
            shards.append({name: value})
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = {}, 0
        current[name] = value
        filled += size
    return [*shards, current] if current or not shards else shards
