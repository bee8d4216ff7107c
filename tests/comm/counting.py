# SPDX-License-Identifier: Apache-2.0
"""A group that writes down its collectives, to show how few there are and where their results lie."""

import gc
from typing import Any

from farflung.comm.torch_group import TorchGroup


def num_alive(kind: type) -> int:
    """Return how many objects of a class there are in this process."""
    return sum(type(one) is kind for one in gc.get_objects())


class CountingGroup(TorchGroup):
    """A TorchGroup that keeps (name, tensor written to, its bytes) of each collective in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def all_reduce(self, x: Any, op: Any = "sum") -> Any:
        self.calls.append(("all_reduce", x.data_ptr(), x.nbytes))
        return super().all_reduce(x, op)

    def all_gather(self, out: Any, x: Any) -> Any:
        self.calls.append(("all_gather", out.data_ptr(), out.nbytes))
        return super().all_gather(out, x)

    def broadcast(self, x: Any, src: int) -> Any:
        self.calls.append(("broadcast", x.data_ptr(), x.nbytes))
        return super().broadcast(x, src)

    def scatter(self, out: Any, parts: Any, src: int) -> Any:
        self.calls.append(("scatter", out.data_ptr(), out.nbytes))
        return super().scatter(out, parts, src)

    def taken(self) -> list[str]:
        """Return the names of the collectives since the last call."""
        names = [name for name, _, _ in self.calls]
        self.calls.clear()
        return names
