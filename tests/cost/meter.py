# SPDX-License-Identifier: Apache-2.0
"""Count what a rank allocates and sends: exactly, tensor by tensor, without asking the system."""

import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farflung.comm.shards import local
from farflung.cost.model import copies

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
