# SPDX-License-Identifier: Apache-2.0
"""What a module holds in place of an offloaded weight: a tensor on the meta device that knows where its values are.

Hooks bring a module's own weights for its forward pass. Code that computes with the weight of another module, such as
`F.linear(x, self.proj.weight)`, meets the stand-in instead. It takes the values for that one call, since torch itself
would compute with the meta tensor and return zeros or whatever was in memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from farflung.base.errors import StateError
from farflung.base.torch_internals import ASK_OF_KIND, without_overrides
from farflung.base.tree import recursively_apply

# What describes or marks a tensor and needs no values. Whatever is not listed here gets them.
_DESCRIBES = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_shared", "is_pinned", "is_signed"),
    *("is_set_to", "is_same_size", "untyped_storage", "data_ptr", "has_names", "requires_grad_", "retain_grad"),
    *("register_hook", "register_post_accumulate_grad_hook", *ASK_OF_KIND),
    *("__hash__", "__len__", "__repr__", "__format__", "__set__"),
)
# What has the same values in another form: a stand-in too, as long as it stays on the meta device.
_CONVERTS = ("to", "type", "half", "float", "double", "bfloat16", "detach", "data")
_IN_PLACE = re.compile(r".*[^_]_|__setitem__|__i(add|sub|mul|(true|floor)div|mod|pow|matmul|and|x?or|[lr]shift)__")


class _Source(Protocol):
    """Where the values of a stand-in are."""

    def fetch(self, stand_in: Tensor) -> Tensor:
        """Return the values where the module that owns the weight would have them for its forward pass."""


class StandIn(Tensor):
    """An offloaded buffer, or the data of an offloaded parameter."""

    __slots__ = ("source",)
    source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _DESCRIBES:
            with without_overrides():
                return func(*args, **kwargs)
        if isinstance(args[0], StandIn) and (name in _CONVERTS or attribute):
            with suppress(NotImplementedError, RuntimeError), without_overrides():  # to a real device it needs values
                result = func(*args, **kwargs)
                if not isinstance(result, Tensor) or attribute == "grad":
                    return result
                if result.is_meta and (attribute or name) in _CONVERTS:
                    return result if result is args[0] else made(result, _Converted(args[0]))
        _refuse_changes(name, args, kwargs)
        args, kwargs = recursively_apply(_values, (args, kwargs), test_type=lambda leaf: isinstance(leaf, StandIn))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        with without_overrides():
            memo[id(self)] = copied = made(self, self.source)
        copied.source = copy.deepcopy(self.source, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _values(self).__reduce_ex__(protocol)


class ParameterStandIn(StandIn):
    """An offloaded parameter."""

    _is_param = True  # by which torch recognizes parameters of other classes


def made(like: Tensor, source: _Source) -> StandIn:
    """Return a stand-in with the shape, the dtype and the attributes of `like`, a tensor on the meta device."""
    with without_overrides():
        kind = ParameterStandIn if isinstance(like, nn.Parameter) else StandIn
        stand_in: Any = like.detach().as_subclass(kind).requires_grad_(like.requires_grad)
    stand_in.source = source
    vars(stand_in).update(vars(like))
    return cast(StandIn, stand_in)


@dataclass(frozen=True)
class _Converted:
    """The values of another stand-in, in another dtype or without gradients."""

    of: StandIn

    def fetch(self, stand_in: Tensor) -> Tensor:
        values: Tensor = _values(self.of).to(stand_in.dtype)
        return values if stand_in.requires_grad else values.detach()

    def __str__(self) -> str:
        return str(self.of.source)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _values(stand_in: StandIn) -> Tensor:
    return stand_in.source.fetch(stand_in)


def _refuse_changes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise StateError if a call would write into a stand-in: the weight would stay as it was."""
    is_in_place = _IN_PLACE.fullmatch(name) is not None
    written = [kwargs.get("out"), args[0] if is_in_place and args else None]
    for target in written:
        for one in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(one, StandIn):
                raise StateError(
                    f"{name} would change {one.source}, which is offloaded, so the change would be lost. Change it "
                    "before the model is dispatched, or after remove_hook_from_submodules(model)."
                )
