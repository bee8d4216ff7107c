# SPDX-License-Identifier: Apache-2.0
"""Start a function, not a script, in several connected processes: from a notebook, or to debug on the CPU."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from farflung.base.checks import check_callable, check_number, check_whole, wrong_type
from farflung.base.errors import ConfigError, RankFailure, StateError
from farflung.base.signals import END, WARNINGS, restore_defaults
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT, LaunchSettings, check_variables, field_named, rank_variables
from farflung.config.problems import renamed
from farflung.launch.agent import run_agent
from farflung.launch.cell import refuse_joined, train_in_notebook
from farflung.launch.events import Screen, showing
from farflung.launch.network import choose_interface
from farflung.launch.plan import (
    Meeting,
    Plan,
    fit_for_cores,
    meet as meeting_of,
    network_variables,
    one_machine,
    threads_of_each,
)
from farflung.launch.report import explain
from farflung.process.heard import record_signals
from farflung.process.tether import end_with_launcher

_OF_MEMBERS = {"function", "args", "mixed_precision", "meet", "elastic"}  # arguments of a replica that comes and goes


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    meet: str | None = None,
    elastic: str = "1:8",
) -> Any:
    """Call `function(*args)` in `num_processes` connected processes on this machine, and wait for all of them.

    The processes are forked, so the function may be one that the notebook defines. One process alone is this one: no
    fork. Without GPUs the processes train on the CPU, and are connected.

    Args:
        num_processes: on this machine; by default one for each GPU, or one on the CPU, at most 16 for each core.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`.
        use_port: where the processes meet. On one machine 29500 (the default) and 0 mean any free port.
        master_addr: the address of machine 0.
        node_rank: this machine among `num_nodes`.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: torch's rendezvous; by default made from the above.
        max_restarts: how often all processes are started again after one failed.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: put before the processes' lines.
        meet: the address of a run whose replicas come and go (`farflung launch --meet`). This process is one of them
            until the function returns or the cell is interrupted; below the cell is what `farflung watch` shows.
        elastic: how many replicas that run begins with, and has at most, if it begins here.

    Returns:
        what the function returns, with `meet`; otherwise None.

    Raises:
        ConfigError: settings that can't work, or a port in use.
        StateError: this process has joined a world or initialized CUDA already, so it can't be forked.
        RankFailure: the function failed in one of the processes; the message names the rank and has its traceback.
    """
    _check(function, args)
    given = {**locals(), "num_processes": None if num_processes == 1 else num_processes}
    usual = inspect.signature(notebook_launcher).parameters
    idle = {"elastic"} if meet is None else usual.keys() - _OF_MEMBERS
    for name in sorted(name for name in idle if given[name] != usual[name].default):
        where = "without meet, so replicas are" if meet is None else f"and meet {meet}, where a replica is"
        kind = "fixed" if meet is None else "this process alone"
        raise ConfigError(f"{name} is {given[name]!r}, {where} {kind}. Leave it out.")
    check_whole("num_nodes", num_nodes, least=1)
    check_whole("node_rank", node_rank, least=0)
    check_whole("max_restarts", max_restarts, least=0)
    if num_processes is not None:
        check_whole("num_processes", num_processes, least=1)
    check_number("monitor_interval", monitor_interval, above=0)
    if meet is not None:
        return train_in_notebook(function, args, {"meet": meet, "elastic": elastic, "mixed_precision": mixed_precision})
    port = int(use_port) if isinstance(use_port, str) and use_port.isdecimal() else use_port
    check_whole("use_port", port, least=0, most=65535)
    gpus = torch.cuda.device_count()
    num_local = num_processes if num_processes is not None else max(1, gpus)
    if node_rank >= num_nodes:
        raise ConfigError(f"node_rank is {node_rank}; it must be below num_nodes, which is {num_nodes}.")
    if 0 < gpus < num_local:
        found = counted(gpus, "GPU")
        raise ConfigError(f"num_processes is {num_local}, but this machine has {found}; each process needs one.")
    if gpus == 0:
        fit_for_cores(num_local, "num_processes")
    precision = field_named("mixed_precision").parse(mixed_precision, "mixed_precision")
    several = num_local * num_nodes > 1
    try:
        settings = LaunchSettings(
            mixed_precision=str(precision),
            use_cpu=several and gpus == 0,
            num_machines=num_nodes,
            machine_rank=node_rank,
            main_process_ip=master_addr,
            main_process_port=0 if num_nodes == 1 and port == DEFAULT_PORT else int(port),
            rdzv_backend=rdzv_backend,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
        )
        meeting = meeting_of(settings) if several and not rdzv_endpoint else one_machine()
        if rdzv_endpoint:
            interface = choose_interface(settings, master_addr) if num_nodes > 1 else None
            meeting = Meeting(rdzv_backend, rdzv_endpoint, {"rank": node_rank}, rdzv_id, num_nodes, interface=interface)
    except ConfigError as error:
        names = {"main_process_ip": "master_addr", "main_process_port": "use_port"}
        raise renamed(error, names) from None
    if not several:
        with environ.patched(_stated(settings)):
            function(*args)
        return None
    meeting = replace(meeting, conf={**meeting.conf, **(rdzv_conf or {})})
    _fork(function, args, num_local, settings, meeting, log_line_prefix_template)
    return None


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in `num_processes` forked, connected processes on the CPU, and wait for all of them.

    Raises:
        ConfigError: `num_processes` is less than 1.
        StateError: this process has joined a world already, so it can't be forked.
        RankFailure: the function failed in one of the processes; the message names the rank and has its traceback.
    """
    _check(function, args)
    check_whole("num_processes", num_processes, least=1)
    fit_for_cores(num_processes, "num_processes")
    _fork(function, args, num_processes, LaunchSettings(use_cpu=True), one_machine())


def _check(function: object, args: object) -> None:
    check_callable("function", function, "train, without parentheses")
    if not isinstance(args, (list, tuple)):
        raise wrong_type("args", args, f"a list or a tuple, such as ({args!r},)")


def _stated(settings: LaunchSettings) -> dict[str, str]:
    """Return the variables that tell ranks what the arguments state; the user's variables count for the rest."""
    stated = rank_variables(settings).items() - rank_variables(LaunchSettings()).items()
    return {"ACCELERATE_MIXED_PRECISION": settings.mixed_precision, **dict(stated)}


def _fork(
    function: Callable[..., Any],
    args: Sequence[Any],
    num_local: int,
    settings: LaunchSettings,
    meeting: Meeting,
    line_prefix: str | None = None,
) -> None:
    check_variables()
    refuse_joined("be forked into others")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StateError(
            "CUDA is already initialized in this process, so forked processes can't use it. Restart the notebook and "
            "touch the GPU inside the function only."
        )
    variables = _stated(settings) | network_variables(meeting, settings)
    if environ.text("OMP_NUM_THREADS") is None:
        variables["OMP_NUM_THREADS"] = str(threads_of_each(num_local))
    plan = Plan((_as_rank(function), *args), num_local, variables, meeting, alone=False)
    with showing(Screen(settings)):
        outcome = run_agent(plan, settings, line_prefix)
    if outcome.signal is not None:
        raise KeyboardInterrupt if outcome.signal == signal.SIGINT else SystemExit(128 + outcome.signal)
    if outcome.failures:
        title, text = explain(outcome.failures)
        raise _ForkedRankFailure(f"{title}\n\n{text}")


class _ForkedRankFailure(RankFailure, ProcessRaisedException):
    """A failure of a forked rank, which code that catches torch's own error for it catches too."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.msg = message


def _as_rank(function: Callable[..., Any]) -> Callable[..., None]:
    """Wrap `function` for a forked rank: its result is dropped, and signals do what they do in a fresh process."""

    def run(*args: Any) -> None:
        end_with_launcher()
        restore_defaults((*END, *WARNINGS))
        record_signals()
        threads = environ.integer("OMP_NUM_THREADS")
        if threads:
            torch.set_num_threads(threads)  # the variable is read when a process starts, and this one was forked
        function(*args)

    return run
