# SPDX-License-Identifier: Apache-2.0
"""What an `Accelerator` answers about what was settled when it was made, and about where its loop stands."""

from __future__ import annotations

from typing import Any

from torch import nn

from farflung.accelerator import session as slot
from farflung.accelerator.prepare import PreparedLoader, Preparer, Registry
from farflung.accelerator.session import Layout
from farflung.accelerator.settings import resolve_rng_types
from farflung.accelerator.views import AcceleratorState, GradientState
from farflung.base.checks import check_flag, check_optional, check_whole
from farflung.base.enums import DistributedType, FP8BackendType
from farflung.base.forward import Forward, unchecked
from farflung.config.handlers import (
    AORecipeKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy


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

    mixed_precision = Forward[str]("_precision.name", "`no`, `bf16`, `fp16` or `fp8`.")
    scaler = Forward[Any]("_precision.scaler", "The loss scaler of fp16, else None.")

    @property
    def native_amp(self) -> bool:
        """Whether forward passes compute in a half precision."""
        return self.mixed_precision != "no"

    @property
    def fp8_enabled(self) -> bool:
        """Whether linear layers multiply in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """`AO` where linear layers multiply in fp8, else `NO`."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How torchao converts models to fp8; None without it."""
        return getattr(self._precision, "recipe", None)

    fp8_recipe_handler = ao_recipe_handler  # there is no other kind

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is a recipe for fp8."""
        return self.ao_recipe_handler is not None

    @property
    def multi_device(self) -> bool:
        """Whether several processes train together, each on an accelerator of its own."""
        return self._world.size > 1 and self._world.device.type != "cpu"

    # ---- where the loop stands

    sync_gradients = Forward[bool](
        "_loop.sync_gradients", "Whether the current micro-batch completes its accumulation window.", unchecked
    )
    step = Forward[int]("_loop.step", "Micro-batches since the accumulation window was last reset.", unchecked)

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
        check_optional("ddp_handler", value, DistributedDataParallelKwargs, wanted)
        self._strategy.ddp_handler = value

    device_placement = Forward[bool](
        "_preparer.device_placement", "Whether things are moved to the device.", check_flag
    )
    step_scheduler_with_optimizer = Forward[bool](
        "_preparer.step_scheduler_with_optimizer",
        "Whether schedulers tick when their optimizers step, not on each call.",
        check_flag,
    )

    @property
    def rng_types(self) -> list[str]:
        """The kinds of random numbers that ranks share at the start of an iteration."""
        return self._preparer.rng_types

    @rng_types.setter
    def rng_types(self, value: list[str] | None) -> None:
        self._preparer.rng_types = resolve_rng_types(value)

    # ---- how data are shared out

    split_batches = Forward[bool](
        "dataloader_config.split_batches", "Whether a loader's batch size is that of all processes together."
    )
    dispatch_batches = Forward[bool | None](
        "dataloader_config.dispatch_batches",
        "Whether the main process reads batches and distributes them; None: for iterable datasets only.",
    )
    even_batches = Forward[bool](
        "dataloader_config.even_batches",
        "Whether the last round is padded, so that all ranks get the same number of batches.",
        unchecked,
    )
    use_seedable_sampler = Forward[bool](
        "dataloader_config.use_seedable_sampler", "Whether shuffling depends only on a seed and the epoch's number."
    )
    non_blocking = Forward[bool](
        "dataloader_config.non_blocking", "Whether batches are copied to the device without waiting."
    )
    use_stateful_dataloader = Forward[bool](
        "dataloader_config.use_stateful_dataloader",
        "Whether prepared loaders keep their position, for `state_dict` and `load_state_dict`.",
    )

    # ---- where files go

    project_dir = Forward[str | None]("project_configuration.project_dir", "Where the project keeps its files.")
    logging_dir = Forward[str | None]("project_configuration.logging_dir", "Where the project keeps its logs.")
    save_iteration = Forward[int]("project_configuration.iteration", "The number of the next automatic checkpoint.")

    # ---- what was prepared, under Accelerate's private names, which libraries read

    _models = Forward[list[nn.Module]]("_registry.models", "Prepared models.")
    _optimizers = Forward[list[AcceleratedOptimizer]]("_registry.optimizers", "Prepared optimizers.")
    _schedulers = Forward[list[AcceleratedScheduler]]("_registry.schedulers", "Prepared schedulers.")
    _dataloaders = Forward[list[PreparedLoader]]("_registry.loaders", "Prepared loaders.")
