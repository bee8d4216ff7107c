# SPDX-License-Identifier: Apache-2.0
"""Keeps what transformers' Trainer logs, whichever tracker is on, once a script has loaded it."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from farflung.process.after_import import after_import
from farflung.process.run_files import Metrics


def keep_trainer_logs(metrics: Metrics) -> None:
    """Have `Trainer.log` of the main process add to `metrics` from now on, once transformers' Trainer is loaded."""
    after_import("transformers.trainer", functools.partial(_watch, metrics))


def _watch(metrics: Metrics, module: ModuleType) -> None:
    trainer: Any = getattr(module, "Trainer", None)
    if trainer is None:
        return
    log = trainer.log

    def kept(self: Any, logs: dict[str, Any], *args: Any, **more: Any) -> Any:
        if self.is_world_process_zero():
            metrics.add(logs, self.state.global_step)
        return log(self, logs, *args, **more)

    trainer.log = functools.update_wrapper(kept, log)
