# SPDX-License-Identifier: Apache-2.0
"""Loading weights into a model tensor by tensor, each straight to its device or to the disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farflung.base.checks import check_path
from farflung.base.errors import CheckpointError, ConfigError, Unsupported
from farflung.base.files import utf8_name
from farflung.base.torch_internals import compiled_from, is_flattened
from farflung.base.tree import send_to_device
from farflung.big_model import tensors
from farflung.big_model.hooks import align_module_device, has_offloaded_params, weights_of
from farflung.big_model.offload import Folder, Index, load_offloaded_weight, offload_weight, save_offload_index
from farflung.checkpoint import paths
from farflung.checkpoint.files import inside
from farflung.checkpoint.reader import damage_as, read_weights
from farflung.comm.shards import model_has_dtensor

_log = logging.getLogger("farflung.utils.modeling")
_T = TypeVar("_T")


def load_state_dict(
    checkpoint_file: Folder, device_map: Mapping[str, tensors.Device] | None = None
) -> dict[str, Tensor]:
    """Return the weights in a file, safetensors or torch's.

    Args:
        device_map: a device for each module; from a safetensors file, weights go there directly. What is for the disk,
            or has no device, comes to the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or holds something that would run code.
        ConfigError: the file was written for another framework.
    """
    path = check_path("checkpoint_file", checkpoint_file)
    weights = _read(path)
    devices = {"": "cpu", **(device_map or {})}
    for name, tensor in weights.items() if path.suffix == ".safetensors" else ():
        device = tensors.device_for(name, devices)
        weights[name] = tensor.to(tensors.as_device("cpu" if device == "disk" else device))
    return weights


def _read(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file; those of a safetensors file are mapped, and read when they are used."""
    weights = read_weights(path)
    if path.suffix == ".safetensors":
        with utf8_name(path) as name, safe_open(name, framework="pt") as file:
            kind = (file.metadata() or {}).get("format", "pt")
        if kind != "pt":
            raise ConfigError(f"{path} holds weights for {kind!r}. Save them for PyTorch ('pt').")
    return weights


