# SPDX-License-Identifier: Apache-2.0
"""What four ranks hold and send in a step is what the estimate of their layout says, within 10 %.

`Meter` counts what a rank allocates and sends: exactly, tensor by tensor, without asking the system.
"""

import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.layout_cost import RankLayout, estimate, size_of
from farflung import Accelerator
from farflung.comm.shards import local
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.cost.model import copies
from farflung.cost.recipes import method_of
from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.outer import Int8, diloco, streaming_diloco
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks

pytestmark = pytest.mark.long

RANKS, EVERY = 4, 2
SHAPE = Shape(width=128, depth=4, heads=4, context=8)  # with one sequence of 8 bytes there are hardly any activations
SHARDED = RankLayout(1, 4, sharded=True, gloo=True)
RECIPE, INT8 = diloco(EVERY), streaming_diloco(EVERY, 2, codec=Int8())
TWO_ROWS = replace(SHARDED, dp_replicate_size=2, dp_shard_size=2)
CASES = {
    "DDP": (RankLayout(4, 1), None),
    "FSDP": (SHARDED, None),
    "FSDP in bf16": (replace(SHARDED, param_bytes=2, reduce_bytes=4), None),
    "FSDP, not resharded": (replace(SHARDED, reshard=False), None),
    "FSDP, accumulated": (replace(SHARDED, micro_batches=2), None),
    "HSDP": (TWO_ROWS, None),
    "FSDP islands": (TWO_ROWS, RECIPE),
    "FSDP islands, 8 bits": (TWO_ROWS, INT8),
    "DDP islands": (RankLayout(2, 2), RECIPE),
}

# What a collective sends of its largest tensor; gloo makes a reduce-scatter of an all-reduce, as test_wire.py sees.
_COLLECTIVES = {
    "allreduce_": lambda size: copies("reduced", size),
    "allgather_": lambda size: copies("gathered", size) / size,
    "_allgather_base_": lambda size: copies("gathered", size) / size,
    "_reduce_scatter_base_": lambda size: copies("reduced", size),
}
_LEAST_BYTES = 2048  # smaller tensors are many, and hardly count


class Meter(TorchDispatchMode):
    """Follows all that is computed inside of it.

    Attributes:
        peak: the most bytes that tensors made inside of it had at one time, since `reset`; those of 2 kB and more.
        sent: bytes that this rank sent, by the ranks of the group, since `reset`.
    """

    def __init__(self):
        super().__init__()
        self._storages = weakref.WeakSet()
        self.reset()

    def reset(self):
        self.peak, self.sent = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], args)
        result = func(*args, **(kwargs or {}))
        made = {local(t).untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        large = [one for one in made if one not in self._storages and one.nbytes() >= _LEAST_BYTES]
        if large or func.namespace == "fsdp":  # FSDP gives old tensors new memory, and then copies into it
            self._storages.update(large)
            self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self._storages)))
        return result

    def _count(self, name, args):
        if name not in _COLLECTIVES:
            return
        (group,) = (dist.ProcessGroup.unbox(a) for a in args if "ProcessGroup" in str(getattr(a, "_type", str)()))
        tensors = [[t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)] for a in args]
        ranks = tuple(dist.get_process_group_ranks(group))
        self.sent[ranks] += _COLLECTIVES[name](len(ranks)) * max(map(sum, tensors))


def accelerator_of(layout, recipe):
    grid = ParallelismConfig(dp_replicate_size=layout.dp_replicate_size, dp_shard_size=layout.dp_shard_size)
    wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=layout.reshard, **wrapping)
    return Accelerator(
        cpu=True,
        mixed_precision="bf16" if layout.param_bytes else "no",
        gradient_accumulation_steps=layout.micro_batches,
        **({"fsdp_plugin": plugin, "parallelism_config": grid} if layout.sharded else {}),
        island_size=layout.dp_shard_size if recipe is not None and not layout.sharded else None,
    )


def measure(layout, recipe):
    """What a step of a round costs this rank: bytes at the peak, bytes to its row, bytes to its column."""
    with Meter() as meter:
        accelerator = accelerator_of(layout, recipe)
        model = GPT(SHAPE)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        torch.manual_seed(accelerator.process_index)  # for data of its own
        tokens = torch.randint(256, (1, SHAPE.context))

        def train_rounds(count):
            for _ in range(count * EVERY * layout.micro_batches):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
                    optimizer.step()
                    optimizer.zero_grad()

        with nullcontext() if recipe is None else accelerator.outer(model, recipe) as outer:
            train_rounds(1)  # it allocates what the next one reuses
            meter.reset()
            before = outer.stats().bytes_sent if outer else 0
            train_rounds(1)
            row, column = (sent / EVERY for sent in by_axis(meter.sent, accelerator.process_index, layout))
            if outer:  # by its own count, as other threads than the meter's may send: test_wire.py holds it to the wire
                column = (outer.stats().bytes_sent - before) / EVERY
            peak = meter.peak
    AcceleratorState._reset_state()
    return peak, row, column


def by_axis(sent, rank, layout):
    row, place = divmod(rank, layout.dp_shard_size)
    columns = tuple(range(place, RANKS, layout.dp_shard_size))
    near = tuple(range(row * layout.dp_shard_size, (row + 1) * layout.dp_shard_size))
    return sent[near], sent[columns]


def measure_all():
    torch.manual_seed(0)
    return {name: measure(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def measured():
    return run_ranks(measure_all, RANKS, timeout_s=120)


@pytest.mark.parametrize("name", CASES)
def test_memory_and_bytes_are_those_of_the_estimate(measured, name):
    layout, recipe = CASES[name]
    size = size_of(GPT(SHAPE), ["Block"])
    held = size.parameters // layout.shards
    outer = None if recipe is None else method_of(recipe, held, name=name)
    cost = estimate(size, replace(layout, outer=outer))
    for peak, row_bytes, column_bytes in (ranks[name] for ranks in measured):
        assert (peak, row_bytes, column_bytes) == pytest.approx((cost.peak, cost.row_bytes, cost.column_bytes), rel=0.1)
