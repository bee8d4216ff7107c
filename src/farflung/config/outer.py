# SPDX-License-Identifier: Apache-2.0
"""The outer loop as plain names and values, which a script, a file, a variable or a flag can state alike.

This room doesn't know torch. It refuses unknown recipes, unknown options and missing ones; whether a value is in its
range is for the recipe to say: `OuterConfig` of `farflung.methods.arguments` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from farflung.base.checks import check_word
from farflung.base.errors import ConfigError, did_you_mean
from farflung.config.recipes import CODECS, RECIPES, Option, help_of

Outer = TypeVar("Outer")

AUTO = "auto"  # the recipe that chooses another one, with all its options
NAMES = (AUTO, *RECIPES)
MACHINE = "machine"
_ALL = "all"
_EXAMPLES: Mapping[str, Any] = {"alpha": 0.01, "levels": "4:machine,64:all", "warmup": 500}  # of needed arguments


# The options of every recipe.
COMMON = (
    Option(
        "steps",
        int,
        "Optimizer steps of the whole run, if known: rounds that don't fit are refused, and fewer than ten warned of.",
    ),
    Option(
        "weigh_by",
        str,
        "Weight replicas by the optimizer steps, the items (samples, tokens), or the squares of each step's items that "
        "they processed.",
        ("steps", "items", "items_squared"),
    ),
    Option("anchor_on_cpu", bool, "Keep the anchor and the outer optimizer's state in host memory."),
    Option("inner", str, "What a round does with the inner optimizer's state.", ("keep", "reset", "average")),
    Option(
        "bucket_bytes", int, "Bucket size: bytes sent at a time. [an eighth of the trainable parameters, 4 to 12.5 MiB]"
    ),
    Option(
        "same_data",
        bool,
        "Replicas may see the same batches: else changes that are equal to the last bit in the first rounds stop the "
        "run.",
    ),
    Option(
        "robust",
        str,
        "Keep a faulty replica from spoiling the weights: by a trimmed mean (four replicas or more), or by clipping to "
        "the median norm (three or more).",
        ("trimmed", "clip"),
    ),
    Option(
        "report",
        str,
        "When rank 0 prints a line about the rounds: `round` (after each), a number of seconds, or `off`; `auto` is "
        "every 5 seconds on a terminal, else each round. [auto]",
    ),
)
REPORT_SECONDS = 5.0  # between two lines on a terminal

# The arguments of all recipes, each name once, and the options of all.
_KINDS = {each.name: each.kind for arguments in RECIPES.values() for each in arguments}
_OPTIONS = [Option(name, kind, help_of(name), CODECS if name == "codec" else ()) for name, kind in _KINDS.items()]
OPTIONS: Mapping[str, Option] = {option.name: option for option in (*_OPTIONS, *COMMON)}


@dataclass(frozen=True, init=False, repr=False, eq=False)
class OuterSettings:
    """An outer loop by the names of its recipe and its options, whose values nobody has checked yet: see `OuterConfig`.

    An option can be read as an attribute, `settings.every`; it is None if it is left to the recipe.

    Raises:
        ConfigError: an unknown recipe, a missing or unknown option, or a word that is none of an option's choices.
    """

    recipe: str
    _given: Mapping[str, Any]

    def __init__(self, recipe: str, **options: Any) -> None:
        check_word("The recipe of an outer loop", recipe, NAMES)
        given = {name: value for name, value in options.items() if value is not None}
        _check_names(recipe, given)
        for name, value in given.items():
            if OPTIONS[name].choices:
                check_word(name, value, OPTIONS[name].choices)
        if "report" in given:
            _check_report(given["report"])
        if "levels" in given:
            given["levels"] = _levels(given["levels"])
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "_given", {name: given[name] for name in OPTIONS if name in given})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OuterSettings) and (self.recipe, self._given) == (other.recipe, other._given)

    def __hash__(self) -> int:
        return hash(self.recipe)

    def __getattr__(self, option: str) -> Any:
        if option not in OPTIONS:
            raise AttributeError(f"{type(self).__name__} has no option {option!r}.{did_you_mean(option, OPTIONS)}")
        return self._given.get(option)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._given.items())
        return f"{type(self).__name__}({self.recipe!r}{options})"

    def report_seconds(self, on_terminal: bool) -> float | None:
        """Return the least seconds between two lines about the rounds: 0 prints one for each, None none."""
        word = "auto" if self.report is None else self.report
        words = {"auto": REPORT_SECONDS if on_terminal else 0.0, "round": 0.0, "off": None}
        return words[word] if word in words else float(word)

    def given(self) -> dict[str, Any]:
        """Return the options that are not left to the recipe, by name."""
        return dict(self._given)


def _check_names(recipe: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a name is no option of the recipe, or one is missing."""
    arguments = RECIPES.get(recipe, ())
    known = [each.name for each in arguments] + [each.name for each in COMMON]
    odd = [name for name in given if name not in known]
    if recipe == AUTO and (chosen := [*odd, *(["inner"] if "inner" in given else [])]):
        others = f", and so {'is' if len(chosen) == 2 else 'are'} {', '.join(chosen[1:])}" if chosen[1:] else ""
        raise ConfigError(
            f"is for {AUTO} to choose{others}. Leave it out, or name a recipe in place of {AUTO}, such as diloco.",
            chosen[0],
        )
    if odd:
        near = did_you_mean(odd[0], known)
        raise ConfigError(f"{recipe} has no option {', '.join(odd)}; it takes {', '.join(known)}.{near}")
    missing = [each for each in arguments if each.is_needed and each.name not in given]
    if missing:
        values = {each.name: _EXAMPLES.get(each.name, 32 if each.kind is int else 0.1) for each in missing}
        flags = " ".join(f"--outer_{name} {value}" for name, value in values.items())
        stated = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(f"{recipe} needs {' and '.join(values)}, such as {stated}; as flags: {flags}.")


