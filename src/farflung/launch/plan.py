# SPDX-License-Identifier: Apache-2.0
"""From settings to a plan for this machine: what is started, how often, with which variables, and where all meet.

Everything that can be known to fail is refused here, before any process starts.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from farflung.base.checks import is_address
from farflung.base.errors import ConfigError, did_you_mean
from farflung.base.events import Kind, record
from farflung.base.lazy import LazyModule
from farflung.base.words import counted, numbered, plural
from farflung.config import environ
from farflung.config.grid import check_layout
from farflung.config.launch import DEFAULT_PORT, LaunchSettings, rank_variables
from farflung.config.outer import AUTO
from farflung.config.resolve import Resolved, explained
from farflung.integrations.as_accelerate import path_variables
from farflung.launch.network import (
    NAME_WAIT_S,
    Interface,
    address_towards,
    choose_interface,
    loopback_interface,
    refuse_busy_port,
    resolve_host,
)
from farflung.launch.shell import start_of

if TYPE_CHECKING:
    from farflung.methods import arguments as outer_arguments
else:
    outer_arguments = LazyModule("farflung.methods.arguments")

RANK = "farflung.launch.rank"  # between Python and the script: has failures reported, wherever

MAX_PER_CORE = 16  # more than that on a CPU is a slip: each of them takes 0.2 GB before it has done anything

_CGROUP = Path("/sys/fs/cgroup")  # in a container, its own

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# What launchers tell their ranks. A process that runs alone must not find another run's.
PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"),
    environ.LAUNCHER,
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)


@dataclass(frozen=True)
class Script:
    """What a launcher runs.

    Args:
        exec_alone: one process alone takes the place of this one.
        is_inner: this launcher is under that of replicas.
        start: starts a replica, given its variables, which is no process of its own; None: a Python runs the script.
    """

    name: str
    arguments: tuple[str, ...] = ()
    exec_alone: bool = False
    is_inner: bool = False
    start: Callable[[Mapping[str, str]], Any] | None = None


@dataclass(frozen=True)
class Meeting:
    """Where and how the machines of a run find each other; torch's rendezvous."""

    backend: str  # torch's `static` or `c10d`
    endpoint: str  # `host:port` of machine 0; port 0 is any free one
    conf: Mapping[str, str | int]  # more for the backend
    run_id: str  # the same on all machines
    num_machines: int = 1
    address: str | None = None  # how the ranks of this machine call it; None: by its host name
    interface: Interface | None = None  # through which this machine talks to others; None: there are none
    listen: str | None = None  # the address at which machine 0 serves the store; None: the endpoint's


@dataclass(frozen=True)
class Plan:
    """What happens on this machine."""

    command: tuple[Any, ...]  # of each process: a program and its arguments; or a function and its, for forked ones
    num_local: int  # processes
    variables: Mapping[str, str]  # of the environment, that they get besides the launcher's own
    meeting: Meeting
    alone: bool  # one process that needs no agent over it

    @property
    def ranks(self) -> range:
        """The ranks of this machine, if the machines are numbered beforehand."""
        first = int(self.meeting.conf.get("rank", 0)) * self.num_local
        return range(first, first + self.num_local)


