# SPDX-License-Identifier: Apache-2.0
"""Precedence: a flag before the environment, the environment before a file, a file before the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.files import Stated, find_file, read_file
from farflung.config.launch import FIELDS, LaunchSettings, check_variables
from farflung.config.outer import renamed
from farflung.config.setting import Field

_STRENGTH = {"flag": 3, "environment": 2, "file": 1, "default": 0}


@dataclass(frozen=True)
class Origin:
    """Where a value came from: `flag`, `environment`, `file` or `default`, and which one."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".rstrip()


@dataclass(frozen=True)
class Resolved:
    """The settings that count, where each came from, the file that was read, and what to tell the user about them."""

    settings: LaunchSettings
    origins: Mapping[str, Origin]
    file: Path | None
    notes: tuple[str, ...] = ()


def resolve(flags: Mapping[str, str | bool]) -> Resolved:
    """Put together what the command line (`flags`, by the setting's name), the environment and a file say.

    Raises ConfigError for a value that can't be read and for settings that contradict each other, Unsupported for what
    Farflung does not do.
    """
    check_variables()
    named = flags.get("config_file") or environ.text("FARFLUNG_CONFIG_FILE") or None
    path = find_file(None if named is None else str(named))
    stated = read_file(path) if path is not None else {}
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for entry in FIELDS:
        values[entry.name], origins[entry.name] = _first(entry, flags, stated)
    notes = _choose_the_device(values, origins)
    _check_used(values, origins)
    notes += [one.note for name, one in stated.items() if one.note and origins[name].kind == "file"]
    try:
        return Resolved(LaunchSettings.of(values), origins, path, tuple(notes))
    except ConfigError as error:
        raise explained(error, path, origins) from None


def _first(entry: Field, flags: Mapping[str, str | bool], stated: Mapping[str, Stated]) -> tuple[Any, Origin]:
    if entry.name in flags:
        said = flags[entry.name]
        flag = entry.flags[-1]
        value = said if isinstance(said, bool) else entry.parse(said, flag, environ.TRUE_WORDS, environ.FALSE_WORDS)
        return value, Origin("flag", flag)
    value = entry.from_environment()
    if value is not None:
        return value, Origin("environment", entry.variable)
    if entry.name in stated:
        return stated[entry.name].value, Origin("file", stated[entry.name].place)
    return entry.default, Origin("default")


def _choose_the_device(values: dict[str, Any], origins: dict[str, Origin]) -> list[str]:
    """Decide between the CPU and GPUs (`multi_gpu`, `gpu_ids`) where both are asked for; return notes for the user.

    A variable that asks for the CPU is obeyed even where a flag asks for GPUs, as in Accelerate: that is how a command
    line for GPUs is tried on a machine without. Otherwise a flag or variable overrules what is weaker. Where both are
    equally strong the settings refuse them.
    """
    notes = []
    for gpus, idle in (("multi_gpu", False), ("gpu_ids", "all")):
        if values["use_cpu"] and values[gpus] != idle:
            cpu, gpu = origins["use_cpu"], origins[gpus]
            by_variable = (cpu.kind, gpu.kind) == ("environment", "flag")
            if by_variable:
                notes.append(f"{cpu.place} asks for the CPU, so {gpu.place} starts processes on the CPU.")
            if by_variable or _STRENGTH[cpu.kind] > _STRENGTH[gpu.kind]:
                values[gpus], origins[gpus] = idle, cpu
            elif _STRENGTH[gpu.kind] > _STRENGTH[cpu.kind]:
                values["use_cpu"], origins["use_cpu"] = False, gpu
    return notes


def _check_used(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    """Refuse flags and keys of a file that nothing reads: FSDP or a grid is described, and nobody asks for it.

    Variables may be for what the script itself makes.
    """
    for switch, prefix in (("use_fsdp", "fsdp_"), ("use_parallelism_config", "parallelism_config_")):
        stated = [name for name in values if name.startswith(prefix) and origins[name].kind in ("flag", "file")]
        if values[switch] is None and stated:
            where = origins[stated[0]]
            what = f"{where.place} ({stated[0]})" if where.kind == "file" else where.place
            raise ConfigError(f"{what} is read only with --{switch}, which is not set. Set it too.")


def explained(error: ConfigError, path: Path | None, origins: Mapping[str, Origin]) -> ConfigError:
    """Name the option of the outer loop as the user wrote it, and the file, for readers who don't know about it."""
    written: dict[str, str] = {}  # a flag, a variable, or a line of a file
    for setting, origin in origins.items():
        option = setting.removeprefix("outer_")
        if option != setting and origin.place:
            written[option] = f"{origin.place}: {option}" if origin.kind == "file" else origin.place
    from_file = path is not None and any(origin.kind == "file" for origin in origins.values())
    blame = f" (Settings that the command line did not give were read from {path}.)" if from_file else ""
    return ConfigError(f"{renamed(error, written)}{blame}")
