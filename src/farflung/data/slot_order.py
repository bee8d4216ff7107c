# SPDX-License-Identifier: Apache-2.0
"""Orders of batches that replicas agree on without sending them: drawn from one seed and the number of the epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader

from farflung.checkpoint import rng
from farflung.data.resume.position import generators_of
from farflung.data.torch_loaders import samplers_of, seeded_samplers

_COMPARED = 1000  # batches; orders that were drawn apart differ in them


def proposed_seed(loader: DataLoader[Any]) -> int:
    """Return the seed that a loader has or would draw."""
    seeded = seeded_samplers(loader)
    if seeded:
        return seeded[0].initial_seed % 2**63
    generator = next(iter(generators_of(loader)), None)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def agreed_order(batches: Iterable[Any], loader: DataLoader[Any], seed: int, epoch: int) -> list[Any]:
    """Return the batches of an epoch, in an order that depends on the seed and the epoch alone.

    The samplers get the epoch through `set_epoch`; all random states are restored afterwards.
    """
    samplers, host = samplers_of(loader), rng.read_host()
    generators = [(one, one.generator) for one in samplers if hasattr(one, "generator")]
    of_epoch = (seed + epoch) % 2**63
    random.seed(of_epoch)
    np.random.seed(of_epoch % 2**32)
    torch.default_generator.manual_seed(of_epoch)
    for sampler, _ in generators:
        sampler.generator = torch.Generator().manual_seed(of_epoch)
    for seeded in seeded_samplers(loader):
        seeded.initial_seed = seed
    try:
        announce(epoch, loader)
        return list(batches)
    finally:
        rng.write_host(host)
        for sampler, generator in generators:
            sampler.generator = generator


def announce(epoch: int, loader: DataLoader[Any]) -> None:
    """Tell the samplers of a loader of the epoch."""
    for sampler in samplers_of(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def digest_of(order: list[Any]) -> int:
    """Return a number in which orders differ that replicas have drawn apart."""
    return crc32(repr(order[:_COMPARED]).encode())
