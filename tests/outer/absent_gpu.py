# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not here: tensors that say `cuda:0` but lie in the host's memory, and what may not be done with them.

Torch's fake tensors have no values, and an outer loop votes by values; nor can they take a backward pass without a
driver. These have values, so a run must end with the bits that it has on the CPU. A tensor of the host among those of
the device is an error, as on a GPU, and whatever makes the host wait for the device is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from farflung.codec import blockwise

CUDA = torch.device("cuda", 0)
WRITES = {"copy_", "_foreach_copy_", "__set__"}
COPIES = {*WRITES, "to", "cpu", "cuda", "numpy"}
READS = {"item", "tolist", "equal", "allclose", "nonzero", "masked_select", "unique", "numpy"}
READS |= {"__bool__", "__int__", "__float__", "__index__", "is_nonzero", "bincount", "argwhere", "__contains__"}


class Away(Tensor):
    """A tensor on the device. Its memory is the host's, which no operation is told."""

    device = CUDA
    is_cuda = True
    is_cpu = False

    def record_stream(self, stream: None) -> None:
        """Do nothing: there is one stream."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, [])


def is_place(value: Any) -> bool:
    """Whether an argument names a device."""
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"))


def run(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], waits: list[str]) -> Any:
    """Run an operation of torch; note it in `waits` if the host would wait for the device."""
    name = function.__name__
    given = tree_leaves((args, kwargs))
    tensors = [one for one in given if isinstance(one, Tensor)]
    away = [isinstance(one, Away) for one in tensors]
    places = [torch.device(one).type for one in given if is_place(one)]
    if name in WRITES:
        ends_away = bool(away) and away[0]
    elif name in ("cpu", "cuda") or places:
        ends_away = "cuda" in (name, *places)
    else:
        ends_away = any(away) and (name != "to" or away[-1])  # `to` takes another tensor's place
    if any(away) and (name in READS or (name in COPIES and not ends_away)):
        waits.append(name)
    if any(away) and name not in COPIES:
        odd = [one for one, is_away in zip(tensors, away, strict=True) if not is_away and one.dim() > 0]
        assert not odd, f"{name}: a tensor of the host, of shape {list(odd[0].shape)}, among those of the device"
    moves = name in ("to", "cpu", "cuda") and away[0] != ends_away
    args, kwargs = tree_map(lambda one: "cpu" if is_place(one) else one, (args, kwargs))
    if name == "cuda":
        function = Tensor.cpu
    with torch._C.DisableTorchFunctionSubclass():
        found = function(*args, **kwargs)
        found = found.clone() if moves and found is args[0] else found
    if ends_away:
        return tree_map_only(Tensor, lambda one: one if isinstance(one, Away) else one.as_subclass(Away), found)
    return tree_map_only(Away, lambda one: one.as_subclass(Tensor), found)


class AbsentGpu(TorchFunctionMode):
    """Makes what a thread creates on `cuda` lie on the device that is not here.

    Attributes:
        waits: the operations for which the host waited.
    """

    def __init__(self, stream: Any = None) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, self.waits)

    def move(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; `Module.to` would keep the parameters, and so their place."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                module._parameters[name] = nn.Parameter(parameter.detach().to(CUDA))
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(CUDA)
        return model


class _Stream:
    """The one stream, and its events: all that was called is done."""

    device = CUDA

    def __init__(self, device: Any = None) -> None:
        self.record_event = lambda: self
        self.wait = self.wait_event = self.synchronize = lambda *_: None


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    """Give this process a GPU that is not here, without Triton, for the length of a block."""
    with pytest.MonkeyPatch.context() as patch, AbsentGpu() as gpu:
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", AbsentGpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        patch.setattr(blockwise, "kernels", lambda x, block: None)
        yield gpu
