# SPDX-License-Identifier: Apache-2.0
"""`prepare`: models, optimizers, loaders and schedulers, each made ready once and remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from farflung.accelerator import lazy
from farflung.base.checks import check_flag, check_type, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.torch_internals import before_calls, compiled_from
from farflung.base.words import counted
from farflung.comm.recording import WeakHook
from farflung.comm.tensor_memory import check_exchangeable
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.handlers import DataLoaderConfiguration
from farflung.data.loader import PreparedLoader
from farflung.data.prepare import prepare_loader
from farflung.loop.finite import SkipNonfinite
from farflung.loop.optimizer import AcceleratedOptimizer, parameters_of
from farflung.loop.scheduler import AcceleratedScheduler, Ticks, horizon_of
from farflung.loop.uneven import check_even
from farflung.process.run_files import note_model
from farflung.resume.run import Run
from farflung.strategy.compile import compile_in_place

_KINDS = (nn.Module, Optimizer, DataLoader, LRScheduler, AcceleratedScheduler)
_STRANGERS = (str, bytes, Real, Tensor, Mapping, Set, GeneratorType)


@dataclass
class Preparer:
    """Prepares objects for one Accelerator. It takes every decision, so that the loop need take none.

    Scripts may set `rng_types`, `device_placement` and `step_scheduler_with_optimizer` for what is prepared afterwards.
    """

    run: Run
    compiling: TorchDynamoPlugin
    data: DataLoaderConfiguration
    rng_types: list[str]
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_ticks: Ticks
    finite: SkipNonfinite | None = None

    def prepare(self, things: Sequence[Any], device_placement: Sequence[bool | None] | None) -> list[Any]:
        """Prepare `things`, in order. Loaders and schedulers of other kinds than torch's come back unchanged."""
        for thing in things:
            _refuse_stranger(thing)
        placements = [None] * len(things) if device_placement is None else _placements(device_placement, len(things))
        optimizers = [_bare(thing) for thing in things if isinstance(thing, Optimizer)]
        optimizers += [optimizer.optimizer for optimizer in self.run.optimizers]
        new = [thing for thing in things if isinstance(thing, DataLoader) and self.run.find(thing) is None]
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
        return [self.scheduler(thing, new) if isinstance(thing, kinds) else thing for thing in first]

    def model(
        self, model: nn.Module, place: bool | None, evaluation_mode: bool = False, optimizers: Sequence[Optimizer] = ()
    ) -> nn.Module:
        """Prepare one model: device, precision, compiling, and the strategy's wrapper unless it is only evaluated."""
        check_type("prepare_model: model", model, nn.Module, "an nn.Module")
        known = self.run.find(model)
        was_evaluated = any(known is other for other in self.run.evaluated)
        if known is not None and (evaluation_mode or not was_evaluated):
            return known  # type: ignore[no-any-return]
        inside = compiled_from(model)
        if any(inside is one for one in self.run.trained):
            return model  # which was prepared before it was compiled
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if len(devices) > 1 and self.run.world.size > 1:
            raise ConfigError(
                f"This model is spread over the devices {sorted(map(str, devices))} by its device map, which can't be "
                f"trained by {self.run.world.size} processes. Load it without device_map, or start one process."
            )
        is_wrapped = not evaluation_mode
        # By the marks that transformers leaves on what it loads with bitsandbytes.
        is_quantized = bool(devices) and any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if is_quantized and is_wrapped:
            _check_quantized(devices, self.run.world.device)
        stays = is_quantized or len(devices) > 1 or (is_wrapped and self.run.strategy.places)
        if self._placed(place) and not stays:
            model = model.to(self.run.world.device)
        self.run.precision.wrap(model)
        compile_in_place(model, self.compiling)
        own = {id(parameter) for parameter in model.parameters()}
        owners = [optimizer for optimizer in optimizers if any(id(p) in own for p in parameters_of(optimizer))]
        if is_wrapped and self.run.world.size > 1:
            named = [*model.named_parameters(), *model.named_buffers()]
            check_exchangeable(named, takes_float8=self.run.world.device.type != "cpu")
        self.run.unaveraged += self.run.strategy.unaveraged(model) if is_wrapped else []
        prepared = self.run.strategy.prepare(model, owners) if is_wrapped else model
        if is_wrapped and self.run.loop.ends is not None:
            check = partial(check_even, self.run.strategy.awaited)
            before_calls(prepared, WeakHook(check, self.run.loop))
        if is_wrapped and self.finite is not None:
            self.finite.follow(prepared)
        if was_evaluated:  # and is trained now
            for listed in (self.run.models, self.run.evaluated):
                listed[:] = [other for other in listed if other is not known]
        if evaluation_mode:
            self.run.evaluated.append(prepared)
        elif self.run.world.is_main:
            strategy = self.run.strategy
            note_model(model, str(strategy.kind.value), strategy.mesh.island.size, self.run.world.size)
        return self.run.add(self.run.models, model, prepared)

    def optimizer(self, optimizer: Optimizer, place: bool | None) -> AcceleratedOptimizer:
        check_type("prepare_optimizer: optimizer", optimizer, Optimizer, "a torch optimizer")
        known = self.run.find(optimizer)
        if known is not None:
            return known  # type: ignore[no-any-return]
        self.run.strategy.adopt(_bare(optimizer))
        prepared = AcceleratedOptimizer(
            _bare(optimizer), self._placed(place), state=self.run.loop, precision=self.run.precision
        )
        prepared.finite, prepared.unaveraged = self.finite, self.run.unaveraged
        for scheduler in self.run.schedulers:  # that were prepared before it
            made_for = _bare(getattr(scheduler, "optimizer", None))
            if made_for is prepared.optimizer:
                scheduler.optimizers = [prepared]
            elif made_for is None:
                scheduler.optimizers = [*scheduler.optimizers, prepared]
        return self.run.add(self.run.optimizers, optimizer, prepared)

    def scheduler(self, scheduler: Any, new: Sequence[DataLoader[Any]] = ()) -> AcceleratedScheduler:
        """Prepare one scheduler; it follows the optimizer that it was made for, or all if that one is unknown.

        Args:
            new: loaders that are prepared with it, so that it was made by the length that they had before.
        """
        known = self.run.find(scheduler)
        if known is not None:
            return known  # type: ignore[no-any-return]
        if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
            raise wrong_type("prepare_scheduler: scheduler", scheduler, "a learning rate scheduler")
        made_for = _bare(getattr(scheduler, "optimizer", None))
        followed = [optimizer for optimizer in self.run.optimizers if optimizer.optimizer is made_for]
        if isinstance(scheduler, AcceleratedScheduler):  # of another Accelerator, or made by hand: ticks as it did
            prepared = scheduler
            prepared.optimizers = followed or prepared.optimizers
        else:
            per_update = self.scheduler_ticks == "per_update" or self.data.split_batches
            prepared = AcceleratedScheduler(
                scheduler,
                followed or self.run.optimizers,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                ticks=1 if per_update else self._epoch_ticks(scheduler, new) or self.run.strategy.mesh.readers.size,
                warns=self.run.world.is_main,
            )
        return self.run.add(self.run.schedulers, scheduler, prepared)

    def _epoch_ticks(self, scheduler: Any, new: Sequence[DataLoader[Any]]) -> Callable[[], int] | None:
        """Return the ticks of a schedule that is made for the data of all replicas that come and go, or None."""
        if self.run.slots is None:
            return None
        shares, horizon = [self.run.find(loader).share for loader in new], horizon_of(scheduler)
        found = (lazy.ticks.epoch_ticks(scheduler, horizon, share, self.run.loop.num_steps) for share in shares)
        return next((ticks for ticks in found if ticks is not None), None)

    def loader(
        self,
        loader: DataLoader[Any],
        place: bool | None,
        slice_fn: Any = None,
        already_sharded: bool | None = None,
    ) -> PreparedLoader:
        known = self.run.find(loader)
        if known is not None:
            return known  # type: ignore[no-any-return]
        prepared = prepare_loader(
            loader,
            exchange=self.run.world.exchange,
            device=self.run.world.device if self._placed(place) else None,
            state=self.run.loop,
            config=self.data if already_sharded is None else replace(self.data, already_sharded=already_sharded),
            rng_types=self.rng_types,
            slice_fn=slice_fn,
            readers=self.run.strategy.mesh.readers,
            slots=self.run.slots,
        )
        if self.run.loop.ends is not None:
            self.run.loop.ends.add(prepared)
        return self.run.add(self.run.loaders, loader, prepared)

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
    """Raise WrongType for an object that is no model, optimizer, loader or scheduler, and can't stand for one."""
    if isinstance(thing, type):
        raise wrong_type("prepare: an argument", thing, f"an instance, such as {thing.__name__}(...)")
    stages = getattr(thing, "pipeline", None)  # webdataset's loader is a data set with a DataLoader among its stages
    is_loader = isinstance(stages, list) and any(isinstance(stage, DataLoader) for stage in stages)
    if isinstance(thing, Dataset) and not is_loader:
        raise wrong_type("prepare: an argument", thing, "a DataLoader over that data set")
    if isinstance(thing, (list, tuple)) and any(isinstance(one, _KINDS) for one in thing):
        wanted = f"one object: give prepare the things in the {type(thing).__name__} one by one, prepare(*things)"
        raise wrong_type("prepare: an argument", thing, wanted)
    if isinstance(thing, _STRANGERS) and not isinstance(thing, _KINDS):
        raise wrong_type("prepare: an argument", thing, "a model, an optimizer, a DataLoader or a scheduler")


def _check_quantized(devices: Set[Any], device: torch.device) -> None:
    """Raise ConfigError if quantized weights can't be trained on `device`; several GPUs for one process are fine."""
    found = {str(one) for one in devices}
    here = {str(device), device.type} if device.type == "cpu" else {str(device), device.type, str(device.index or 0)}
    elsewhere = found - here if len(found) == 1 else found & ({"cpu", "disk"} - here)
    if elsewhere:
        raise ConfigError(
            f"This model has quantized weights on {', '.join(sorted(elsewhere))}, where they can't be trained: this "
            f"process trains on {device}. Load it with device_map={{'': '{device}'}}."
        )


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
