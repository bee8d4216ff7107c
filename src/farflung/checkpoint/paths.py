# SPDX-License-Identifier: Apache-2.0
"""Every file name in a checkpoint: Accelerate's for what it has, and ours for what it lacks."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from farflung.base.errors import CheckpointError
from farflung.base.former_name import FORMER_NAME

CHECKPOINTS = "checkpoints"  # the folder in a project where automatic naming puts them
PREFIX = "checkpoint_"
NAMED = re.compile(rf"{PREFIX}(\d+)")
FOLDERS = ("loop_state", "outer_state")  # of what each rank writes by itself
SCALER = "scaler.pt"
TORCHDATA_LOADERS = "dl_state_dict*.bin"  # what Accelerate writes of loaders that are stateful
MANIFEST = "farflung.json"
FORMER_MANIFEST = f"{FORMER_NAME}.json"
MANIFESTS = (MANIFEST, FORMER_MANIFEST)
SHARDS_INDEX = ".metadata"  # in a folder of shards: what is where, as torch's DCP writes it

_PER_OBJECT = ("optimizer", "scheduler", "sampler", "dl_state_dict")
_KNOWN = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)"
    r"|(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)|(model|pytorch_model)\.(safetensors|bin)\.index\.json"
    rf"|({'|'.join(_PER_OBJECT)})(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|(loop_state|outer_state)/rank_\d+\.bin"
    rf"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|__\d+_\d+\.distcp|{'|'.join(map(re.escape, MANIFESTS))})"
    r"|pytorch_model_fsdp(_\d+)?\.bin"
)
_SHARDS = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_MODEL = re.compile(
    r"(model|pytorch_model)(_\d+|-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|pytorch_model_fsdp(_\d+)?\.bin|pytorch_model_fsdp_\d+/\.metadata"
)
_EXPORTED = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
_TORCH = (".bin", ".pt", ".pkl")


def model(index: int, safe: bool = True) -> str:
    """Return the name of the file with the weights of model `index`."""
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return f"{_numbered(stem, index)}.{ending}"


def model_index(safe: bool = True) -> str:
    """Return the name of the file that says in which shard each weight is."""
    return f"{model(0, safe)}.index.json"


def model_shards(index: int) -> str:
    """Return the name of the folder with the shards of model `index`."""
    return f"pytorch_model_fsdp_{index}"


def gathered_model(index: int) -> str:
    """Return the name of the file in which Accelerate keeps the weights of a sharded model that it gathered."""
    return f"{_numbered('pytorch_model_fsdp', index)}.bin"


def optimizer_shards(index: int) -> str:
    """Return the name of the folder with the shards of optimizer `index`."""
    return f"optimizer_{index}"


def optimizer(index: int) -> str:
    """Return the name of the file with the state of optimizer `index`."""
    return f"{_numbered('optimizer', index)}.bin"


def scheduler(index: int) -> str:
    """Return the name of the file with the state of scheduler `index`."""
    return f"{_numbered('scheduler', index)}.bin"


def custom(index: int) -> str:
    """Return the name of the file with the state of registered object `index`."""
    return f"custom_checkpoint_{index}.pkl"


def random_states(rank: int) -> str:
    """Return the name of the file with the random states of `rank`."""
    return f"random_states_{rank}.pkl"


def loop_state(rank: int) -> str:
    """Return the name of the file with what only `rank` knows: its place in the data, its unfinished gradients."""
    return f"loop_state/rank_{rank}.bin"


def outer_state(rank: int) -> str:
    """Return the name of the file with the outer loops of `rank`."""
    return f"outer_state/rank_{rank}.bin"


def checkpoint(iteration: int) -> str:
    """Return the name that automatic naming gives checkpoint `iteration`."""
    return f"{PREFIX}{iteration}"


def is_known(name: str) -> bool:
    """Say whether a file of this name belongs to a checkpoint."""
    return _KNOWN.fullmatch(name) is not None


def is_shards(name: str) -> bool:
    """Say whether this is the name of a folder of shards."""
    return _SHARDS.fullmatch(name) is not None


def is_model(name: str) -> bool:
    """Say whether this is the name of a file with weights of a model."""
    return _MODEL.fullmatch(name) is not None


def is_exported(name: str) -> bool:
    """Say whether `save_model` gives files this name."""
    return _EXPORTED.fullmatch(name) is not None


def is_custom(name: str) -> bool:
    """Say whether this is the name of a registered object's file."""
    return _CUSTOM.fullmatch(name) is not None


def is_torch(name: str) -> bool:
    """Say whether a file of this name was written by `torch.save`."""
    return name.endswith(_TORCH)


def inside(name: str) -> str:
    """Return `name` as it is, once it is sure to stay in the folder.

    Raises:
        CheckpointError: it is absolute, climbs out, or is no plain path.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise CheckpointError(f"{name!r} names a file outside of its folder, so it was neither read nor written.")
    return name


def _numbered(stem: str, index: int) -> str:
    return stem if index == 0 else f"{stem}_{index}"
