# SPDX-License-Identifier: Apache-2.0
"""Keeps what transformers' Trainer logs, whichever tracker is on, once a script has loaded it; and doesn't load it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from farflung.hosts.patching import around
from farflung.process.run_files import Metrics

_TRAINER = "transformers.trainer"


def keep_trainer_logs(metrics: Metrics) -> None:
    """Have `Trainer.log` of the main process add to `metrics` from now on, once transformers' Trainer is loaded."""
    if _TRAINER in sys.modules:
        _watch(metrics, sys.modules[_TRAINER])
    else:
        sys.meta_path.insert(0, _Watcher(metrics))


def _watch(metrics: Metrics, module: ModuleType) -> None:
    def kept(log: Callable[..., Any], trainer: Any, logs: dict[str, Any], *args: Any, **more: Any) -> Any:
        if trainer.is_world_process_zero():
            metrics.add(logs, trainer.state.global_step)
        return log(trainer, logs, *args, **more)

    if hasattr(module, "Trainer"):
        around(module.Trainer, "log", kept)


class _Watcher:  # no MetaPathFinder: `importlib.abc` takes longer to load than the rest of a rank's start
    """Finds the Trainer's module as Python does, and watches it when it has been loaded."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                _watch(self._metrics, module)

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec
