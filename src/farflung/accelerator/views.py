# SPDX-License-Identifier: Apache-2.0
"""Accelerate's state classes, as views: they own nothing and read the world and the session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from farflung.accelerator.control import ProcessControl
from farflung.accelerator.session import (
    Layout,
    check_layout,
    close_session,
    current_session,
    new_loop,
    open_session,
    opened_session,
    require_open,
    resolve_layout,
    session_in_use,
)
from farflung.accelerator.settings import check_init, refuse_engines, resolve_compile
from farflung.base.checks import check_flag, check_type, check_word
from farflung.base.enums import DistributedType, PrecisionType
from farflung.base.errors import Unsupported
from farflung.base.forward import Forward
from farflung.config import environ
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.handlers import GradientAccumulationPlugin, InitProcessGroupKwargs
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.loop.state import LoopState, LoopView
from farflung.process.bootstrap import join_world, leave_world
from farflung.process.world import World, current_world, forget_rank, joined_world


class _SharedState:
    """The dictionary of a state class at the moment of reading: empty until there is such a state."""

    def __get__(self, instance: Any, owner: Any) -> dict[str, Any]:
        state = owner.__new__(owner)
        return {name: getattr(state, name) for name in owner._shared} if state.initialized else {}


def _joined(kind: str) -> World:
    world = current_world()
    require_open(kind, world is not None)
    assert world is not None
    return world


class PartialState(ProcessControl):
    """This process and its world, which the first one made joins.

    Args:
        cpu: stay on the CPU even if there is an accelerator.
        kwargs: arguments of `torch.distributed.init_process_group`: backend, init_method, timeout.
    """

    _shared: tuple[str, ...] = (
        "backend",
        "device",
        "debug",
        "distributed_type",
        "num_processes",
        "process_index",
        "fork_launched",
    )
    _shared_state = _SharedState()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        known = ("backend", "init_method", "timeout")
        for name in kwargs:
            if not name.startswith("_"):
                check_word(f"An argument of {type(self).__name__}", name, ("cpu", *known))
        check_flag("cpu", cpu)
        join_world(cpu, check_init(InitProcessGroupKwargs(**{name: kwargs[name] for name in known if name in kwargs})))

    _world = Forward[World](lambda self: _joined(type(self).__name__))
    initialized = Forward[bool](lambda self: current_world() is not None, "Whether this process has joined its world.")
    backend = Forward[str | None](
        "_world.backend", "How the processes talk: `gloo`, `nccl` ...; None when there is one."
    )

    @property
    def default_device(self) -> torch.device:
        """The kind of device that this machine offers first."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def debug(self) -> bool:
        """Whether the launcher asked for its debug mode. What it checks is checked always."""
        return environ.flag("ACCELERATE_DEBUG_MODE")

    @debug.setter
    def debug(self, value: bool) -> None:
        check_flag("debug", value)
        environ.export({"ACCELERATE_DEBUG_MODE": str(value).lower()})

    fork_launched = Forward[bool](
        lambda self: environ.flag("FORK_LAUNCHED"), "Whether this process was forked from a notebook's."
    )

    def set_device(self) -> None:
        """Do nothing: the device was chosen when the process joined its world."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy `group`, or leave the world and destroy its group if Farflung made it."""
        if group is None:
            leave_world()
        else:
            check_type("group", group, torch.distributed.ProcessGroup, "a process group of torch.distributed")
            torch.distributed.destroy_process_group(group)

    @staticmethod
    def _reset_state() -> None:
        leave_world()
        forget_rank()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


