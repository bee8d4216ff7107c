# SPDX-License-Identifier: Apache-2.0
"""The interface of the engines: a job to start elsewhere, and what each engine does with it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from farflung.base.errors import ConfigError, FarflungError, did_you_mean
from farflung.base.files import atomic_file
from farflung.config import environ
from farflung.config.engines import LOCAL
from farflung.config.launch import LaunchSettings, flags_for
from farflung.config.places import NO_FILE
from farflung.launch.codes import EngineFailure
from farflung.launch.folder import SUBMITTED
from farflung.launch.plan import num_replicas
from farflung.launch.shell import start_of

_NOT_INNER = ("engine", "hosts", "sync", "engine_options", "dry_run", "config_file", "run_dir")
_TO_FIND = ("engine", "hosts", "engine_options", "elastic", "replicas", "meet", "json")  # a job that was submitted
# What `follow`, `scale` and `cancel` need of a handle, by engine.
_HANDLES: Mapping[str, Mapping[str, type]] = {
    "ssh": {"pid": int, "host": str, "hosts": list},
    "ray": {"pid": int, "host": str},
    "slurm": {"jobs": list, "next": int},
    "kubernetes": {"job": str, "namespace": str},
}


@dataclass(frozen=True)
class Job:
    """A run that an engine starts: how many launchers of ours, each with what command.

    Args:
        settings: as the user gave them.
        script, arguments: what each launcher runs.
        folder: the run's, absolute.
        handle: by what the engine knows it, once it is submitted; empty before.
    """

    settings: LaunchSettings
    script: str
    arguments: tuple[str, ...]
    folder: Path
    handle: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for word in (self.script, *self.arguments, str(self.folder)):
            try:
                is_argument = b"\0" not in os.fsencode(word)
            except UnicodeEncodeError:
                is_argument = False
            if not is_argument:
                raise ConfigError(f"{word!r} can't be an argument of a program. Leave NUL and lone surrogates out.")

    @property
    def engine(self) -> str:
        """The name of what starts it."""
        return self.settings.engine or "ssh"

    @property
    def is_elastic(self) -> bool:
        """Whether it consists of replicas that come and go, each a small job of its own."""
        return self.settings.elastic is not None

    @property
    def count(self) -> int:
        """How many launchers there are at the start: replicas or, in a fixed run, machines."""
        return num_replicas(self.settings) if self.is_elastic else self.settings.num_machines

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @cached_property
    def options(self) -> Mapping[str, str]:
        """`engine_options` by key. What follows a comma without a key of its own belongs to the value before it."""
        found: dict[str, str] = {}
        key = ""
        for part in filter(None, self.settings.engine_options.split(",")):
            name, has_value, value = part.partition("=")
            if has_value:
                key = name.strip().replace("-", "_")
                found[key] = value.strip()
            elif key:
                found[key] += f",{part.strip()}"
            else:
                raise ConfigError(f"engine_options begins with {part!r}; use key=value,key=value.")
        return found

    def command(self, **changes: Any) -> tuple[str, ...]:
        """Return the words of the launcher that the engine starts, from `launch` on, with some settings changed.

        It reads no file of settings, starts the processes itself, and writes into this run's folder.
        """
        inner = replace(self.settings, **{"engine": None, "hosts": None, "sync": False, "engine_options": ""} | changes)
        place = ("--engine", LOCAL, "--config_file", NO_FILE, "--run_dir", str(self.folder))
        return "launch", *place, *flags_for(inner, without=_NOT_INNER), self.script, *self.arguments

    def check_options(self, known: Collection[str], numbers: Sequence[str] = ()) -> None:
        """Raise ConfigError for what `engine_options` can't hold.

        Args:
            known: the keys, which the engine's page in `docs/engines` explains.
            numbers: those of whole numbers.
        """
        if self.handle:  # it runs, whatever this release thinks of its options
            return
        for key, value in self.options.items():
            if key not in known:
                raise ConfigError(
                    f"engine_options has the key {key!r}, which {self.engine} does not know; use one "
                    f"of {', '.join(known)}.{did_you_mean(key, known)}"
                )
            if key in numbers and not value.isdecimal():
                raise ConfigError(f"engine_options has {key}={value}; use a whole number.")

    def check_left_out(self, names: Iterable[str], why: str) -> None:
        """Raise ConfigError for settings that say what the engine decides: `why` ends the sentence."""
        for name in names:
            if value := getattr(self.settings, name):
                raise ConfigError(f"{name} is {value}, but {why}")

    def check_key(self, instead: str, has_files: bool = True) -> None:
        """Raise ConfigError if the run's key would not reach what the engine starts: `instead` says how it does.

        Args:
            has_files: the key file has the same path there.
        """
        named = self.settings.key_file or ("FARFLUNG_KEY" if environ.text(environ.KEY) else "")
        if named and self.is_elastic and not (has_files and self.settings.key_file):
            raise ConfigError(f"The run's key is in {named}, which stays on this machine. {instead}")

    def check_unicode(self, reader: str, words: Iterable[str] = ()) -> None:
        """Raise ConfigError if the script, its arguments or other `words` are no text, and `reader` takes only text."""
        for word in (self.script, *self.arguments, *words):
            if not word.isascii() and os.fsencode(word).decode(errors="replace") != word:
                raise ConfigError(f"{word!r} is not valid UTF-8, and {reader} takes no other text.")

    def write(self, handle: Mapping[str, Any]) -> None:
        """Write into the run's folder what was submitted, for later commands about it."""
        settings = asdict(self.settings)
        rows = {"settings": settings, "script": self.script, "arguments": self.arguments, "handle": dict(handle)}
        with atomic_file(self.folder / SUBMITTED) as part:
            part.write_text(json.dumps(rows, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Return the job whose run's folder this is; raise ConfigError if it was started without an engine."""
        try:
            rows = json.loads((folder / SUBMITTED).read_text(encoding="utf-8"))
            handle, arguments = dict(rows["handle"]), tuple(rows["arguments"])
            job = cls(_known_settings(rows["settings"]), rows["script"], arguments, folder, handle)
            needed = _HANDLES[job.engine]
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} is of a run that was started on this machine alone: no engine knows it. Ctrl-C at its "
                "launcher ends it; with --elastic, `farflung launch --join` or the same --meet adds replicas."
            ) from None
        except (OSError, ValueError, TypeError, AttributeError, FarflungError) as error:
            raise _damaged(folder, str(error)) from None
        except KeyError as error:
            raise _damaged(folder, f"it has no usable {error}") from None
        if not handle:
            raise EngineFailure(
                f"{folder.name} was not submitted: its engine refused it, or its launcher is about to submit it."
            )
        if wrong := [name for name, kind in needed.items() if not isinstance(handle.get(name), kind)]:
            raise _damaged(folder, f"its handle has no usable {', '.join(wrong)}")
        return job


