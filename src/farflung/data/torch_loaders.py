# SPDX-License-Identifier: Apache-2.0
"""Torch's own loaders: read once into a `Source`, and wrapped by another loader (`LoaderView`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from farflung.base.checks import check_flag
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.forward import Forward, unchecked
from farflung.base.torch_internals import copied_loader, expect_batches
from farflung.data.iterable import IterableDatasetShard
from farflung.data.samplers import SeedableRandomSampler, SkipBatchSampler, made_generator
from farflung.loop.state import LoopState, LoopView

_DATA_AXES = {"dp", "fsdp", "dp_replicate", "dp_shard"}  # mesh axes along which ranks see different data
_INSIDE = ("batch_sampler", "sampler")  # where samplers hold others


class Source:
    """A loader and its properties, read once, because torch refuses to set any of them later.

    Scripts may replace samplers inside others at any time, so what concerns an epoch looks these up again.

    Attributes:
        indices: yields the indices of each batch: the batch sampler, or the sampler if there is none.
        indices_name: the attribute of the loader that holds them.
        sampler: puts the samples in order: the sampler, or a batch sampler that has none inside.
        batch_size: of the loader, or else of its batch sampler; None: neither has one.
        drop_last: the loader or its batch sampler leaves out a short last batch.
        makes_batches: it has a batch sampler.
        streams: its data set has no indices.
        is_view: it wraps another loader, so it is iterated as it is.
        by_index: samples are read by index, so that some can be left unread.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.dataset: Any = loader.dataset
        self.makes_batches = loader.batch_sampler is not None
        self.indices: Any = loader.batch_sampler if self.makes_batches else loader.sampler
        self.indices_name = "batch_sampler" if self.makes_batches else "sampler"
        self.sampler: Any = getattr(self.indices, "sampler", self.indices)
        self.batch_size: int | None = loader.batch_size or getattr(self.indices, "batch_size", None)
        self.drop_last: bool = loader.drop_last or getattr(self.indices, "drop_last", False)
        self.streams = isinstance(loader.dataset, IterableDataset)
        self.is_view = isinstance(loader, LoaderView)
        self.by_index = not self.is_view and not self.streams

    # ---- what concerns an epoch

    @property
    def samplers(self) -> list[Any]:
        """All samplers, and those inside them."""
        found: list[Any] = []
        waiting: list[Any] = [self.loader.batch_sampler, self.loader.sampler]
        while waiting:
            sampler = waiting.pop()
            if sampler is not None and not any(sampler is other for other in found):
                found.append(sampler)
                waiting += [getattr(sampler, name, None) for name in _INSIDE]
        return found

    @property
    def seeded_samplers(self) -> list[SeedableRandomSampler]:
        """The samplers whose order depends on a seed and the epoch alone."""
        return [sampler for sampler in self.samplers if isinstance(sampler, SeedableRandomSampler)]

    @property
    def order(self) -> tuple[Any, Any]:
        """The innermost sampler, and what holds it: a batch sampler, or None."""
        holder: Any = None
        inner: Any = self.indices
        while inside := [one for name in _INSIDE if (one := getattr(inner, name, None)) is not None]:
            holder, inner = inner, inside[0]
        return inner, holder

    @property
    def keeper(self) -> Any:
        """The object whose state dict has a stream's position: the loader, or a data set that this process reads."""
        if self.by_index:  # it continues in a copy, which skips what was handed out
            return None
        if hasattr(self.loader, "load_state_dict"):
            return self.loader
        return self.dataset if self.loader.num_workers == 0 and self.streams else None

    @property
    def generators(self) -> list[torch.Generator]:
        """Those of the loader, of its samplers, and of its data set."""
        found: list[torch.Generator] = []
        for owner in (self.loader, *self.samplers, self.dataset, getattr(self.dataset, "dataset", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        return found

    def set_generators(self, states: list[Tensor]) -> None:
        """Set the generators' states; if there are none, as in one process, a sampler gets one."""
        own = self.generators
        if len(states) == 1 and not own:
            for sampler in self.samplers:
                if getattr(sampler, "generator", self) is None:
                    sampler.generator = made_generator()
                    own = [sampler.generator]
        if len(own) == len(states):
            for generator, state in zip(own, states, strict=True):
                generator.set_state(state)

    def announce(self, epoch: int) -> None:
        """Call `set_epoch` wherever there is one: on the loader, its samplers, those inside them, and its data set."""
        for thing in (self.loader, *self.samplers, self.dataset):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)

    @property
    def keeps_workers(self) -> bool:
        """Whether workers stay from one iteration to the next: they do not if they would miss its epoch.

        Each has a copy of the data set. Only an epoch that lies in shared memory, as in Hugging Face's streams, changes
        in all copies.
        """
        data = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        shared = (
            value.is_shared() if isinstance(value, Tensor) else isinstance(value, SynchronizedBase)  # type: ignore[no-untyped-call]
            for name, value in getattr(data, "__dict__", {}).items()
            if "epoch" in name
        )
        return self.loader.persistent_workers and (not hasattr(data, "set_epoch") or any(shared))

    def num_batches(self) -> int:
        """Count the batches, also those that torch leaves out, as each worker of a stream ends by itself.

        Workers are taken to share out a stream sample by sample. Should they do it otherwise, torch warns when there
        are more batches.
        """
        loader, stream = self.loader, self.dataset
        if self.is_view or loader.num_workers < 2 or not self.streams:
            return len(loader)
        if not isinstance(stream, IterableDatasetShard):
            stream = IterableDatasetShard(stream, loader.batch_size or 1, loader.drop_last)
        length = stream.num_batches(loader.num_workers)
        expect_batches(loader, length)
        return length

    # ---- copies

    def altered(self, **attributes: Any) -> Source:
        """Return a copy with other attributes: everything else, workers and subclass included, is kept.

        ConfigError: a view has no attributes of its own to change.
        """
        if self.is_view and attributes:
            raise ConfigError(
                f"A {type(self.loader).__name__} cannot be sharded across ranks: prepare the loader first, then call "
                "skip_first_batches on what comes back."
            )
        if not self.is_view:
            return Source(copied_loader(self.loader, attributes))
        view = copy.copy(cast(LoaderView, self.loader))
        source = view.base_source.altered()
        view.__dict__.update(base_source=source, base_dataloader=source.loader)
        return Source(view)

    def with_indices(self, indices: Any, **attributes: Any) -> Source:
        return self.altered(**{self.indices_name: indices}, **attributes)

    def without_first(self, num_batches: int, keep: int = 0) -> DataLoader[Any]:
        """Return a copied loader that doesn't read its first batches, except for the first `keep` of those."""
        return self.with_indices(SkipBatchSampler(self.indices, num_batches, keep=keep)).loader

    def seedable(self, data_seed: int | None) -> Source:
        """Return a copy whose shuffling depends on a seed and the epoch alone; others as they are."""
        if not isinstance(self.sampler, RandomSampler) or isinstance(self.sampler, SeedableRandomSampler):
            return self
        seeded = SeedableRandomSampler.of(self.sampler, data_seed)
        if self.indices is self.sampler:
            return self.with_indices(seeded)
        indices = copy.copy(self.indices)
        indices.sampler = seeded
        return self.with_indices(indices, **({"sampler": seeded} if self.makes_batches else {}))


class LoaderView(DataLoader[Any]):
    """A loader that wraps another one and looks like it: it reads attributes from that one.

    The other one is a copy of the script's loader, with `changes`. Attributes that torch's loader declares are set on
    the copy, and take effect there; all others are set on the view. With `stateful` it is also an instance of
    torchdata's `StatefulDataLoader`, if that is installed.
    """

    _state: LoopState

    def __init__(
        self, source: Source, changes: Mapping[str, Any] = MappingProxyType({}), *, stateful: bool = False
    ) -> None:
        self.use_stateful_dataloader = stateful
        self.base_source = source.altered(**changes)
        self.base_dataloader = self.base_source.loader
        if stateful and _torchdata_loader() is not None:
            object.__setattr__(self, "__class__", _stateful_kind(cast(Any, type(self))))

    if not TYPE_CHECKING:  # what the class of the script's loader has beyond torch's, and torch's private attributes

        def __getattr__(self, name):
            if name == "base_dataloader":  # not there yet: this is a copy in the making
                raise AttributeError(name)
            return getattr(self.base_dataloader, name)

    @property
    def gradient_state(self) -> LoopView:
        """The state of the training loop that this loader reports to; each access returns a new view."""
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
        super().__init__(Source(base), stateful=use_stateful_dataloader)

    @classmethod
    def over(cls, source: Source, skip_batches: int) -> SkipDataLoader:
        """Leave out the first batches of an existing loader."""
        view = cls.__new__(cls)
        view.skip_batches, view._state = skip_batches, LoopState()
        LoaderView.__init__(view, source)
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
