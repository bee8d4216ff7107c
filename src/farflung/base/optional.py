# SPDX-License-Identifier: Apache-2.0
"""Which other packages are installed, by their metadata and without importing them."""

from __future__ import annotations

import operator
import re
from importlib.util import find_spec
from typing import Any

from farflung.base.checks import check_text, check_word
from farflung.base.errors import ConfigError

STR_OPERATION_TO_FUNC = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def is_installed(module: str, *packages: str) -> bool:
    """Return whether `module` can be imported and one of `packages` (by default, one of its name) has it.

    A folder that happens to bear the name of a library belongs to no package.
    """
    try:
        if find_spec(module) is None:
            return False
    except (ImportError, ValueError):  # the parent of a submodule is missing, or a module without a spec was put there
        return False
    return any(map(installed_version, packages or (module,)))


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether a version stands in the relation `operation` to `requirement_version`.

    Args:
        library_or_version: the name of an installed library, or a `packaging.version.Version`.
        operation: one of `>`, `>=`, `==`, `!=`, `<=`, `<`.
    """
    check_word("operation", operation, STR_OPERATION_TO_FUNC)
    check_text("version", requirement_version)
    try:
        installed = _version(library_or_version) if isinstance(library_or_version, str) else str(library_or_version)
    except ModuleNotFoundError:
        raise ConfigError(f"compare_versions: {library_or_version} is not installed.") from None
    return compare_release(installed, operation, requirement_version)


def compare_release(one: str, operation: str, other: str) -> bool:
    """Return whether the release of version `one` stands in the relation `operation` to that of `other`."""
    return bool(STR_OPERATION_TO_FUNC[operation](_numbers(one), _numbers(other)))


def installed_version(library: str) -> str:
    """Return the version of `library`, an empty text if it is not installed."""
    try:
        return _version(library)
    except ModuleNotFoundError:
        return ""


def _version(library: str) -> str:
    from importlib.metadata import version  # late: it takes longer to load than a command has to answer a wrong use

    return version(library)


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, `2.13.0+cpu` -> (2, 13), without trailing zeros."""
    release = re.match(r"(\d+(\.\d+)*)?", text)
    numbers = [int(part) for part in release[0].split(".") if part] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
