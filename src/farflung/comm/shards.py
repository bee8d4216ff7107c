# SPDX-License-Identifier: Apache-2.0
"""What a tensor keeps on this rank: the one place that asks whether it is a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

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


def model_has_dtensor(model: nn.Module) -> bool:
    """Say whether a parameter of `model` is a DTensor."""
    return any(type(parameter) not in _PLAIN and hasattr(parameter, "to_local") for parameter in model.parameters())
