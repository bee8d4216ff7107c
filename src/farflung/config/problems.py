# SPDX-License-Identifier: Apache-2.0
"""Several errors of one file or one plugin as one error, so that a user can mend all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from farflung.base.errors import ConfigError, FarflungError, Unsupported


class Problems:
    """Errors that are raised together."""

    def __init__(self) -> None:
        self._found: list[FarflungError] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Keep what a block raises for later."""
        try:
            yield
        except FarflungError as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise what was caught, if anything was: several errors as one, with a line for each."""
        if self._found:
            raise _joined(self._found)


def renamed(error: FarflungError, names: Mapping[str, str]) -> FarflungError:
    """Return an error that begins with what the user wrote for its setting: a flag, a variable, or a key."""
    if error.together:
        return _joined([renamed(each, names) for each in error.together])
    return type(error)(error.problem, names[error.setting]) if error.setting in names else error


def _joined(errors: Sequence[FarflungError]) -> FarflungError:
    if len(errors) == 1:
        return errors[0]
    kind = Unsupported if all(isinstance(each, Unsupported) for each in errors) else ConfigError
    error = kind("\n".join(map(str, errors)))
    error.together = tuple(errors)
    return error
