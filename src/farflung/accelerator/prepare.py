# SPDX-License-Identifier: Apache-2.0
"""`prepare`: models, optimizers, loaders and schedulers, each made ready once and remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from farflung.base.checks import check_flag, check_type, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.tensor_memory import check_exchangeable
from farflung.base.torch_internals import compiled_from
from farflung.base.words import counted
from farflung.comm.torch_group import TorchGroup
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.handlers import DataLoaderConfiguration
from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.data.loader import DataLoaderShard
from farflung.data.prepare import prepare_loader
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler, Ticks
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy
from farflung.strategy.compile import compile_in_place

if TYPE_CHECKING:
    from farflung.data.slots import Slots

_KINDS = (nn.Module, Optimizer, DataLoader, LRScheduler, AcceleratedScheduler)
_STRANGERS = (str, bytes, Real, Tensor, Mapping, Set, GeneratorType)

PreparedLoader = DataLoaderShard | DataLoaderDispatcher


@dataclass
class Registry:
    """What one Accelerator has prepared, in order, and which wrapper stands for which original.

    `evaluated` are those of `models` that were prepared for evaluation alone; `slots` are the shares of a replica that
    comes and goes, None where the replicas of the run are fixed.
    """

    slots: Slots | None = None
    models: list[nn.Module] = field(default_factory=list)
    evaluated: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    _known: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def find(self, thing: Any) -> Any:
        """Return the prepared form of `thing`, which may be that form itself, or None."""
        found = self._known.get(id(thing))
        return None if found is None else found[1]

    def resolve(self, model: Any) -> Any:
        """Return the prepared form of a model that was unwrapped or compiled since; `model` itself if it is unknown."""
        found = self.find(model)
        if found is None and isinstance(model, nn.Module):
            found = self.find(compiled_from(model))
        return model if found is None else found

    @property
    def trained(self) -> list[nn.Module]:
        """Those of `models` that are not for evaluation alone and have something that requires a gradient."""
        left_out = {id(model) for model in self.evaluated}
        return [
            model
            for model in self.models
            if id(model) not in left_out and any(p.requires_grad for p in model.parameters())
        ]

    @property
    def is_training(self) -> bool:
        """Whether a model that is trained is in train mode, or there is none yet."""
        return not self.trained or any(model.training for model in self.trained)

    def remember(self, original: Any, prepared: Any) -> None:
        """Note that `prepared` stands for `original`."""
        self._known[id(original)] = (original, prepared)  # the original is kept alive, so its id stays its own
        self._known[id(prepared)] = (prepared, prepared)

    def clear(self) -> None:
        for listed in (self.models, self.evaluated, self.optimizers, self.schedulers, self.loaders):
            listed.clear()
        self._known.clear()


@dataclass
class Preparer:
    """Makes things ready for one Accelerator. Every decision is taken here, so that the loop need take none.

    Scripts may set `rng_types`, `device_placement` and `step_scheduler_with_optimizer` for what is prepared afterwards.
    """

    world: World
    strategy: Strategy
    precision: Precision
    compiling: TorchDynamoPlugin
    loop: LoopState
    registry: Registry
    data: DataLoaderConfiguration
    rng_types: list[str]
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_ticks: Ticks

    def prepare(self, things: Sequence[Any], device_placement: Sequence[bool | None] | None) -> list[Any]:
        """Prepare `things`, in order. Loaders and schedulers of other kinds than torch's come back unchanged."""
        for thing in things:
            _refuse_stranger(thing)
        placements = [None] * len(things) if device_placement is None else _placements(device_placement, len(things))
        optimizers = [_bare(thing) for thing in things if isinstance(thing, Optimizer)]
        optimizers += [one.optimizer for one in self.registry.optimizers]
        first = [
            self.model(thing, place, optimizers=optimizers)
            if isinstance(thing, nn.Module)
            else self.optimizer(thing, place)
            if isinstance(thing, Optimizer)
            else self.loader(thing, place)
            if isinstance(thing, DataLoader)
            else thing
            for thing, place in zip(things, placements, strict=True)
        ]
        # Schedulers last, for they follow prepared optimizers.
        kinds = (LRScheduler, AcceleratedScheduler)
        return [self.scheduler(thing) if isinstance(thing, kinds) else thing for thing in first]

    def model(
        self, model: nn.Module, place: bool | None, evaluation_mode: bool = False, optimizers: Sequence[Optimizer] = ()
    ) -> nn.Module:
        """Prepare one model: device, precision, compiling, and the strategy's wrapper unless it is only evaluated."""
        check_type("prepare_model: model", model, nn.Module, "an nn.Module")
        known = self.registry.find(model)
        was_evaluated = any(known is other for other in self.registry.evaluated)
        if known is not None and (evaluation_mode or not was_evaluated):
            return known  # type: ignore[no-any-return]
        inside = compiled_from(model)
        if any(inside is one for one in self.registry.trained):
            return model  # which was prepared before it was compiled
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if len(devices) > 1 and self.world.size > 1:
            raise ConfigError(
                f"This model is spread over the devices {sorted(map(str, devices))} by its device map, which can't be "
                f"trained by {self.world.size} processes. Load it without device_map, or start one process."
            )
        is_wrapped = not evaluation_mode
        if self._placed(place) and len(devices) <= 1 and not (is_wrapped and self.strategy.places):
            model = model.to(self.world.device)
        self.precision.wrap(model)
        compile_in_place(model, self.compiling)
        own = {id(parameter) for parameter in model.parameters()}
        owners = [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]
        if is_wrapped and self.world.size > 1:
            named = [*model.named_parameters(), *model.named_buffers()]
            check_exchangeable(named, takes_float8=self.world.device.type != "cpu")
        prepared = self.strategy.prepare(model, owners) if is_wrapped else model
        if is_wrapped and self.loop.ends is not None:
            self.loop.ends.check_before(prepared, self._awaited, self._in_hand)
        if was_evaluated:  # and is trained now
            for listed in (self.registry.models, self.registry.evaluated):
                listed[:] = [other for other in listed if other is not known]
        self.registry.models.append(prepared)
        if evaluation_mode:
            self.registry.evaluated.append(prepared)
        self.registry.remember(model, prepared)
        return prepared

    def _awaited(self, model: nn.Module) -> list[int]:
        """Return the ranks that a forward pass of a prepared model, or its backward pass, waits for now."""
        group = self.strategy.awaited(model)
        return group.ranks if isinstance(group, TorchGroup) else []

    def _in_hand(self) -> Any:
        """Return the current iteration, unless ranks whose data end are joined."""
        return None if self.loop.joined is not None else self.loop.current

    def optimizer(self, optimizer: Optimizer, place: bool | None) -> AcceleratedOptimizer:
        check_type("prepare_optimizer: optimizer", optimizer, Optimizer, "a torch optimizer")
        known = self.registry.find(optimizer)
        if known is not None:
            return known  # type: ignore[no-any-return]
        device = self.world.device if self._placed(place) else None
        self.strategy.adopt(_bare(optimizer))
        prepared = AcceleratedOptimizer(_bare(optimizer), state=self.loop, precision=self.precision, device=device)
        self.registry.optimizers.append(prepared)
        self.registry.remember(optimizer, prepared)
        return prepared

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler; it follows the optimizer that it was made for, or all where that one is unknown."""
        known = self.registry.find(scheduler)
        if known is not None:
            return known  # type: ignore[no-any-return]
        if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
            raise wrong_type("prepare_scheduler: scheduler", scheduler, "a learning rate scheduler")
        made_for = _bare(getattr(scheduler, "optimizer", None))
        followed = [optimizer for optimizer in self.registry.optimizers if optimizer.optimizer is made_for]
        if isinstance(scheduler, AcceleratedScheduler):  # of another Accelerator, or made by hand: ticks as it did
            prepared = scheduler
            prepared.optimizers = followed or prepared.optimizers
        else:
            per_update = self.scheduler_ticks == "per_update" or self.data.split_batches
            prepared = AcceleratedScheduler(
                scheduler,
                followed or self.registry.optimizers,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                ticks=1 if per_update else self.world.size,
                warns=self.world.is_main,
            )
        self.registry.schedulers.append(prepared)
        self.registry.remember(scheduler, prepared)
        return prepared

    def loader(self, loader: DataLoader[Any], place: bool | None, slice_fn: Any = None) -> PreparedLoader:
        known = self.registry.find(loader)
        if known is not None:
            return known  # type: ignore[no-any-return]
        prepared = prepare_loader(
            loader,
            exchange=self.world.exchange,
            device=self.world.device if self._placed(place) else None,
            state=self.loop,
            config=self.data,
            rng_types=self.rng_types,
            slice_fn=slice_fn,
            slots=self.registry.slots,
        )
        if self.loop.ends is not None:
            self.loop.ends.add(prepared)
        self.registry.loaders.append(prepared)
        self.registry.remember(loader, prepared)
        return prepared

    def _placed(self, place: bool | None) -> bool:
        return self.device_placement if place is None else place


def _placements(said: Sequence[bool | None], number: int) -> Sequence[bool | None]:
    wanted = f"a list of flags, one for each of {counted(number, 'object')}, such as [True]"
    check_type("prepare: device_placement", said, (list, tuple), wanted)
    for placed in said:
        if placed is not None:
            check_flag("prepare: each of device_placement", placed)
    if len(said) != number:
        entries = counted(len(said), "entry")
        raise ConfigError(f"prepare: {counted(number, 'object')}, but device_placement has {entries}.")
    return said


def _refuse_stranger(thing: Any) -> None:
    """Raise WrongType for what is no model, optimizer, loader or scheduler, and can't stand for one."""
    if isinstance(thing, type):
        raise wrong_type("prepare: an argument", thing, f"an instance, such as {thing.__name__}(...)")
    if isinstance(thing, Dataset):
        raise wrong_type("prepare: an argument", thing, "a DataLoader over that data set")
    if isinstance(thing, (list, tuple)):
        wanted = f"one object: give prepare the things in the {type(thing).__name__} one by one, prepare(*things)"
        raise wrong_type("prepare: an argument", thing, wanted)
    if isinstance(thing, _STRANGERS) and not isinstance(thing, _KINDS):
        raise wrong_type("prepare: an argument", thing, "a model, an optimizer, a DataLoader or a scheduler")


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
