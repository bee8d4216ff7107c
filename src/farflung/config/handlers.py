# SPDX-License-Identifier: Apache-2.0
"""What `Accelerator` takes: keyword handlers and plugins with Accelerate's names, fields and defaults."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from datetime import timedelta
from typing import Any

from farflung.base.checks import (
    check_callable,
    check_fields,
    check_flag,
    check_path,
    check_place,
    check_type,
    check_whole,
    check_word,
    wrong_type,
)
from farflung.base.enums import DDPCommunicationHookType
from farflung.base.errors import ConfigError, Unsupported

_ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu", "privateuse1")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


class KwargsHandler:
    """A dataclass whose fields become keyword arguments of something in torch."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults of the handler, not from those of a script's subclass."""
        kinds: list[type] = [type(self), *(kind for kind in type(self).__mro__ if is_dataclass(kind))]
        defaults = kinds[-1]().__dict__
        return {name: value for name, value in self.to_dict().items() if name in defaults and defaults[name] != value}


class CheckedKwargs(KwargsHandler):
    """One whose fields are checked when it is made, and again where they are used, as scripts set them in between."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ConfigError for a wrong value; the fields' metadata say in which range they must be."""
        check_fields(self)


@dataclass
class AutocastKwargs(CheckedKwargs):
    """Arguments of `torch.autocast`.

    Args:
        outputs_to_fp32: a prepared model's half-precision outputs are converted to fp32; False keeps them.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    outputs_to_fp32: bool = True


@dataclass
class DistributedDataParallelKwargs(CheckedKwargs):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and what its gradients go through on the wire.

    Args:
        comm_hook: how gradients are compressed for the all-reduce.
        comm_wrapper: a cast to fp16 or bf16 around another hook (PowerSGD).
        comm_state_option: arguments of `PowerSGDState` but the process group.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = field(default=25, metadata={"least": 1})
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        check_fields(self)
        check_word("DistributedDataParallelKwargs: comm_hook", self.comm_hook, DDPCommunicationHookType.list())
        if self.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
            raise Unsupported(
                "comm_hook=batched_power_sgd: torch's hook of that name fails in its first compressed step: it "
                "makes matrices where its own orthogonalization takes batches of them. Use power_sgd."
            )
        check_word("DistributedDataParallelKwargs: comm_wrapper", self.comm_wrapper, ("no", "fp16", "bf16"))
        options = "a dictionary of arguments of PowerSGDState"
        check_type("DistributedDataParallelKwargs: comm_state_option", self.comm_state_option, Mapping, options)
        wraps = self.comm_wrapper != DDPCommunicationHookType.NO
        if (self.comm_state_option or wraps) and self.comm_hook != DDPCommunicationHookType.POWER_SGD:
            raise ConfigError(
                f"comm_wrapper {self.comm_wrapper!s} and comm_state_option {self.comm_state_option} are for PowerSGD, "
                f"but comm_hook is {self.comm_hook!s}. Use power_sgd, or leave them out."
            )

    def ddp_arguments(self) -> dict[str, Any]:
        """Return the arguments of DDP's constructor that differ from the defaults."""
        ours = ("comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in self.to_kwargs().items() if name not in ours}


@dataclass
class GradScalerKwargs(CheckedKwargs):
    """Arguments of `torch.amp.GradScaler`."""

    init_scale: float = field(default=65536.0, metadata={"above": 0})
    growth_factor: float = field(default=2.0, metadata={"above": 1})
    backoff_factor: float = field(default=0.5, metadata={"above": 0, "below": 1})
    growth_interval: int = field(default=2000, metadata={"least": 1})
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(CheckedKwargs):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: None: the device decides: gloo for CPUs, gloo and NCCL for NVIDIA GPUs.
        timeout: how long a collective may take; None is torch's default for the backend.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def check(self) -> None:
        check_fields(self)
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            example = self.timeout if isinstance(self.timeout, (int, float)) else 1800
            raise wrong_type("timeout", self.timeout, f"a timedelta, such as datetime.timedelta(seconds={example})")


@dataclass
class WatchdogKwargs(CheckedKwargs):
    """What to do about ranks that do not come to a collective. Not in Accelerate.

    Args:
        timeout_s: how long a rank may wait in a collective that another one has not entered. Then those that wait raise
            an error that names the late ranks and shows what they are doing. Without this handler the environment
            variable `FARFLUNG_HANG_TIMEOUT_S` counts, which `farflung launch` sets (`--hang_timeout_s`, by default
            600); without both it is the time-out of torch's group, 30 minutes by default.
    """

    timeout_s: float = field(default=300.0, metadata={"above": 0})


@dataclass
class ProfileKwargs(CheckedKwargs):
    """Arguments of `torch.profiler.profile`, for `Accelerator.profile`.

    Args:
        activities: any of `cpu`, `cuda`, `xpu`, `mtia`; None is everything that the machine has.
        schedule_option: arguments of `torch.profiler.schedule`: wait, warmup, active, repeat, skip_first.
        output_trace_dir: where each rank writes its Chrome trace, `profile_{rank}.json`; None writes none.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def check(self) -> None:
        if self.output_trace_dir is not None:
            check_path("ProfileKwargs: output_trace_dir", self.output_trace_dir)
        if self.activities is not None:
            check_type("ProfileKwargs: activities", self.activities, (list, tuple), "a list, such as ['cpu']")
        for activity in self.activities or ():
            check_word("ProfileKwargs: each of activities", activity, _ACTIVITIES)
        if self.schedule_option is not None:
            wanted = "a dictionary, such as {'wait': 1, 'warmup': 1, 'active': 3}"
            check_type("ProfileKwargs: schedule_option", self.schedule_option, Mapping, wanted)
            for name in self.schedule_option:
                check_word("ProfileKwargs: each key of schedule_option", name, _SCHEDULE)
            missing = [name for name in _SCHEDULE[:3] if name not in self.schedule_option]
            if missing:
                raise ConfigError(f"ProfileKwargs: schedule_option lacks {' and '.join(missing)}; it must be {wanted}.")
        if self.on_trace_ready is not None:
            check_callable("ProfileKwargs: on_trace_ready", self.on_trace_ready, "one that takes the profiler")

    def build(self) -> Any:
        """Return the `torch.profiler.profile` with these arguments."""
        import torch  # here, as settings are read by the launcher too, which trains nothing

        self.check()
        activities = torch.profiler.ProfilerActivity.__members__
        return torch.profiler.profile(
            activities=None if self.activities is None else [activities[name.upper()] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class AORecipeKwargs(CheckedKwargs):
    """How torchao trains in fp8, for `mixed_precision="fp8"`.

    Args:
        config: a `torchao.float8.Float8LinearConfig`; None makes one of the two fields below.
        module_filter_func: takes a module and its name, and says whether it is converted. None: linear layers whose
            sizes are multiples of 16, but the first and the last of the model.
        pad_inner_dim: pad matrices to multiples of 16, as the hardware wants them; None: yes.
        enable_fsdp_float8_all_gather: refused, as weights are gathered in bf16; None: no.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def check(self) -> None:
        check_fields(self)
        if self.module_filter_func is not None:
            wanted = "one of a module and its name"
            check_callable("AORecipeKwargs: module_filter_func", self.module_filter_func, wanted)
        if self.config is not None and self.pad_inner_dim is not None:
            raise ConfigError("AORecipeKwargs: config and pad_inner_dim were both given. Give it in the config.")
        if self.enable_fsdp_float8_all_gather or getattr(self.config, "enable_fsdp_float8_all_gather", False):
            raise Unsupported(
                "enable_fsdp_float8_all_gather=True is not supported: FSDP gathers weights in bf16. Leave it out."
            )


@dataclass
class GradientAccumulationPlugin(CheckedKwargs):
    """How gradients are accumulated.

    Args:
        num_steps: micro-batches in one accumulation window.
        adjust_scheduler: kept for Accelerate's sake, though neither value changes what a scheduler does: it ticks when
            the optimizer steps.
        sync_with_dataloader: the last batch of a loader completes its window, however short that is.
        sync_each_batch: synchronize gradients on each micro-batch, which spares memory under sharding and costs time.
    """

    num_steps: int | None = field(default=None, metadata={"least": 1})
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share out their data. Not frozen: trainers set `data_seed` after making it.

    Args:
        split_batches: the loader's batch size is that of all ranks together, not of each.
        dispatch_batches: rank 0 reads and hands out; None does so for iterable data sets on several ranks.
        even_batches: fill up the last round with samples from the start, so that ranks get equally many batches. If
            the data have indices, batches then come in order even if the loader has `in_order=False`.
        use_seedable_sampler: shuffle by a seed and the epoch's number alone.
        data_seed: that seed; None takes torch's initial seed.
        non_blocking: copy to the device without waiting; useful with `pin_memory=True`.
        use_stateful_dataloader: prepared loaders are instances of torchdata's `StatefulDataLoader`, if that is
            installed. They have `state_dict` and `load_state_dict` with either value.
        already_sharded: each process's loader reads its own share alone, as with a data set or sampler that takes
            its part by rank, so nothing is shared out any further. False: it does not, and what processes read may
            differ, as by random changes. None: it does not, and an error if it can be seen that it does.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    already_sharded: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.already_sharded and (self.split_batches or self.dispatch_batches):
            other = "split_batches" if self.split_batches else "dispatch_batches"
            raise ConfigError(
                f"already_sharded=True leaves to each process what it reads, and {other}=True shares it out. Leave one "
                "of them out."
            )
        if self.data_seed is not None and not self.use_seedable_sampler:
            raise ConfigError(f"data_seed is {self.data_seed}, but it has no effect without use_seedable_sampler=True.")


@dataclass
class ProjectConfiguration:
    """Where a project keeps its files. Not frozen: scripts count `iteration` on their own.

    Args:
        project_dir: a folder; or an address, such as `s3://bucket/run`, which has checkpoints alone.
        logging_dir: where trackers write; None is `project_dir`.
        automatic_checkpoint_naming: `save_state()` chooses `checkpoints/checkpoint_N` by itself.
        total_limit: how many of those are kept; None keeps all.
        iteration: the N of the next one.
        save_on_each_node: each machine's first process writes, not only the very first.
        keep_local: a folder of this machine in which copies of checkpoints stay that are saved to an address, or loaded
            from one; None: temporary folders have them meanwhile.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    keep_local: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("automatic_checkpoint_naming", "save_on_each_node"):
            check_flag(f"ProjectConfiguration: {name}", getattr(self, name))
        check_whole("ProjectConfiguration: iteration", self.iteration, least=0)
        if self.total_limit is not None:
            check_whole("ProjectConfiguration: total_limit", self.total_limit, least=1)
        if self.keep_local is not None:
            check_path("ProjectConfiguration: keep_local", self.keep_local)
        if self.logging_dir is not None:
            check_type("ProjectConfiguration: logging_dir", self.logging_dir, (str, os.PathLike), "a path")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, and `logging_dir` to the same if it has no value."""
        if project_dir is not None:
            check_place("project_dir", project_dir)
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
