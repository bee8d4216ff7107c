# SPDX-License-Identifier: Apache-2.0
"""The properties of an `Accelerator`: the settings that were fixed when it was made, and the state of its loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from farflung.accelerator.prepare import Preparer
from farflung.accelerator.session import Layout, session_in_use
from farflung.accelerator.settings import resolve_rng_types
from farflung.accelerator.views import AcceleratorState, Engines, GradientState
from farflung.base.checks import check_flag, check_optional, check_whole, shown
from farflung.base.enums import DistributedType, FP8BackendType
from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.base.forward import Forward, unchecked
from farflung.config.handlers import (
    AORecipeKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from farflung.data.loader import PreparedLoader
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.mesh import cut_sequences
from farflung.process.world import World
from farflung.resume.run import Run
from farflung.strategy.base import Strategy

_T = TypeVar("_T")


def _joined(run: Run) -> World:
    session_in_use()
    return run.world


class _RunList(Forward[list[_T]]):
    """A list of the `Run`. Setting it replaces its elements; the list stays the same object."""

    def __set__(self, instance: Any, value: list[_T]) -> None:
        self.__get__(instance)[:] = value


class AcceleratorProperties(Engines):
    """The properties of an Accelerator that read its settings, its loop and what it has prepared."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _loop: LoopState
    _precision: Precision
    _preparer: Preparer
    _run: Run
    _strategy: Strategy

    _idle_scaler: Any = None

    state: AcceleratorState  # views, which scripts may set attributes of
    gradient_state: GradientState
    _world = Forward[World]("_run.world")
    _described = Forward[World](lambda self: _joined(self._run))

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together, or the value that a script has set `state.distributed_type` to."""
        return session_in_use().named_kind or self._strategy.kind

    mixed_precision = Forward[str]("_precision.name", "`no`, `bf16`, `fp16` or `fp8`.")

    @property
    def scaler(self) -> Any:
        """The loss scaler of fp16, which a script may replace; else None, or one that is off and that it has set."""
        return self._precision.scaler or self._idle_scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        is_scaler, own = isinstance(value, torch.amp.GradScaler), self._precision.scaler
        if own is None and (value is None or (is_scaler and not value.is_enabled())):
            self._idle_scaler = value
        elif own is None or not is_scaler:
            raise ConfigError(
                f"accelerator.scaler was set to {shown(value)}, but mixed_precision={self.mixed_precision!r} decides "
                "it. Give Accelerator(kwargs_handlers=[GradScalerKwargs(...)]) its settings."
            )
        elif value is not own:
            self._precision.forget()
            self._precision.scaler = value

    @property
    def native_amp(self) -> bool:
        """Whether forward passes compute in a half precision; a script may turn that off."""
        return self._precision.autocasts

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        check_flag("native_amp", value)
        if value and self.mixed_precision == "no":
            raise ConfigError("native_amp is True, but mixed_precision is 'no'. Give Accelerator(mixed_precision=...).")
        self._precision.autocasts = value

    fp8_enabled = Forward[bool](lambda self: self.mixed_precision == "fp8", "Whether linear layers multiply in fp8.")
    fp8_backend = Forward[FP8BackendType](
        lambda self: FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO,
        "`AO` if linear layers multiply in fp8, else `NO`.",
    )

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How torchao converts models to fp8; None without it."""
        return getattr(self._precision, "recipe", None)

    fp8_recipe_handler = ao_recipe_handler  # there is no other kind

    has_fp8_handler = Forward[bool](
        lambda self: self.ao_recipe_handler is not None, "Whether there is a recipe for fp8."
    )
    multi_device = Forward[bool](
        lambda self: self._world.size > 1 and self._world.device.type != "cpu",
        "Whether several processes train together, each on an accelerator of its own.",
    )

    # ---- where the loop stands

    sync_gradients = Forward[bool](
        "_loop.sync_gradients", "Whether the current micro-batch completes its accumulation window.", unchecked
    )
    step = Forward[int]("_loop.step", "Micro-batches since the accumulation window was last reset.", unchecked)

    gradient_accumulation_steps = Forward[int](
        "_loop.num_steps",
        "Micro-batches in one accumulation window.",
        lambda _, value: check_whole("gradient_accumulation_steps", value, least=1),
    )

    optimizer_step_was_skipped = Forward[bool](
        lambda self: any(optimizer.step_was_skipped for optimizer in self._run.optimizers),
        "Whether an optimizer's last attempted step was skipped because gradients overflowed.",
    )

    skipped_steps = Forward[int](
        lambda self: 0 if self._finite is None else self._finite.total,
        "How many steps `skip_nonfinite` has skipped since this Accelerator was made.",
    )

    # ---- how things are prepared from now on

    ddp_handler = Forward[DistributedDataParallelKwargs | None](
        "_strategy.ddp_handler",
        "Arguments for torch's DDP.",
        lambda name, value: check_optional(
            name, value, DistributedDataParallelKwargs, "a DistributedDataParallelKwargs(...), or None"
        ),
    )
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

    _models = _RunList[nn.Module]("_run.models", "Prepared models.")
    _optimizers = _RunList[AcceleratedOptimizer]("_run.optimizers", "Prepared optimizers.")
    _schedulers = _RunList[AcceleratedScheduler]("_run.schedulers", "Prepared schedulers.")
    _dataloaders = _RunList[PreparedLoader]("_run.loaders", "Prepared loaders.")
    _custom_objects = _RunList[Any]("_run.custom", "Objects that were registered for checkpoints.")

    # ---- its position on each axis of the grid, and the axes and engines that Farflung lacks

    torch_device_mesh = Engines._device_mesh
    is_composable_parallelism_enabled = Forward[bool]("is_fsdp2", "Whether models are sharded over several processes.")

    @property
    def data_parallel_rank(self) -> int:
        """The row of this process, its index among the replicas of a `ParallelismConfig`; StateError without one."""
        return self._grid("data_parallel_rank").mesh.replicas.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """The column of this process, its index among the shards of a `ParallelismConfig`; StateError without one."""
        return self._grid("data_parallel_shard_rank").place["dp_shard"]

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer this process holds; StateError without a `ParallelismConfig`."""
        return self._grid("tensor_parallel_rank").place["tp"]

    def _grid(self, name: str) -> Layout:
        if self._layout is None or self._layout.parallelism is None:
            raise StateError(
                f"{name}: this run has no parallelism configuration, so there is no such axis. Use process_index."
            )
        return self._layout

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank's part of the sequences. Raises StateError without a configuration."""
        return self._grid("context_parallel_rank").place["cp"]

    @property
    def pipeline_parallel_rank(self) -> int:
        """Raise Unsupported: there is no pipeline parallelism."""
        raise Unsupported("pipeline_parallel_rank: pipeline parallelism is not supported. Use process_index.")

    should_save_model = Forward[bool](
        lambda self: True, "True: saving is called by all processes, and chooses by itself which of them write."
    )
    delayed_fp8_autocast = Forward[bool](lambda self: False, "False: that is of TransformerEngine.")
    has_lomo_optimizer = Forward[bool](lambda self: False, "False: LOMO's optimizers are not supported.")
    te_recipe_handler = Forward[None](lambda self: None, "None: TransformerEngine is not supported.")
    msamp_recipe_handler = Forward[None](lambda self: None, "None: MS-AMP is not supported.")

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Raise Unsupported: LOMO steps inside its backward pass."""
        raise Unsupported(
            "lomo_backward: LOMO's optimizers are not supported. Use backward(loss) and optimizer.step()."
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader `dl` as it is: sequences are not shared out among processes."""
        return dl

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Cut sequences over the ranks of context parallelism, and attention with them; without it, change nothing.

        A loss in the block is that of this rank's part, and its backward pass belongs there too;
        `reduce(loss, "mean")` is the loss of all. torch 2.13 does this on CPUs under `SDPBackend.MATH` without a mask.

        Args:
            buffers: tensors with a dimension of tokens: inputs, labels, positions. They are cut in place.
            buffer_seq_dims: that dimension of each.
            no_restore_buffers: those of `buffers` that may stay cut after the block.
        """
        parallelism, mesh = self.parallelism_config, self.torch_device_mesh
        if mesh is None or parallelism is None or not parallelism.cp_enabled:
            return nullcontext()
        if not buffers or len(buffers) != len(buffer_seq_dims or ()):
            raise ConfigError(
                f"maybe_context_parallel: {len(buffers or ())} buffers and {len(buffer_seq_dims or ())} "
                "buffer_seq_dims. Give the tensors with a dimension of tokens, and that dimension of each."
            )
        strategy = parallelism.cp_handler.cp_comm_strategy
        return cut_sequences(mesh["cp"], strategy, buffers, buffer_seq_dims or [], no_restore_buffers)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a device map spreads `model`, or a module in it, over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(isinstance(found, dict) and len(found) > 1 for found in maps)
