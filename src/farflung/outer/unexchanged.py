# SPDX-License-Identifier: Apache-2.0
"""Frozen weights and buffers that are not saved: no round sends them, but all replicas begin with the same ones.

They are compared by fingerprints, and only what differs is sent: at the start from rank 0, to a newcomer from one of
the others. Frozen weights that a script moves by itself (a momentum encoder, the average of a teacher) are compared
again at a flush, where the mean of those that differ takes their place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farflung.base.torch_internals import own_buffers, own_parameters, passing_buffers
from farflung.comm.bucket import broadcast_values
from farflung.comm.collectives import gather_json
from farflung.comm.exchange import Exchange
from farflung.comm.fingerprint import bytes_of, fingerprint
from farflung.comm.group import Group
from farflung.comm.shards import is_sharded, local
from farflung.outer.ballot import digest_of

FINGERPRINT_BYTES = 8  # of all of it, on the wire


def make_alike(model: nn.Module, group: Group, giver: int, takes: bool) -> None:
    """Take over what rank `giver` has of a model's frozen weights and unsaved buffers: a collective.

    Args:
        takes: False: this rank keeps its own.
    """
    differing = [one.detach() for one in _differing(_unexchanged(model), group)]
    # Bytes, as not every dtype can be copied into a bucket.
    plain = [bytes_of(one) if one.is_contiguous() else one for one in differing]
    broadcast_values(plain, group, giver, takes)


def moved(model: nn.Module, group: Group) -> list[Tensor]:
    """Return the frozen floating weights that are not the same on all ranks any more: a collective."""
    frozen = {name: one for name, one in _unexchanged(model).items() if isinstance(one, nn.Parameter)}
    return _differing({k: one for k, one in frozen.items() if one.is_floating_point() and one.itemsize > 1}, group)


def _unexchanged(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and unsaved buffers of a model by name, as far as they are plain memory."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        passing = passing_buffers(module)
        frozen = {k: one for k, one in own_parameters(module).items() if one is not None and not one.requires_grad}
        buffers = {key: one for key, one in own_buffers(module).items() if one is not None and key in passing}
        found |= {f"{path}.{key}": one for key, one in (*frozen.items(), *buffers.items()) if _is_plain(one)}
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is values in memory: not quantized by a class of its own, without shape, or on no device."""
    is_dense = tensor.layout is torch.strided and not (is_lazy(tensor) or tensor.is_meta or tensor.is_quantized)
    return is_dense and (type(tensor) in (Tensor, nn.Parameter) or is_sharded(tensor))


def _differing(tensors: dict[str, Tensor], group: Group) -> list[Tensor]:
    """Return those of `tensors` that all ranks have, of one shape and dtype, and not with the same values."""
    if group.size == 1:
        return []
    mine = {f"{name} {one.dtype} {list(one.shape)}": fingerprint(local(one)) for name, one in tensors.items()}
    everything = torch.tensor([digest_of(str(mine))], dtype=torch.float64)
    if len(set(group.all_gather_small(everything).flatten().tolist())) == 1:
        return []
    everyone = gather_json(Exchange(group), mine, "outer loop")
    kinds = sorted(kind for kind in mine if all(kind in said for said in everyone))
    differ = {kind for kind in kinds if len({said[kind] for said in everyone}) > 1}
    by_kind = dict(zip(mine, tensors.values(), strict=True))
    return [local(by_kind[kind]) for kind in kinds if kind in differ]
