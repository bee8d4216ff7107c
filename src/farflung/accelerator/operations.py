# SPDX-License-Identifier: Apache-2.0
"""Accelerate's free functions over the processes of this run; each joins the world first if no call has done so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from farflung.accelerator.session import current_session, flushed
from farflung.base.checks import check_type
from farflung.base.torch_internals import child_slots, compiled_again, compiled_from
from farflung.base.tree import is_container, is_namedtuple, leaves_of, rebuilt, recursively_apply
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.data import prepare as loading
from farflung.precision.amp import without_precision
from farflung.process.bootstrap import join_world
from farflung.strategy.compile import without_compile

_PARALLEL = (DistributedDataParallel, DataParallel)


def _flushed() -> Exchange:
    return flushed(join_world().exchange)


def gather(tensor: Any) -> Any:
    """Concatenate each tensor of a tree over all processes, in rank order, along the first dimension."""
    return collectives.gather(_flushed(), tensor)


def gather_object(object: Any) -> Any:
    """Gather picklable objects: each process's list, joined in rank order."""
    return collectives.gather_object(_flushed(), object)


def gather_for_metrics(
    exchange: Exchange, data: Any, remainder: int, use_gather_object: bool, at: str | None = None
) -> Any:
    """Gather `data` and keep the first `remainder` samples of it; all of them if that is 0 or less.

    Args:
        data: a tree of tensors, whose first dimensions may differ between ranks; a list of picklable objects, one a
            sample; or a dictionary, a named tuple, a dataclass or a tuple with tensors and containers of such.
        use_gather_object: gather rows as pickled objects even if all leaves are tensors; they may differ in shape.
        at: the current batch's position: a rank that is at another one gets an error.
    """
    is_record = is_container(data) and (not isinstance(data, (list, tuple)) or is_namedtuple(data) or _is_mixed(data))
    if not use_gather_object and _holds_tensors_alone(data):
        gathered = collectives.gather(exchange, data, ragged=True, at=at, within="gather_for_metrics")
        # One process gathers a number as it is: nothing to cut.
        return recursively_apply(lambda x: x[:remainder] if x.ndim else x, gathered) if remainder > 0 else gathered
    if use_gather_object or not is_record:
        # Of another name than tensors, which must not be taken for them.
        within = "gather_for_metrics of objects"
        items = collectives.gather_object(exchange, data, at, "gather_for_metrics", within)
        return items[:remainder] if remainder > 0 else items
    return rebuilt(data, lambda value: gather_for_metrics(exchange, value, remainder, False, at))


def _is_mixed(data: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether `data` has tensors of samples, such as predictions, next to containers, such as their texts."""
    tensors = [isinstance(item, torch.Tensor) and item.ndim > 0 for item in data]
    others = [is_container(item) for item, is_tensor in zip(data, tensors, strict=True) if not is_tensor]
    return any(tensors) and bool(others) and all(others)


def _holds_tensors_alone(data: Any) -> bool:
    """Return whether `data` is a tree of tensors. An empty list is not: on another rank it may hold objects."""
    if isinstance(data, Mapping):
        return all(map(_holds_tensors_alone, data.values()))
    leaves = leaves_of(data)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give every process the tensors of one."""
    return collectives.broadcast(_flushed(), tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the items of `object_list` on every process with those of one, and return it."""
    return collectives.broadcast_object_list(_flushed(), object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Sum or average each tensor of a tree over all processes, and multiply by `scale`."""
    return collectives.reduce(_flushed(), tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad each tensor of a tree along `dim` to the longest of all processes."""
    return collectives.pad_across_processes(_flushed(), tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when every process has come here."""
    collectives.wait_for_everyone(_flushed())


@wraps(loading.prepare_data_loader)
def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
    """Prepare a loader; it reports to the loop of the process's latest Accelerator, if there is one."""
    prepared = loading.prepare_data_loader(*args, **kwargs)
    session = current_session()
    if session is not None:
        prepared.report_to(session.loop)
    return prepared


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the module inside one that DDP or torch.compile wrapped. Talks to no other process.

    Args:
        keep_fp32_wrapper: False returns a module that computes without mixed precision: if it was prepared with that, a
            duplicate that shares all its tensors, because the prepared one keeps computing with it.
        keep_torch_compile: False returns a module that computes without torch.compile: the one inside a compiled one,
            or, if the module itself was compiled, a duplicate that shares all its tensors.
        recursive: replace modules inside that DDP wrapped, too, by what it wrapped; the model itself changes.
    """
    check_type("extract_model_from_parallel: model", model, nn.Module, "an nn.Module")
    compiled: Any = None
    inner: Any = model
    while isinstance(inner, _PARALLEL) or compiled_from(inner) is not None:
        if isinstance(inner, _PARALLEL):
            inner = inner.module
        else:
            compiled, inner = inner, compiled_from(inner)
    for holder in inner.modules() if recursive else ():  # it visits the children that the block below puts there
        for name, child in child_slots(holder).items():
            while isinstance(child, _PARALLEL):
                child = child.module
            setattr(holder, name, child)
    if not keep_fp32_wrapper:
        inner = without_precision(inner)
    if not keep_torch_compile:
        return without_compile(inner)
    if compiled is None:
        return inner
    # If DDP itself was compiled, compile what it holds in the same way.
    return compiled if compiled_from(compiled) is inner else compiled_again(compiled, inner)
