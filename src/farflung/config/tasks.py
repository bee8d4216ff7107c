# SPDX-License-Identifier: Apache-2.0
"""The variables by which srun, mpirun and the like tell each of the tasks that they start which one it is."""

from __future__ import annotations

import re
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
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "mpirun --map-by ppr:1:node",
    ),
    _Starter("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "mpiexec -ppn 1"),
    _Starter(
        *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
        "mpirun_rsh -ppn 1",
    ),
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
    """Say whether srun has started this process as a task.

    The batch script sees SLURM_NTASKS and SLURM_PROCID too, but is one process. So is the shell of `srun --pty`: the
    other tasks have no terminal, and have ended.
    """
    of_steps = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID")
    return any(map(environ.text, of_steps)) and not environ.text("SLURM_PTY_PORT")


def read_task() -> Task | None:
    """Return which of several tasks this process is, or None where it is the only one.

    The variables that torchrun would read (`PET_*`) come first, then Open MPI's, PMI's, MVAPICH's and Slurm's.

    Raises:
        ConfigError: the variables contradict each other, or state a range of machines.
    """
    machines = environ.text("PET_NNODES") or "1"
    if not machines.isdecimal():
        raise ConfigError(
            f"The environment variable PET_NNODES is {machines!r}, but the number of machines must be fixed. For "
            "replicas that come and go use --elastic; --num_machines 1 trains on this machine alone."
        )
    if size := _several("PET_NNODES"):
        return _task(size, "PET_NODE_RANK", _stated(1), "")
    for starter in STARTERS:
        if size := _several(starter.size):
            local = _number(starter.local_size) or _stated(1)
            return _task(size, starter.rank, local, starter.one_each)
    if in_slurm_step() and (size := _several("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")):
        return _task(size, "SLURM_PROCID", on_each_node(size.value), "srun --ntasks-per-node=1")
    return None


def on_each_node(size: int) -> Stated:
    """Return how many of the `size` tasks of a step of srun run on each of its nodes."""
    nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or _stated(size)
    return _stated(-(-size // max(1, nodes.value)), nodes.place)


def read_processes() -> Stated | None:
    """Return how many processes torchrun would start on each machine, None where no variable states a number."""
    told = environ.text("PET_NPROC_PER_NODE") or ""
    return _number("PET_NPROC_PER_NODE") if told.isdecimal() and int(told) > 0 else None  # else auto, gpu or cpu


def _task(size: Stated, rank_variable: str, local_size: Stated, one_each: str) -> Task:
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
    step_host, step_port = step_address()
    return Task(size, rank, local_size, one_each, host or _address("MASTER_ADDR") or step_host, port or step_port)


def _stated(value: int | str, variable: str = "") -> Stated:
    return Stated(value, "environment", variable)


def _number(*variables: str) -> Stated | None:
    """Return the first of `variables` that is set, as an integer."""
    found = ((environ.integer(name), name) for name in variables)
    return next((_stated(value, name) for value, name in found if value is not None), None)


def _several(*variables: str) -> Stated | None:
    told = _number(*variables)
    return told if told is not None and told.value > 1 else None


def _address(variable: str) -> Stated | None:
    host = environ.text(variable)
    return _stated(host, variable) if host else None


def step_address() -> tuple[Stated | None, Stated | None]:
    """Return where the tasks of a step of srun may meet: its first host, and a port that no other step takes there.

    Of Slurm's list, `gpu[007-010,12]-ib,login2` begins with `gpu007-ib`.
    """
    if not in_slurm_step():
        return None, None
    variable = next(filter(environ.text, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")), "")
    first = re.match(r"(?:[^\[\],\s]|\[\d[^\[\]]*\])+(?=,|$)", environ.text(variable) or "")
    host = None if first is None else _stated(re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]), variable)
    job, step = environ.integer("SLURM_JOB_ID"), environ.integer("SLURM_STEP_ID") or 0
    return host, None if job is None else _stated(10_000 + (8 * job + step) % 20_000, "SLURM_JOB_ID")
