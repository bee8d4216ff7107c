# SPDX-License-Identifier: Apache-2.0
"""What is done to torch's own loaders: looked through, copied with other indices, told about epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from farflung.base.errors import ConfigError
from farflung.base.torch_internals import copied_loader
from farflung.data.position import samplers_of
from farflung.data.samplers import SkipBatchSampler


class LoaderView(DataLoader[Any]):
    """A loader that stands before another one and looks like it: attributes are read from, and set on, that one.

    Attributes:
        base_dataloader: the loader behind.
    """

    base_dataloader: DataLoader[Any]

    def __init__(self, base: DataLoader[Any], **own: Any) -> None:
        self.__dict__.update(own, base_dataloader=base)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # not there yet: this is a copy in the making
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if is_own or not hasattr(self.base_dataloader, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.base_dataloader, name, value)

    def __len__(self) -> int:
        return len(self.base_dataloader)


def reads_indices(loader: DataLoader[Any]) -> bool:
    """Say whether a loader gets its samples by index, so that it can leave some unread."""
    return not isinstance(loader, LoaderView) and not isinstance(loader.dataset, IterableDataset)


def index_source(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return what gives a loader the indices of each batch: its batch sampler, or its sampler when it has none."""
    source: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return source


def altered(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other attributes: everything else, workers and subclass included, is kept.

    Raises:
        ConfigError: the loader stands before another one, of which it skips batches.
    """
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
