# SPDX-License-Identifier: Apache-2.0
"""The variables by which srun, mpirun and the like tell each of the tasks that they start which one it is.

Sources: the pages of srun and of heterogeneous jobs; of Open MPI's, MPICH's and MVAPICH's mpirun; IBM's "Environment
variables set for job execution"; for jsrun Lightning's LSFEnvironment; SkyPilot's "Distributed Multi-Node Jobs";
dstack's runner.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import NamedTuple

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.setting import Stated


class _Starter(NamedTuple):
    """The names under which a program tells the tasks that it starts how many they are, and which one each is."""

    size: str
    rank: str
    local_size: str
    local_rank: str
    one_each: str  # starts one task per machine


# Slurm is not among them: mpirun starts its helpers by srun there, and the tasks under those see Slurm's variables too.
STARTERS = (
    _Starter(
        *("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
        "jsrun --rs_per_host 1 --tasks_per_rs 1",
    ),
    _Starter(
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "mpirun --map-by ppr:1:node",
    ),
    _Starter("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "mpiexec -ppn 1"),
    _Starter(
        *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
        "mpirun_rsh -ppn 1",
    ),
)
# Of what starts one task on each machine: how many, which one, and the address of the first, maybe before others.
_PLATFORMS = (
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP"),
)


@dataclass(frozen=True)
class Task:
    """One of several tasks."""

    size: Stated
    rank: Stated
    local_size: Stated  # on this machine
    one_each: str  # starts one task per machine
    host: Stated | None  # of the first task; None: no variable tells
    port: Stated | None  # at which the tasks may meet there


def in_slurm_step() -> bool:
    """Return whether srun has started this process as a task.

    The batch script sees SLURM_NTASKS and SLURM_PROCID too, but is one process. So is the shell of `srun --pty`: the
    other tasks have no terminal, and have ended.
    """
    of_steps = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID")
    return any(map(environ.text, of_steps)) and not environ.text("SLURM_PTY_PORT")


def read_task() -> Task | None:
    """Return which of several tasks this process is, or None if it is the only one, or if a rank has started it.

    The variables that torchrun would read (`PET_*`) come first, then jsrun's, Open MPI's, PMI's, MVAPICH's, those of
    SkyPilot and dstack, and Slurm's.

    Raises:
        ConfigError: the variables contradict each other, or state a range of machines.
    """
    if _is_of_rank():
        return None
    machines = environ.text("PET_NNODES") or "1"
    if not machines.isdecimal():
        raise ConfigError(
            f"The environment variable PET_NNODES is {machines!r}, but the number of machines must be fixed. For "
            "replicas that come and go use --elastic; --num_machines 1 trains on this machine alone."
        )
    if size := _several("PET_NNODES"):
        return _task(size, "PET_NODE_RANK", _stated(1), "")
    for starter in STARTERS:
        if (size := _several(starter.size)) and not (starter.size == "PMI_SIZE" and _has_step_of(size)):
            local = _number(starter.local_size, "PMI_LOCAL_SIZE") or _stated(1)
            return _task(size, starter.rank, local, starter.one_each)
    for num_machines, rank, hosts in _PLATFORMS:
        if size := _several(num_machines):
            return _task(size, rank, _stated(1), "", _address(hosts))
    if in_slurm_step() and (size := _several("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")):
        if _several("SLURM_HET_SIZE"):
            raise ConfigError(
                f"This launcher is one of {size.value} tasks in a heterogeneous Slurm job (SLURM_HET_SIZE is set), "
                "whose groups have numbers of their own. Give --num_machines, --machine_rank and --main_process_ip."
            )
        return _task(size, "SLURM_PROCID", on_each_node(size.value), "srun --ntasks-per-node=1")
    _refuse_unread()
    _refuse_ranks()
    return None


def _is_of_rank() -> bool:
    """Return whether a rank of a run has started this process, which sees the rank's variables but is no task."""
    return any(map(environ.text, ("TORCHELASTIC_RUN_ID", environ.LAUNCHER, environ.REPLICA)))


def _refuse_unread() -> None:
    """Raise ConfigError for a task of pbsdsh or blaunch: their variables aren't read, so each would train alone."""
    hosts = [host.partition(".")[0] for host in (environ.text("LSB_MCPU_HOSTS") or "").split()[::2]]  # and their slots
    signs = {name: (environ.integer(name) or 0) > alone for name, alone in (("PBS_NODENUM", 0), ("PBS_TASKNUM", 1))}
    signs["LSB_MCPU_HOSTS"] = socket.gethostname().partition(".")[0] in hosts[1:]
    if sign := next((name for name, is_one in signs.items() if is_one), None):
        raise ConfigError(
            f"By {sign} ({environ.text(sign)!r}) this launcher is one of several tasks of pbsdsh or blaunch, whose "
            "variables are not read. Give --num_machines, --machine_rank and --main_process_ip (--num_machines 1 to "
            "train on this machine alone), or start the launchers by mpirun."
        )


