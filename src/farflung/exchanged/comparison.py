# SPDX-License-Identifier: Apache-2.0
"""Compares what must be equal on all ranks.

Weights that rounds agree on: by a digest in some votes, and by tensor if the digests differ. Frozen weights and buffers
that are not saved, which no round sends: by fingerprints; only those that differ are sent, at the start from rank 0, to
a newcomer from a member. Frozen weights that a script moves by itself (a momentum encoder, the average of a teacher)
are compared again at a flush, and get their mean.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farflung.base.torch_internals import own_buffers, own_parameters, passing_buffers
from farflung.base.words import numbered
from farflung.comm.bucket import broadcast_values
from farflung.comm.group import Group
from farflung.comm.shards import is_sharded, local
from farflung.comm.tensor_memory import bytes_of, fingerprint
from farflung.methods.agreement import Averaged
from farflung.votes.ballot import Voters, digest_of, odd_among

_logger = logging.getLogger(__name__)

FINGERPRINT_BYTES = 8  # of all that is not exchanged, on the wire
_DIGEST_EVERY = 50  # rounds of a fragment between two checks that the ranks still agree,
_WATCHED = 8  # and in how many after newcomers have come each one is checked


@dataclass(eq=False)
class Comparison:
    """Compares the weights of one fragment.

    Attributes:
        digest: of what the last round agreed on, if it is to be compared with that of other ranks; else -1.
        is_unseen: no round has landed yet of these parameters.
    """

    names: Sequence[str]  # of its parameters
    digest: int = -1
    is_unseen: bool = True
    _num_watched: int = 0  # rounds that are still to be checked, as newcomers have come

    def note_round(self, weights: Averaged, num_rounds: int, is_common: bool) -> None:
        """Keep a digest of a round's result now and then, if that is the same on all ranks."""
        self.is_unseen = False
        is_due = num_rounds % _DIGEST_EVERY == 1 or self._num_watched > 0
        self._num_watched = max(0, self._num_watched - 1)
        self._note(weights, is_common and is_due)

    def note_newcomers(self, weights: Averaged, is_common: bool) -> None:
        """Compare the agreed weights in the first rounds, and in the next vote if all share them between rounds."""
        self._num_watched = _WATCHED
        self._note(weights, is_common)

    def continue_from(self, other: Comparison) -> None:
        self.digest, self._num_watched = other.digest, other._num_watched

    def difference(self, weights: Averaged, digests: Sequence[int], voters: Voters) -> str:
        """Compare the digests of all ranks; return a sentence that names the first tensor that differs, if any does."""
        if len(set(digests)) == 1:
            return ""
        mine = self._checksums(weights)
        everyone = voters.group.all_gather_small(torch.tensor(mine, dtype=torch.float64))
        for column, name in enumerate(self.names):
            if odd := odd_among(everyone[:, column].tolist()):
                where = numbered(voters.noun, odd)
                return f"The replicas no longer agree on {name}: its value on {where} is not that of the others"
        return (
            f"The replicas no longer agreed at the end of their last round (digests {list(digests)}), though the "
            "tensors are equal now"
        )

    def _note(self, weights: Averaged, is_compared: bool) -> None:
        self.digest = digest_of(" ".join(map(str, self._checksums(weights)))) if is_compared else -1

    def _checksums(self, weights: Averaged) -> list[int]:
        """Return a checksum of the agreed value of each parameter."""
        found: dict[int, int] = {}
        for k in range(len(weights.buckets)):
            for number, piece in zip(weights.buckets.owners(k), weights.agreed(k), strict=True):
                found[number] = (31 * found.get(number, 0) + fingerprint(piece)) % 2**48
        return [found.get(number, 0) for number in range(len(self.names))]


# ---- what no round exchanges


def synchronize(model: nn.Module, exchanged: Collection[int], group: Group, giver: int, takes: bool) -> None:
    """Copy the frozen weights and unsaved buffers of rank `giver` to all ranks: a collective.

    Args:
        exchanged: the ids of the parameters that rounds send.
        takes: False: this rank keeps its own.
    """
    differing = [one.detach() for one in _differing(_unexchanged(model, exchanged), group).values()]
    # Bytes, as not every dtype can be copied into a bucket.
    plain = [bytes_of(one) if one.is_contiguous() else one for one in differing]
    broadcast_values(plain, group, giver, takes)


def moved(
    model: nn.Module, exchanged: Collection[int], left_out: dict[str, Tensor], group: Group
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the frozen floating weights that are not the same on all ranks any more, and such buffers: a collective.

    Args:
        left_out: saved buffers that rounds don't send.
    """
    frozen = {name: one for name, one in _unexchanged(model, exchanged).items() if isinstance(one, nn.Parameter)}
    floats = {k: one for k, one in frozen.items() if one.is_floating_point() and one.itemsize > 1}
    differing = _differing({**floats, **{f"buffer {k}": one for k, one in left_out.items()}}, group).items()
    weights = [one for kind, one in differing if not kind.startswith("buffer ")]
    return weights, [one for kind, one in differing if kind.startswith("buffer ")]


def frozen_fingerprints(model: nn.Module, exchanged: Collection[int]) -> dict[str, int]:
    """Return a number for each frozen weight, by its name."""
    frozen = {name: one for name, one in _unexchanged(model, exchanged).items() if isinstance(one, nn.Parameter)}
    return {name.removeprefix("."): fingerprint(local(one)) for name, one in frozen.items()}


def _unexchanged(model: nn.Module, exchanged: Collection[int]) -> dict[str, Tensor]:
    """Return the frozen parameters and unsaved buffers of a model by name, as far as they are plain memory."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        passing = passing_buffers(module)
        frozen = {k: one for k, one in own_parameters(module).items() if one is not None and id(one) not in exchanged}
        buffers = {key: one for key, one in own_buffers(module).items() if one is not None and key in passing}
        found |= {f"{path}.{key}": one for key, one in (*frozen.items(), *buffers.items()) if _is_plain(one)}
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain memory: not quantized by a class of its own, without shape, or on no device."""
    is_dense = tensor.layout is torch.strided and not (is_lazy(tensor) or tensor.is_meta or tensor.is_quantized)
    return is_dense and (type(tensor) in (Tensor, nn.Parameter) or is_sharded(tensor))


def _differing(tensors: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Return those of `tensors` that all ranks have, of one shape and dtype, and not with the same values."""
    if group.size == 1:
        return {}
    mine = {f"{name} {one.dtype} {list(one.shape)}": fingerprint(local(one)) for name, one in tensors.items()}
    everything = torch.tensor([digest_of(str(mine))], dtype=torch.float64)
    if len(set(group.all_gather_small(everything).flatten().tolist())) == 1:
        return {}
    everyone = group.all_gather_json(mine)
    kinds = sorted(kind for kind in mine if all(kind in said for said in everyone))
    differ = {kind for kind in kinds if len({said[kind] for said in everyone}) > 1}
    by_kind = dict(zip(mine, tensors.values(), strict=True))
    return {kind: local(by_kind[kind]) for kind in kinds if kind in differ}


def compare_frozen(now: Mapping[str, int], place: Mapping[str, Any]) -> None:
    """Warn of frozen weights that are not those with which a state was written: it has only what is trained."""
    if odd := [name for name, number in place.get("frozen", {}).items() if now.get(name) != number]:
        _logger.warning(
            f"The state at step {place['position']} was written with other values of frozen weights: "
            f"{', '.join(odd[:5])}{', and more' if odd[5:] else ''}. It contains only what is trained. Start with "
            "the run's frozen weights; if your script changes them, load them from a checkpoint."
        )
