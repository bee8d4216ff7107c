# SPDX-License-Identifier: Apache-2.0
"""The only place that reads or writes the process environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from farflung.base.errors import ConfigError

T = TypeVar("T")
# How Kubernetes tells each pod of the services of its namespace ("Discovering services" in its documentation). The name
# of the service comes first, so one called `farflung` or `master` gives FARFLUNG_PORT, MASTER_PORT and more.
_HOST = r"(\d+(\.\d+){3}|[\da-fA-F]*:[\da-fA-F:.]+)"
_OF_SERVICE = re.compile(
    rf"\w+?_(SERVICE_HOST={_HOST}|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\[?{_HOST}\]?:\d+"
    rf"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR={_HOST}))"
)
_OF_TORCH = re.compile(r"LOGLEVEL|(PY)?TORCH_\w+|(NCCL|GLOO|OMP|GOMP|KMP|MKL|OPENBLAS)_\w+")  # also OpenMP's ...
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
FALSE_WORDS = ("0", "false", "no", "off", "n", "f", "")
SHOWS_ATTEMPTS = "FARFLUNG_SHOWS_ATTEMPTS"  # if the launcher shows how each attempt failed, and not the last alone
REPORTS = "FARFLUNG_REPORTS"  # the file descriptor to which a launcher under a tether reports, by its number
QUIET = "FARFLUNG_QUIET"  # of the setting `quiet`: ranks print no lines about rounds unless a setting asks for them
LAUNCHER = "FARFLUNG_LAUNCHER"  # the process that a rank must not outlive, by its number
RUN_FOLDER = "FARFLUNG_RUN_FOLDER"  # where ranks write of their run
RUN_ATTEMPT = "FARFLUNG_RUN_ATTEMPT"  # which one it is in that folder, by its number
REPLICA = "FARFLUNG_REPLICA"  # how people call the replica that a rank belongs to
OF_LAUNCHERS = (SHOWS_ATTEMPTS, REPORTS, LAUNCHER, RUN_FOLDER, RUN_ATTEMPT, REPLICA)
KEY, KEY_FILE = "FARFLUNG_KEY", "FARFLUNG_KEY_FILE"  # of a run: its key, which nothing shows; the file that has it
MEMBER_VARIABLES = ("FARFLUNG_STORE", "FARFLUNG_MEMBER")  # of a replica that comes and goes: the run's address, its id
OF_RANK = (RUN_FOLDER, RUN_ATTEMPT, REPLICA, *MEMBER_VARIABLES)  # of its run


def text(name: str, default: str | None = None) -> str | None:
    """Return the variable `name`, or `default` when it is not set."""
    value = os.environ.get(name)
    return default if value is None or _is_of_service(name, value) else value


def named(prefix: str) -> dict[str, str]:
    """Return the variables whose names begin with `prefix`, except those that describe a Kubernetes service."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    return {name: value for name, value in variables.items() if not _is_of_service(name, value)}


def _is_of_service(name: str, value: str) -> bool:
    return _OF_SERVICE.fullmatch(f"{name}={value}") is not None


def integer(*names: str) -> int | None:
    """Return the first of the variables `names` that is set, as an integer, or None; raise ConfigError for a word."""
    values = (_parsed(name, int, "an integer") for name in names)
    return next((value for value in values if value is not None), None)


def number(name: str) -> float | None:
    """Return the variable `name` as a number, or None when it is not set; raise ConfigError if it is none."""
    return _parsed(name, float, "a number")


def _parsed(name: str, kind: Callable[[str], T], noun: str) -> T | None:
    value = text(name)
    try:
        return kind(value) if value else None
    except ValueError:
        raise ConfigError(f"The environment variable {name} is {value!r}; it must be {noun}.") from None


def flag(name: str, default: bool = False) -> bool:
    """Return the variable `name` as a yes or no, or `default` when it is not set; raise ConfigError for other words."""
    value = text(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word in TRUE_WORDS + FALSE_WORDS:
        return word in TRUE_WORDS
    raise ConfigError(f"The environment variable {name} is {value!r}; use one of true, false, 1, 0, yes, no.")


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set `variables` in this process, and so in the processes that it starts."""
    os.environ.update(variables)


def remove(*names: str) -> None:
    """Unset the variables `names`; those that are not set are passed over."""
    for name in names:
        os.environ.pop(name, None)


def remove_empty() -> None:
    """Unset torch's variables that are empty, as compose files and CI leave those without a value: it takes no such."""
    remove(*(name for name, value in os.environ.items() if not value and _OF_TORCH.fullmatch(name)))


@contextmanager
def patched(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set `variables` for the length of a block (None unsets) and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _put(variables)
        yield
    finally:
        _put(before)


def _put(variables: Mapping[str, str | None]) -> None:
    remove(*variables)
    export({name: value for name, value in variables.items() if value is not None})
