# SPDX-License-Identifier: Apache-2.0
"""The second step of a collective over nested data: payloads too large for the packet, or on another device.

The headers have been compared by now, so every rank takes the same path. Leaves of a megabyte and more travel straight
into their output, all at once; the others share one flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.base.torch_internals import foreach_copy_
from farflung.comm.exchange import Exchange
from farflung.comm.group import Op
from farflung.comm.packet import Header, PayloadLayout
from farflung.comm.tensor_memory import bytes_of

_LONG_BYTES = 1024 * 1024  # from here on the copy into a shared buffer costs more than a collective of its own


@torch.no_grad()
def gather(exchange: Exchange, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate each leaf over the ranks along its first dimension; shapes are the same on all ranks."""
    size, group, wire = exchange.size, exchange.group, exchange.wire(leaves)
    alone, shared = _split(leaves)
    # Numbers become a vector.
    shapes = [(size * x.shape[0], *x.shape[1:]) if x.shape else (size,) for x in leaves]
    outputs = [torch.empty(shape, dtype=x.dtype, device=wire) for shape, x in zip(shapes, leaves, strict=True)]
    sources = [_dense(leaves[k], wire) for k in alone]
    works = [group.all_gather(bytes_of(outputs[k]), bytes_of(source)) for k, source in zip(alone, sources, strict=True)]
    if shared:
        layout = _layout_of([leaves[k] for k in shared])
        mine = exchange.scratch("mine", layout.nbytes, wire)
        everyone = exchange.scratch("everyone", size * layout.nbytes, wire)
        foreach_copy_(layout.views(mine), [leaves[k] for k in shared])
        group.all_gather(everyone, mine).wait()
        targets = [outputs[k].view(size, *leaves[k].shape) for k in shared]
        for rank, row in enumerate(everyone.view(size, layout.nbytes).unbind()):
            foreach_copy_([target[rank] for target in targets], layout.views(row))
    for work in works:
        work.wait()
    return [output.to(leaf.device) for output, leaf in zip(outputs, leaves, strict=True)]


@torch.no_grad()
def gather_apart(exchange: Exchange, headers: Sequence[Header], leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return each rank's leaves, by rank, as views of scratch; their first dimensions may differ."""
    wire = exchange.wire(leaves)
    longest = max(header.layout.nbytes for header in headers)
    mine = exchange.scratch("mine", longest, wire)
    everyone = exchange.scratch("everyone", exchange.size * longest, wire)
    foreach_copy_(_layout_of(leaves).views(mine), list(leaves))
    exchange.group.all_gather(everyone, mine).wait()
    rows = everyone.view(exchange.size, longest).unbind()
    return [header.layout.views(row) for header, row in zip(headers, rows, strict=True)]


@torch.no_grad()
def reduce(exchange: Exchange, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype], op: Op) -> list[Tensor]:
    """Reduce each leaf over the ranks, computing in the dtype given for it; new tensors of that dtype, on the wire."""
    group, wire = exchange.group, exchange.wire(leaves)
    alone, shared = _split(leaves)
    outputs = [torch.empty(x.shape, dtype=dtype, device=wire) for x, dtype in zip(leaves, dtypes, strict=True)]
    if alone:
        foreach_copy_([outputs[k] for k in alone], [leaves[k] for k in alone])
    works = [group.all_reduce(outputs[k], op) for k in alone]
    for dtype in dict.fromkeys(dtypes[k] for k in shared):  # in an order that all ranks share
        members = [k for k in shared if dtypes[k] is dtype]
        layout = PayloadLayout([leaves[k].shape for k in members], [dtype] * len(members))
        flat = exchange.scratch("mine", layout.nbytes, wire)
        places = layout.views(flat)
        foreach_copy_(places, [leaves[k] for k in members])
        group.all_reduce(flat.view(dtype), op).wait()
        foreach_copy_([outputs[k] for k in members], places)
    for work in works:
        work.wait()
    return outputs


@torch.no_grad()
def broadcast(exchange: Exchange, leaves: Sequence[Tensor], src: int) -> None:
    """Overwrite each leaf with the one of rank `src`."""
    group, wire, sends = exchange.group, exchange.wire(leaves), exchange.rank == src
    alone, shared = _split(leaves)
    buffers = [_dense(leaves[k], wire) if sends else _receiver(leaves[k], wire) for k in alone]
    works = [group.broadcast(bytes_of(buffer), src) for buffer in buffers]
    if shared:
        members = [leaves[k] for k in shared]
        layout = _layout_of(members)
        flat = exchange.scratch("mine", layout.nbytes, wire)
        places = layout.views(flat)
        if sends:
            foreach_copy_(places, members)
        group.broadcast(flat, src).wait()
        if not sends:
            overwrite(members, places)
    for work in works:
        work.wait()
    if not sends:
        arrived = [(leaves[k], buffer) for k, buffer in zip(alone, buffers, strict=True) if buffer is not leaves[k]]
        overwrite([leaf for leaf, _ in arrived], [buffer for _, buffer in arrived])


@torch.no_grad()
def overwrite(leaves: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its leaf; unlike torch's call for many, into leaves that are lazily conjugated too."""
    for leaf, value in zip(leaves, values, strict=True):
        leaf.copy_(value)


def _split(leaves: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return which leaves travel alone and which share a buffer; it depends on nothing but shapes and dtypes."""
    alone = [k for k, x in enumerate(leaves) if x.nbytes >= _LONG_BYTES or (len(leaves) == 1 and x.nbytes > 0)]
    return alone, [k for k in range(len(leaves)) if k not in alone]


def _layout_of(leaves: Sequence[Tensor]) -> PayloadLayout:
    return PayloadLayout([x.shape for x in leaves], [x.dtype for x in leaves])


def _dense(x: Tensor, wire: torch.device) -> Tensor:
    return x.to(wire).resolve_conj().resolve_neg().contiguous()


def _receiver(x: Tensor, wire: torch.device) -> Tensor:
    """Return `x` itself if bytes can be written straight into it."""
    straight = x.device == wire and x.is_contiguous() and not x.is_conj() and not x.is_neg()
    return x if straight else torch.empty(x.shape, dtype=x.dtype, device=wire)
