# SPDX-License-Identifier: Apache-2.0
"""What an `Accelerator` answers about what was settled when it was made, and about where its loop stands."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import nn

from farflung.accelerator import session as slot
from farflung.accelerator.prepare import PreparedLoader, Preparer, Registry
from farflung.accelerator.session import Layout
from farflung.accelerator.settings import resolve_rng_types
from farflung.accelerator.views import AcceleratorState, GradientState
from farflung.base.checks import check_flag, check_type, check_whole
from farflung.base.enums import DistributedType, FP8BackendType
from farflung.config.handlers import DataLoaderConfiguration, DistributedDataParallelKwargs, ProjectConfiguration
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy

if TYPE_CHECKING:
    from farflung.config.fp8 import AORecipeKwargs


class AcceleratorProperties:
    """The properties of an Accelerator that read its settings, its loop and what it has prepared."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _layout: Layout
    _loop: LoopState
    _precision: Precision
    _preparer: Preparer
    _registry: Registry
    _strategy: Strategy
    _world: World

    @property
    def state(self) -> AcceleratorState:
        """A view of the process, its world and the session."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """A view of where the training loop stands."""
        return GradientState()

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together, or what a script has set `state.distributed_type` to."""
        session = slot.current()  # none where the state was reset: an Accelerator keeps what it was made with
        return (None if session is None else session.named_kind) or self._strategy.kind

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""
        return self._precision.name

    @property
    def native_amp(self) -> bool:
        """Whether forward passes compute in a half precision."""
        return self._precision.name != "no"

    @property
    def scaler(self) -> Any:
        """The loss scaler of fp16, else None."""
        return self._precision.scaler

    @property
    def fp8_backend(self) -> FP8BackendType:
        """`AO` where linear layers multiply in fp8, else `NO`."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def fp8_enabled(self) -> bool:
        """Whether linear layers multiply in fp8."""
        return self._precision.name == "fp8"

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How torchao converts models to fp8; None without it."""
        return getattr(self._precision, "recipe", None)

    @property
    def fp8_recipe_handler(self) -> AORecipeKwargs | None:
        """The same as `ao_recipe_handler`: there is no other kind."""
        return self.ao_recipe_handler

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is a recipe for fp8."""
        return self.ao_recipe_handler is not None

    @property
    def multi_device(self) -> bool:
        """Whether several processes train together, each on an accelerator of its own."""
        return self._world.size > 1 and self._world.device.type != "cpu"

    # ---- where the loop stands

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes its accumulation window."""
        return self._loop.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._loop.sync_gradients = value

    @property
    def step(self) -> int:
        """Micro-batches since the accumulation window was last reset."""
        return self._loop.step

    @step.setter
    def step(self, value: int) -> None:
        self._loop.step = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one accumulation window."""
        return self._loop.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        check_whole("gradient_accumulation_steps", value, least=1)
        self._loop.num_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last attempted step was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._registry.optimizers)

    # ---- how things are prepared from now on

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Arguments for torch's DDP."""
        return self._strategy.ddp_handler

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs | None) -> None:
        wanted = "a DistributedDataParallelKwargs(...), or None"
        check_type("ddp_handler", value, (DistributedDataParallelKwargs, NoneType), wanted)
        self._strategy.ddp_handler = value

    @property
    def device_placement(self) -> bool:
        """Whether things are moved to the device."""
        return self._preparer.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        check_flag("device_placement", value)
        self._preparer.device_placement = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers tick when their optimizers step, not on each call."""
        return self._preparer.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        check_flag("step_scheduler_with_optimizer", value)
        self._preparer.step_scheduler_with_optimizer = value

    @property
    def rng_types(self) -> list[str]:
        """The kinds of random numbers that ranks share at the start of an iteration."""
        return self._preparer.rng_types

    @rng_types.setter
    def rng_types(self, value: list[str] | None) -> None:
        self._preparer.rng_types = resolve_rng_types(value)

    # ---- how data are shared out

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads batches and distributes them; None: for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is padded, so that all ranks get the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends only on a seed and the epoch's number."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders keep their position, for `state_dict` and `load_state_dict`."""
        return self.dataloader_config.use_stateful_dataloader

    # ---- where files go

    @property
    def project_dir(self) -> str | None:
        """Where the project keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where the project keeps its logs."""
        return self.project_configuration.logging_dir

    # ---- what was prepared, under Accelerate's private names, which libraries read

    @property
    def _models(self) -> list[nn.Module]:
        return self._registry.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._registry.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._registry.schedulers

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        return self._registry.loaders
