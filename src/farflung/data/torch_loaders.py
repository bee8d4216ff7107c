# SPDX-License-Identifier: Apache-2.0
"""What is done to torch's own loaders: looked through, copied with other indices, told about epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from farflung.base.checks import check_flag
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.forward import Forward, unchecked
from farflung.base.torch_internals import copied_loader, expect_batches
from farflung.base.tree import send_to_device
from farflung.data.iterable import IterableDatasetShard
from farflung.data.samplers import SeedableRandomSampler, SkipBatchSampler
from farflung.loop.state import LoopState, LoopView

_DATA_AXES = {"dp", "fsdp", "dp_replicate", "dp_shard"}  # mesh axes along which ranks see different data


class LoaderView(DataLoader[Any]):
    """A loader that stands before another one and looks like it: attributes are read from, and set on, that one.

    A subclass sets its own attributes before it calls this constructor. With `stateful` it is an instance of
    torchdata's `StatefulDataLoader` too, where that is installed.
    """

    _state: LoopState

    def __init__(self, base: DataLoader[Any], *, stateful: bool = False) -> None:
        self.use_stateful_dataloader = stateful
        self.base_dataloader = base
        if stateful and _torchdata_loader() is not None:
            object.__setattr__(self, "__class__", _stateful_kind(cast(Any, type(self))))

    if not TYPE_CHECKING:  # what the class of the script's loader has beyond torch's, and torch's private attributes

        def __getattr__(self, name):
            if name == "base_dataloader":  # not there yet: this is a copy in the making
                raise AttributeError(name)
            return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("base_dataloader")  # None: this one is in the making
        if name in self.__dict__ or hasattr(type(self), name) or base is None or not hasattr(base, name):
            object.__setattr__(self, name, value)
        else:
            setattr(base, name, value)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    @property
    def gradient_state(self) -> LoopView:
        """Where the training loop stands that this loader reports to; each look is a view of its own."""
        return LoopView(self._state)


# What torch's loader declares, with the types that it gives them.
_DECLARED = """
    dataset sampler batch_sampler batch_size drop_last collate_fn generator in_order timeout prefetch_factor
    num_workers worker_init_fn persistent_workers multiprocessing_context pin_memory pin_memory_device
