# SPDX-License-Identifier: Apache-2.0
"""Whether and how `prepare` compiles models."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from farflung.base.checks import check_fields, check_optional, check_word
from farflung.base.enums import DynamoBackend
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.handlers import CheckedKwargs

_PREFIX = "ACCELERATE_DYNAMO_"
_NEED_BACKEND = ("mode", "fullgraph", "dynamic", "options", "use_regional_compilation")
# The arguments of torch.compile with the plugin's defaults.
_SILENT = {"backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}


_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")


def check_backend(name: str, backend: object) -> None:
    """Raise ConfigError unless `backend` is a word for a compiler, in whatever case."""
    word = backend.lower() if isinstance(backend, str) else backend
    check_word(name, word, [str(known).lower() for known in DynamoBackend])


def _variable(name: str) -> str:
    return _PREFIX + ("MODE" if name == "mode" else f"USE_{name.removeprefix('use_').upper()}")


@dataclass
class TorchDynamoPlugin(CheckedKwargs):
    """Arguments of `torch.compile` for the models that `prepare` is given.

    What is None is read from the environment: `ACCELERATE_DYNAMO_BACKEND`, `_MODE`, `_USE_FULLGRAPH`, `_USE_DYNAMIC`
    and `_USE_REGIONAL_COMPILATION`.

    Args:
        backend: the compiler behind `torch.compile`; `no` compiles nothing. All other arguments need another one.
        mode: `default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`.
        fullgraph: a break in the graph is an error.
        dynamic: compile for shapes that vary; None waits until one has varied.
        options: what the backend takes; excludes a mode.
        disable: make `torch.compile` do nothing.
        use_regional_compilation: compile each repeated block of the model by itself: equal blocks are compiled once.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def check(self) -> None:
        given = self.backend if self.backend is not None else environ.text(_PREFIX + "BACKEND") or "no"
        check_backend("TorchDynamoPlugin: backend" if self.backend is not None else _PREFIX + "BACKEND", given)
        word = str(given).upper()
        asked = [name for name in _NEED_BACKEND if getattr(self, name) not in (None, False, "default")]
        asked = [name for name in asked if environ.text(_variable(name)) is None]  # others may have none
        if word == DynamoBackend.NO and asked:
            raise ConfigError(f"{', '.join(asked)} of TorchDynamoPlugin need a backend, such as backend='inductor'.")
        self.backend = DynamoBackend(word)
        self.mode = self.mode or environ.text(_variable("mode")) or "default"
        for name in ("fullgraph", "use_regional_compilation"):
            setattr(self, name, environ.flag(_variable(name)) if getattr(self, name) is None else getattr(self, name))
        if self.dynamic is None and environ.text(_variable("dynamic")) is not None:
            self.dynamic = environ.flag(_variable("dynamic"))
        check_fields(self)
        check_word("TorchDynamoPlugin: mode", self.mode, _MODES)
        check_optional("TorchDynamoPlugin: options", self.options, dict, "a dictionary of what the backend takes")
        if self.options and self.mode != "default":
            raise ConfigError(f"torch.compile takes mode={self.mode!r} or options={self.options!r}, not both.")

    @property
    def compiles(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name, the backend as `torch.compile` spells it."""
        return {**copy.deepcopy(self.__dict__), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from the plugin's defaults."""
        fields = self.to_dict()
        return {name: fields[name] for name, silent in _SILENT.items() if fields[name] != silent}
