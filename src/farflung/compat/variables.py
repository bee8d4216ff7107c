# SPDX-License-Identifier: Apache-2.0
"""Accelerate's functions over environment variables."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from farflung.base.optional import is_installed
from farflung.compat import defined_in
from farflung.config import environ

_OURS = "ACCELERATE_"
_PURGED = "_accelerate_is_purged_environment_wrapped"  # Accelerate's mark, so that neither wraps what the other has
_LAUNCHERS = ("", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")  # torchrun, MPICH, Open MPI, MVAPICH
_UNSAFE = frozenset(";\n<> ")  # what a line `NAME=value` of a shell script can't hold

_logger = logging.getLogger("farflung.utils.environment")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a word for yes (`y`, `yes`, `t`, `true`, `on`, `1`) as 1, one for no as 0; with `to_bool`, True and False.

    Raises ValueError for another word.
    """
    word = value.lower()
    if word not in environ.TRUE_WORDS and (word not in environ.FALSE_WORDS or not word):
        raise ValueError(f"invalid truth value {word}")
    answer = word in environ.TRUE_WORDS
    return answer if to_bool else int(answer)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of the variables `env_keys` that holds 0 or more, or `default`."""
    values = (int(environ.text(key, "-1") or "") for key in env_keys)
    return next((value for value in values if value >= 0), default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable `key` as a yes or no, or `default` if it is not set; ValueError for another word."""
    return bool(str_to_bool(environ.text(key, str(default)) or ""))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable `key`, or `default` if it is not set."""
    return environ.text(key, str(default)) or ""


def is_rich_available() -> bool:
    """Return whether rich is installed and `ACCELERATE_ENABLE_RICH` asks for it."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Set variables, their names in upper case, for the length of a block; afterwards they are as before."""
    return environ.patched({name.upper(): str(value) for name, value in kwargs.items()})


@contextmanager
def clear_environment() -> Iterator[None]:
    """Unset all variables for the length of a block; afterwards they are as before, and no others are set."""
    before = environ.snapshot()
    environ.remove(*before)
    try:
        yield
    finally:
        environ.remove(*environ.snapshot())
        environ.export(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Return a function that leaves the variables `ACCELERATE_...` as it found them.

    Of a class, those methods are changed whose name begins with `test`; those of classes derived from it too.
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)

    def purge_methods(cls: Any, /, **kwargs: Any) -> None:
        for name in dir(cls):
            method = getattr(cls, name)
            if name.startswith("test") and callable(method) and not hasattr(method, _PURGED):
                setattr(cls, name, _purged(method))

    purge_methods(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(purge_methods)  # type: ignore[assignment]
    return func_or_cls


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = environ.named(_OURS)
        try:
            return function(*args, **kwargs)
        finally:
            environ.remove(*environ.named(_OURS))
            environ.export(before)

    setattr(purged, _PURGED, True)
    return purged


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return a line `NAME=value` for each variable that such a line can hold; a warning names the others."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _UNSAFE & set(name + value):
            lines.append(f"{name}={value}\n")
        else:
            _logger.warning("%s=%s is left out: empty, or with a space, a line break, or one of ; < >", name, value)
    return lines


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the list of paths in a variable, without empty ones, with `path_to_add` at its end."""
    paths = [path for path in (environ.text(env_var_name) or "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


@dataclass
class CPUInformation:
    """The place of this process among those of its run, as its launcher's variables say it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the place of this process as torchrun, MPICH, Open MPI or MVAPICH has set it; alone if none has."""
    ranks, sizes = ([f"{prefix}{word}" for prefix in _LAUNCHERS] for word in ("RANK", "SIZE"))
    of_node = _LAUNCHERS[2:]
    return CPUInformation(
        rank=get_int_from_env(ranks, 0),
        world_size=get_int_from_env(["WORLD_SIZE", *sizes[1:]], 1),
        local_rank=get_int_from_env(["LOCAL_RANK", "MPI_LOCALRANKID", *(f"{p}LOCAL_RANK" for p in of_node)], 0),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", *(f"{p}LOCAL_SIZE" for p in of_node)], 1
        ),
    )


__all__ = defined_in(globals())
