# SPDX-License-Identifier: Apache-2.0
"""What a tensor keeps on this rank, and what it is a part of: the one place that asks whether it is a DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from farflung.base.torch_internals import shard_shape_and_offset

_PLAIN = {Tensor, nn.Parameter}


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that lives on this rank, without history; it shares the tensor's memory."""
    if type(tensor) in _PLAIN:
        return tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # asked by name: torch.distributed.tensor is slow to import
    return tensor.detach() if to_local is None else to_local().detach()


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the local part of each tensor starts in memory."""
    if set(map(type, tensors)) <= _PLAIN:
        return list(map(Tensor.data_ptr, tensors))
    return [local(tensor).data_ptr() for tensor in tensors]


def part_of(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape of this rank's part of `tensor`, and where it begins in the whole one."""
    if not is_sharded(tensor):
        return list(tensor.shape), [0] * tensor.dim()
    return shard_shape_and_offset(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def num_parts(tensor: Tensor) -> int:
    """Return into how many parts `tensor` is cut; more ranks than these share it if some hold the same part."""
    if not is_sharded(tensor):
        return 1
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    # Of a sharding with strides, which FSDP2 makes over tensor parallelism, is_shard() is False.
    return math.prod(n for n, placed in zip(mesh.shape, placements, strict=True) if not placed.is_replicate())


def is_partial(tensor: Tensor) -> bool:
    """Return whether the ranks that share `tensor` hold summands of it."""
    return is_sharded(tensor) and any(placed.is_partial() for placed in tensor.placements)  # type: ignore[attr-defined]


def align_gradients(parameters: Iterable[Tensor]) -> None:
    """Redistribute gradients to the placements of their parameters: a collective of the ranks on their meshes.

    Tensor parallelism leaves some whole, such as an embedding's, and others as summands, such as a norm's.
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_sharded(parameter) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of `model` is a DTensor."""
    return any(map(is_sharded, model.parameters()))


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor that `tensor` is this rank's part of: for a DTensor a collective of all its ranks."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def meshes(tensors: Iterable[Tensor]) -> list[DeviceMesh]:
    """Return the different meshes over which `tensors` are spread, in the order in which they come up."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor)))  # type: ignore[attr-defined]


def mesh_over(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh that `tensor` is spread over; None if it is whole."""
    return tensor.device_mesh if is_sharded(tensor) else None  # type: ignore[attr-defined]


def largest(mine: Tensor, shard: Tensor) -> Tensor:
    """Return the largest of the numbers `mine`, 0-d, of the ranks that share `shard`: a collective of these."""
    mesh = mesh_over(shard)
    if mesh is None:
        return mine
    from torch.distributed.tensor import DTensor, Partial  # here, as it is slow to import

    return full(DTensor.from_local(mine, mesh, [Partial("max")] * mesh.ndim))


def sharded_parts(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of `modules` that `fully_shard` was called on."""
    # By name, as torch.distributed.fsdp is slow to import; of the class, as a module looks long for what it has not.
    return [module for module in modules if hasattr(type(module), "set_requires_gradient_sync")]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard the modules that `fully_shard` was called on. Nothing is sent.

    After a forward pass without a backward pass some still hold whole parameters, which would hide values that are
    written to the shards.
    """
    for part in sharded_parts(modules):
        part.reshard()


def spread_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return this rank's part of a whole `value`, spread as `shard` is. Nothing is sent: each rank has the same value.

    Args:
        value: of the whole shape of `shard`.
    """
    from torch.distributed.tensor import distribute_tensor  # here, as it is slow to import

    mesh, placements = shard.device_mesh, shard.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach().to(local(shard).device), mesh, placements, src_data_rank=None)


def with_local(value: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor that is spread and placed as `shard` is, whose local part has the values of `value`."""
    made = torch.empty_like(shard.detach(), dtype=value.dtype)
    local(made).copy_(value)
    return made


def mesh_of(tensor: Tensor) -> tuple[list[int], str]:
    """Return the ranks that share `tensor` with this one, and how; the same for two tensors that are spread alike."""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return mesh.mesh.flatten().tolist(), f"{list(mesh.shape)} {placements}"
