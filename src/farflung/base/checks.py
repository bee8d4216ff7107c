# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, one for each kind, and how a value is written in a message."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from types import FunctionType
from typing import Any
from urllib.parse import unquote

from farflung.base.errors import ConfigError, WrongType, did_you_mean
from farflung.base.words import counted

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # a drive of Windows has one letter
_STORES = "s3", "gs", "az", "hf"


def shown(value: Any) -> str:
    """Return `value` as a message shows it: short, on one line, without an address in memory."""
    kind = type(value).__name__
    kind = f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{kind} of shape {list(value.shape)} and dtype {value.dtype}"
    is_sized = isinstance(value, (list, tuple, set, dict))
    items = value.values() if isinstance(value, dict) else value
    if is_sized and not all(isinstance(item, (str, Real, tuple, type(None))) for item in items):
        return f"{kind} of {counted(len(value), 'item')}"
    text = " ".join(_REPR.repr(value).split())
    is_plain = is_sized or isinstance(value, (str, Real, type(None)))
    return text if " at 0x" not in text and (is_plain or "..." not in text) else kind


def wrong_type(name: str, value: object, wanted: str) -> WrongType:
    """Return the error for a `value` that is no `wanted`, which ends the sentence "It must be ..."."""
    return WrongType(f"is {shown(value)}; it must be {wanted}.", name)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise WrongType unless `value` is an instance of `kinds`."""
    if not isinstance(value, kinds):
        raise wrong_type(name, value, wanted)


def check_optional(name: str, value: object, kind: type, wanted: str) -> None:
    """Raise WrongType unless `value` is None or an instance of `kind`."""
    if value is not None:
        check_type(name, value, kind, wanted)


def check_callable(name: str, value: object, example: str) -> None:
    """Raise WrongType unless `value` can be called."""
    if not callable(value):
        raise wrong_type(name, value, f"a function, such as {example}")


def check_flag(name: str, value: object) -> None:
    """Raise WrongType unless `value` is True or False, or 1 or 0."""
    if not isinstance(value, bool) and (hasattr(value, "__len__") or value not in (0, 1)):
        raise wrong_type(name, value, "True or False")


def check_text(name: str, value: object) -> None:
    """Raise WrongType unless `value` is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong_type(name, value, "a text that is not empty")


def check_path(name: str, value: object) -> Path:
    """Return `value` as a path in this machine's file system, its `~` expanded.

    Raises:
        WrongType: it is no path, or an empty one.
        ConfigError: it is the address of a bucket or the like, or there is no home folder for its `~`.
    """
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise wrong_type(name, value, "a path, such as 'runs/first'")
    text = os.fsdecode(value)
    if is_address(text):
        raise ConfigError(f"is {text!r}, an address. It must be a path: {_instead_of(text)}.", name)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        if text.partition("/")[0] != "~":  # no user has this name, so it is a folder's
            return Path(text)
        raise ConfigError(
            f"is {text!r}, and no home folder is known: HOME is not set, and this user has no entry in the "
            "password database. Set HOME, or give a path without `~`.",
            name,
        ) from None


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is an address (`s3://bucket/x`), also after a `Path` has joined its slashes."""
    return _ADDRESS.match(os.fsdecode(path)) is not None


class Address(str):
    """`s3://bucket/run` or the like, with a path's own `/`, `name` and `parent`."""

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        return Address(self.rpartition("/")[0])


def check_place(name: str, value: object) -> Path | Address:
    """Return `value` as a path, which `file://` may begin, or as the address of a bucket; the errors of `check_path`.

    ConfigError names the schemes of buckets if it has another one.
    """
    if not isinstance(value, (str, os.PathLike)) or not (found := _ADDRESS.match(text := os.fsdecode(value))):
        return check_path(name, value)
    scheme, rest = found[1].lower(), text[found.end() :].rstrip("/")
    if scheme == "file":
        return Path("/", unquote(rest))
    if scheme not in _STORES or not rest:
        known = ", ".join(f"{one}://" for one in _STORES)
        raise ConfigError(f"is {text!r}; an address is {known} or file://, and what follows.", name)
    return Address(f"{scheme}://{rest}")


def _instead_of(address: str) -> str:
    scheme, _, rest = address.partition(":")
    if scheme.lower() == "file":
        return f"give {'/' + rest.lstrip('/')!r}"
    return "give a local folder and copy the files there afterwards, or the folder where the bucket is mounted"


def check_whole(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number from `least` to `most`."""
    wanted = ("a whole number" + _range(least, most)).rstrip()
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise wrong_type(name, value, wanted)
    number = int(value)
    if (least is not None and number < least) or (most is not None and number > most):
        raise ConfigError(f"is {value}; it must be {wanted}.", name)


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
) -> None:
    """Raise ConfigError unless `value` is a number in this range; NaN never is, an infinity unless `finite`."""
    wanted = (("a finite number" if finite else "a number") + _range(least, most, above, below)).rstrip()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise wrong_type(name, value, wanted)
    x = float(value)
    is_inside = (above is None or x > above) and (least is None or x >= least)
    is_inside = is_inside and (below is None or x < below) and (most is None or x <= most)
    if math.isnan(x) or (finite and math.isinf(x)) or not is_inside:
        raise ConfigError(f"is {value}; it must be {wanted}.", name)


def _range(least: float | None, most: float | None, above: float | None = None, below: float | None = None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None and below is None:
        return f", {least} or more"
    limits = {"of at least {}": least, "above {}": above, "below {}": below, "of at most {}": most}
    return " " + " and ".join(words.format(limit) for words, limit in limits.items() if limit is not None)


def check_word(name: str, value: object, words: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `words`, with a suggestion if one is near."""
    known = list(words)
    if not isinstance(value, str) or value not in known:
        near = did_you_mean(value.lower(), known) if isinstance(value, str) else ""
        raise ConfigError(f"is {shown(value)}; it must be one of {', '.join(known)}.{near}", name)


def check_protocol(name: str, value: object, methods: Iterable[str], wanted: str) -> None:
    """Raise WrongType unless `value` is an instance of a class that has all of `methods`."""
    if isinstance(value, type) or not all(hasattr(value, method) for method in methods):
        raise wrong_type(name, value, wanted)


_FIELDS: Mapping[str, Callable[..., None]] = {
    "bool": check_flag,
    "int": check_whole,
    "float": check_number,
    "str": check_text,
}


def check_fields(settings: Any) -> None:
    """Check the flags, numbers and texts of a dataclass against their annotations, and the ranges in their metadata."""
    for each in fields(settings):
        value, kind = getattr(settings, each.name), str(each.type)
        check = _FIELDS.get(kind.removesuffix(" | None"))
        if check is not None and not (value is None and kind.endswith(" | None")):
            check(f"{type(settings).__name__}: {each.name}", value, **each.metadata)
