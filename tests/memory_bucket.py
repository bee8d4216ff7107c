# SPDX-License-Identifier: Apache-2.0
"""A bucket in this process's memory, each of whose answers is late: many replicas as threads, without a server."""

import time
from collections import Counter
from dataclasses import dataclass, field

from obstore.store import MemoryStore

from farflung.address.object_store import BucketBoard


@dataclass(frozen=True)
class MemoryBoard(BucketBoard):
    """The objects of such a bucket.

    Args:
        late_s: how late answers are.
        counts: of requests, by kind.
    """

    late_s: float = field(default=0.0, kw_only=True)
    counts: Counter = field(default_factory=Counter, compare=False, kw_only=True)

    def ask(self, request, act="read"):
        self.counts[act] += 1
        time.sleep(self.late_s)
        return super().ask(request, act)


def memory_board(late_s=0.0):
    """Return the objects of a new bucket."""
    store = MemoryStore()
    return MemoryBoard("memory", quick=store, slow=store, single=store, late_s=late_s)
