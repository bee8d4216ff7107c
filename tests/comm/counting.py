# SPDX-License-Identifier: Apache-2.0
"""A group that writes down its collectives, to show how few there are and where their results lie."""

import gc
from functools import partial
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
        for name in ("all_reduce", "all_gather", "broadcast", "scatter"):
            setattr(self, name, partial(self._counted, name, getattr(self, name)))

    def _counted(self, name: str, call: Any, out: Any, *args: Any) -> Any:
        self.calls.append((name, out.data_ptr(), out.nbytes))
        return call(out, *args)

    def taken(self) -> list[str]:
        """Return the names of the collectives since the last call."""
        names = [name for name, _, _ in self.calls]
        self.calls.clear()
        return names