def _files_of(checkpoint: Path) -> tuple[list[Path], set[str] | None]:
    """Return the files with weights, and the names in them where an index says them."""
    if checkpoint.is_dir():
        for name in (paths.model(0, safe=False), paths.model(0)):  # Accelerate's order
            if (checkpoint / name).is_file():
                return [checkpoint / name], None
        indices = sorted(checkpoint.glob("*.index.json"))
        if len(indices) != 1:
            raise CheckpointError(
                f"{checkpoint} has {len(indices)} files *.index.json and no {paths.model(0)} or "
                f"{paths.model(0, safe=False)}. Name the file with the weights, or the index."
            )
        checkpoint = indices[0]
    if not checkpoint.is_file():
        raise CheckpointError(f"{checkpoint} does not exist. Name a file with weights, an index, or a folder of them.")
    if checkpoint.suffix != ".json":
        return [checkpoint], None
    with damage_as(f"{checkpoint} is no index of weights"):
        index = json.loads(checkpoint.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = index.get("weight_map", index)
        files = [checkpoint.parent / inside(name) for name in sorted(set(weight_map.values()))]
    return files, set(weight_map)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Folder,
    device_map: Mapping[str, tensors.Device] | None = None,
    offload_folder: Folder | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model. Those for several devices still need `dispatch_model` before the model can run.

    Args:
        checkpoint: a file with weights, the index of several, or a folder that has one of these.
        device_map: a device for each module. By default weights are copied to where the model has them.
        offload_folder: where weights for the disk are written.
        dtype: which floating-point weights are converted to; by default the model's own.
        offload_state_dict: has no effect: only one weight (of files that `torch.save` wrote, one file) is held aside.
        offload_buffers: write buffers of modules on the disk there too.
        keep_in_fp32_modules: names of modules that keep 32 bits where `dtype` is fp16.
        strict: names in the checkpoint and in the model must be the same.
        full_state_dict, broadcast_from_rank0: as torch's `StateDictOptions`, for a model that is sharded over ranks.

    Raises:
        CheckpointError: the checkpoint is missing or damaged; under `strict`, names differ; otherwise, it lacks weights
            that the model has on the meta device, that is, without values.
        ConfigError: shapes differ, a weight has no device, or there is no `offload_folder`.
        Unsupported: `offload_8bit_bnb`, or 8-bit weights of bitsandbytes.
    """
    if offload_8bit_bnb:
        raise Unsupported("offload_8bit_bnb is not supported. Quantize with torchao, or load with transformers.")
    ties = tensors.find_tied_parameters(model)
    tensors.warn_if_untied(model, ties)
    if device_map is not None:
        tensors.check_tied_parameters_on_same_device(ties, device_map)
    may_share = dist.is_available() and dist.is_initialized() and device_map is None and dtype is None
    if not may_share and (broadcast_from_rank0 or not full_state_dict):
        raise ConfigError(
            "full_state_dict=False and broadcast_from_rank0 are for models that are sharded over a process group; "
            "they go with neither device_map nor dtype."
        )
    is_wrapped = any(isinstance(one, DistributedDataParallel) or compiled_from(one) for one in model.modules())
    is_sharded = model_has_dtensor(model) or any(map(is_flattened, model.parameters()))
    by_torch = may_share and (broadcast_from_rank0 or is_wrapped or is_sharded)
    sources: Iterator[dict[str, Tensor]] = iter(())

    def find() -> tuple[set[str], int]:
        nonlocal sources
        files, names = _files_of(check_path("checkpoint", checkpoint))
        sources = map(_read, files)  # one file at a time
        if names is None:
            sources = iter([weights := _read(files[0])])
            names = set(weights)
        _check_names(model, checkpoint, names, ties, strict)
        return names, len(files)

    names, num_files = _on_first(find, broadcast_from_rank0)
    if by_torch:  # which also knows names without the prefixes of wrappers
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(
            full_state_dict=full_state_dict, strict=False, broadcast_from_rank0=broadcast_from_rank0
        )
        weights_here: dict[str, Tensor] = {}  # of one file; empty on ranks that get them from rank 0
        for _ in range(num_files):
            weights_here.clear()
            _on_first(lambda: weights_here.update(next(sources)), broadcast_from_rank0)
            set_model_state_dict(model, dict(weights_here), options=options)
    else:
        kind, keep = tensors.as_dtype(dtype), keep_in_fp32_modules or ()
        _load_each(model, sources, names, device_map, offload_folder, kind, offload_buffers, keep)
    # Names in the checkpoint first: they have the dtype that was asked for.
    tensors.retie_parameters(model, [sorted(group, key=lambda name: name not in names) for group in ties])


def _on_first(act: Callable[[], _T], for_all: bool) -> _T:
    """Call `act` on each rank; or, `for_all`, on rank 0 alone: all ranks get its result, or raise."""
    if not for_all:
        return act()
    found: list[Any] = [None, ""]
    try:
        if dist.get_rank() == 0:
            found[0] = act()
    except BaseException as error:
        found[1] = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.broadcast_object_list(found)
    if found[1]:
        raise CheckpointError(f"Rank 0 could not load the checkpoint for all ranks: {found[1]}")
    result: _T = found[0]
    return result


def _check_names(
    model: nn.Module, checkpoint: Folder, names: set[str], ties: Iterable[Iterable[str]], strict: bool
) -> None:
    """Compare the names in a checkpoint with the model's, before anything is changed."""
    expected = model.state_dict()
    if any(name.endswith(".SCB") for name in names - set(expected)):
        raise Unsupported(f"{checkpoint} holds 8-bit weights of bitsandbytes. Load it with transformers.")
    shared = {name for group in ties if names & set(group) for name in group}
    missing = [name for name in expected if name not in names and name not in shared]
    empty = [name for name in missing if isinstance(expected[name], Tensor) and expected[name].is_meta]
    unexpected = sorted(names - set(expected))
    if strict and (missing or unexpected):
        raise CheckpointError(f"{checkpoint} lacks {missing or 'nothing'}, and has {unexpected or 'nothing'} too many.")
    if empty:
        raise CheckpointError(
            f"{checkpoint} lacks {empty}, which the model has on the meta device, so it could not run. If weights are "
            "shared, call the model's tie_weights() first."
        )
    if missing:
        _log.warning("%s lacks %s", checkpoint, missing)
    if unexpected:
        _log.warning("%s in %s were not used when loading, as the model has no place for them", unexpected, checkpoint)


def _load_each(
    model: nn.Module,
    sources: Iterable[dict[str, Tensor]],
    names: set[str],
    device_map: Mapping[str, tensors.Device] | None,
    folder: Folder | None,
    dtype: torch.dtype | None,
    offload_buffers: bool,
    keep_in_fp32: Sequence[str],
) -> None:
    """Put weights, which have these `names`, where a device map wants them."""
    if device_map is not None and "disk" in device_map.values():
        if folder is None:
            raise ConfigError("The device map sends modules to the disk, and no offload_folder says where.")
        Path(folder).mkdir(parents=True, exist_ok=True)
    own, before = set(model.state_dict()), weights_of(model)
    staying = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    index: Index = {}
    lost = set(names)

    def place(name: str, value: Tensor) -> Tensor | None:
        """Give the model a weight, on the device of the map; return what is to be written where that is the disk."""
        path, _, key = name.rpartition(".")
        if key == "_extra_state":  # of whatever kind its module saves
            model.get_submodule(path).set_extra_state(value)
            return None
        is_kept = dtype == torch.float16 and any(name == kept or f"{kept}." in name for kept in keep_in_fp32)
        kind = torch.float32 if is_kept else dtype
        old = tensors.get_tensor(model, name)
        if device_map is None and kind is None and not old.is_meta:
            with torch.no_grad():
                old.copy_(tensors.converted(name, old, value, kind))  # an optimizer may hold the parameter
            return None
        device = ("cpu" if old.is_meta else old.device) if device_map is None else tensors.device_for(name, device_map)
        if device != "disk" or name in staying:  # in memory with its module, not on the disk with the module's weights
            there = "cpu" if device == "disk" else device
            tensors.set_module_tensor_to_device(model, name, there, value, kind, clear_cache=False)
            return None
        stored = tensors.converted(name, old, value, kind)
        tensors.set_module_tensor_to_device(model, name, "meta", dtype=stored.dtype)
        return stored

    for name, value in (item for weights in sources for item in weights.items()):
        lost.discard(name)
        for_disk = place(name, value) if name in own else None
        if for_disk is not None:
            assert folder is not None
            offload_weight(for_disk, name, folder, index, own=before)
    if folder is not None:
        save_offload_index(index, folder)
    if lost:
        raise CheckpointError(f"The index names {sorted(lost)}, and the files lack them, so the model is incomplete.")


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Load weights that `offload_weight` wrote into a model, on the CPU, by their `index` of dtypes and shapes."""
    for name, info in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), info)
        tensors.set_module_tensor_to_device(model, name, "cpu", value)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model whose weights are offloaded, on the CPU; ConfigError if one has no values."""
    state: dict[str, Tensor] = {}
    own = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        with align_module_device(module, "cpu"):
            for name, value in module.state_dict().items():
                full = f"{path}.{name}" if path else name
                if full in own and not getattr(value, "is_meta", False):  # extra state may be no tensor
                    state.setdefault(full, send_to_device(value, "cpu"))
    missing = [name for name in own if name not in state]
    if missing:
        raise ConfigError(f"{missing} are on the meta device and no hook has values for them, so they can't be saved.")
    return {name: state[name] for name in own}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: tensors.Device | None = "cpu",
) -> dict[str, Any]:
    """Replace what `state_dict` has of a module by its values, and return it; offloaded ones come to a device.

    `module_name` is the full name of one of the module's tensors.
    """
    root = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, value in module.state_dict().items():
            full = f"{root}.{name}" if root else name
            if full in state_dict:
                state_dict[full] = value
    return state_dict