def _refuse_ranks() -> None:
    """Raise ConfigError if RANK and WORLD_SIZE number this launcher, and may count machines or processes."""
    size, rank, host = _several("WORLD_SIZE"), environ.text("RANK"), environ.text("MASTER_ADDR")
    if size and rank and host and not environ.text("PET_NNODES"):
        raise ConfigError(
            f"RANK is {rank}, WORLD_SIZE is {size.value} and MASTER_ADDR is {host!r}, so this launcher seems to be one "
            f"of several; these variables don't tell whether they count machines. If so, give --num_machines "
            f"{size.value} --machine_rank {rank} --main_process_ip {host}; otherwise unset them, or give "
            "--num_machines 1 to train on this machine alone."
        )


def on_each_node(size: int) -> Stated:
    """Return how many of the `size` tasks of a step of srun run on each of its nodes."""
    nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or _stated(size)
    return _stated(-(-size // max(1, nodes.value)), nodes.place)


def read_processes() -> Stated | None:
    """Return how many processes torchrun would start on each machine, None if no variable states a number."""
    count = "" if _is_of_rank() else environ.text("PET_NPROC_PER_NODE") or ""
    return _number("PET_NPROC_PER_NODE") if count.isdecimal() and int(count) > 0 else None  # else auto, gpu or cpu


def _task(size: Stated, rank_variable: str, local_size: Stated, one_each: str, first: Stated | None = None) -> Task:
    rank = _number(rank_variable)
    if rank is None or not 0 <= rank.value < size.value:
        raise ConfigError(
            f"This launcher is one of {size.value} tasks ({size.place}), and {rank_variable} is "
            f"{environ.text(rank_variable)!r}, so it can't tell which. Give --num_machines and --machine_rank."
        )
    host, port = _address("PET_MASTER_ADDR"), _number("PET_MASTER_PORT", "MASTER_PORT")
    endpoint = re.fullmatch(r"\[?(.+?)\]?:(\d+)", environ.text("PET_RDZV_ENDPOINT") or "")
    if host is None and endpoint:
        host, port = (_stated(part, "PET_RDZV_ENDPOINT") for part in (endpoint[1], int(endpoint[2])))
    host = host or _address("MASTER_ADDR") or first or _first_host(_is_step(size))
    return Task(size, rank, local_size, one_each, host, port or (step_address()[1] if _is_step(size) else None))


def _stated(value: int | str, variable: str = "") -> Stated:
    return Stated(value, "environment", variable)


def _number(*variables: str) -> Stated | None:
    """Return the first of `variables` that is set, as an integer."""
    found = ((environ.integer(name), name) for name in variables)
    return next((_stated(value, name) for value, name in found if value is not None), None)


def _several(*variables: str) -> Stated | None:
    count = _number(*variables)
    return count if count is not None and count.value > 1 else None


def _address(variable: str) -> Stated | None:
    """Return the address, or the first one of several, that a variable holds."""
    return next((_stated(word, variable) for word in (environ.text(variable) or "").split()), None)


def _has_step_of(size: Stated) -> bool:
    """Return whether srun has started just the tasks that another variable counts, as with `--mpi=pmi2`."""
    return in_slurm_step() and environ.integer("SLURM_STEP_NUM_TASKS") == size.value


def _is_step(size: Stated) -> bool:
    """Return whether the tasks are those of a step of srun, and not of an mpirun that starts its helpers by one."""
    return _has_step_of(size) or size.place.startswith("SLURM")


def _first_host(is_step: bool) -> Stated | None:
    """Return the first host that Slurm lists: of `gpu[007-010,12]-ib,login2` gpu007-ib; None without a readable list.

    mpirun's helpers are a Slurm step without the host of rank 0.
    """
    names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
    variable = next(filter(environ.text, names if is_step else names[::-1]), "")
    first = re.match(r"(?:[^\[\],\s]|\[\d[^\[\]]*\])+(?=,|$)", environ.text(variable) or "")
    return None if first is None else _stated(re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]), variable)


def step_address() -> tuple[Stated | None, Stated | None]:
    """Return where the tasks of a step of srun may meet: its first host, and a port that no other step takes there."""
    if not in_slurm_step():
        return None, None
    job, step = environ.integer("SLURM_JOB_ID"), environ.integer("SLURM_STEP_ID") or 0
    port = None if job is None else _stated(10_000 + (8 * job + step) % 20_000, "SLURM_JOB_ID")
    return _first_host(is_step=True), port
