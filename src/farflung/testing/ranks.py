# SPDX-License-Identifier: Apache-2.0
"""Run one function on several connected gloo ranks of this machine, and get their values or their tracebacks back."""

from __future__ import annotations

import gc
import multiprocessing as mp
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from farflung.base.errors import RankFailure
from farflung.base.words import numbered
from farflung.config import environ
from farflung.process.sockets import serve_store
from farflung.testing.patience import patience

# Modules that the server imports once, so that ranks start with them: torch, and what most ranks use of Farflung.
_PRELOADED = ["torch", "torch.distributed", "farflung.testing.preload"]
_PRELOADED += [f"farflung.{name}" for name in ("accelerator.accelerator", "accelerator.checkpointer", "outer")]
_PRELOADED += [f"farflung.{name}" for name in ("checkpoint.sharded", "outer.merge_states", "strategy.sharded", "utils")]
_PRELOADED += [f"farflung.{name}" for name in ("address.c10d_transport", "members.elastic")]
# What test files import, as each rank imports the file of its function.
_OF_TESTS = ["pytest", "hypothesis", "torch.distributed.pipelining"]
_OF_TESTS += [f"torch.distributed.tensor.{name}" for name in ("experimental", "parallel")]


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 3.0,
    connect: bool = True,
) -> list[Any]:
    """Call `function(*args)` on `num_ranks` fresh processes, joined by gloo on loopback; return their values by rank.

    The processes are forked from a server that has torch and Farflung loaded, so that starting them costs milliseconds.
    Each sees the caller's environment with the variables that torchrun would set (`RANK`, `MASTER_ADDR` ...), and
    computes on one thread.

    Args:
        function: picklable, so defined at the top of a module; its values must be picklable too.
        timeout_s: how long all of them together may take on an idle machine; a slow or busy one gets more time
            (`farflung.testing.patience`).
        grace_s: how long the others may continue once a rank has failed, on an idle machine: they need a second or two
            to find out, and to say what they know.
        connect: initialize the default process group first; False leaves that to `function`.

    Raises:
        RankFailure: a rank raised (the message holds its traceback), died, or was not done in time.
    """
    context = fork_context()
    store = serve_store("127.0.0.1", 0, wait_for_workers=False)
    workers: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            variables = environ.snapshot() | _variables(rank, num_ranks, store.port)
            worker: BaseProcess = context.Process(target=_rank_main, args=(there, variables, connect, function, args))
            worker.start()
            there.close()
            workers.append(worker)
            pipes.append(here)
        limit_s = patience(timeout_s)
        return _collect(workers, pipes, limit_s, grace_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def fork_context() -> ForkServerContext:
    """Return the context whose processes fork from a server with torch and Farflung loaded.

    A process has one server, and the first that forks from it settles what it loads: so all use this context.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _OF_TESTS if name in sys.modules)])
    return context


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, so there is no race for a free port
    }


def _rank_main(
    pipe: Connection, variables: dict[str, str], connect: bool, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the server has loaded lives on: a collection in each rank would copy and look through all of it
    environ.remove(*(environ.snapshot().keys() - variables.keys()))  # those of the server's first caller
    environ.export(variables)
    mp.set_start_method("fork", force=True)  # for a loader's workers: they would inherit the slow forkserver
    torch.set_num_threads(1)
    try:
        if connect:
            dist.init_process_group("gloo")
            dist.barrier()  # a rank that ended now would break the connections that another still waits for
        # By value: what torch would send of a tensor dies with this process.
        word = pickle.dumps(("value", function(*args)))
    except BaseException:
        word = pickle.dumps(("error", traceback.format_exc()))
    pipe.send_bytes(word)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(workers: list[BaseProcess], pipes: list[Connection], timeout_s: float, grace_s: float) -> list[Any]:
    """Wait for each rank's word; stop at the first error, giving the others a moment so that the cause is shown too."""
    deadline = time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    pending = dict(enumerate(pipes))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if not errors:
                late = sorted(pending)
                raise RankFailure(f"{numbered('rank', late)} did not return within {timeout_s:.3g} s; the others had.")
            break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                kind, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                workers[rank].join()
                kind, value = "error", f"the process died with exit code {workers[rank].exitcode}"
            (values if kind == "value" else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + patience(grace_s))
    if errors:
        raise RankFailure("\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors)))
    for rank, worker in enumerate(workers):
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
        if worker.exitcode is None:
            raise RankFailure(f"rank {rank} returned its value but its process did not end within {timeout_s:.3g} s.")
    return [values[rank] for rank in range(len(workers))]