def _check_report(word: str | float) -> None:
    try:
        is_known = word in ("auto", "round", "off") or (0 < float(word) < inf and not isinstance(word, bool))
    except (TypeError, ValueError):
        is_known = False
    if not is_known:
        raise ConfigError(
            f"is {word!r}; use auto, round, off, or a number of seconds above zero, such as 30.", "report"
        )


def outer_config(settings: Mapping[str, Any], called: str, make: Callable[..., Outer]) -> Outer | None:
    """Build settings with `make` from those of `settings` that are not None; return None if there are none.

    `called` is the flag or variable that sets the recipe: a ConfigError names it if the recipe is missing.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return None
    if "recipe" not in given:
        flag = called.startswith("--")
        names = [f"--outer-{name.replace('_', '-')}" if flag else f"FARFLUNG_OUTER_{name.upper()}" for name in given]
        verb, example = "needs" if len(names) == 1 else "need", f"{called}{' ' if flag else '='}diloco"
        raise ConfigError(f"{', '.join(names)} {verb} a recipe: set {called}, for example {example}.")
    return make(**given)


def _levels(stated: Mapping[int, int | str | None] | str) -> dict[int, int | str | None]:
    """Return levels as a dictionary, in which None is all ranks."""
    pairs: list[tuple[Any, Any]] = list(stated.items()) if isinstance(stated, Mapping) else []
    if isinstance(stated, str):
        parts = [part.partition(":") for part in stated.split(",")]
        pairs = [(_whole(every), _whole(size.strip())) for every, _, size in parts]
    levels: dict[int, int | str | None] = {}
    for every, size in pairs:
        size = None if size == _ALL else size
        fits = size is None or size == MACHINE or type(size) is int
        if type(every) is not int or not fits or every in levels:
            levels.clear()
            break
        levels[every] = size
    if not levels:
        raise ConfigError(
            f"is {stated!r}; map each number of steps to how many ranks average after it: 2 or more, "
            "'machine' or 'all', such as '4:machine,64:all'.",
            "levels",
        )
    return levels


def _whole(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text
