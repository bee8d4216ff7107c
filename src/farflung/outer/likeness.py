# SPDX-License-Identifier: Apache-2.0
"""Compares a newcomer with the members of a run before they admit it: settings must be equal, while other versions and
another script are only reported."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from farflung.outer.membership import Needs

_PROTOCOL = 2  # of what replicas say to each other; other numbers don't understand it
_SETTINGS = ("protocol", "processes in a replica", "outer loop", "data")
_TENSORS_SHOWN = 5
_PART = re.compile(r", (?![^(]*\))|; ")  # of a description, outside of brackets


def versions() -> dict[str, str]:
    """Return the versions, the script and the arguments of this process."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    content = script.read_bytes() if script.is_file() else b""
    return {
        "Farflung": _own_version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "script": f"{script.name} ({hashlib.blake2b(content, digest_size=4).hexdigest()})",
        "arguments": " ".join(sys.argv[1:]),
    }


def description_of(needs: Needs, island_size: int, data: str, versions: Mapping[str, str]) -> str:
    """Return the description of a replica that asks to be admitted, as JSON."""
    values = (_PROTOCOL, island_size, needs.description, data)
    return json.dumps({**dict(zip(_SETTINGS, values, strict=True)), **versions})


def unlike(theirs: str, mine: str) -> str:
    """Return the settings in which a replica that asks differs, with both values; empty if it may be admitted."""
    found = []
    for name, value, own in _differing(theirs, mine, of_settings=True):
        values, owns = _PART.split(value), _PART.split(own)
        value = ", ".join(part for part in values if part not in owns) or value
        own = ", ".join(part for part in owns if part not in values) or own
        found.append(f"its {name} is {value}; the run's is {own}")
    return "; ".join(found)


def unlike_tensors(theirs: Sequence[str], mine: Sequence[str]) -> str:
    """Return the first tensors that only one of both models has."""
    odd = [f"it alone has {line}" for line in theirs if line not in set(mine)]
    odd += [f"the run alone has {line}" for line in mine if line not in set(theirs)]
    return "; ".join(odd[:_TENSORS_SHOWN] + ([f"and {len(odd) - _TENSORS_SHOWN} more"] if odd[_TENSORS_SHOWN:] else []))


def other_versions(theirs: str, mine: str) -> str:
    """Return all other differences, which do no harm by themselves."""
    differing = _differing(theirs, mine, of_settings=False)
    return "; ".join(f"{name}: {value!r} instead of {own!r}" for name, value, own in differing)


def _own_version() -> str:
    try:
        return version("farflung")
    except PackageNotFoundError:  # it runs from its sources
        return "unknown"


def _differing(theirs: str, mine: str, of_settings: bool) -> list[tuple[str, str, str]]:
    there, here = json.loads(theirs), json.loads(mine)
    names = [name for name in {**here, **there} if (name in _SETTINGS) == of_settings]
    return [(name, str(there.get(name)), str(here.get(name))) for name in names if there.get(name) != here.get(name)]
