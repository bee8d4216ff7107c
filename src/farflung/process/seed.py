# SPDX-License-Identifier: Apache-2.0
"""Random states: seeding all of them, and giving every rank those of the first."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.base.enums import RNGType
from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.collectives import broadcast
from farflung.comm.exchange import Exchange
from farflung.process import world as slot


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, `numpy` and `torch` on every device of this process.

    Args:
        device_specific: add the rank, so that each process draws its own numbers.
        deterministic: also ask torch for deterministic algorithms only, which can be slower.

    Raises:
        StateError: `device_specific` before an `Accelerator` or a `PartialState` has been made.
    """
    if device_specific:
        seed += slot.joined().rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices of all kinds
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the first one's state of one kind of random numbers: `torch`, `cuda`, `xpu` or `generator`.

    Raises:
        ConfigError: `generator` without a generator.
        Unsupported: a kind of device that this machine does not have.
    """
    share_rng_state(rng_type, generator, slot.joined().exchange)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every rank the first one's random states of all the kinds in `rng_types`."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def share_rng_state(
    rng_type: RNGType | str | None, generator: torch.Generator | None, exchange: Exchange, within: str | None = None
) -> None:
    """Give every rank the state of rank 0; arguments and errors are those of `synchronize_rng_state`.

    Args:
        within: as of `broadcast`.
    """
    kind = RNGType(str(rng_type))
    state = _read(kind, generator)
    broadcast(exchange, state, within=within)
    _write(kind, generator, state)


def _read(kind: RNGType, generator: torch.Generator | None) -> Tensor:
    if kind is RNGType.TORCH:
        return torch.get_rng_state()
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ConfigError("synchronize_rng_state('generator') needs `generator=`, the one to synchronize.")
        return generator.get_state()
    return _device_module(kind).get_rng_state()  # type: ignore[no-any-return]


def _write(kind: RNGType, generator: torch.Generator | None, state: Tensor) -> None:
    if kind is RNGType.TORCH:
        torch.set_rng_state(state)
    elif kind is RNGType.GENERATOR:
        assert generator is not None
        generator.set_state(state)
    else:
        _device_module(kind).set_rng_state(state)


def _device_module(kind: RNGType) -> Any:
    module = getattr(torch, kind.value, None)
    if module is None or not module.is_available():
        raise Unsupported(f"rng_types has {kind.value!r}, but no such device is here. Use 'torch' or 'generator'.")
    return module
