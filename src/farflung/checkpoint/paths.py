# SPDX-License-Identifier: Apache-2.0
"""Every file name in a checkpoint: Accelerate's for what it has, and ours for what it lacks.

Functions name the file (or folder) of a model, an optimizer and so on by its index, or by the rank.
"""

from __future__ import annotations

import re
from functools import partial

CHECKPOINTS = "checkpoints"  # the folder in a project where automatic naming puts them
PREFIX = "checkpoint_"
FOLDERS = ("loop_state", "outer_state")  # of what each rank writes by itself
SCALER = "scaler.pt"
TORCHDATA_LOADERS = "dl_state_dict*.bin"  # what Accelerate writes of loaders that are stateful
MANIFEST = "farflung.json"
SHARDS_INDEX = ".metadata"  # in a folder of shards: what is where, as torch's DCP writes it

NAMED = re.compile(rf"{PREFIX}(\d+)")
CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")  # of a registered object
SHARDS = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")  # a folder
EXPORTED = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")  # by `save_model`
MODEL = re.compile(
    r"(model|pytorch_model)(_\d+|-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|pytorch_model_fsdp(_\d+)?\.bin|pytorch_model_fsdp_\d+/\.metadata"
)
KNOWN = re.compile(  # whatever belongs to a checkpoint
    rf"{MODEL.pattern}|{EXPORTED.pattern}|{CUSTOM.pattern}"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl"
    r"|(loop_state|outer_state)/rank_\d+\.bin"
    r"|(pytorch_model_fsdp|optimizer)_\d+/(\.metadata|__\d+_\d+\.distcp|farflung\.json)"
)
TORCH = (".bin", ".pt", ".pkl")  # endings of what `torch.save` writes

model_shards = "pytorch_model_fsdp_{}".format  # a folder
optimizer_shards = "optimizer_{}".format  # a folder
custom = "custom_checkpoint_{}.pkl".format  # of a registered object
random_states = "random_states_{}.pkl".format
loop_state = "loop_state/rank_{}.bin".format  # what only one rank knows: its position, its unfinished gradients
outer_state = "outer_state/rank_{}.bin".format  # the outer loops of a rank
checkpoint = f"{PREFIX}{{}}".format  # a folder, under automatic naming


def _numbered(stem: str, ending: str, index: int) -> str:
    return f"{stem}.{ending}" if index == 0 else f"{stem}_{index}.{ending}"


gathered_model = partial(_numbered, "pytorch_model_fsdp", "bin")  # weights of a sharded model that Accelerate gathered
optimizer = partial(_numbered, "optimizer", "bin")  # the state of one, whole
scheduler = partial(_numbered, "scheduler", "bin")


def model(index: int, safe: bool = True) -> str:
    """Weights, whole."""
    return _numbered("model", "safetensors", index) if safe else _numbered("pytorch_model", "bin", index)


def model_index(safe: bool = True) -> str:
    """In which of several files each weight is."""
    return f"{model(0, safe)}.index.json"