def make_plan(settings: LaunchSettings, script: str, arguments: Sequence[str], reported: bool = False) -> Plan:
    """Return what to do on this machine; `reported`: a launcher shows the failure of one process alone too."""
    command_line(settings, script, arguments)  # what can't be found is refused before GPUs are counted
    num_local, on_cpu = _count_processes(settings)
    check_layout(settings, num_local * settings.num_machines, settings.num_machines, settings.outer_recipe)
    unknown = [rank for rank in settings.shown_ranks if rank >= num_local * settings.num_machines]
    if unknown:
        world = counted(num_local * settings.num_machines, "process")
        raise ConfigError(f"only_rank names {numbered('rank', unknown)}, but ranks of {world} are counted from 0.")
    if settings.num_cpu_threads_per_process is not None:
        _check_threads(settings.num_cpu_threads_per_process)
    if settings.log_dir is not None and not settings.dry_run:
        _make_folder(settings.log_dir, "log_dir")
    if settings.save_on_signal is not None and not is_address(settings.save_on_signal) and not settings.dry_run:
        _make_folder(settings.save_on_signal, "save_on_signal")
    watched = bool(settings.max_restarts) or settings.log_dir is not None or settings.tee != "0"
    watched = watched or settings.outer_recipe is not None or settings.json  # both report at the end
    alone = num_local == 1 and settings.num_machines == 1 and not watched
    meeting = meet(replace(settings, main_process_port=None) if alone else settings)  # which meets nobody
    variables = rank_variables(settings) | network_variables(meeting, settings)
    if on_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate on CPUs trains unconnected copies
    if settings.as_accelerate:
        variables |= path_variables()
    if num_local > 1 and settings.num_cpu_threads_per_process is None:
        variables["OMP_NUM_THREADS"] = str(threads_of_each(num_local))
    reported = reported or not alone or settings.run_dir != "none"
    command = command_line(settings, script, arguments, reported)
    return Plan(command, num_local, variables, meeting, alone)


def has_launchers(settings: LaunchSettings) -> bool:
    """Return whether each replica has a launcher of its own: for several ranks, or for files of what they print."""
    return settings.ranks_per_replica > 1 or settings.tee != "0" or settings.log_dir is not None


def num_replicas(settings: LaunchSettings) -> int:
    """Return how many replicas this launcher starts, if they come and go."""
    return settings.replicas or settings.bounds[0]


def one_replica(settings: LaunchSettings) -> LaunchSettings:
    """Return the settings of one replica that comes and goes: a run of its own, without those that replicas share."""
    shared = ("elastic", "replicas", "join", "meet", "grace_s", "heartbeat_s", "state_every", "key_file")
    left_out: dict[str, Any] = dict.fromkeys((*shared, "main_process_ip", "main_process_port", "max_restarts"))
    size, threads = settings.ranks_per_replica, settings.num_cpu_threads_per_process
    if threads is None and num_replicas(settings) > 1:
        threads = threads_of_each(num_replicas(settings) * size)
    own = left_out | {"ranks_per_replica": 1, "num_processes": size, "num_cpu_threads_per_process": threads}
    return replace(settings, **own, run_dir="none")  # the launcher has one


def command_line(
    settings: LaunchSettings, script: str, arguments: Sequence[str], reported: bool = False
) -> tuple[str, ...]:
    """Return program and arguments that run `script`; `reported`: a launcher shows what it reports of its failure."""
    if settings.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"There is no executable program {script!r} (--no_python).")
        return (*((*start_of(RANK), "--exec") if reported else ()), script, *arguments)
    python = start_of(RANK, None, "-u") if reported else (sys.executable, "-u")
    if settings.module:
        _check_module(script)
        return (*python, "-m", script, *arguments)
    path = Path(script)
    if not script or not path.exists():
        near = did_you_mean(str(path), map(str, path.parent.glob("*.py")))
        raise ConfigError(f"The script {script!r} does not exist (looked in {os.getcwd()}).{near}")
    if not path.is_file() and not (path / "__main__.py").is_file():
        raise ConfigError(f"The script {script!r} is not a file of Python code. Name one, or a module with -m.")
    return (*python, script, *arguments)


def _check_module(name: str) -> None:
    """Raise ConfigError if there is no module `name`. None is imported to find out."""
    where: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for k, part in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), where) if part and where is not None else None
        if spec is None and part and k == 0:  # a finder of an editable install may know it
            spec = find_spec(part)
        if spec is None:
            break
        where = spec.submodule_search_locations
    if spec is None:
        advice = " A script is named without -m." if Path(name).is_file() else ""
        raise ConfigError(
            f"There is no module {name!r}, neither here ({os.getcwd()}) nor among those installed.{advice}"
        )


