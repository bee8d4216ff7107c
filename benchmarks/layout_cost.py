# SPDX-License-Identifier: Apache-2.0
"""What a layout costs each rank: bytes of memory, and bytes sent along each axis of the grid, as plain arithmetic.

The ranks are a grid of R rows (`dp_replicate_size`) and S columns (`dp_shard_size`). Of N parameters in groups, each of
which FSDP gathers at once, L is the largest but the root's; w, p and r are the bytes of a value at rest, gathered, and
while gradients are reduced. A rank that shards holds N/S of everything; one that does not, all of it.

    at rest     = (weights w + gradients w + optimizer) / S
    gathered    = p (root + 2L)           one group computes while the next one arrives; the root's stays
                  p N                     if nothing is resharded after the forward pass
    reducing    = p (root + L) + r L      a group's gradients, and the buffer that is reduced; the root's gradients wait
    row, a step = (S-1)/S (p N, p (N - root) again for the backward pass, r N for gradients)
    column      = 2(R-1)/R r N/S a step   or what the outer loop sends of N/S parameters in a round

Sources: what is divided by S is stage 3 of ZeRO (arXiv:1910.02054); what is held in a step is what `fully_shard` of
torch 2.13 allocates, as measured by the tests; the ring's factors are those of Patarasuk and Yuan (2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from farflung.cost.model import Cost, Method, Workload, copies, cost_of


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, in plain numbers; `size_of` reads them from a model."""

    # Parameters in each group that is gathered at once; first the root's: whatever is in no wrapped module, such as
    # embeddings and head.
    groups: tuple[int, ...]
    trained: int | None = None  # how many of those are trained; None: all
    value_bytes: int = 4  # of a parameter at rest
    state_values: int = 2  # that the optimizer keeps of a trained parameter, in its dtype: 2 for Adam, 1 for momentum

    @property
    def parameters(self) -> int:
        return sum(self.groups)

    @property
    def root(self) -> int:
        return self.groups[0]

    @property
    def num_trained(self) -> int:
        return self.parameters if self.trained is None else self.trained


@dataclass(frozen=True)
class RankLayout:
    """How a model is spread over a grid of ranks, and which ranks communicate."""

    dp_replicate_size: int = 1  # rows: ranks of a column, which hold the same values
    dp_shard_size: int = 1  # columns: ranks of a row, an island if there is an outer loop
    sharded: bool = False  # a row shards one copy of the model (FSDP); otherwise each rank holds all of it (DDP)
    # Sharded weights are given back after the forward pass and gathered again for the backward pass: all but the
    # root's, unless there are no others. (`reshard_after_forward`)
    reshard: bool = True
    param_bytes: int | None = None  # of a gathered weight and of its gradient; None: as at rest. (`param_dtype`)
    reduce_bytes: int | None = None  # of a gradient that is reduced; None: as gathered. (`reduce_dtype`)
    micro_batches: int = 1  # backward passes of a step; the last one reduces the gradients (`accumulate`)
    outer: Method | None = None  # the outer loop between rows; None: they average gradients in every step (DDP, HSDP)
    gloo: bool = False  # the backend is gloo, which reduces a copy of all of a row's gradients and sends each twice

    @property
    def shards(self) -> int:
        """In how many parts a model lies."""
        return self.dp_shard_size if self.sharded else 1


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank. Activations and the optimizer's scratch memory are not among them."""

    weights: float  # at rest
    gradients: float  # at rest: what the optimizer reads
    optimizer: float  # its state
    outer: float  # what an outer loop keeps: anchor, momentum, buffers
    gathered: float  # weights that FSDP holds in the backward pass: the root's, those of a group and of the next one
    reducing: float  # gradients on their way: what waits, a group's and the buffer that is reduced; or DDP's buckets
    peak: float  # the most that is there at one time, which not all of the above are
    row_bytes: float  # sent to the other ranks of the row in a step
    # Sent to the other ranks of the column in a step; on the average, if they meet every H steps.
    column_bytes: float


def estimate(size: ModelSize, layout: RankLayout) -> Estimate:
    """Return the bytes of memory, and the bytes sent along each axis, of one rank.

    Rows of a weight that don't divide among the shards are padded: up to S-1 rows of each weight are not counted.
    Buffers, such as a BatchNorm's, are not either.
    """
    weights = size.parameters * size.value_bytes / layout.shards
    gradients = size.num_trained * size.value_bytes / layout.shards
    optimizer = size.state_values * gradients
    meeting = _meeting(size, layout)
    outer = 0.0 if meeting is None else meeting.memory.total
    gathered, reducing, most = _in_passes(size, layout, gradients)
    row_bytes, column_bytes = _gradient_bytes(size, layout)
    return Estimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        outer=outer,
        gathered=gathered,
        reducing=reducing,
        peak=weights + optimizer + outer + most,
        row_bytes=row_bytes + _weight_bytes(size, layout),
        column_bytes=column_bytes if meeting is None else meeting.bytes_sent_per_step,
    )