class Engines:
    """What shards models, as `Accelerator` and `AcceleratorState` both answer: FSDP2, or nothing."""

    _layout: Forward[Layout | None]
    _world: Forward[World]

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded; None: they are not."""
        return None if self._layout is None else self._layout.fsdp

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The grid of ranks that the script or the launcher asked for; None: neither did."""
        return None if self._layout is None else self._layout.parallelism

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over several processes."""
        return self.fsdp_plugin is not None and self._world.size > 1

    deepspeed_plugin = Forward[None](lambda self: None, "None: DeepSpeed is not supported.")
    megatron_lm_plugin = Forward[None](lambda self: None, "None: Megatron-LM is not supported.")
    torch_tp_plugin = Forward[None](lambda self: None, "None: tensor parallelism is not supported.")

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        """The mesh of a `ParallelismConfig`, of its axes with several ranks; None without one."""
        return None if self.parallelism_config is None else self.parallelism_config.device_mesh


class AcceleratorState(Engines, PartialState):
    """This process, its world, and what the first `Accelerator` settled.

    Raises:
        ConfigError: settings other than those of the process's first `Accelerator`.
        Unsupported: a plugin of an engine that Farflung does not support.
    """

    _shared = (*PartialState._shared, "mixed_precision", "dynamo_plugin", "parallelism_config")

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_engines(
            deepspeed_plugin=deepspeed_plugin, torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin
        )
        check_layout(fsdp_plugin, parallelism_config, None)
        if mixed_precision is not None:
            check_word("mixed_precision", mixed_precision, PrecisionType.list())
        super().__init__(cpu, **kwargs)
        compiling = None if dynamo_plugin is None else resolve_compile(None, dynamo_plugin)
        session = open_session(joined_world(), mixed_precision, None, compiling)
        if fsdp_plugin is not None or parallelism_config is not None:
            resolve_layout(session, fsdp_plugin, parallelism_config)

    _world = Forward[World](lambda self: getattr(current_session(), "world", None) or _joined("AcceleratorState"))
    _described = Forward[World](lambda self: session_in_use().world)
    initialized = Forward[bool](
        lambda self: current_session() is not None, "Whether an `Accelerator` has settled things in this process."
    )

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together, or the value that a script has set; that does not change how they train."""
        return session_in_use().named_kind or (DistributedType.FSDP if self.is_fsdp2 else self._world.kind)

    @distributed_type.setter
    def distributed_type(self, kind: DistributedType) -> None:
        session_in_use().named_kind = DistributedType(kind)

    _layout = Forward["Layout | None"](lambda self: getattr(current_session(), "layout", None))

    mixed_precision = Forward[str](lambda self: session_in_use().mixed_precision, "`no`, `bf16`, `fp16` or `fp8`.")

    dynamo_plugin = Forward[TorchDynamoPlugin](
        lambda self: opened_session().compiling or TorchDynamoPlugin(), "How the latest `Accelerator` compiles models."
    )
    deepspeed_plugins = Engines.deepspeed_plugin

    device_mesh = Engines._device_mesh

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Raise Unsupported: there is no plugin to return."""
        raise Unsupported(f"get_deepspeed_plugin({name!r}): DeepSpeed is not supported. Use DDP, or an outer loop.")

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Raise Unsupported: there is no plugin to choose."""
        raise Unsupported(f"select_deepspeed_plugin({name!r}): DeepSpeed is not supported. Use DDP, or an outer loop.")

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        close_session()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return super().__repr__() + f"Mixed precision type: {self.mixed_precision}\n"


class _PluginKwargs(dict[str, Any]):
    """Fields of a plugin that differ from their defaults; setting one changes how the loop accumulates."""

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        for name in self:
            check_word("A name in plugin_kwargs", name, vars(GradientAccumulationPlugin()))
        opened_session().accumulate(GradientAccumulationPlugin(**self))

    def __reduce__(self) -> tuple[type, tuple[Any]]:  # a copy is a plain one
        return dict, (dict(self),)


class GradientState(LoopView):
    """Where the training loop stands, as the latest `Accelerator` sees it."""

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        if gradient_accumulation_plugin is not None:
            wanted = "a GradientAccumulationPlugin(num_steps=...)"
            check_type("gradient_accumulation_plugin", gradient_accumulation_plugin, GradientAccumulationPlugin, wanted)
            session = open_session(joined_world(), None, None)
            session.accumulate(gradient_accumulation_plugin)

    initialized = Forward[bool](
        lambda self: current_session() is not None, "Whether an `Accelerator` has been made in this process."
    )

    _loop = Forward[LoopState](lambda self: opened_session().loop)

    adjust_scheduler = Forward[bool](
        lambda self: opened_session().plugin.adjust_scheduler, "The plugin's field of that name."
    )

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's fields that differ from their defaults. What a script sets in it holds from then on."""
        return _PluginKwargs(replace(opened_session().plugin, num_steps=self.num_steps).to_kwargs())

    @plugin_kwargs.setter
    def plugin_kwargs(self, value: dict[str, Any]) -> None:
        _PluginKwargs().update(value)

    @staticmethod
    def _reset_state() -> None:
        session = current_session()
        if session is not None:
            session.loop, session.first = new_loop(session.plugin, session.world), None

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def is_initialized() -> bool:
    """Return whether an `Accelerator` has settled things in this process."""
    return current_session() is not None