def _make_folder(folder: str, name: str) -> None:
    """Make the folder of a setting, if it is not there, and refuse one in which nothing can be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise ConfigError(
            f"{name} is {folder!r}, where no folder can be written: {error.strerror}. Name another one; it need not "
            "exist yet."
        ) from None


def network_variables(meeting: Meeting, settings: LaunchSettings) -> dict[str, str]:
    """Return what to set for gloo, NCCL and torch about the network; the user's variables count before a route."""
    if meeting.interface is None:
        return {} if environ.text("GLOO_SOCKET_IFNAME") else {"GLOO_SOCKET_IFNAME": loopback_interface()}
    variables = dict.fromkeys(INTERFACE_VARIABLES, meeting.interface.name)
    if not settings.debug:
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns at each connection if an address has no name
    named = INTERFACE_VARIABLES if settings.network_interface is not None else ()
    return {name: value for name, value in variables.items() if name in named or not environ.text(name)}


def _count_processes(settings: LaunchSettings) -> tuple[int, bool]:
    """Return how many processes this machine runs, and whether they are several on CPUs.

    torch is loaded only if the answer depends on the machine.
    """
    wanted = settings.num_local
    if settings.use_cpu:
        return fit_for_cores(wanted or 1, "--num_processes"), True
    if wanted == 1 and settings.num_machines == 1 and not settings.multi_gpu and not settings.gpu_list:
        return 1, False
    found = count_gpus()
    available = len(settings.gpu_list) or found
    if found == 0:
        if settings.multi_gpu or settings.gpu_list:
            asked = "multi_gpu" if settings.multi_gpu else f"gpu_ids {settings.gpu_ids}"
            raise ConfigError(
                f"GPUs are requested ({asked}), but torch finds none on this machine. Use --cpu to train without."
            )
        return fit_for_cores(wanted or 1, "--num_processes"), (wanted or 1) * settings.num_machines > 1
    visible = environ.text("CUDA_VISIBLE_DEVICES")
    missing = [one for one in settings.gpu_list if visible is None and one.isdecimal() and int(one) >= found]
    if missing:
        there = "GPU 0" if found == 1 else f"GPUs 0 to {found - 1}"
        raise ConfigError(f"gpu_ids is {settings.gpu_ids}, but this machine has only {there}.")
    if wanted is not None and wanted > available:
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise ConfigError(
            f"{wanted} processes on this machine need a GPU each, and there {'is' if available == 1 else 'are'} "
            f"{available}{why}. "
            f"Use --num_processes {available * settings.num_machines}, or train on the CPU with --cpu."
        )
    return wanted or available, False


def fit_for_cores(number: int, called: str, noun: str = "process") -> int:
    """Return `number`; raise ConfigError if it is more processes, or threads, than this machine's cores may run.

    `called` is the setting as its user knows it.
    """
    cores = usable_cores()
    if number > MAX_PER_CORE * cores:
        raise ConfigError(
            f"{called} asks for {number} {plural(noun)} on this machine's CPU, which has "
            f"{counted(cores, 'usable core')}. At most {MAX_PER_CORE} per core can be started, which is "
            f"{MAX_PER_CORE * cores} here."
        )
    return number


def _check_threads(threads: int) -> None:
    """Refuse too many threads, but only note those of a variable, which may be set for all programs of a machine."""
    if str(threads) != environ.text("OMP_NUM_THREADS"):
        fit_for_cores(threads, "num_cpu_threads_per_process", "thread")
    elif threads > MAX_PER_CORE * (cores := usable_cores()):
        message = f"OMP_NUM_THREADS is {threads}, but this machine has {counted(cores, 'usable core')}"
        record(Kind.NOTE, message=f"{message}, so training on its CPU will be slow")


def count_gpus() -> int:
    """Return how many GPUs torch finds on this machine."""
    with torch_is_loaded():
        import torch  # a second, so only on demand
    return torch.cuda.device_count()


