# SPDX-License-Identifier: Apache-2.0
"""Trains the loop you already have on far-flung machines, and talks as little as the network allows.

Names are loaded when they are first used, so that `import farflung` itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farflung.accelerator.accelerator import Accelerator as Accelerator
    from farflung.accelerator.local_sgd import LocalSGD as LocalSGD
    from farflung.accelerator.views import PartialState as PartialState
    from farflung.base.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from farflung.base.enums import DistributedType as DistributedType
    from farflung.config.handlers import AutocastKwargs as AutocastKwargs
    from farflung.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
    from farflung.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from farflung.config.handlers import GradScalerKwargs as GradScalerKwargs
    from farflung.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from farflung.config.handlers import ProfileKwargs as ProfileKwargs
    from farflung.config.handlers import WatchdogKwargs as WatchdogKwargs
    from farflung.data.prepare import skip_first_batches as skip_first_batches
    from farflung.launch.notebook import debug_launcher as debug_launcher
    from farflung.launch.notebook import notebook_launcher as notebook_launcher
    from farflung.outer.named import OuterConfig as OuterConfig
    from farflung.process.seed import synchronize_rng_states as synchronize_rng_states

__version__ = "0.1.0"

_WHERE = {
    "Accelerator": "farflung.accelerator.accelerator",
    "LocalSGD": "farflung.accelerator.local_sgd",
    "PartialState": "farflung.accelerator.views",
    "DDPCommunicationHookType": "farflung.base.enums",
    "DistributedType": "farflung.base.enums",
    "AutocastKwargs": "farflung.config.handlers",
    "DataLoaderConfiguration": "farflung.config.handlers",
    "DistributedDataParallelKwargs": "farflung.config.handlers",
    "GradScalerKwargs": "farflung.config.handlers",
    "InitProcessGroupKwargs": "farflung.config.handlers",
    "ProfileKwargs": "farflung.config.handlers",
    "WatchdogKwargs": "farflung.config.handlers",
    "OuterConfig": "farflung.outer.named",
    "skip_first_batches": "farflung.data.prepare",
    "debug_launcher": "farflung.launch.notebook",
    "notebook_launcher": "farflung.launch.notebook",
    "synchronize_rng_states": "farflung.process.seed",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'farflung' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
