# SPDX-License-Identifier: Apache-2.0
"""Gather, reduce, broadcast and pad nested tensors over ranks: one collective whatever the number of leaves and dtypes.

The names, arguments and results are Accelerate's. Ranks that bring different things (structures, shapes, dtypes, kinds
of device) all raise the same `CollectiveMismatch`; a rank whose own arguments are wrong, as when a leaf is no tensor,
raises what is wrong with them, and the others learn of it. On one rank nothing is sent, and values are returned as they
are.
"""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.base.checks import check_number, shown, wrong_type
from farflung.base.errors import ConfigError, FarflungError, WrongType
from farflung.base.torch_internals import foreach_add, foreach_div_, foreach_maximum, foreach_mul_
from farflung.base.tree import flatten, unflatten
from farflung.comm import payloads
from farflung.comm.exchange import MAX_CAPACITY, Exchange, Packets
from farflung.comm.group import SUMMED_IN, Op
from farflung.comm.packet import Signature, raw, require_alike

_T = TypeVar("_T")

_GATHER: Signature = ("gather",)
_GATHER_RAGGED: Signature = ("gather", ("ragged", True))
_WAIT: Signature = ("wait_for_everyone",)
REDUCTIONS = ("sum", "mean", "max", "none")
_MAX_LOCAL_SUM = 1024 * 1024  # bytes from all ranks; above, summing them all on each rank is no longer the short way

# What a sum or maximum is computed in. gloo and NCCL know no int16 and no bool.
_FLOATS = (torch.float64, torch.float32, torch.complex128, torch.complex64)
_COMPUTED_IN = {dtype: dtype for dtype in (*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)} | SUMMED_IN
_COMPUTED_IN |= {torch.int16: torch.int32, torch.bool: torch.uint8}


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left unpadded."""


def wait_for_everyone(exchange: Exchange, within: str | None = None) -> None:
    """Return when every rank has called this. `within`: the script's own call, if another one, for errors to name."""
    if exchange.size > 1:
        signature = _WAIT if within is None else (within,)
        leaves, spec = exchange.flatten(signature, ())
        exchange.share(signature, leaves, spec)


def gather(
    exchange: Exchange, tree: Any, ragged: bool = False, at: str | None = None, within: str | None = None
) -> Any:
    """Concatenate each tensor of `tree` over the ranks, in rank order, along its first dimension.

    Args:
        tree: nested tensors of one structure on all ranks. Numbers (0-d tensors) become vectors `[size]`.
        ragged: allow first dimensions to differ between ranks, also to be 0.
        at: a place in the program, where ranks may come to different ones; it is a mismatch if they differ.
        within: see `wait_for_everyone`.

    Returns:
        a tree of new tensors, detached, each `[size * n, ...]` on the device it came from; alone, `tree` itself.
    """
    own = _GATHER_RAGGED if ragged else _GATHER
    signature = _placed(own if within is None else (within,), at)
    leaves, spec = exchange.flatten(signature, tree)
    if exchange.size == 1:
        return tree
    packets = exchange.share(signature, leaves, spec)
    if ragged and not packets.same:
        require_alike(
            packets.headers,
            "Only first dimensions may differ here; use gather_object.",
            lambda kind: (kind.shape[1:], len(kind.shape), kind.dtype, kind.device),
        )
    else:
        require_alike(packets.headers, "Use pad_across_processes(dim=0) or gather_object.")
        if not all(packets.arrived):
            return unflatten(spec, payloads.gather(exchange, leaves))
    columns = zip(*_apart(exchange, packets, leaves), strict=True)
    joined = [torch.stack(column) if column[0].dim() == 0 else torch.cat(column) for column in columns]
    return unflatten(spec, [x.to(leaf.device) for x, leaf in zip(joined, leaves, strict=True)])