@contextmanager
def torch_is_loaded(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Around the import of what needs torch in the launcher, whose processes get `variables`.

    torch reads its log level when it is loaded. What it logs as an error in this process it raises as well. No garbage
    is collected meanwhile: what an import makes is there to stay, and looking through it costs a tenth of the second.
    """
    quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL"} if "TORCH_CPP_LOG_LEVEL" in (variables or {}) else {}
    was_on = gc.isenabled()
    gc.disable()
    try:
        with environ.patched(quiet):
            yield
    finally:
        if was_on:
            gc.enable()


def usable_cores() -> int:
    """Return how many cores this process may use: no more than its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of cgroup v2, and of v1
        with suppress(OSError, ValueError):  # no such file, or `max`
            quota, period = map(int, " ".join((_CGROUP / name).read_text() for name in names).split())
            cores = min(cores, -(-quota // period)) if quota > 0 else cores
    return cores


def threads_of_each(num_processes: int) -> int:
    """Return the number of CPU threads of each process, if `num_processes` share the cores of this machine."""
    return max(1, usable_cores() // num_processes)


def meet(settings: LaunchSettings) -> Meeting:
    """Return where the processes meet; on one machine and without a port, at a free port that nobody else can take."""
    conf: dict[str, str | int] = {**settings.rendezvous}
    host = settings.main_process_ip or "127.0.0.1"
    if "%" in host:
        raise ConfigError(
            f"is {host!r}; torch takes no address with a zone. Use one without, or a name.", "main_process_ip"
        )
    resolve_host(host, NAME_WAIT_S if settings.num_machines > 1 and not settings.dry_run else 0.0)
    port = settings.main_process_port or 0
    if settings.num_machines == 1 and port == 0:
        return one_machine(host, conf=conf)
    port = port or DEFAULT_PORT
    if settings.machine_rank == 0:
        refuse_busy_port(port)
    if settings.num_machines == 1:
        return one_machine(host, port, conf)
    if settings.rdzv_backend == "static":
        conf["rank"] = settings.machine_rank
    interface = choose_interface(settings, host)
    listen = address_towards(host, interface) if settings.machine_rank == 0 else None
    row = (conf, "farflung", settings.num_machines, interface.address, interface, listen)
    return Meeting(settings.rdzv_backend, _endpoint(host, port), *row)


def one_machine(host: str = "127.0.0.1", port: int = 0, conf: Mapping[str, str | int] | None = None) -> Meeting:
    """Return how the processes of one machine meet; on port 0 the store says which one it got, so that none is lost."""
    return Meeting("static", _endpoint(host, port), conf or {}, os.urandom(16).hex(), 1, host)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def lone_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs alone: a world of one, whatever run this launcher is part of.

    LOCAL_RANK is left out: Accelerate and transformers take it for the sign of a distributed run. A script that makes
    a process group nevertheless finds what it needs; on port 0 its store takes any free one.
    """
    inherited = {name: value for name, value in environ.snapshot().items() if name not in PLACE_VARIABLES}
    lone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return inherited | dict(variables) | lone


def check_recipe(resolved: Resolved, variables: Mapping[str, str], most: int) -> None:
    """Make the recipe of the outer loop, so that what it refuses is refused here and not by each rank.

    `most` is how many replicas there may be at most, as far as it is known here.

    Recipes need torch. They are loaded only now, when torch is about to be loaded anyway.
    """
    config = resolved.settings.outer
    if config is None or config.recipe == AUTO:  # which has no values that could be refused, and no codec yet
        return
    with torch_is_loaded(variables):
        make = outer_arguments.OuterConfig
    try:
        settings = make(config.recipe, **config.given())
    except ConfigError as error:
        raise explained(error, resolved.file, resolved.origins) from None
    recipe = outer_arguments.recipe_of(settings, local_size=2)
    is_fixed = not (resolved.settings.elastic or resolved.settings.join)
    if why := outer_arguments.unfit(recipe, most, is_fixed, by_ddp=True):
        raise ConfigError(why)
