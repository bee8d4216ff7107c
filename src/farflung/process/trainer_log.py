# SPDX-License-Identifier: Apache-2.0
"""Keeps what transformers' Trainer logs, whichever tracker is on, once a script has loaded it; and doesn't load it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from farflung.process.run_files import Metrics


def keep_trainer_logs(metrics: Metrics) -> None:
    """Have `Trainer.log` of the main process add to `metrics` from now on, once transformers' Trainer is loaded."""
    _after_import("transformers.trainer", functools.partial(_watch, metrics))


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


def _after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name` as soon as it is loaded: now, if it is."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher:  # no MetaPathFinder: `importlib.abc` takes longer to load than the rest of a rank's start
    """Finds a module as Python does, and calls `act` with it when it has been loaded."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                self._act(module)

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec
