# SPDX-License-Identifier: Apache-2.0
"""Accelerate's free functions for the files of one sharded model or optimizer, and for making whole files of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farflung.accelerator.operations import extract_model_from_parallel
from farflung.base.checks import check_path
from farflung.base.errors import Unsupported
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.manager import CheckpointGroup, CheckpointSaver, SaveRequest
from farflung.checkpoint.writer import save_object
from farflung.compat.free_functions import is_peft_model
from farflung.process.bootstrap import join_world
from farflung.resume import lazy, models, optimizers

if TYPE_CHECKING:
    from farflung.accelerator.accelerator import Accelerator
    from farflung.checkpoint.sharded import ShardPlanner

Path_ = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write one sharded model, or (`adapter_only`) the active adapter of a PEFT model: every process calls this.

    Each process writes its shards to `output_dir/pytorch_model_fsdp_0`, with `model_index` in the name. If the
    plugin's `state_dict_type` is FULL_STATE_DICT, the first one writes all to `output_dir/pytorch_model_fsdp.bin`.
    """
    _only_dcp(use_dcp)
    folder = check_path("save_fsdp_model: output_dir", output_dir)
    bare, group = _chosen(model, adapter_only), _group(accelerator, "save_fsdp_model")
    state = models.model_shards(bare)
    if not _gathers(fsdp_plugin):
        _write_shards(group, folder / paths.model_shards(model_index), {"model": state})
        return
    whole = models.gathered_model(bare, state, accelerator.is_main_process)
    _write_whole(group, folder / paths.gathered_model(model_index), whole)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: Path_,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Give a model, sharded or not, the weights that `save_fsdp_model` or `save_state` wrote: every process calls this.

    `input_dir` is the folder of the checkpoint, or that of the model's shards in it. Returns what `load_state_dict`
    does. Raises CheckpointError, with the model as it was, if there are no such weights or they are damaged.
    """
    _only_dcp(use_dcp)
    folder = _parent_of(check_path("load_fsdp_model: input_dir", input_dir), paths.model_shards(model_index))
    bare = _chosen(model, adapter_only)
    if isinstance(bare, _Adapter):
        _check_encoder(bare.whole)
    checkpoint = Checkpoint(folder, None)
    group = _group(accelerator, "load_fsdp_model")
    state = _read(group, folder, lambda: models.read_model(bare, checkpoint, model_index, strict=True))
    return models.load(bare, state, strict=True)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: Path_,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of one optimizer of a sharded model, to `output_dir/optimizer_0`: every process calls this.

    If the plugin's `state_dict_type` is FULL_STATE_DICT, the first one writes all of it to
    `output_dir/optimizer.bin`.
    """
    _only_dcp(use_dcp)
    folder = check_path("save_fsdp_optimizer: output_dir", output_dir)
    bare = [extract_model_from_parallel(model)]
    names = optimizers.parameter_names(bare, optimizer)
    group = _group(accelerator, "save_fsdp_optimizer")
    group.agree(f"Writing {output_dir}", lambda: optimizers.check_optimizer(bare, optimizer))
    if not _gathers(fsdp_plugin):
        state = optimizers.by_name(optimizer.state_dict(), names)
        _write_shards(group, folder / paths.optimizer_shards(optimizer_index), optimizers.for_shards(state))
        return
    whole = optimizers.gathered_optimizer(optimizer, accelerator.is_main_process)
    _write_whole(group, folder / paths.optimizer(optimizer_index), whole and optimizers.by_name(whole, names))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: Path_,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Give an optimizer the state that `save_fsdp_optimizer` or `save_state` wrote; see `load_fsdp_model`.

    `adapter_only` changes nothing: the state is that of the parameters which the optimizer has.
    """
    _only_dcp(use_dcp)
    folder = check_path("load_fsdp_optimizer: input_dir", input_dir)
    folder = _parent_of(folder, paths.optimizer_shards(optimizer_index))
    bare = [extract_model_from_parallel(model)]
    group = _group(accelerator, "load_fsdp_optimizer")
    checkpoint = Checkpoint(folder, None)
    state = _read(group, folder, lambda: optimizers.read_optimizer(bare, optimizer, checkpoint, optimizer_index))
    optimizer.load_state_dict(state)


def merge_fsdp_weights(
    checkpoint_dir: Path_, output_path: Path_, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Make one file of a model's shards, in the directory `output_path`: `model.safetensors`, or `pytorch_model.bin`.

    The first process does it, on the CPU, in memory for one whole model; the others wait. None need be there but it.

    Args:
        checkpoint_dir: with the shards, such as `my_checkpoint/pytorch_model_fsdp_0`.
        safe_serialization: write safetensors, not with torch.
        remove_checkpoint_dir: remove `checkpoint_dir` when that is done.
    """
    source = check_path("merge_fsdp_weights: checkpoint_dir", checkpoint_dir)
    target = check_path("merge_fsdp_weights: output_path", output_path)
    world = join_world()

    def merge() -> None:
        if world.is_main:
            lazy.sharded.merge_shards(source, target, safe_serialization, remove_checkpoint_dir)

    CheckpointGroup(world.exchange, 0, "merge_fsdp_weights").agree(f"Merging {checkpoint_dir}", merge)


