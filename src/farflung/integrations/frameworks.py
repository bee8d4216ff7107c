# SPDX-License-Identifier: Apache-2.0
"""Frameworks around torch's DDP: what Lightning needs in addition to hooks, and the words of each for what it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from farflung.integrations.patching import around
from farflung.integrations.training_data import sampler_of

# By a module that a script has loaded: how it makes a process group, and a DDP model.
_WORDS = {
    "lightning": ('give the Trainer, or Fabric, strategy="ddp"',) * 2,
    "pytorch_lightning": ('give the Trainer strategy="ddp"',) * 2,
    "lightning_fabric": ('give Fabric strategy="ddp"',) * 2,
    "ignite": ("run the training in idist.Parallel(backend=...)", "pass the model through idist.auto_model"),
    "keras": (
        "call torch.distributed.init_process_group in the script",
        "wrap the Keras model in torch.nn.parallel.DistributedDataParallel and train it in a loop, as fit does not",
    ),
}
_TORCH = (
    "call torch.distributed.init_process_group in the script",
    "wrap their model in torch.nn.parallel.DistributedDataParallel",
)


def _words() -> tuple[str, str]:
    return next((words for name, words in _WORDS.items() if name in sys.modules), _TORCH)


def to_make_a_group() -> str:
    """Say how the script's framework makes a process group."""
    return _words()[0]


def to_make_ddp() -> str:
    """Say how the script's framework makes a DDP model."""
    return _words()[1]


def follow_lightning(flush: Callable[[], None], is_planned: Callable[[DistributedSampler[Any]], bool]) -> None:
    """Follow Lightning, if the script has loaded it.

    Args:
        flush: called where a fit ends on all ranks: a collective.
        is_planned: returns whether a sampler's length is a plan, and its passes may end before or after it. Lightning
            would end an epoch there without its validation, or leave data out, so it is not told the length.
    """

    def end(ended: Callable[..., None], *args: Any) -> None:
        flush()
        ended(*args)

    def length(sized_len: Callable[[object], int | None], loader: Any) -> int | None:
        parts = [part for part in getattr(loader, "flattened", [loader]) if isinstance(part, DataLoader)]
        samplers = [sampler for part in parts if (sampler := sampler_of(part)) is not None]
        return None if any(map(is_planned, samplers)) else sized_len(loader)

    for module, owner, name, act in (
        ("lightning.pytorch.strategies", "Strategy", "on_train_end", end),
        ("pytorch_lightning.strategies", "Strategy", "on_train_end", end),
        ("lightning.fabric.utilities.data", "", "sized_len", length),
        ("lightning_fabric.utilities.data", "", "sized_len", length),
    ):
        there: Any = sys.modules.get(module)
        there = getattr(there, owner) if there is not None and owner else there
        if there is not None and not hasattr(getattr(there, name), "__wrapped__"):
            around(there, name, act)
