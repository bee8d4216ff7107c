# SPDX-License-Identifier: Apache-2.0
"""Each process holds the whole model; gradients are averaged during the backward pass by torch's DDP."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farflung.base.enums import DDPCommunicationHookType as Hook, DistributedType
from farflung.base.errors import ConfigError
from farflung.base.torch_internals import is_static_graph_unknown
from farflung.comm.bucket import broadcast_values
from farflung.comm.ddp_hook import average_hook
from farflung.comm.group import Group
from farflung.comm.shards import model_has_dtensor
from farflung.config.handlers import DistributedDataParallelKwargs
from farflung.process.mesh import Mesh
from farflung.strategy.sharded import ShardedModels, refuse_muon


class DDP(ShardedModels):
    """Replicas that average their gradients in each backward pass. Models that come sharded stay as they are.

    The `kind` is the device's word for it (MULTI_CPU, MULTI_GPU ...). If rows of the mesh are of several processes,
    gradients are averaged over a row alone inside `local`.
    """

    def __init__(self, kind: DistributedType, mesh: Mesh, device: torch.device) -> None:
        super().__init__(mesh)
        self.kind = kind
        self._device = device
        self._has_rows = mesh.device_mesh is not None
        self._handler: DistributedDataParallelKwargs | None = None
        self._unsynced: list[nn.Module] = []  # whose hook averages nothing now, once for each reason

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        return self._handler

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        if self._has_rows and handler is not None and handler.comm_hook == Hook.POWER_SGD:
            raise ConfigError(f"comm_hook={handler.comm_hook} can't be used with islands. Use fp16, bf16 or none.")
        if handler is not None:
            handler.check()
        self._handler = handler

    def adopt(self, optimizer: Optimizer) -> None:
        refuse_muon(optimizer)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        if isinstance(model, DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model  # torch's DDP refuses a model that has nothing to learn
        self.check_parallel(model)
        if model_has_dtensor(model):
            self.take(model)
            return model
        on_accelerator = self._device.type != "cpu" and all(p.device == self._device for p in model.parameters())
        row = self.mesh.row.get_group() if self._has_rows else None
        if self._has_rows:  # each row's DDP copies its first rank, so the first ranks of the rows must be equal
            broadcast_values([*model.parameters(), *model.buffers()], self.mesh.replicas)
        self.ddp_handler = self._handler  # which checks what a script has set since
        handler = self._handler or DistributedDataParallelKwargs()
        ddp = DistributedDataParallel(
            model,
            device_ids=[self._device.index] if on_accelerator else None,
            process_group=row,
            **handler.ddp_arguments(),
        )
        self._register_hook(ddp, handler)
        atexit.register(_let_go, weakref.ref(ddp))
        return ddp

    def unaveraged(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the frozen parameters: DDP won't average their gradients even if they are unfrozen later."""
        if isinstance(model, DistributedDataParallel) or model_has_dtensor(model):  # the script's own
            return []
        return [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]

    def _register_hook(self, ddp: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
        """Register what the handler asks for, averaging over the ranks that average a model's gradients now."""
        casts = {Hook.FP16: torch.float16, Hook.BF16: torch.bfloat16}
        averaging = partial(self._averaging_group, weakref.ref(ddp))
        if handler.comm_hook in casts or self._has_rows or (ddp.static_graph and handler.comm_hook == Hook.NO):
            ddp.register_comm_hook(None, average_hook(averaging, casts.get(handler.comm_hook)))
        elif handler.comm_hook == Hook.POWER_SGD:
            # Here, as it loads torch.distributed.nn and more, which nobody else needs.
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

            wrappers = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}
            hook: Any = powerSGD_hook.powerSGD_hook
            if handler.comm_wrapper in wrappers:
                hook = wrappers[handler.comm_wrapper](hook)
                hook.__name__ = "hook"  # DDP goes by the name, and refuses bf16 on backends that have it
            ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, **handler.comm_state_option), hook)

    def _averaging_group(self, reference: weakref.ref[DistributedDataParallel]) -> dist.ProcessGroup | None:
        ddp = reference()
        if any(ddp is other for other in self._unsynced):
            return None
        if any(ddp is other for other in self._local):
            return self.mesh.row.get_group()
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            return super().no_sync(model)
        return self._first_unsynced(model) if is_static_graph_unknown(model) else model.no_sync()

    @contextmanager
    def _first_unsynced(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Learn a static graph without averaging: torch wants the first backward pass to be a synchronized one."""
        if self._handler is not None and self._handler.comm_hook == Hook.POWER_SGD:
            raise ConfigError(
                f"static_graph=True with comm_hook={self._handler.comm_hook} needs a first backward pass that is "
                "synchronized, and this one is in no_sync() or an accumulation window. Leave out static_graph."
            )
        self._unsynced.append(ddp)
        try:
            yield
        finally:
            self._unsynced.remove(ddp)

    @contextmanager
    def _ddp_synchronized(self, ddp: DistributedDataParallel) -> Iterator[None]:
        before = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = True
        ddp.reducer.prepare_for_backward([])  # as the forward pass does if gradients are to be synchronized
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = before

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            if self.averaged_over(model) is None:
                return nullcontext()
            if model.find_unused_parameters and not model.static_graph:
                raise ConfigError(
                    "trigger_sync_in_backward with find_unused_parameters=True: torch looks for unused parameters at "
                    "the end of a forward pass that is to be synchronized, so it can't synchronize another. Leave out "
                    "find_unused_parameters, or run the forward pass outside of no_sync()."
                )
            return self._ddp_synchronized(model)
        return super().sync_in_backward(model)

    @contextmanager
    def _ddp_alone(self, ddp: DistributedDataParallel) -> Iterator[None]:
        before = ddp.require_forward_param_sync, ddp.broadcast_buffers
        self._local.append(ddp)
        try:
            if self._has_rows:
                yield
            elif is_static_graph_unknown(ddp):
                ddp.broadcast_buffers = False
                with self._first_unsynced(ddp):
                    yield
            else:
                # The first forward pass after a synchronized backward broadcasts the buffers, even inside no_sync().
                ddp.require_forward_param_sync = False
                with ddp.no_sync():
                    yield
        finally:
            ddp.require_forward_param_sync, ddp.broadcast_buffers = before
            self._local.remove(ddp)

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._ddp_alone(model) if isinstance(model, DistributedDataParallel) else super().local(model)

    def averaged_over(self, model: nn.Module) -> Group | None:
        if not isinstance(model, DistributedDataParallel):
            return super().averaged_over(model)
        if all(model is not other for other in self._local):
            return self.mesh.everyone
        return self.mesh.island if self._has_rows else None

    def awaited(self, model: nn.Module) -> Group | None:
        if not isinstance(model, DistributedDataParallel):
            return super().awaited(model)
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            return self.averaged_over(model)
        if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return self.mesh.island if self._has_rows else self.mesh.everyone
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model


def _let_go(reference: weakref.ref[DistributedDataParallel]) -> None:
    """Have a model that lives until the end of the process forget its group, so that it can be destroyed before."""
    ddp = reference()
    if ddp is not None:
        ddp.process_group = ddp.reducer = ddp.logger = None  # type: ignore[assignment]
