# SPDX-License-Identifier: Apache-2.0
"""What one launch setting is: its value, its help, and every form in which a user states it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from farflung.base.errors import ConfigError, did_you_mean
from farflung.config import environ

Value = int | float | bool | str | None
Question = str | Callable[[Mapping[str, Value]], str]


@dataclass(frozen=True)
class Field:
    """One launch setting and every form it takes."""

    name: str  # in `LaunchSettings`, and its key in a configuration file
    group: str  # in `--help` and pages
    kind: type  # int, float, bool or str
    default: Value  # if no flag, variable or file sets it
    help: str
    variable: str  # of the environment, that sets it
    told_as: str | None  # the environment variable in which the ranks find it; None: they need not know
    flags: tuple[str, ...]  # without their negative forms; either spelling, `_` or `-`, works for each
    in_file: bool = True  # a configuration file may set it
    says_word: bool = False  # its flag is followed by `true` or `false`, as Accelerate's for FSDP are; of a bool alone
    choices: tuple[str, ...] = ()  # the words it may take; empty: any
    checked_later: bool = False  # whether what reads the setting checks its word
    question: Question | None = None  # of `farflung config`, which may depend on the answers so far
    asked_when: Callable[[Mapping[str, Value]], bool] = lambda answers: True  # whether the question makes sense after

    def parse(self, text: str, called: str) -> Value:
        """Return the value that `text` stands for; raise ConfigError or Unsupported if there is none.

        An error names the setting as it is `called`: `--num_processes`, `train.yaml:3: debug`.
        """
        if self.kind is bool:
            word = text.strip().lower()
            if word not in environ.TRUE_WORDS + environ.FALSE_WORDS:
                raise ConfigError(f"{called} is {text!r}; use true or false.")
            return word in environ.TRUE_WORDS
        if self.kind is str:
            return self._parse_word(text, called)
        try:
            value: Value = self.kind(text)
        except ValueError:
            noun = "an integer" if self.kind is int else "a number"
            raise ConfigError(f"{called} is {text!r}; it must be {noun}.") from None
        return value

    def from_environment(self) -> Value:
        """Return what its environment variable says, None if that is not set."""
        text = environ.text(self.variable)
        called = f"The environment variable {self.variable}"
        return self.parse(text, called) if text else None

    def _parse_word(self, text: str, called: str) -> str:
        word = text.lower()
        if word == "false" and "no" in self.choices:  # how YAML reads an unquoted `no`
            word = "no"
        if not self.choices or (self.checked_later and word not in self.choices):
            return text
        if word not in self.choices:
            raise ConfigError(
                f"{called} is {text!r}; use one of {', '.join(self.choices)}.{did_you_mean(word, self.choices)}"
            )
        return word

    @property
    def is_switch(self) -> bool:
        """Whether its flag stands alone: the flag means yes, and its negative form no."""
        return self.kind is bool and not self.says_word

    def text(self, value: Value) -> str:
        """Return `value` as a file or a variable holds it; `parse` reads it back."""
        return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Stated:
    """A value, what states it, and where it stands (`train.yaml:3`); with a message about it for the user."""

    value: Any
    kind: str  # `flag`, `environment`, `file` or `default`
    place: str = ""
    note: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".rstrip()


def setting(default: Value, help: str, **more: Any) -> Any:
    """Declare one attribute of `LaunchSettings`; see `Field` for the further arguments.

    Without `variable` it is the name for `fsdp_` and `parallelism_config_`, else `FARFLUNG_` and the name; without
    `flags`, `--` and the name. `told`: the ranks find it in its variable, as they do in each `variable` that is named.
    """
    return field(default=default, metadata={"default": default, "help": help, **more})


def accelerates(default: Value, help: str, **more: Any) -> Any:
    """Declare an attribute whose variable is `ACCELERATE_` and the name, in which the ranks find it."""
    return setting(default, help, prefix="ACCELERATE_", told=True, **more)


def underscored(word: str) -> str:
    """Return a flag as its setting spells it: `--num_processes` and `--num-processes` are one flag in each command."""
    return word.replace("-", "_")


BOTH_SPELLINGS = {"token_normalize_func": underscored, "help_option_names": ["-h", "--help"]}
