# SPDX-License-Identifier: Apache-2.0
"""Each process holds the whole model; gradients are averaged during the backward pass by torch's DDP."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farflung.base.enums import DDPCommunicationHookType as Hook
from farflung.base.enums import DistributedType
from farflung.comm.group import Group
from farflung.config.handlers import DistributedDataParallelKwargs


class DDP:
    """Replicas that average their gradients in each backward pass.

    Args:
        kind: which word the process's device has for it (MULTI_CPU, MULTI_GPU ...).
        replicas: all processes.
        handler: arguments for torch's DDP.
    """

    def __init__(
        self,
        kind: DistributedType,
        replicas: Group,
        device: torch.device,
        handler: DistributedDataParallelKwargs | None = None,
    ) -> None:
        self.kind = kind
        self.replicas = replicas
        self._device = device
        self._handler = handler or DistributedDataParallelKwargs()
        self._local: list[DistributedDataParallel] = []

    def prepare(self, pairs: Sequence[tuple[nn.Module, Sequence[Optimizer]]]) -> list[nn.Module]:
        return [self._wrapped(model) for model, _ in pairs]

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model  # torch's DDP refuses a model that has nothing to learn
        on_accelerator = self._device.type != "cpu" and all(p.device == self._device for p in model.parameters())
        ddp = DistributedDataParallel(
            model, device_ids=[self._device.index] if on_accelerator else None, **self._handler.ddp_arguments()
        )
        _register_hook(ddp, self._handler)
        atexit.register(_let_go, weakref.ref(ddp))
        return ddp

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @contextmanager
    def _synchronized(self, ddp: DistributedDataParallel) -> Iterator[None]:
        before = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = True
        ddp.reducer.prepare_for_backward([])  # as the forward pass does where gradients are to be synchronized
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = before

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel) and self.synchronizes(model):
            return self._synchronized(model)
        return nullcontext()

    @contextmanager
    def _alone(self, ddp: DistributedDataParallel) -> Iterator[None]:
        # The first forward pass after a synchronized backward broadcasts the buffers, even inside no_sync().
        before = ddp.require_forward_param_sync
        ddp.require_forward_param_sync = False
        self._local.append(ddp)
        try:
            with ddp.no_sync():
                yield
        finally:
            ddp.require_forward_param_sync = before
            self._local.remove(ddp)

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._alone(model) if isinstance(model, DistributedDataParallel) else nullcontext()

    def synchronizes(self, model: nn.Module) -> bool:
        return isinstance(model, DistributedDataParallel) and all(model is not other for other in self._local)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model


def _let_go(reference: weakref.ref[DistributedDataParallel]) -> None:
    """Have a model that lives until the end of the process forget its group, so that this can be destroyed before."""
    ddp = reference()
    if ddp is not None:
        ddp.process_group = ddp.reducer = ddp.logger = None  # type: ignore[assignment]


def _cast_hook(dtype: torch.dtype) -> Any:
    """Return a hook that averages gradients in `dtype`, for backends whose torch hook of that name is refused."""

    # No annotations: torch looks at them, and does not understand postponed ones.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        group = dist.group.WORLD
        assert group is not None
        gradient = bucket.buffer()
        small = gradient.to(dtype).div_(group.size())
        work = dist.all_reduce(small, group=group, async_op=True)
        assert work is not None
        done: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: gradient.copy_(future.value()[0])
        )
        return done

    return hook


def _register_hook(ddp: DistributedDataParallel, handler: DistributedDataParallelKwargs) -> None:
    casts = {Hook.FP16: torch.float16, Hook.BF16: torch.bfloat16}
    if handler.comm_hook in casts:
        ddp.register_comm_hook(None, _cast_hook(casts[handler.comm_hook]))
    elif handler.comm_hook == Hook.POWER_SGD:
        # Here, as it loads torch.distributed.nn and more, which nobody else needs.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        wrappers = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}
        hook: Any = powerSGD_hook.powerSGD_hook
        if handler.comm_wrapper in wrappers:
            hook = _renamed(wrappers[handler.comm_wrapper](hook))
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, **handler.comm_state_option), hook)


def _renamed(torchs: Any) -> Any:
    """Return torch's hook under another name: DDP goes by the name, and refuses bf16 on backends that have it."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return torchs(state, bucket)

    return hook
