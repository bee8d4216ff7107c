# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations inside a module are computed again in the backward pass, not kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(modules: Sequence[nn.Module], offload: bool = False) -> None:
    """Let each of `modules` keep only its inputs between forward and backward, with `offload` in the host's memory.

    Names of parameters stay as they are.
    """
    for module in modules:
        plain = module.forward
        if isinstance(plain, MethodType) and plain.__self__ is module:
            # A method, so that a copy of the module computes with the weights of the copy.
            module.forward = MethodType(_recomputed(plain.__func__, offload), module)
        else:
            module.forward = _recomputed(plain, offload)


def _recomputed(plain: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        kept = torch.autograd.graph.save_on_cpu(torch.accelerator.is_available()) if offload else nullcontext()
        with kept:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return forward