def gather_object(
    exchange: Exchange, objects: Any, at: str | None = None, name: str = "gather_object", within: str | None = None
) -> Any:
    """Collect the items of each rank's list of picklable objects in one list, in rank order.

    Args:
        objects: a list, tuple or other iterable of objects. Mappings and strings are refused: gathered item by item
            they would lose their values.
        at: see `gather`.
        name: of the call that a script made, for errors about its argument.
        within: see `wait_for_everyone`; None: `name`.

    Returns:
        the list of all items; alone, `objects` itself.
    """
    signature = _placed((within or name,), at)
    if not isinstance(objects, Iterable) or isinstance(objects, (Mapping, str, bytes)):
        what = f"{name}: wants a list, got a {type(objects).__name__} ({shown(objects)}); wrap it in one."
        exchange.fail(signature, WrongType(what))
    if exchange.size == 1:
        return objects
    # pickle would write all that a row is a view of.
    items = [row.clone() for row in objects] if isinstance(objects, Tensor) else list(objects)
    leaves, spec = exchange.flatten(signature, _pickled(exchange, signature, items))
    parts = _apart(exchange, exchange.share(signature, leaves, spec), leaves)
    return [item for (part,) in parts for item in pickle.loads(raw(part.cpu()))]


def broadcast(exchange: Exchange, tree: Any, from_process: int = 0, within: str | None = None) -> Any:
    """Overwrite each tensor of `tree`, in place, with the one of rank `from_process`.

    Args:
        tree: nested tensors, with the same structure, shapes and dtypes on all ranks.
        within: what this is a part of, such as `iter(loader)`; the errors name that.

    Returns:
        a new `tree` of the same tensors; alone, `tree` itself.
    """
    signature = _called(exchange, "broadcast", from_process)
    leaves, spec = exchange.flatten(signature, tree)
    if exchange.size == 1:
        return tree
    if within:
        signature = (within,)
    limit = MAX_CAPACITY if exchange.rank == from_process else 0
    packets = exchange.share(signature, leaves, spec, limit)
    require_alike(
        packets.headers, "Every rank must pass tensors of the sender's shapes and dtypes, which are overwritten."
    )
    if not packets.arrived[from_process]:
        payloads.broadcast(exchange, leaves, from_process)
    elif exchange.rank != from_process:
        payloads.overwrite(leaves, packets.views(from_process))
    return unflatten(spec, leaves)


def broadcast_object_list(
    exchange: Exchange, object_list: list[Any], from_process: int = 0, within: str | None = None
) -> list[Any]:
    """Replace the items of `object_list`, in place, by those of rank `from_process`; return the list.

    The items are picklable objects, as many on all ranks. `within` is that of `broadcast`.
    """
    signature = _called(exchange, "broadcast_object_list", from_process)
    if not isinstance(object_list, list):
        wanted = "a list, whose items are overwritten"
        exchange.fail(signature, wrong_type("broadcast_object_list: object_list", object_list, wanted))
    if exchange.size == 1:
        return object_list
    signature = (*(signature if within is None else (within,)), ("items", len(object_list)))
    sends = exchange.rank == from_process
    content = _pickled(exchange, signature, object_list) if sends else torch.empty(0, dtype=torch.uint8, device="cpu")
    leaves, spec = exchange.flatten(signature, content)
    packets = exchange.share(signature, leaves, spec)
    if not packets.arrived[from_process]:
        (kind,) = packets.headers[from_process].kinds
        received = content if sends else torch.empty(kind[0], dtype=torch.uint8, device="cpu")
        payloads.broadcast(exchange, [received], from_process)
    else:
        (received,) = packets.views(from_process)
    if not sends:
        object_list[:] = pickle.loads(raw(received))
    return object_list


def from_first(exchange: Exchange, act: Callable[[], _T], within: str = "outer loop") -> _T:
    """Call `act` on rank 0, and return its result on all ranks; an error of Farflung's there is raised on all.

    `within` is that of `broadcast`.
    """
    if exchange.size == 1:
        return act()
    said: tuple[Any, FarflungError | None] = None, None
    if exchange.rank == 0:
        try:
            said = act(), None
        except FarflungError as error:
            said = None, error
    ((found, failure),) = broadcast_object_list(exchange, [said], within=within)
    if failure is not None:
        raise failure
    return found  # type: ignore[no-any-return]