def _only_dcp(use_dcp: bool) -> None:
    if not use_dcp:
        raise Unsupported(
            "use_dcp=False, a file for each rank that loads on as many ranks alone, is not supported. Leave it out: "
            "writing needs no more communication than one small exchange."
        )


def _gathers(plugin: Any) -> bool:
    return plugin is not None and plugin.state_dict_type == "FULL_STATE_DICT"


def _group(accelerator: Accelerator, call: str) -> CheckpointGroup:
    return CheckpointGroup(accelerator._run.world.exchange, 0, call)


def _read(group: CheckpointGroup, folder: Path, read: Callable[[], Any]) -> Any:
    """Return what `read` returns on this process; an error on one is raised on all."""
    values: list[Any] = []
    group.agree(f"Loading {folder}", lambda: values.append(read()))
    return values[0]


def _parent_of(folder: Path, name: str) -> Path:
    return folder.parent if folder.name == name else folder


def _write_shards(group: CheckpointGroup, folder: Path, state: dict[str, Any]) -> None:
    saver = CheckpointSaver(group)
    request = SaveRequest(folder, {})
    planners: list[ShardPlanner] = []

    def plan() -> Any:
        planners.append(lazy.sharded.ShardPlanner("", state, saver.group.leads))
        return planners[0].plan

    with saver.begin(request) as staged:
        plans = saver.group.agree(request.doing, plan)
        saver.write(request, staged, [planners[0].entry(plans, saver.group.exchange.rank)])


def _write_whole(group: CheckpointGroup, path: Path, whole: dict[str, Any]) -> None:
    def write() -> None:
        if group.leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_object(whole, path)

    group.agree(f"Writing {path}", write)


class _Adapter(nn.Module):
    """The active adapter of a PEFT model, as a module: its weights alone, without its name in theirs."""

    whole: Any

    def __init__(self, model: Any) -> None:
        from peft import get_peft_model_state_dict

        super().__init__()
        self.__dict__["whole"] = model  # which is no child
        self._own: dict[str, Any] = get_peft_model_state_dict(model, adapter_name=model.active_adapter)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self._own)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return iter(self._own.items())

    def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Take weights by peft's function: what is computed for a state dict is no place to load it to."""
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(self.whole, dict(state), adapter_name=self.whole.active_adapter)


def _chosen(model: nn.Module, adapter_only: bool) -> nn.Module:
    bare: nn.Module = extract_model_from_parallel(model)
    return _Adapter(bare) if adapter_only and is_peft_model(bare) else bare


def _check_encoder(model: Any) -> None:
    """Raise Unsupported if an adapter's prompts are computed: peft saves the prompts, not what computes them."""
    encoders = getattr(model, "prompt_encoder", None)
    if not encoders:
        return
    computing = [name for name, _ in encoders[model.active_adapter].named_parameters() if name != "embedding.weight"]
    if computing:
        raise Unsupported(
            "load_fsdp_model: with adapter_only=True the file has the prompts of this adapter, from which the weights "
            f"of its encoder ({', '.join(computing[:3])}) can't be restored. Save and load it with adapter_only=False."
        )
