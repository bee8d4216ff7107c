# SPDX-License-Identifier: Apache-2.0
"""Precedence: a flag before the environment, the environment before a file, a file before the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.files import find_file, read_file
from farflung.config.launch import DEFAULT_PORT, FIELDS, LaunchSettings, check_variables
from farflung.config.outer import renamed
from farflung.config.setting import Field, Stated
from farflung.config.tasks import Task, read_task

_STRENGTH = {"flag": 3, "environment": 2, "file": 1, "default": 0}
_PLACE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
_ALONE = "For runs that know nothing of each other, give --num_machines 1."


@dataclass(frozen=True)
class Resolved:
    """The settings that count, where each came from, the file that was read, and what to tell the user about them."""

    settings: LaunchSettings
    origins: Mapping[str, Stated]
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
    found = {entry.name: _first(entry, flags, stated) for entry in FIELDS}
    notes = [*_choose_the_device(found), *_take_place(found)]
    _check_used(found)
    notes += [one.note for one in found.values() if one.note]
    try:
        settings = LaunchSettings.of({name: one.value for name, one in found.items()})
    except ConfigError as error:
        raise explained(error, path, found) from None
    return Resolved(settings, found, path, tuple(notes))


def _first(entry: Field, flags: Mapping[str, str | bool], stated: Mapping[str, Stated]) -> Stated:
    if entry.name in flags:
        said, flag = flags[entry.name], entry.flags[-1]
        value = said if isinstance(said, bool) else entry.parse(said, flag, environ.TRUE_WORDS, environ.FALSE_WORDS)
        return Stated(value, "flag", flag)
    value = entry.from_environment()
    if value is not None:
        return Stated(value, "environment", entry.variable)
    return stated.get(entry.name) or Stated(entry.default, "default")


def _choose_the_device(found: dict[str, Stated]) -> list[str]:
    """Decide between the CPU and GPUs (`multi_gpu`, `gpu_ids`) where both are asked for; return notes for the user.

    A variable that asks for the CPU is obeyed even where a flag asks for GPUs, as in Accelerate: that is how a command
    line for GPUs is tried on a machine without. Otherwise a flag or variable overrules what is weaker. Where both are
    equally strong the settings refuse them.
    """
    notes = []
    for gpus, idle in (("multi_gpu", False), ("gpu_ids", "all")):
        cpu, gpu = found["use_cpu"], found[gpus]
        if cpu.value and gpu.value != idle:
            by_variable = (cpu.kind, gpu.kind) == ("environment", "flag")
            if by_variable:
                notes.append(f"{cpu.place} asks for the CPU, so {gpu.place} starts processes on the CPU.")
            if by_variable or _STRENGTH[cpu.kind] > _STRENGTH[gpu.kind]:
                found[gpus] = replace(cpu, value=idle)
            elif _STRENGTH[gpu.kind] > _STRENGTH[cpu.kind]:
                found["use_cpu"] = replace(gpu, value=False)
    return notes


def _take_place(found: dict[str, Stated]) -> list[str]:
    """Where srun, mpirun or a cluster started this launcher as one of several, take its place among them from there.

    What a flag or a variable of ours states stays. Returns a note for the user where something was taken.
    """
    stated = {name for name in _PLACE if found[name].kind in ("flag", "environment")}
    is_alone = "num_machines" in stated and found["num_machines"].value == 1
    if is_alone or {"num_machines", "machine_rank"} <= stated or found["join"].value:
        return []
    task = read_task()
    if task is None:
        return []
    many, is_elastic = f"one of {task.size.value} tasks ({task.size.place})", bool(found["elastic"].value)
    if not is_elastic:
        _check_task(found, task, many)
    for name, one in zip(_PLACE, (task.size, task.rank, task.host, task.port), strict=True):
        if one is not None and name not in stated:
            found[name] = one
    if not found["main_process_ip"].value:
        raise ConfigError(
            f"This launcher is {many}, but no variable tells where the first one runs. Give its host as "
            f"--main_process_ip or in MASTER_ADDR. {_ALONE}"
        )
    place = [f"{name} {found[name].value} ({found[name].place})" for name in _PLACE[1:] if found[name].place]
    if is_elastic:
        _take_replicas(found, task)
    return [f"{many}: {', '.join(place)}. {_ALONE}"]


def _check_task(found: Mapping[str, Stated], task: Task, many: str) -> None:
    """Raise ConfigError where the tasks can't be the machines of one run."""
    if task.local_size.value > 1:
        once = f"With one task per machine, `{task.one_each} farflung launch ...`, all become one run. "
        raise ConfigError(
            f"This launcher is {many}, several of them on this machine ({task.local_size.place}). It starts all "
            f"processes of its machine itself. {once}To let {task.one_each.split()[0]} start each process, leave out "
            f"`farflung launch`: `python train.py`. {_ALONE}"
        )
    machines, processes = found["num_machines"], found["num_processes"]
    if machines.kind in ("flag", "environment") and machines.value != task.size.value:
        raise ConfigError(
            f"This launcher is {many}, but num_machines is {machines.value} ({machines.place}). Leave it out, or give "
            "--machine_rank too."
        )
    if processes.value is not None and processes.value % task.size.value:
        raise ConfigError(
            f"This launcher is {many}, and num_processes ({processes.value}) counts the processes of all of them: give "
            f"a multiple of {task.size.value}. {_ALONE}"
        )


def _take_replicas(found: dict[str, Stated], task: Task) -> None:
    """Make the first task's launcher serve the run and the others join it; together they start the least."""
    host, port = str(found["main_process_ip"].value), found["main_process_port"].value or DEFAULT_PORT
    rank, bounds = found["machine_rank"], found["elastic"]
    least = str(bounds.value).partition(":")[0]
    if found["replicas"].value is None and least.isdecimal():
        share = (int(least) + task.size.value - 1 - rank.value) // task.size.value
        found["replicas"] = replace(bounds, value=max(1, share))
    found["num_machines"], found["machine_rank"] = Stated(1, "default"), Stated(0, "default")
    if rank.value == 0:
        found["main_process_port"] = replace(found["main_process_port"], value=port)
    else:
        found["join"] = replace(rank, value=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        for name in ("elastic", "main_process_ip", "main_process_port"):
            found[name] = Stated(None, "default")


def _check_used(found: Mapping[str, Stated]) -> None:
    """Refuse flags and keys of a file that nothing reads: FSDP or a grid is described, and nobody asks for it.

    Variables may be for what the script itself makes.
    """
    for switch, prefix in (("use_fsdp", "fsdp_"), ("use_parallelism_config", "parallelism_config_")):
        stated = [name for name in found if name.startswith(prefix) and found[name].kind in ("flag", "file")]
        if found[switch].value is None and stated:
            where = found[stated[0]]
            what = f"{where.place} ({stated[0]})" if where.kind == "file" else where.place
            raise ConfigError(f"{what} is read only with --{switch}, which is not set. Set it too.")


def explained(error: ConfigError, path: Path | None, origins: Mapping[str, Stated]) -> ConfigError:
    """Name the option of the outer loop as the user wrote it, and the file, for readers who don't know about it."""
    written: dict[str, str] = {}  # a flag, a variable, or a line of a file
    for setting, origin in origins.items():
        option = setting.removeprefix("outer_")
        if option != setting and origin.place:
            written[option] = f"{origin.place}: {option}" if origin.kind == "file" else origin.place
    from_file = path is not None and any(origin.kind == "file" for origin in origins.values())
    blame = f" (Settings that the command line did not give were read from {path}.)" if from_file else ""
    return ConfigError(f"{renamed(error, written)}{blame}")
