# SPDX-License-Identifier: Apache-2.0
"""Several errors of one file or one plugin as one error, so that a user can mend all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
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
        if len(self._found) > 1:
            kind = Unsupported if all(isinstance(one, Unsupported) for one in self._found) else ConfigError
            raise kind("\n".join(map(str, self._found)))
        for one in self._found:
            raise one
