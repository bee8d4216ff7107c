# SPDX-License-Identifier: Apache-2.0
"""What a script asks and does as one process among others: its rank, calls on one process, or one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from farflung.accelerator.session import flushed
from farflung.base.checks import check_callable, check_whole, wrong_type
from farflung.base.enums import DistributedType
from farflung.base.errors import ConfigError
from farflung.base.forward import Forward
from farflung.base.tree import rebuilt
from farflung.comm import collectives
from farflung.process.world import World

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessControl:
    """A process's rank in its world, under Accelerate's names, for `PartialState` and `Accelerator`."""

    _world: Forward[World]
    _described = Forward[World]("_world")  # by the attributes that a reset takes away

    device = Forward[torch.device]("_described.device", "Where this process's models and batches go.")
    num_processes = Forward[int]("_described.size", "How many processes the run has.")
    process_index = Forward[int]("_described.rank", "This process's rank among all.")
    local_process_index = Forward[int]("_described.local_rank", "This process's rank on its machine.")
    is_main_process = Forward[bool]("_world.is_main", "Whether this is the first process of all.")
    is_local_main_process = Forward[bool]("_world.is_local_main", "Whether this is the first process of its machine.")
    is_last_process = Forward[bool]("_world.is_last", "Whether this is the last process of all.")
    use_distributed = Forward[bool](lambda self: self._world.size > 1, "Whether there is more than one process.")

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self._world.kind

    def wait_for_everyone(self) -> None:
        """Return when every process has come here; raise CollectiveMismatch when one makes another call instead."""
        collectives.wait_for_everyone(flushed(self._world.exchange))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        if self._world.is_local_main:
            print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block the first process runs before the others do."""
        return self._first(self._world.is_main)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block each machine's first process runs before the machine's others do."""
        return self._first(self._world.is_local_main)

    @contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        name = "main_process_first or local_main_process_first"  # which nest, and wait in another order
        if not mine:
            collectives.wait_for_everyone(flushed(self._world.exchange), name)
        yield  # an exception here passes the barrier by: this process ends, and the others see it gone
        if mine:
            collectives.wait_for_everyone(flushed(self._world.exchange), name)

    def on_main_process(self, function: Function | None = None) -> Any:
        """Make `function` run on the first process of all and return None on the others."""
        return _only("on_main_process", function, lambda: self._world.is_main)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Make `function` run on the first process of each machine and return None on the others."""
        return _only("on_local_main_process", function, lambda: self._world.is_local_main)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Make `function` run on the last process of all and return None on the others."""
        return _only("on_last_process", function, lambda: self._world.is_last)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Make `function` run on the process `process_index` and return None on the others; alone, it always runs."""
        check_whole("process_index", process_index, least=0)
        return _only("on_process", function, lambda: self._world.rank == process_index or self._world.size == 1)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Make `function` run on each machine's process `local_process_index`; see `on_process`."""
        check_whole("local_process_index", local_process_index, least=0)
        index = local_process_index
        return _only("on_local_process", function, lambda: self._world.local_rank == index or self._world.size == 1)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of `inputs`; the first ranks get one more if it does not divide.

        Args:
            inputs: a list, tuple, tensor (first dimension) or data set; or a dictionary of such, all of one length. A
                string is whole on each.
            apply_padding: repeat the last item until all shares are of one length, so that results can be gathered.
        """
        yield _share(inputs, self._world.rank, self._world.size, apply_padding)


def _only(name: str, function: Callable[..., Any] | None, chosen: Callable[[], bool]) -> Any:
    if function is None:
        return functools.partial(_only, name, chosen=chosen)
    check_callable(f"{name}: function", function, "one without arguments")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if chosen() else None

    return guarded


def _share(inputs: Any, rank: int, size: int, padded: bool) -> Any:
    if size == 1 or isinstance(inputs, (str, bytes)):
        return inputs
    if not (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")):
        raise wrong_type(
            "split_between_processes: inputs", inputs, "a list, tuple, tensor or data set, or a dictionary of such"
        )
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"split_between_processes: the values differ in length: {lengths}.")
        share = functools.partial(_share, rank=rank, size=size, padded=padded)
        if not isinstance(inputs, dict):
            return rebuilt(inputs, share)
        made = copy(inputs)
        made.update((key, share(value)) for key, value in inputs.items())
        return made
    count, extra = divmod(len(inputs), size)
    start = rank * count + min(rank, extra)
    stop = start + count + (rank < extra)
    missing = count + (extra > 0) - (stop - start) if padded and len(inputs) else 0
    rows = [*range(start, stop), *[len(inputs) - 1] * missing]
    if hasattr(inputs, "select") and not isinstance(inputs, Tensor):
        return inputs.select(rows)  # a Hugging Face data set, whose slices are columns
    if isinstance(inputs, Dataset):  # slices of some are columns, too
        return [inputs[row] for row in rows]
    share, last = inputs[start:stop], inputs[-1:]
    if not missing:
        return share
    if isinstance(inputs, (list, tuple)):
        return share + last * missing
    return inputs[rows] if hasattr(inputs, "shape") else [inputs[row] for row in rows]  # arrays; ranges and data sets