"""
for _name in _DECLARED.split():
    setattr(LoaderView, _name, Forward(f"base_dataloader.{_name}", check=unchecked))


class SkipDataLoader(LoaderView):
    """A loader without its first `skip_batches` batches, which are read and thrown away."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        base = made_loader(dataset, use_stateful_dataloader, kwargs)
        self.skip_batches, self._state = skip_batches, LoopState()
        super().__init__(base, stateful=use_stateful_dataloader)

    @classmethod
    def over(cls, loader: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """Leave out the first batches of a loader that is there already."""
        view = cls.__new__(cls)
        view.skip_batches, view._state = skip_batches, LoopState()
        LoaderView.__init__(view, loader)
        return view

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return islice(iter(self.base_dataloader), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)


def made_loader(dataset: Any, stateful: bool, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Return the loader that Accelerate's constructors make of a data set and the arguments of torch's."""
    check_flag("use_stateful_dataloader", stateful)
    return ((_torchdata_loader() if stateful else None) or DataLoader)(dataset, **arguments)


@cache
def _torchdata_loader() -> type[DataLoader[Any]] | None:
    if find_spec("torchdata") is None:
        return None
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    return StatefulDataLoader  # type: ignore[no-any-return]


@cache
def _stateful_kind(kind: Any) -> Any:
    """Return the class of views of class `kind` that are instances of torchdata's loader too."""
    missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(kind, name)]
    own: dict[str, Any] = {name: Forward(f"base_dataloader.{name}", check=unchecked) for name in missing}
    own["__reduce__"] = lambda view: (_unpickled, (kind,), view.__dict__)
    bases: tuple[Any, ...] = (kind, _torchdata_loader())
    return type(kind.__name__, bases, {**own, "__module__": kind.__module__})


def _unpickled(kind: Any) -> Any:
    return object.__new__(_stateful_kind(kind))


def refuse_mesh(mesh: Any) -> None:
    """Raise Unsupported for a device mesh with axes along which ranks see the same data."""
    axes = set(getattr(mesh, "mesh_dim_names", None) or ()) - _DATA_AXES
    if axes:
        raise Unsupported(f"A mesh with the axes {sorted(axes)} is not supported. Use {sorted(_DATA_AXES)}.")


def reads_indices(loader: DataLoader[Any]) -> bool:
    """Say whether a loader gets its samples by index, so that it can leave some unread."""
    return not isinstance(loader, LoaderView) and not isinstance(loader.dataset, IterableDataset)


def index_source(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return what gives a loader the indices of each batch: its batch sampler, or its sampler when it has none."""
    source: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return source


def altered(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other attributes: everything else, workers and subclass included, is kept."""
    if isinstance(loader, LoaderView):
        raise ConfigError(
            f"A {type(loader).__name__} cannot be sharded across ranks: prepare the loader first, then call "
            "skip_first_batches on what comes back."
        )
    return copied_loader(loader, attributes)


def with_indices(loader: DataLoader[Any], source: Iterable[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader that gets the indices of its batches from `source`."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return altered(loader, **{name: source}, **attributes)


def without_first(loader: DataLoader[Any], num_batches: int, keep: int = 0) -> DataLoader[Any]:
    """Return a copy of a loader that does not read its first batches, but for the first `keep` of those."""
    return with_indices(loader, SkipBatchSampler(index_source(loader), num_batches, keep=keep))


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader and those inside them."""
    found: list[Any] = []
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    while waiting:
        sampler = waiting.pop()
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def announce(epoch: int, loader: DataLoader[Any]) -> None:
    """Call `set_epoch` wherever a loader has one: on itself, its samplers, those inside them, and its data set."""
    for thing in (loader, *samplers_of(loader), loader.dataset):
        if hasattr(thing, "set_epoch"):
            thing.set_epoch(epoch)


def keeper_of(loader: Any) -> Any:
    """Return what knows how far its data were read: the loader, or a data set that is read in this process."""
    if hasattr(loader, "load_state_dict"):
        return loader
    return loader.dataset if loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset) else None


def order_of(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """Return what puts the samples of a loader in order, and what holds it: a batch sampler, or None."""
    holder: Any = None
    inner: Any = index_source(loader)
    while (next_inner := getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)) is not None:
        holder, inner = inner, next_inner
    return inner, holder


def mover(device: torch.device | None, non_blocking: bool) -> Callable[[Any], Any] | None:
    """Return what brings a batch to `device`, or None when it is there already, as on a machine of CPUs alone."""
    if device is None or (device.type == "cpu" and not torch.accelerator.is_available()):
        return None
    return partial(send_to_device, device=device, non_blocking=non_blocking)


def num_batches_of(loader: DataLoader[Any]) -> int:
    """Return how many batches a loader makes, also where torch leaves out that each worker of a stream ends by itself.

    Workers are taken to share out a stream sample by sample. Should they do it otherwise, torch warns when there are
    more batches.
    """
    stream = loader.dataset
    if isinstance(loader, LoaderView) or loader.num_workers < 2 or not isinstance(stream, IterableDataset):
        return len(loader)
    if not isinstance(stream, IterableDatasetShard):
        stream = IterableDatasetShard(stream, loader.batch_size or 1, loader.drop_last)
    length = stream.num_batches(loader.num_workers)
    expect_batches(loader, length)
    return length


def seeded_samplers(loader: DataLoader[Any]) -> list[SeedableRandomSampler]:
    """Return the samplers of a loader whose order depends on a seed and the epoch alone."""
    return [sampler for sampler in samplers_of(loader) if isinstance(sampler, SeedableRandomSampler)]