def _in_passes(size: ModelSize, layout: RankLayout, gradients: float) -> tuple[float, float, float]:
    """Return what is gathered, what is being reduced, and the most of these and gradients at rest at one time."""
    if not layout.sharded:
        buckets = size.num_trained * size.value_bytes * (layout.dp_replicate_size * layout.dp_shard_size > 1)
        return 0.0, buckets, gradients + buckets
    param, reduce = _pass_bytes(size, layout)
    share = size.num_trained / size.parameters
    keeps, accumulates = not layout.reshard, layout.micro_batches > 1
    largest = max(size.groups[1:], default=0)
    moving = size.root + sum(sorted(size.groups[1:])[-2:])
    gathered = param * (size.parameters if keeps else moving)
    waiting = share * (reduce * size.parameters if accumulates else param * size.root)
    # A group's gradients are copied into the buffer that is reduced; gloo then copies that.
    buffers = share * (reduce + max(param, reduce * layout.gloo))
    forward = gathered + param * largest * (1 + keeps) + accumulates * waiting
    # What is kept, or has waited, is freed group by group while gradients come to rest: the start has the most of it.
    at_rest = 0.0 if keeps or accumulates else gradients * (1 - moving / size.parameters)
    backward = gathered + waiting + buffers * largest + at_rest
    root = param * size.root + buffers * size.root + gradients * (1 - size.root / size.parameters)
    return gathered, waiting + buffers * largest, max(forward, backward, root, gradients)


def _pass_bytes(size: ModelSize, layout: RankLayout) -> tuple[int, int]:
    """Return the bytes of a value that is gathered, and of a gradient that is reduced."""
    param = (layout.sharded and layout.param_bytes) or size.value_bytes
    return param, layout.reduce_bytes or param


def _weight_bytes(size: ModelSize, layout: RankLayout) -> float:
    """Return what a rank sends of weights to its row in a step."""
    if not layout.sharded:
        return 0.0
    again = layout.reshard * (sum(size.groups[1:]) or size.root)
    times = layout.micro_batches * (size.parameters + again)
    return copies("gathered", layout.dp_shard_size) * _pass_bytes(size, layout)[0] * times / layout.dp_shard_size


def _gradient_bytes(size: ModelSize, layout: RankLayout) -> tuple[float, float]:
    """Return what a rank sends of gradients to its row, and to its column, in a step."""
    whole = size.num_trained * _pass_bytes(size, layout)[1]
    row = copies("reduced", layout.dp_shard_size) * whole
    if layout.sharded and not layout.gloo:
        row /= 2  # the first half of an all-reduce
    return row, copies("reduced", layout.dp_replicate_size) * whole / layout.shards


def _meeting(size: ModelSize, layout: RankLayout) -> Cost | None:
    """Return what the outer loop costs a rank, which exchanges its own shards with its column."""
    if layout.outer is None:
        return None
    layers = max(len(size.groups) - 1, layout.outer.fragments)
    parameters = math.ceil(size.num_trained / layout.shards)
    rows, row = layout.dp_replicate_size, layout.dp_shard_size
    run = Workload(parameters, layers, step_s=1.0, replicas=rows, bandwidth_bps=math.inf, island_size=row)
    return cost_of(run, layout.outer)


def size_of(model: nn.Module, classes: Iterable[str] | None = None, *, state_values: int = 2) -> ModelSize:
    """Return how large a model is, and in which groups FSDP gathers it. What is trained must be of one dtype.

    The model may be on the meta device, or sharded already: then the groups are those that it was sharded in.

    Args:
        classes: names of the classes whose modules are groups of their own, as `transformer_cls_names_to_wrap` has
            them; None: those that the model's modules name themselves (`_no_split_modules`), if they do.
        state_values: that the optimizer keeps for each trained parameter: 2 for Adam, 1 for momentum.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen: set[int] = set()
    groups = [_numel_of_new(module, seen) for module in _groups(model, classes)]
    return ModelSize(
        groups=(_numel_of_new(model, seen), *reversed(groups)),
        trained=sum(parameter.numel() for parameter in trained),
        value_bytes=trained[0].element_size(),
        state_values=state_values,
    )


def _groups(model: nn.Module, classes: Iterable[str] | None) -> Iterator[nn.Module]:
    """Yield the modules that are groups of their own, those inside of others first."""
    inside = [module for module in model.modules() if module is not model][::-1]
    if isinstance(model, FSDPModule):
        yield from (module for module in inside if isinstance(module, FSDPModule))
        return
    named = (getattr(module, "_no_split_modules", None) or () for module in model.modules())
    names = {name for one in named for name in one} if classes is None else set(classes)
    yield from (module for module in inside if type(module).__name__ in names)


def _numel_of_new(module: nn.Module, seen: set[int]) -> int:
    """Count the values of the parameters of `module` that no group has yet."""
    new = {id(parameter): parameter for parameter in module.parameters() if id(parameter) not in seen}
    seen.update(new)
    return sum(parameter.numel() for parameter in new.values())
