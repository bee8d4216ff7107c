# SPDX-License-Identifier: Apache-2.0
"""Properties of one line: what an object answers by asking one of its parts."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class Forward(property, Generic[T]):
    """A property that reads an attribute of an attribute: `size = Forward[int]("_world.size", "Number of ranks.")`.

    Args:
        source: the path to it, or a function of the object.
        doc: the docstring.
        check: makes the attribute at that path writable; called with its name and the new value.
    """

    def __init__(
        self, source: str | Callable[[Any], T], doc: str = "", check: Callable[[str, Any], object] | None = None
    ) -> None:
        def write(instance: Any, value: T) -> None:
            assert isinstance(source, str)
            path, _, name = source.rpartition(".")
            assert check is not None
            check(name, value)
            setattr(attrgetter(path)(instance), name, value)

        super().__init__(attrgetter(source) if isinstance(source, str) else source, check and write)
        self.__doc__ = doc  # Python before 3.13 would show that of this class

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None, /) -> T: ...  # type: ignore[override]
        def __set__(self, instance: Any, value: T, /) -> None: ...


def unchecked(name: str, value: object) -> None:
    """Allow a `Forward` to be set to any value."""
