# SPDX-License-Identifier: Apache-2.0
"""Run the processes of this machine under torch's elastic agent, and say how it ended.

torch is loaded when an agent is started, not before: a command line that can't work is refused at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.base.errors import RankFailure
from laconic.config import environ
from laconic.launch.plan import Meeting
from laconic.launch.report import Failure

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those that the agent takes over
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this machine: well, by failures, or by a signal to the launcher."""

    failures: tuple[Failure, ...] = ()
    signal: int | None = None


@dataclass(frozen=True)
class Watch:
    """How the agent looks after its processes."""

    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    role: str = "default"
    log_dir: str | None = None
    tee: str = "0"
    line_prefix: str | None = None
    show_logs: bool = False


def run_agent(
    entrypoint: str | Callable[..., None],
    arguments: Sequence[Any],
    num_local: int,
    *,
    variables: Mapping[str, str],
    meeting: Meeting,
    watch: Watch,
) -> Outcome:
    """Start `num_local` connected processes, wait for them, and return how it ended. None of them is left behind.

    Args:
        entrypoint: a program, or a function for forked processes.
        arguments: for the program or the function, as they are.
        variables: environment variables for the processes.

    Raises:
        RankFailure: the machines did not find each other.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with ExitStack() as around:
        around.enter_context(_signals_put_back())
        around.enter_context(_agent_logs(watch))
        around.enter_context(environ.patched(variables))
        log_dir = watch.log_dir or around.enter_context(tempfile.TemporaryDirectory(prefix="laconic_"))
        config = LaunchConfig(
            min_nodes=meeting.num_machines,
            max_nodes=meeting.num_machines,
            nproc_per_node=num_local,
            run_id=meeting.run_id,
            role=watch.role,
            rdzv_endpoint=meeting.endpoint,
            rdzv_backend=meeting.backend,
            rdzv_configs=dict(meeting.conf),
            max_restarts=watch.max_restarts,
            monitor_interval=watch.monitor_interval_s,
            start_method="fork",
            log_line_prefix_template=watch.line_prefix,
            local_addr=meeting.address,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir, tee=Std.from_str(watch.tee)),
        )
        try:
            returned = elastic_launch(config, entrypoint)(*_as_they_are(arguments))
        except ChildFailedError as error:
            named = [
                Failure.of(rank, one.exitcode, one.error_file_data, pid=one.pid, seen_s=one.timestamp)
                for rank, one in error.failures.items()
            ]
            if isinstance(entrypoint, str):
                _end_sessions([failure.pid for failure in named])
                return Outcome(tuple(named))
            before_us = min(rank - one.local_rank for rank, one in error.failures.items())
            return Outcome((*named, *_unnamed(named, Path(log_dir), before_us)))
        except SignalException as error:
            return Outcome(signal=int(error.sigval))
        except (RendezvousError, DistNetworkError, DistStoreError) as error:
            raise RankFailure(
                f"The processes could not meet at {meeting.endpoint} ({meeting.num_machines} machines, "
                f"{meeting.backend}): {error}"
            ) from error
    if len(returned) != num_local:
        raise RankFailure(f"{num_local} processes were started, but only {len(returned)} of them reported their end.")
    return Outcome()


def _as_they_are(arguments: Sequence[Any]) -> list[Any]:
    """The agent puts the rank in for `${local_rank}` in texts; a doubled `$` is how it spells one."""
    return [argument.replace("$", "$$") if isinstance(argument, str) else argument for argument in arguments]


def _unnamed(named: Sequence[Failure], log_dir: Path, before_us: int) -> list[Failure]:
    """Return the failures that stand in error files only: of several functions that fail, the agent names one.

    Args:
        before_us: ranks of the machines before this one.
    """
    ranks = {failure.rank for failure in named}
    last_attempt = max(log_dir.glob("*/attempt_*"), key=lambda folder: folder.stat().st_mtime)
    files = {before_us + int(file.parent.name): file for file in last_attempt.glob("*/error.json")}
    return [Failure.of(rank, 1, _read(file)) for rank, file in sorted(files.items()) if rank not in ranks]


def _read(file: Path) -> dict[str, Any]:
    try:
        left: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # it was ended while it wrote
        return {}
    return left


def _end_sessions(leaders: Sequence[int]) -> None:
    """End what failed programs have started and left behind: the agent gives each program a session of its own."""
    for pid in leaders:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def _agent_logs(watch: Watch) -> Iterator[None]:
    """Keep the agent's log lines back: what they say of a failure, our report says once and shorter.

    Its errors are let through where a failure may be followed by another attempt, of which there is no report.
    """
    if watch.show_logs or environ.text("LOGLEVEL"):
        yield
        return
    least = logging.ERROR if watch.max_restarts else logging.CRITICAL + 1
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items() if name.startswith(_LOGGERS)]
    before = [(logger, logger.level) for logger in loggers if isinstance(logger, logging.Logger)]
    for logger, _ in before:
        logger.setLevel(least)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@contextmanager
def _signals_put_back() -> Iterator[None]:
    """The agent takes over the signals that end a process, and keeps them; give them back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
