# SPDX-License-Identifier: Apache-2.0
"""All random states of a process, read and written together, in the form in which Accelerate keeps them."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

from farflung.base.words import counted

# How Accelerate calls the states of a kind of device.
_DEVICES = {name: f"torch_{name}_manual_seed" for name in ("cuda", "xpu", "mlu", "musa", "hpu")}


def read_host() -> dict[str, Any]:
    """Return the states of `random`, numpy and torch's CPU generator."""
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


def pack_host() -> bytes:
    """Return what `read_host` does as bytes, which one process sends another at less cost than tensors."""
    states = read_host()
    return pickle.dumps({**states, "torch_manual_seed": states["torch_manual_seed"].numpy()})


def unpack_host(packed: bytes) -> dict[str, Any]:
    """Return the states that were packed by `pack_host`; never those from a file."""
    states = pickle.loads(packed)
    return {**states, "torch_manual_seed": torch.from_numpy(states["torch_manual_seed"].copy())}


def read() -> dict[str, Any]:
    """Return the states of `random`, numpy and torch on every device of this machine."""
    states = read_host()
    for kind, key in _DEVICES.items():
        module = _module(kind)
        if module is not None:
            states[key] = module.get_rng_state_all()
    return states


def check(states: dict[str, Any]) -> None:
    """Raise KeyError, TypeError, ValueError or RuntimeError unless `states` can be written; nothing is changed."""
    random.Random().setstate(states["random_state"])
    np.random.RandomState().set_state(states["numpy_random_seed"])
    torch.Generator().set_state(states["torch_manual_seed"])


def write_host(states: dict[str, Any]) -> None:
    """Make the states of `random`, numpy and torch's CPU generator those that were read."""
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])


def write(states: dict[str, Any]) -> list[str]:
    """Restore what `read` or `read_host` returned; return notes on devices present on only one side."""
    write_host(states)
    odd = []
    for kind, key in _DEVICES.items():
        module, saved = _module(kind), states.get(key)
        if module is None:
            continue
        number = 0 if saved is None else len(saved)
        if number == module.device_count():
            module.set_rng_state_all(saved)
        else:
            odd.append(
                f"random states of {counted(number, f'{kind} device')} were saved, but this machine has "
                f"{module.device_count()}"
            )
    return odd


def _module(kind: str) -> Any:
    module = getattr(torch, kind, None)
    known = module is not None and hasattr(module, "get_rng_state_all") and module.is_available()
    return module if known else None
