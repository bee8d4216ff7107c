# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast forward passes whose outputs are fp32, and a loss scaler for fp16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from farflung.base.errors import ConfigError, Unsupported
from farflung.base.torch_internals import child_slots, copied_module, overflowed, ready_scaler, scaler_stages
from farflung.base.tree import convert_to_fp32
from farflung.base.words import counted
from farflung.config.handlers import AutocastKwargs, GradScalerKwargs
from farflung.precision.base import Closure, Precision, wrap_forward

_MARK = "_farflung_plain_forward"  # where a wrapped model keeps the forward of its own that it had, or None


class Autocast(Precision):
    """Forward passes in a half precision (`bf16` or `fp16`), weights and gradients in fp32."""

    def __init__(self, name: str, device_type: str, handler: AutocastKwargs | None = None) -> None:
        self.name, self.autocasts = name, True
        self.dtype = torch.bfloat16 if name == "bf16" else torch.float16
        self._device_type = device_type
        self._handler = handler or AutocastKwargs()

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        chosen = handler or self._handler
        if not self.autocasts:
            return nullcontext()
        return torch.autocast(
            self._device_type, dtype=self.dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        if hasattr(model, _MARK):
            return model
        object.__setattr__(model, _MARK, model.__dict__.get("forward"))
        wrap_forward(model, self._computing)
        return model

    def _computing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        self._handler.check()
        handler = copy(self._handler)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.autocast(handler):
                outputs = plain(*args, **kwargs)
            return convert_to_fp32(outputs) if self.autocasts and handler.outputs_to_fp32 else outputs

        return forward


class ScaledFp16(Autocast):
    """fp16 forward passes, with the loss scaled so that small gradients survive."""

    def __init__(
        self, device_type: str, handler: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
    ) -> None:
        super().__init__("fp16", device_type, handler)
        self.scaler = torch.amp.GradScaler(device_type, **(scaler.to_kwargs() if scaler else {}))
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        self._update_if_stepped()
        return self.scaler.scale(loss)  # type: ignore[no-any-return]

    def unscale_(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._unscaled:
            with _explaining(optimizer):
                self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        if closure is not None:
            raise Unsupported("fp16 with a loss scaler can't step with a closure. Use bf16, or step without one.")
        if id(optimizer) in self._stepped:
            self._update_if_stepped()
        with _explaining(optimizer):
            self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        # A fused optimizer's step is called even after an overflow, so the call itself says nothing.
        return not overflowed(self.scaler, optimizer)

    def forget(self, optimizer: Optimizer | None = None) -> None:
        if optimizer is None:
            self._update_if_stepped()
            self._unscaled.clear()
            self._stepped.clear()
            scaler_stages(self.scaler).clear()
        elif id(optimizer) not in self._stepped:  # else the scale is still to be updated by what the step found
            self._unscaled.discard(id(optimizer))
            scaler_stages(self.scaler).pop(id(optimizer), None)

    def _update_if_stepped(self) -> None:
        """Update the scale between two losses, never between two optimizers that step on gradients of one scale."""
        if self._stepped:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped.clear()

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {
            "after_update": self._state_after_update(),
            "scaler": self.scaler.state_dict(),
            "optimizers": [self._state_of(optimizer) for optimizer in optimizers],
        }

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Take over what `state_dict` returned; or, of a checkpoint that another program wrote, the scaler's alone."""
        per_optimizer = state.get("optimizers", [])
        self.scaler.load_state_dict(state["scaler"])
        self.forget()
        for optimizer, saved in zip(optimizers, per_optimizer, strict=False):
            if saved["unscaled"]:
                self._unscaled.add(id(optimizer))
            if saved["stepped"]:
                self._stepped.add(id(optimizer))
            if saved["found_inf"] is not None:
                device = torch.device(self._device_type)
                ready_scaler(self.scaler, device)
                found_inf = {device: saved["found_inf"].to(device)}
                stage = OptState[saved["stage"]]
                scaler_stages(self.scaler)[id(optimizer)] = {"stage": stage, "found_inf_per_device": found_inf}

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        known = scaler_stages(self.scaler).get(id(optimizer))
        found_inf = [] if known is None else [x.cpu() for x in known["found_inf_per_device"].values()]
        return {
            "unscaled": id(optimizer) in self._unscaled,
            "stepped": id(optimizer) in self._stepped,
            "stage": None if known is None else known["stage"].name,
            "found_inf": torch.stack(found_inf).amax(0) if found_inf else None,
        }

    def _state_after_update(self) -> dict[str, Any]:
        """Return the scaler's state as it will be when the next loss is scaled; the scaler itself stays as it is."""
        state: dict[str, Any] = self.scaler.state_dict()
        if not self._stepped or not state:
            return state
        later = torch.amp.GradScaler(self._device_type)
        later.load_state_dict(state)
        ready_scaler(later, torch.device(self._device_type))
        for key, known in scaler_stages(self.scaler).items():
            found_inf = {device: x.clone() for device, x in known["found_inf_per_device"].items()}
            scaler_stages(later)[key] = {**known, "found_inf_per_device": found_inf}
        later.update()
        return later.state_dict()


def without_precision(model: nn.Module) -> nn.Module:
    """Return `model` as it computes without `Precision.wrap`: itself if it does, else a duplicate with its tensors.

    What a script did itself, if it kept the forward as `_original_forward`, is undone on the model, as in Accelerate.
    Plain attributes of a duplicate, such as `training`, are those of this moment and do not follow the model's.
    """
    if _MARK in model.__dict__:
        model = copied_module(model, child_slots(model))
    for mark in (_MARK, "_original_forward"):
        if mark in model.__dict__:
            own = model.__dict__.pop(mark)
            model.__dict__.pop("forward", None)
            if own is not None and own != model.forward:  # else it is the method of its class
                model.forward = own
    return model


@contextmanager
def _explaining(optimizer: Optimizer) -> Iterator[None]:
    """Raise ConfigError if torch refuses to unscale gradients because the weights are fp16 themselves."""
    try:
        yield
    except ValueError as error:
        if "unscale FP16" not in str(error):
            raise
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        halves = sum(weight.dtype is torch.float16 for weight in weights)
        raise ConfigError(
            f"mixed_precision='fp16' trains fp32 weights and computes in fp16, but {halves} of the "
            f"{counted(len(weights), 'parameter')} of this {type(optimizer).__name__} are fp16 themselves. Load the "
            "model in fp32 (dtype=torch.float32, or model.float()), or train it with mixed_precision='no'."
        ) from error


def choose_precision(
    name: str, device: torch.device, autocast: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
) -> Precision:
    """Return the precision for one of `no`, `bf16`, `fp16`; that for `fp8` is `precision.fp8.Float8`.

    Raises Unsupported if the device does not have it, ConfigError for another word and for a scaler without fp16.
    """
    if name not in ("no", "bf16", "fp16", "fp8"):
        raise ConfigError(f"mixed_precision is {name!r}; it must be one of no, fp16, bf16, fp8.")
    if scaler is not None and name != "fp16":
        raise ConfigError(f"A GradScalerKwargs was given, but mixed_precision is {name!r}, which uses no loss scaler.")
    if name == "fp16":
        return ScaledFp16(device.type, autocast, scaler)
    if name == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise Unsupported(
                f"{torch.cuda.get_device_name(device)} does not support bf16. Use mixed_precision='fp16'."
            )
        return Autocast("bf16", device.type, autocast)
    return Precision()
