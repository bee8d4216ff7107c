# SPDX-License-Identifier: Apache-2.0
"""The object that a training script holds. It fixes the settings once, then delegates."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from farflung.accelerator import lazy, settings
from farflung.accelerator.checkpoints import Checkpointing
from farflung.accelerator.control import ProcessControl
from farflung.accelerator.controller import OuterController, OuterMethods
from farflung.accelerator.join import join_uneven_inputs
from farflung.accelerator.operations import extract_model_from_parallel, gather_for_metrics
from farflung.accelerator.prepare import Preparer
from farflung.accelerator.properties import AcceleratorProperties
from farflung.accelerator.session import (
    check_layout,
    flushed,
    open_session,
    resolve_layout,
    session_in_use,
    settling,
    unset_announced,
)
from farflung.accelerator.trackers import TrackerMethods
from farflung.accelerator.views import AcceleratorState, GradientState
from farflung.base.checks import check_optional, check_path, check_type, check_whole
from farflung.base.enums import DynamoBackend
from farflung.base.errors import StateError
from farflung.base.words import counted
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group
from farflung.comm.torch_group import explained
from farflung.config import environ, handlers
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.data.loader import PreparedLoader
from farflung.data.prepare import skip_first_batches
from farflung.loop import clip
from farflung.loop.accumulation import Accumulate, explain_loss, weighed
from farflung.loop.finite import SkipNonfinite
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler, Ticks
from farflung.process.bootstrap import join_world, leave_world
from farflung.process.mesh import IslandSize
from farflung.process.run_files import Metrics
from farflung.resume.run import Run
from farflung.strategy.choose import choose_strategy
from farflung.tools.memory import release_memory

if TYPE_CHECKING:
    from farflung.methods.arguments import OuterConfig


class Accelerator(AcceleratorProperties, OuterMethods, Checkpointing, TrackerMethods, ProcessControl):
    """Runs your training loop on as many processes as it was started with. Accelerate's parameters, and:

    Args:
        gradient_accumulation_steps: None takes that of this process's first Accelerator, or the launcher's, or 1.
        scheduler_ticks: `per_process` steps a prepared scheduler `num_processes` times per optimizer step, as
            scripts written for Accelerate expect, divided by `tp_size` and `cp_size`; `per_update` once.
        outer: trains replicas of each model that is prepared with its optimizer independently, with this recipe; they
            are synchronized after each epoch of the training data too. A recipe's name, such as `"diloco"`, takes its
            defaults. None: as the launcher says (`--outer`).
        island_size: under an outer loop, how many neighbouring processes average their gradients in every step, as one
            replica; `host`: those of one machine. None: as the launcher says, or 1. With FSDP it is `dp_shard_size`.
        ema: keep a running mean of the weights in the optimizers' state: below 1 the decay of an exponential mean, such
            as 0.999, else over about how many snapshots. Models have it from `eval()` until they train again;
            `get_state_dict` and `save_model` give it, `end_training` leaves it. Buffers are as they are: see
            `torch.optim.swa_utils.update_bn`.
        ema_every: optimizer steps between two snapshots.
        skip_nonfinite: skip a step whose loss or gradients are not finite on any rank, on all ranks (under an outer
            loop on this replica); this many in a row raise `NonFinite`. Buffers are as before its forward passes,
            schedulers wait, and `skipped_steps` counts. None: such a step is made.
        save_on_signal: a folder or an address for a checkpoint of this process's first Accelerator, if SIGTERM or
            SIGUSR1 ends the run: all ranks stop after the same step, save and exit with code 75. See `resume`. None: as
            the launcher says.

    Raises:
        ConfigError: settings that contradict each other or those of the process's first Accelerator.
        Unsupported: an engine that Farflung does not support.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: handlers.DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: handlers.ProjectConfiguration | None = None,
        gradient_accumulation_plugin: handlers.GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[handlers.KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_ticks: Ticks = "per_process",
        outer: OuterConfig | str | None = None,
        island_size: IslandSize | None = None,
        ema: float | None = None,
        ema_every: int = 1,
        skip_nonfinite: int | None = None,
        save_on_signal: str | os.PathLike[str] | None = None,
    ) -> None:
        settings.refuse_engines(
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        check_layout(fsdp_plugin, parallelism_config, island_size)
        rng_types = settings.resolve_rng_types(rng_types)
        settings.check_arguments(
            device_placement, cpu, step_scheduler_with_optimizer, scheduler_ticks, project_dir, project_config
        )
        given = settings.handlers_by_kind(kwargs_handlers)
        self.scaler_handler: handlers.GradScalerKwargs | None = given.get(handlers.GradScalerKwargs)
        self.init_handler = settings.check_init(given.get(handlers.InitProcessGroupKwargs))
        self.autocast_handler: handlers.AutocastKwargs | None = given.get(handlers.AutocastKwargs)
        self.profile_handler: handlers.ProfileKwargs | None = given.get(handlers.ProfileKwargs)
        accumulation = settings.resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        compiling = settings.resolve_compile(dynamo_backend, dynamo_plugin)
        asked = settings.resolve_outer(outer)
        averages = settings.resolve_ema(ema, ema_every, asked is not None)
        if skip_nonfinite is not None:
            check_whole("skip_nonfinite", skip_nonfinite, least=1)
        self.project_configuration = settings.resolve_project(project_dir, project_config)
        self._tracking = None if log_with is None else lazy.tracking.Tracking(log_with, self.logging_dir)
        self.dataloader_config = settings.resolve_data(dataloader_config, split_batches)
        world = join_world(cpu, self.init_handler, given.get(handlers.WatchdogKwargs))
        self._metrics = Metrics.of_run() if world.is_main else None
        session = open_session(world, mixed_precision, accumulation, compiling)
        with settling(session):
            self._layout = layout = resolve_layout(
                session, fsdp_plugin, parallelism_config, island_size, asked is not None
            )
            self._precision = settings.resolve_precision(session.asked_precision, world.device, given, layout.fsdp)
            session.mixed_precision = self._precision.name
        if accumulation is None:
            session.accumulate_as_first()
        self._loop = session.loop
        ddp = given.get(handlers.DistributedDataParallelKwargs)
        self._strategy = choose_strategy(world, layout.mesh, ddp, layout.fsdp, self._precision.dtype)
        self._distributed = world.size > 1
        self._run = run = Run(world, self._loop, self._precision, self._strategy, layout.fsdp)
        if world.place.member is not None:
            run.slots = lazy.elastic.slots_of(world.place, lazy.slots.Slots, world.exchange, lambda: run.is_training)
        self._finite = None if skip_nonfinite is None else SkipNonfinite(skip_nonfinite, world.is_main)
        self._controller = OuterController(asked, run, averages)
        session.controllers[self._controller] = None
        self.state, self.gradient_state = AcceleratorState(), GradientState()
        self._preparer = Preparer(
            run=run,
            compiling=compiling,
            data=self.dataloader_config,
            rng_types=rng_types,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_ticks=scheduler_ticks,
            finite=self._finite,
        )
        self.flag_tensor: Tensor | None = None
        self._save_on_signal(session, save_on_signal or environ.text("FARFLUNG_SAVE_ON_SIGNAL"))

    # ---- making things ready

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for training; returned in the same order.

        Preparing an object again returns the same wrapper. Functions and other kinds of loaders are returned unchanged.

        Args:
            device_placement: for each argument, whether it is moved to the device; None: the Accelerator's setting.
        """
        session_in_use()  # after a reset nothing would flush the outer loops of what is prepared
        prepared = self._preparer.prepare(args, device_placement)
        self._controller.attach()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; in `evaluation_mode` it is not wrapped for training."""
        prepared = self._preparer.model(model, device_placement, evaluation_mode)
        self._controller.attach()
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        prepared = self._preparer.optimizer(optimizer, device_placement)
        self._controller.attach()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler."""
        return self._preparer.scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
        *,
        already_sharded: bool | None = None,
    ) -> PreparedLoader:
        """Prepare one loader; `slice_fn_for_dispatch` slices a rank's share out of a dispatched batch.

        `already_sharded` is that of `DataLoaderConfiguration`, for this loader; None: the Accelerator's setting.
        """
        return self._preparer.loader(data_loader, device_placement, slice_fn_for_dispatch, already_sharded)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader that skips the first `num_batches` of `dataloader`."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the module inside a prepared model. No communication.

        Args:
            keep_fp32_wrapper: False returns what computes without mixed precision; its tensors are the model's own.
            keep_torch_compile: False returns what computes without torch.compile; its tensors are the model's own.
        """
        check_type("unwrap_model: model", model, nn.Module, "an nn.Module")
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    # ---- the loop

    def accumulate(self, *models: nn.Module | Sequence[nn.Module | None] | None) -> Accumulate:
        """Count a micro-batch; gradients of `models` are synchronized when it completes its window."""
        listed = [one for given in models for one in (given if isinstance(given, (list, tuple)) else [given])]
        resolved = tuple([self._run.resolve(model) for model in listed if model is not None])
        return Accumulate(self._loop, resolved, self._strategy.no_sync if self._distributed else None)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which the gradients of `model` are not synchronized."""
        check_type("no_sync: model", model, nn.Module, "an nn.Module")
        return self._strategy.no_sync(self._run.resolve(model))

    def autocast(self, autocast_handler: handlers.AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that computes in the session's precision."""
        check_optional("autocast_handler", autocast_handler, handlers.AutocastKwargs, "an AutocastKwargs(enabled=...)")
        handler = autocast_handler or self.autocast_handler
        if handler is not None:
            handler.check()
        return self._precision.autocast(handler)

    def backward(self, loss: Tensor, *, num_items: float | Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss, scaled under fp16.

        A mean loss is divided by the number of micro-batches in its window, which may be short when the data end.

        Args:
            loss: 0-d, the mean over the micro-batch; or, with `num_items`, the sum.
            num_items: how many items (tokens, samples) that sum is over. The gradient of a window is then that of
                `sum(loss) / sum(num_items)` over all its micro-batches and all ranks, whatever each of them has.
            kwargs: arguments of `Tensor.backward`.

        Raises:
            ConfigError: `loss` is no tensor of one number that requires a gradient, or `num_items` is no number.
            StateError: some losses of a window come with `num_items`, others without; or the loss was used up.
        """
        window, given = self._loop.window, loss
        try:
            if num_items is not None:
                loss = weighed(loss, num_items, self._loop, *self._averaged_over(window.models))
            elif window.scale is not None:
                raise StateError("backward: the earlier losses of this window came with num_items. Give it to all.")
            elif window.divisor > 1:
                loss = loss / window.divisor
            if self._finite is not None:
                loss = self._finite.marked(loss)
            self._precision.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]
            self._loop.backwards += 1
            if self._loop.keeps_loss:
                self._loop.loss = given.detach(), 1 if num_items is None else num_items
        except (RuntimeError, AttributeError, TypeError) as error:
            known = explained(error, self._run.world.group)  # which names the rank, where torch speaks of a connection
            if known is not error:
                raise known from error
            self._run.world.group.raise_if_broken()
            explain_loss(given, kwargs, error)
            raise

    def _averaged_over(self, accumulated: tuple[nn.Module, ...]) -> tuple[Group | None, bool]:
        """Return the ranks that average the gradients of a window, and whether that waits for the end of the window.

        The ranks are None if there are no others, or not the same for all models. Nothing waits if none of the
        models was prepared: what they hold is not known.
        """
        trained = self._run.trained if self._distributed else []
        models = [model for model in trained if any(model is one for one in accumulated)]
        waits = bool(models) and not self._loop.sync_each_batch
        groups = [self._strategy.averaged_over(model) for model in models or trained]
        return groups[0] if groups and all(group is groups[0] for group in groups) else None, waits

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients' total norm to `max_norm`; return the norm before clipping, as a 0-d tensor.

        Inside an accumulation window nothing is clipped and NaN is returned.
        """
        if self._finite is not None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = self._clipping.norm_(parameters, max_norm, norm_type)
        if self._finite is not None and self.sync_gradients:
            self._finite.note_norm(parameters, norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient's elements to `[-clip_value, clip_value]`; inside a window do nothing."""
        self._clipping.value_(parameters, clip_value)

    @property
    def _clipping(self) -> clip.Clipping:
        return clip.Clipping(self._precision, self._loop, self._run.optimizers)

    def unscale_gradients(self, optimizer: Optimizer | list[Optimizer] | None = None) -> None:
        """Unscale the fp16 gradients of `optimizer`, or of all; does nothing inside a window, and without fp16."""
        chosen = self._run.optimizers if optimizer is None else optimizer
        listed = chosen if isinstance(chosen, (list, tuple)) else [chosen]
        for one in listed:
            check_type("unscale_gradients: optimizer", one, Optimizer, "a torch optimizer")
        if self._precision.scaler is None:
            return
        clip.unscale(self._precision, [self._run.find(one) or self.prepare_optimizer(one) for one in listed])

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which ranks that run out of batches early answer the others' gradient collectives.

        All ranks enter and leave it. A step's gradient is divided by the number of ranks, whether they have data or
        not; with `backward(..., num_items=)` it is that of `sum(loss) / sum(num_items)` over those that have. When a
        rank's data end in the middle of an accumulation window, that window is complete on all ranks. Afterwards the
        models are those of the ranks that trained longest, and so are their optimizers, schedulers and loss scales.

        Args:
            even_batches: for its length, overrides the setting of prepared map-style loaders.
        """
        if self.distributed_type is not self._strategy.kind:
            warnings.warn(
                "join_uneven_inputs is only supported for multi-GPU and multi-CPU training. state.distributed_type was "
                f"set to {self.distributed_type.value}, so nothing is joined.",
                stacklevel=2,
            )
            return nullcontext()
        return join_uneven_inputs(joinables, even_batches, self._run, self._controller.has)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `backward` synchronizes the gradients of `model`, though its forward pass ran
        inside `no_sync`.
        """
        check_type("trigger_sync_in_backward: model", model, nn.Module, "an nn.Module")
        return self._strategy.sync_in_backward(self._run.resolve(model))

    @contextmanager
    def profile(self, profile_handler: handlers.ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile the block with `torch.profiler`.

        If the handler has an `output_trace_dir`, each rank writes its trace there, and waits for the others'.
        Raises StateError if there is nothing to write, as the schedule has recorded no step.
        """
        check_optional("profile_handler", profile_handler, handlers.ProfileKwargs, "a ProfileKwargs(activities=...)")
        handler = profile_handler or self.profile_handler or handlers.ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        if profiler.profiler is None:
            raise StateError(
                f"profile: no step was recorded with the schedule {handler.schedule_option} in "
                f"{counted(profiler.step_num, 'step')}. "
                "Call profiler.step() once a step, and profile more of them."
            )
        folder = check_path("ProfileKwargs: output_trace_dir", handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{self._world.rank}.json"))
        collectives.wait_for_everyone(flushed(self._world.exchange), "profile")

    # ---- talking to the other processes

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a tree over all processes, in rank order, along the first dimension.

        Raises:
            CollectiveMismatch: on every rank, when structures, shapes or dtypes differ.
        """
        return collectives.gather(flushed(self._world.exchange), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, then drop the padding of the batch that was yielded last.

        Args:
            input_data: a tree of tensors, whose first dimensions may differ between ranks; or any picklable object.
            use_gather_object: gather as pickled objects even if all leaves are tensors.

        Raises:
            StateError: nothing in the last batches says how many samples they have, and some are padding.
        """
        loop, exchange = self._loop, flushed(self._world.exchange)
        if loop.loaders and loop.remainder < 0:
            raise StateError(
                "gather_for_metrics: the last round was completed with batches of the first, but nothing in them says "
                "how many samples they have, so these can't be left out. Have collate_fn return tensors in a list, a "
                "dictionary or a dataclass, or use even_batches=False or drop_last=True."
            )
        readers = self._strategy.mesh.readers
        exchange = exchange if readers is exchange.group else Exchange(readers)
        return gather_for_metrics(exchange, input_data, loop.remainder, use_gather_object, loop.position)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average each tensor of a tree over all processes, and multiply by `scale`."""
        return collectives.reduce(flushed(self._world.exchange), tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad each tensor of a tree along `dim` to the longest of all processes."""
        exchange = flushed(self._world.exchange)
        return collectives.pad_across_processes(exchange, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag on this process that `check_trigger` sees on all."""
        self.flag_tensor = torch.ones(1)

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last True; every process must ask."""
        mine = self.flag_tensor if self.flag_tensor is not None else torch.zeros(1)
        if collectives.reduce(flushed(self._world.exchange), mine, "sum", within="check_trigger").item() < 1:
            return False
        self.flag_tensor = None
        return True

    # ---- keeping and ending

    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything that was prepared, and free unused memory; returns None for each of `objects`."""
        self._controller.drop()
        if self._finite is not None:
            self._finite.forget()
        self._precision.forget()
        self._run.clear()
        self._loop.reset()
        return release_memory(*objects)

    clear = free_memory

    def end_training(self) -> None:
        """Wait for the last checkpoint to be written, finish the trackers, and destroy the process group."""
        try:
            self._controller.end()
            self._settle_checkpoints()
        finally:
            self._finish_trackers()
        if self._vote is not None:
            self._vote.release()
            self._loop.at_boundary = None
        unset_announced()
        leave_world()

    def __repr__(self) -> str:
        world = self._run.world
        return f"Accelerator(rank {world.rank} of {world.size}, {world.device}, {self.mixed_precision})"