def _known_settings(stated: Mapping[str, Any]) -> LaunchSettings:
    """Leave out settings that this release no longer has: the job's launchers have them, and it has to be found."""
    known = {entry.name: stated[entry.name] for entry in fields(LaunchSettings) if entry.name in stated}
    with suppress(FarflungError, TypeError, ValueError, AttributeError):
        return LaunchSettings(**known)
    return LaunchSettings(**{name: known[name] for name in _TO_FIND if name in known})


def _damaged(folder: Path, why: str) -> EngineFailure:
    return EngineFailure(
        f"{folder / SUBMITTED} can't be read: {why}. It is damaged, or of another release; the engine's own commands "
        "(squeue, kubectl, ray) still know the job."
    )


class Engine(Protocol):
    """Starts the launchers of a job elsewhere. Every method raises EngineFailure, in a sentence, for what it can't do.

    Args:
        job: the run. ConfigError is raised for settings and options that can't work with this engine.
    """

    outlives_launch: ClassVar[bool]  # whether the job survives Ctrl-C of the command that follows it

    def __init__(self, job: Job) -> None: ...

    def check(self) -> Job | None:
        """Find out, before anything is submitted, whether it can work: the engine, its extra, what it needs there.

        Returns the job with settings that depend on what was found, such as an address; None: as it is.
        """

    def described(self) -> str:
        """Return what would be submitted, as `--dry-run` shows it."""

    def submit(self) -> Mapping[str, Any]:
        """Start the job; return what JSON can hold and the other methods need, which `job.handle` has from then on."""

    def follow(self) -> int:
        """Show what the job prints until it has ended; return its exit code, one of `codes`."""

    def scale(self, count: int) -> str:
        """Make the job have `count` replicas; return what was done, in words."""

    def cancel(self) -> str:
        """End the job; return what was done, in words."""


def launcher_command(words: Sequence[str], python: str = "python3") -> tuple[str, ...]:
    """Return the command of a launcher of ours on a machine whose Python is `python`."""
    return *start_of("farflung.launch.main", python), *words