def reduce(
    exchange: Exchange, tree: Any, reduction: str = "mean", scale: float = 1.0, within: str | None = None
) -> Any:
    """Reduce each tensor of `tree` over the ranks.

    Sums are formed in rank order, half precision in fp32, so that all ranks get the same bits in every run; large
    values go through the backend's all_reduce, also in fp32.

    Args:
        tree: nested tensors, with the same structure, shapes and dtypes on all ranks.
        reduction: `mean`, `sum`, `max`, or `none`, which leaves the values as they are.
        scale: what the results are multiplied by.
        within: see `wait_for_everyone`.

    Returns:
        a tree of new tensors with the dtypes of the old ones, also when alone.

    Raises:
        ConfigError: the reduction is unknown, or makes no sense for a dtype, such as the mean of integers.
    """
    try:
        check_number("reduce: scale", scale)
    except ConfigError as error:
        exchange.fail(("reduce", ("reduction", str(reduction))), error)
    signature = (within,) if within else ("reduce", ("reduction", str(reduction)), ("scale", float(scale)))
    if reduction not in REDUCTIONS:
        exchange.fail(signature, ConfigError(f"reduce: unknown reduction {reduction!r}. Use {', '.join(REDUCTIONS)}."))
    leaves, spec = exchange.flatten(signature, tree)
    if reduction == "none":
        return unflatten(spec, [x.clone() for x in leaves])
    wrong = _wrong_dtype(dict.fromkeys([x.dtype for x in leaves]), reduction, scale, exchange.size)
    if wrong:
        exchange.fail(signature, ConfigError(f"reduce: {wrong}"))
    factor = int(scale) if float(scale).is_integer() else scale
    if exchange.size == 1:
        return unflatten(spec, [x.clone() if factor == 1 else x * factor for x in leaves])
    packets = exchange.share(signature, leaves, spec, limit=_MAX_LOCAL_SUM // exchange.size)
    require_alike(
        packets.headers, "reduce needs equal shapes and dtypes on all ranks; use gather_object if they differ."
    )
    op: Op = "max" if reduction == "max" else "sum"
    dtypes = [_COMPUTED_IN[x.dtype] for x in leaves]
    reduced = _reduced(packets, dtypes, op) if all(packets.arrived) else payloads.reduce(exchange, leaves, dtypes, op)
    with torch.no_grad():
        if reduction == "mean" and reduced:
            foreach_div_(reduced, exchange.size)
        if factor != 1 and reduced:
            foreach_mul_(reduced, factor)
        return unflatten(spec, [x.to(leaf.device, leaf.dtype) for x, leaf in zip(reduced, leaves, strict=True)])


def pad_across_processes(
    exchange: Exchange, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Pad each tensor of `tree` along `dim` to the longest of all ranks.

    Args:
        tree: nested tensors of one structure, each with as many dimensions on all ranks.
        dim: the dimension; tensors that have no such dimension, and nested ones, are left as they are.
        pad_index: what the new places hold.
        pad_first: pad in front, not behind.

    Returns:
        a tree of the tensors as they were, where they are the longest, and of padded copies.

    Raises:
        ConfigError: `pad_index` is no value of a tensor's dtype.
    """
    if not hasattr(dim, "__index__"):
        exchange.fail(("pad_across_processes",), wrong_type("pad_across_processes: dim", dim, "a whole number"))
    signature = ("pad_across_processes", ("dim", index(dim)))
    if not isinstance(pad_index, Real):
        exchange.fail(signature, wrong_type("pad_across_processes: pad_index", pad_index, "a number"))
    found, spec = flatten(tree)
    nested = {k: x for k, x in enumerate(found) if isinstance(x, Tensor) and x.is_nested}
    if nested:
        warnings.warn(
            "pad_across_processes: a nested tensor can't be padded; it is returned as it is.",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
    dense = [torch.empty(0) if k in nested else x for k, x in enumerate(found)]
    leaves, spec = exchange.flatten(signature, unflatten(spec, dense))
    for x in leaves:
        if -x.dim() <= dim < x.dim() and not _holds(x.dtype, pad_index):
            what = f"pad_across_processes: pad_index is {pad_index!r}, but {x.dtype} has no value {pad_index!r}."
            exchange.fail(signature, ConfigError(what))
    if exchange.size == 1:
        return tree
    packets = exchange.share(signature, leaves, spec, limit=0)
    require_alike(packets.headers, "All ranks must have the same number of dimensions.", lambda kind: len(kind.shape))
    padded = []
    for k, x in enumerate(leaves):
        inside = -x.dim() <= dim < x.dim()
        length = max(header.kinds[k].shape[dim] for header in packets.headers) if inside else 0
        padded.append(_padded(x, dim, length, pad_index, pad_first) if inside else x)
    return unflatten(spec, [nested.get(k, x) for k, x in enumerate(padded)])


def _apart(exchange: Exchange, packets: Packets, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return each rank's leaves, by rank, as views of scratch."""
    if all(packets.arrived):
        return [packets.views(rank) for rank in range(exchange.size)]
    return payloads.gather_apart(exchange, packets.headers, leaves)


def _reduced(packets: Packets, dtypes: list[torch.dtype], op: Op) -> list[Tensor]:
    """Sum the packets' leaves in rank order, or take their maximum; new tensors of `dtypes`."""

    def computed(rank: int) -> list[Tensor]:
        return [x if x.dtype is dtype else x.to(dtype) for x, dtype in zip(packets.views(rank), dtypes, strict=True)]

    if not dtypes:
        return []
    combine = foreach_add if op == "sum" else foreach_maximum
    return list(functools.reduce(combine, map(computed, range(len(packets.headers)))))


def _padded(x: Tensor, dim: int, length: int, pad_index: float, pad_first: bool) -> Tensor:
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_full(shape, pad_index)
    padded.narrow(dim, missing if pad_first else 0, x.shape[dim]).copy_(x)
    return padded


def _placed(signature: Signature, at: str | None) -> Signature:
    return signature if at is None else (*signature, ("at", at))


def _wrong_dtype(dtypes: Iterable[torch.dtype], reduction: str, scale: float, size: int) -> str | None:
    """Return why tensors of `dtypes` can't be reduced in this way; None: they can."""
    for dtype in dtypes:
        inexact = dtype.is_floating_point or dtype.is_complex
        if dtype not in _COMPUTED_IN:
            return f"tensors of {dtype} can't be reduced. Convert them first, for example with .float()."
        if dtype is torch.bool and reduction != "max":
            return f"the {reduction} of torch.bool is not defined. Use reduction='max' for any(), or .int() to count."
        if dtype.is_complex and reduction == "max":
            return f"{dtype} has no maximum."
        if not inexact and reduction == "mean" and size > 1:
            return f"the mean of {dtype} values is not {dtype}. Use .float() or reduction='sum'."
        if not inexact and (not float(scale).is_integer() or dtype is torch.bool) and scale != 1:
            return f"tensors of {dtype} can't be scaled by {scale}. Use .float()."
    return None


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Return whether `value` is one of the values of `dtype`, rounding aside."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return float(value).is_integer() and low <= value <= high


def _pickled(exchange: Exchange, signature: Signature, objects: list[Any]) -> Tensor:
    try:
        content = pickle.dumps(objects)
    except Exception as error:  # whatever the objects' own code raises; the other ranks raise too
        exchange.fail(signature, error)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _called(exchange: Exchange, name: str, from_process: int) -> Signature:
    """Return the signature of a broadcast; raise on every rank if `from_process` is no rank."""
    rank = index(from_process) if hasattr(from_process, "__index__") else -1
    signature = (name, ("from_process", rank))
    if not 0 <= rank < exchange.size:
        ranks = "0" if exchange.size == 1 else f"0 to {exchange.size - 1}"
        what = f"{name}: from_process={from_process!r} is no rank of this group; use {ranks}."
        exchange.fail(signature, ConfigError(what))
    return signature
