# SPDX-License-Identifier: Apache-2.0
"""Random states: seeding all of them, and giving every rank those of the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.base.checks import check_whole, check_word, wrong_type
from farflung.base.enums import RNGType
from farflung.base.errors import Unsupported
from farflung.comm.collectives import broadcast
from farflung.comm.exchange import Exchange
from farflung.process.world import joined_world

_LARGEST = 2**32 - 1  # of numpy's seeds


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, `numpy` and `torch` on every device of this process.

    Args:
        device_specific: add the rank, so that each process draws its own numbers.
        deterministic: also ask torch for deterministic algorithms only, which can be slower.

    Raises:
        ConfigError: `seed` is no whole number from 0 to 2**32 - 1.
        StateError: `device_specific` before an `Accelerator` or a `PartialState` has been made.
    """
    world = joined_world() if device_specific else None
    check_whole("set_seed: seed", seed, least=0, most=_LARGEST - (world.size - 1 if world is not None else 0))
    if world is not None:
        seed += world.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices of all kinds
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the first one's state of one kind of random numbers: `torch`, `cuda`, `xpu` or `generator`."""
    share_rng_state(rng_type, generator, joined_world().exchange)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every rank the first one's random states of all the kinds in `rng_types`."""
    if isinstance(rng_types, str) or not isinstance(rng_types, Iterable):
        raise wrong_type("synchronize_rng_states: rng_types", rng_types, "a list, such as ['torch']")
    listed = list(rng_types)
    for rng_type in listed:
        check_word("synchronize_rng_states: each of rng_types", rng_type, RNGType.list())
    for rng_type in listed:
        synchronize_rng_state(rng_type, generator)


def share_rng_state(
    rng_type: RNGType | str | None, generator: torch.Generator | None, exchange: Exchange, within: str | None = None
) -> None:
    """Give every rank the state of rank 0, as `synchronize_rng_state` does; `within` is that of `broadcast`."""
    check_word("rng_type", rng_type, RNGType.list())
    read, write = _state_of(RNGType(str(rng_type)), generator)
    state = read()
    broadcast(exchange, state, within=within)
    write(state)


def _state_of(kind: RNGType, generator: torch.Generator | None) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    if kind is RNGType.TORCH:
        return torch.get_rng_state, torch.set_rng_state
    if kind is RNGType.GENERATOR:
        if not isinstance(generator, torch.Generator):
            wanted = "a torch.Generator; synchronize_rng_state('generator') needs generator=, the one to synchronize"
            raise wrong_type("generator", generator, wanted)
        return generator.get_state, generator.set_state
    module: Any = getattr(torch, kind.value, None)
    if module is None or not module.is_available():
        raise Unsupported(
            f"rng_types has {kind.value!r}, but this machine has no such device. Use 'torch' or 'generator'."
        )
    return module.get_rng_state, module.set_rng_state
