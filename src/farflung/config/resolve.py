# SPDX-License-Identifier: Apache-2.0
"""Precedence: a flag before the environment, the environment before a file, a file before the default."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.base.errors import ConfigError, FarflungError, Unsupported
from farflung.base.lazy import LazyModule
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.engines import LOCAL
from farflung.config.launch import DEFAULT_PORT, FIELDS, LaunchSettings, check_variables, field_named
from farflung.config.places import find_file
from farflung.config.problems import renamed
from farflung.config.setting import Field, Stated
from farflung.config.sharding import without_effect
from farflung.config.tasks import Task, read_processes, read_task

if TYPE_CHECKING:
    from farflung.config import files
else:
    files = LazyModule("farflung.config.files")

# What fsdp_sharding_strategy and fsdp_reshard_after_forward hold if they say the same.
_ALIKE = [(word, "true") for word in ("FULL_SHARD", "1")] + [(word, "false") for word in ("SHARD_GRAD_OP", "2")]
_STRATEGIES = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
_HYBRID = {"HYBRID_SHARD": "true", "4": "true", "HYBRID_SHARD_ZERO2": "false", "5": "false"}
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

    def rows(self, everything: bool = False) -> list[tuple[str, str, str]]:
        """Return name, value and origin of each setting that is not left at its default; or of all that have a value.

        The origin is what states the value and where: `flag --cpu`, `environment SLURM_PROCID`, `file train.yaml:3`.
        """
        stated = ((entry, self.settings.value(entry.name)) for entry in FIELDS)
        origins = {entry.name: str(self.origins.get(entry.name, "default")) for entry in FIELDS}
        return [
            (entry.name, entry.text(value) or "''", origins[entry.name])
            for entry, value in stated
            if value is not None and (everything or value != entry.default or origins[entry.name] != "default")
        ]


def resolve(flags: Mapping[str, str | bool]) -> Resolved:
    """Put together what the command line (`flags`, by the setting's name), the environment and a file say.

    Raises ConfigError for a value that can't be read and for settings that contradict each other, Unsupported for what
    Farflung does not do.
    """
    check_variables()
    named = flags.get("config_file") or environ.text("FARFLUNG_CONFIG_FILE") or None
    path = find_file(None if named is None else str(named))
    stated, read = files.read_file(path) if path is not None else ({}, ())  # YAML's reader is loaded only for a file
    found = {entry.name: _first(entry, flags, stated) for entry in FIELDS}
    notes = [
        *read,
        *_choose_the_device(found),
        *_choose_replicas(found),
        *_take_place(found),
        *_check_used(found),
        *_without_effect(found),
    ]
    notes += _arrange_hybrid(found)
    notes += [one.note for one in found.values() if one.note]
    try:
        settings = LaunchSettings.of({name: one.value for name, one in found.items()})
    except (ConfigError, Unsupported) as error:
        raise explained(error, path, found) from None
    return Resolved(settings, found, path, tuple(notes))


def _first(entry: Field, flags: Mapping[str, str | bool], stated: Mapping[str, Stated]) -> Stated:
    if entry.name in flags:
        given, flag = flags[entry.name], entry.flags[-1]
        value = given if isinstance(given, bool) else entry.parse(given, flag)
        return Stated(value, "flag", flag)
    value = entry.from_environment()
    if value is not None:
        return Stated(value, "environment", entry.variable)
    return stated.get(entry.name) or Stated(entry.default, "default")


def _choose_the_device(settings: dict[str, Stated]) -> list[str]:
    """Decide between the CPU and GPUs (`multi_gpu`, `gpu_ids`) if both are asked for; return notes for the user.

    A variable that asks for the CPU is obeyed even if a flag asks for GPUs, as in Accelerate: that is how a command
    line for GPUs is tried on a machine without. Otherwise a flag or variable overrules what is weaker. If both are
    equally strong the settings refuse them.
    """
    notes = []
    for gpus, idle in (("multi_gpu", False), ("gpu_ids", "all")):
        cpu, gpu = settings["use_cpu"], settings[gpus]
        if cpu.value and gpu.value != idle:
            by_variable = (cpu.kind, gpu.kind) == ("environment", "flag")
            if by_variable:
                notes.append(f"{cpu.place} asks for the CPU, so {gpu.place} starts processes on the CPU.")
            if by_variable or _STRENGTH[cpu.kind] > _STRENGTH[gpu.kind]:
                settings[gpus] = replace(cpu, value=idle)
            elif _STRENGTH[gpu.kind] > _STRENGTH[cpu.kind]:
                settings["use_cpu"] = replace(gpu, value=False)
    return notes


def _choose_replicas(settings: dict[str, Stated]) -> list[str]:
    """Drop a fixed number of ranks where a stronger setting asks for replicas that come and go; return notes.

    Accelerate writes a number of ranks into each of its files. If it is not weaker the settings refuse both.
    """
    chosen = max((settings[name] for name in ("elastic", "join") if settings[name].value), key=_strength, default=None)
    if chosen is None:
        return []
    notes = []
    places = ("main_process_ip", "main_process_port") if settings["meet"].value else ()
    for name in ("num_processes", "num_machines", "machine_rank", "island_size", *places):
        fixed, default = settings[name], field_named(name).default
        if fixed.value != default and _strength(fixed) < _strength(chosen):
            settings[name] = Stated(default, "default")
            if fixed.value != 1:
                notes.append(
                    f"{_written(name, fixed)} is {fixed.value}, which {_written('elastic', chosen)} overrules."
                )
    return notes


def _strength(one: Stated) -> int:
    return _STRENGTH[one.kind]


def _take_place(settings: dict[str, Stated]) -> list[str]:
    """If srun, mpirun or a cluster started this launcher as one of several, take its place among them from there.

    What a flag or a variable of ours states stays. Returns a note for the user if something was taken.
    """
    stated = {name for name in _PLACE if settings[name].kind in ("flag", "environment")}
    # An engine starts launchers with places of their own.
    if settings["engine"].value not in (None, LOCAL) or settings["hosts"].value:
        return []
    if "num_machines" in stated and settings["num_machines"].value == 1:
        return []
    notes = _take_machine(settings, stated)
    _take_processes(settings)
    return notes


def _take_machine(settings: dict[str, Stated], stated: Set[str]) -> list[str]:
    if {"num_machines", "machine_rank"} <= stated or settings["join"].value or settings["meet"].value:
        return []
    task = read_task()
    if task is None:
        return []
    many, is_elastic = f"one of {task.size.value} tasks ({task.size.place})", bool(settings["elastic"].value)
    if not is_elastic:
        _check_task(settings, task, many)
    for name, one in zip(_PLACE, (task.size, task.rank, task.host, task.port), strict=True):
        if one is not None and name not in stated:
            settings[name] = one
    if not settings["main_process_ip"].value:
        raise ConfigError(
            f"This launcher is {many}, but no variable tells where the first one runs. Give its host as "
            f"--main_process_ip or in MASTER_ADDR. {_ALONE}"
        )
    place = [f"{name} {settings[name].value} ({settings[name].place})" for name in _PLACE[1:] if settings[name].place]
    if is_elastic:
        _take_replicas(settings, task)
    return [f"{many}: {', '.join(place)}. {_ALONE}"]


def _take_processes(settings: dict[str, Stated]) -> None:
    """Start as many processes on each machine as torchrun would; raise ConfigError if more are asked for."""
    each, asked, machines = read_processes(), settings["num_processes"], int(settings["num_machines"].value or 1)
    if each is None or settings["elastic"].value or settings["join"].value:
        return
    world = each.value * machines
    if asked.value is not None and asked.value > world:
        raise ConfigError(
            f"{_written('num_processes', asked)} is {asked.value}, but {each.place} is {each.value}, which makes a "
            f"world of {world} on {counted(machines, 'machine')}. Change one of them, or give --num_machines 1 to "
            f"start all here, whatever {each.place} is."
        )
    if asked.kind not in ("flag", "environment"):
        settings["num_processes"] = replace(each, value=world)


def _check_task(settings: Mapping[str, Stated], task: Task, many: str) -> None:
    """Raise ConfigError if the tasks can't be the machines of one run."""
    if task.local_size.value > 1:
        once = f"With one task per machine, `{task.one_each} farflung launch ...`, all become one run. "
        raise ConfigError(
            f"This launcher is {many}, several of them on this machine ({task.local_size.place}). It starts all "
            f"processes of its machine itself. {once}To have {task.one_each.split()[0]} start each process, leave out "
            f"`farflung launch`: `python train.py`. {_ALONE}"
        )
    machines, processes = settings["num_machines"], settings["num_processes"]
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


def _take_replicas(settings: dict[str, Stated], task: Task) -> None:
    """Make the first task's launcher serve the run and the others join it; together they start the least."""
    host, port = str(settings["main_process_ip"].value), settings["main_process_port"].value or DEFAULT_PORT
    rank, bounds = settings["machine_rank"], settings["elastic"]
    least = str(bounds.value).partition(":")[0]
    if settings["replicas"].value is None and least.isdecimal():
        share = (int(least) + task.size.value - 1 - rank.value) // task.size.value
        settings["replicas"] = replace(bounds, value=max(1, share))
    settings["num_machines"], settings["machine_rank"] = Stated(1, "default"), Stated(0, "default")
    if rank.value == 0:
        settings["main_process_port"] = replace(settings["main_process_port"], value=port)
    else:
        settings["join"] = replace(rank, value=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        for name in ("elastic", "grace_s", "main_process_ip", "main_process_port"):
            settings[name] = Stated(None, "default")


def _check_used(settings: Mapping[str, Stated]) -> list[str]:
    """Refuse flags and keys of a file that nothing reads: FSDP or a grid is described, and nobody asks for it.

    A file that names another `distributed_type` may keep its block for FSDP; the note that is returned says so.
    Variables may be for what the script itself makes.
    """
    notes = []
    for switch, prefix in (("use_fsdp", "fsdp_"), ("use_parallelism_config", "parallelism_config_")):
        stated = [name for name in settings if name.startswith(prefix) and settings[name].kind in ("flag", "file")]
        stated.sort(key=lambda name: -_STRENGTH[settings[name].kind])
        if not stated:
            continue
        where, asked = settings[stated[0]], settings[switch]
        what = f"{where.place} ({stated[0]})" if where.kind == "file" else where.place
        if asked.value is None or (not asked.value and asked.kind == "file" != where.kind):
            raise ConfigError(f"{what} is read only with --{switch}, which is not set. Set it too.")
        if not asked.value:
            notes.append(f"{what} is not read, as {asked.place} does not ask for it.")
    return notes


def _without_effect(settings: dict[str, Stated]) -> list[str]:
    """Take out settings of FSDP version 1 that change no result with version 2, and return what to say of them."""
    if not settings["use_fsdp"].value:
        return []
    notes = []
    for argument in ("backward_prefetch", "forward_prefetch", "limit_all_gathers"):
        name = f"fsdp_{argument}"
        note = without_effect(argument, settings[name].value, _written(name, settings[name]))
        if note is not None:
            notes.append(note)
            settings[name] = replace(settings[name], value=None)
    name, version = "fsdp_sharding_strategy", settings["fsdp_version"]
    strategy = settings[name].value
    if strategy is not None and version.value == 2:
        reshard = settings["fsdp_reshard_after_forward"].value or "true"
        if (str(strategy).upper(), str(reshard).lower()) not in _ALIKE:
            notes.append(
                f"{_written(name, settings[name])} is {strategy}, which is for version 1: with {version.place} "
                f"(fsdp_version: 2), fsdp_reshard_after_forward counts, which is {reshard}."
            )
        settings[name] = replace(settings[name], value=None)
    return notes


def _arrange_hybrid(settings: dict[str, Stated]) -> list[str]:
    """Turn version 1's HYBRID_SHARD (shards in a machine, copies on each) into the grid that it is, and say so."""
    names = _STRATEGIES if settings["fsdp_version"].value == 1 else _STRATEGIES[:1]
    strategy = next((settings[name] for name in names if str(settings[name].value).upper() in _HYBRID), None)
    machines, processes = settings["num_machines"].value, settings["num_processes"].value
    is_known = machines == 1 or (isinstance(processes, int) and processes % int(machines or 1) == 0)
    if strategy is None or not settings["use_fsdp"].value or settings["use_parallelism_config"].value or not is_known:
        return []
    for name in _STRATEGIES:
        settings[name] = replace(strategy, value=None)
    settings["fsdp_reshard_after_forward"] = replace(strategy, value=_HYBRID[str(strategy.value).upper()])
    if machines == 1:
        return [f"{strategy.place} says {strategy.value}: on one machine, models are sharded over all processes."]
    shards = int(processes or 1) // int(machines or 1)
    settings["use_parallelism_config"] = replace(strategy, value=True)
    settings["parallelism_config_dp_replicate_size"] = replace(strategy, value=machines)
    settings["parallelism_config_dp_shard_size"] = replace(strategy, value=shards)
    return [
        f"{strategy.place} says {strategy.value}: {machines} copies of the model, each sharded over {shards} processes."
    ]


def _written(setting: str, origin: Stated) -> str:
    """Return how the user wrote a setting: a flag, a variable, or a line of a file and its key."""
    return f"{origin.place}: {setting}" if origin.kind == "file" else origin.place


def explained(error: FarflungError, path: Path | None, origins: Mapping[str, Stated]) -> FarflungError:
    """Name settings as the user wrote them, and the file, for readers who don't know about it.

    An error is about a setting, or an option of the outer loop without its prefix.
    """
    stated = {name: origin for name, origin in origins.items() if origin.place}
    stated |= {name.removeprefix("outer_"): origin for name, origin in stated.items()}
    named = [each.setting for each in error.together or (error,)]
    error = renamed(error, {name: _written(name.removeprefix("outer_"), origin) for name, origin in stated.items()})
    from_file = {name for name, origin in stated.items() if origin.kind == "file"}
    if path is None or not from_file or not from_file.isdisjoint(named):
        return error
    return type(error)(f"{error} (Settings that the command line did not give were read from {path}.)")
