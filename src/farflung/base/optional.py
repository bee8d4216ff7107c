# SPDX-License-Identifier: Apache-2.0
"""What is installed beside Farflung: answered from package metadata, without importing anything."""

from __future__ import annotations

import operator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from farflung.base.checks import check_text, check_word
from farflung.base.errors import ConfigError

_COMPARISONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@cache
def is_available(module: str) -> bool:
    """Say whether the top-level module `module` can be imported."""
    return find_spec(module) is not None


def compare_versions(library: str, operation: str, requirement: str) -> bool:
    """Say whether the installed version of `library` stands in the relation `operation` to `requirement`.

    Args:
        operation: one of `>`, `>=`, `==`, `!=`, `<=`, `<`.

    Raises:
        ConfigError: another operation, or `library` is not installed.
    """
    check_word("operation", operation, _COMPARISONS)
    check_text("version", requirement)
    try:
        installed = version(library)
    except PackageNotFoundError:
        raise ConfigError(f"compare_versions: {library} is not installed.") from None
    return bool(_COMPARISONS[operation](_numbers(installed), _numbers(requirement)))


def installed_version(library: str) -> str:
    """Return the version of `library`, an empty text where it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, `2.13.0+cpu` -> (2, 13), without trailing zeros."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
