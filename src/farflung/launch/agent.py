# SPDX-License-Identifier: Apache-2.0
"""Run the processes of this machine under torch's elastic agent, and say how it ended.

torch is loaded when an agent is started, not before: a command line that can't work is refused at once.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from farflung.base.causes import cause_of_meeting
from farflung.base.checks import Address, check_place
from farflung.base.events import Kind, record
from farflung.base.lazy import LazyModule
from farflung.base.signals import END, PREEMPTION, WARNINGS, Request, handled, heed_children
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import EngineFailure
from farflung.launch.plan import Plan, torch_is_loaded
from farflung.launch.report import Failure, in_order, show
from farflung.process.failure import CHECKPOINT
from farflung.process.heard import SignalForwarder

if TYPE_CHECKING:
    from farflung.launch import rendezvous
else:
    rendezvous = LazyModule("farflung.launch.rendezvous")

_PATIENCE_S = 2.0
_SLOW = "the processes have 30 s to shut down; press Ctrl-C again to kill them now."
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this machine: well, by failures, or by a signal to the launcher."""

    failures: tuple[Failure, ...] = ()  # with a signal, those that were reported before it
    signal: int | None = None
    finished: tuple[int, ...] = ()  # ranks that ended well, though others failed
    notes: frozenset[str] = frozenset()  # their names, that any rank left for the launcher
    checkpoint: Path | Address | None = None  # the newest that a run which failed has written
    is_preempted: bool = False  # ended by a scheduler's signal before it could save


@dataclass
class _RunLogs:
    """The files of this run's ranks; next to them may lie those of earlier runs, and of other machines.

    Attributes:
        path: the folder of its attempts, once the agent has made it.
    """

    path: Path | None = None

    def glob(self, pattern: str) -> Iterator[Path]:
        return iter(()) if self.path is None else self.path.glob(pattern)


def run_agent(plan: Plan, settings: LaunchSettings, line_prefix: str | None = None) -> Outcome:
    """Start the plan's processes, wait for them, and return how it ended. None of them is left behind.

    Raises EngineFailure if the machines do not find each other.
    """
    environ.remove_empty()  # for a launcher that is no command
    heed_children()
    (entrypoint, *arguments), num_local, meeting = plan.command, plan.num_local, plan.meeting
    with torch_is_loaded(plan.variables):
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch

    is_ours = meeting.backend == "static"  # torch's `c10d` too has one store for all attempts by default
    variables = {environ.SHOWS_ATTEMPTS: "true"} if is_ours else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as around:
        saves = settings.save_on_signal is not None
        around.enter_context(_agent_logs(settings))
        around.enter_context(environ.patched({**plan.variables, **variables, environ.LAUNCHER: str(os.getpid())}))
        log_dir = Path(settings.log_dir or around.enter_context(scratch_folder()))
        logs = _RunLogs()
        heard = around.enter_context(_signals(SignalException, saves, logs))
        try:
            agent = elastic_launch(_agent_settings(plan, settings, line_prefix, log_dir, logs), entrypoint)
            # The agent puts the rank in for `${local_rank}` in texts; a doubled `$` is how it spells one.
            agent(*(word.replace("$", "$$") if isinstance(word, str) else word for word in arguments))
        except ChildFailedError as error:
            first = min(rank - int(failure.local_rank) for rank, failure in error.failures.items())  # of this machine's
            failures = [
                Failure.of(rank, failure.exitcode, failure.error_file_data, pid=failure.pid, seen_s=failure.timestamp)
                for rank, failure in error.failures.items()
            ]
            if not isinstance(entrypoint, str):  # of several functions that fail, the agent names one
                failures += [failure for failure in _reported(logs, first) if failure.rank not in error.failures]
                return Outcome(tuple(failures))
            for failed in failures:  # what failed programs have left behind: each has a session of its own
                with suppress(ProcessLookupError):
                    os.killpg(failed.pid, signal.SIGKILL)
            finished = tuple(sorted({*range(first, first + num_local)} - {*error.failures}))
            by = -in_order(failures)[0][0].exit_code
            ended_early = saves and by in PREEMPTION and by in heard.passed_on  # before it could hear signals
            checkpoint = newest_checkpoint(logs)
            return Outcome(tuple(failures), None, finished, _notes(logs), checkpoint, is_preempted=ended_early)
        except SignalException:
            first = num_local * int(meeting.conf.get("rank", 0))
            before = _reported(logs, first, heard.end_at)
            too_early = saves and not heard.passed_on and heard.ended_by in PREEMPTION
            return Outcome(before, heard.ended_by, notes=_notes(logs), is_preempted=too_early)
        except (RendezvousError, DistNetworkError, DistStoreError) as error:
            why = str(error).strip().rstrip(".").partition("\n")[0]
            raise EngineFailure(
                f"The {counted(meeting.num_machines, 'machine')} could not meet at {meeting.endpoint}: {why}. "
                "Check that each was started, with the same main_process_ip, main_process_port and num_machines, and "
                "that they can reach that port of machine 0.",
                cause_of_meeting(error),
            ) from error
        return Outcome(notes=_notes(logs))


@environ.patched({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})  # or torch initializes CUDA, and forks can't use it any more
def _agent_settings(
    plan: Plan, settings: LaunchSettings, line_prefix: str | None, log_dir: Path, logs: _RunLogs
) -> Any:
    """Return torch's `LaunchConfig`; the agent will tell `logs` its folder in `log_dir`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    class LogsSpecs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            found = super().reify(envs)
            logs.path = Path(found.error_files[0]).parents[2]
            return found

    meeting = plan.meeting
    machine = int(meeting.conf.get("rank", 0))
    backend, conf = meeting.backend, dict[str, Any](meeting.conf, rank=machine)
    if backend == "static":
        backend = rendezvous.registered()
        begins = partial(_show_attempt, logs, machine * plan.num_local, settings)
        conf |= {"listen": meeting.listen, "begins": begins}
    return LaunchConfig(
        min_nodes=meeting.num_machines,
        max_nodes=meeting.num_machines,
        nproc_per_node=plan.num_local,
        run_id=meeting.run_id,
        role=settings.role,
        rdzv_endpoint=meeting.endpoint,
        rdzv_backend=backend,
        rdzv_configs=conf,
        max_restarts=settings.max_restarts or 0,
        monitor_interval=settings.monitor_interval,
        start_method="fork",
        log_line_prefix_template=line_prefix,
        local_addr=meeting.address,
        logs_specs=LogsSpecs(
            log_dir=str(log_dir),
            tee=Std.from_str(settings.tee),
            # Ranks of other machines keep torch's filter on.
            local_ranks_filter={rank - machine * plan.num_local for rank in settings.shown_ranks} or None,
        ),
        signals_to_handle="SIGRTMAX",  # one that nobody sends: `_signals` hears the others, and none would be an error
    )


def _show_attempt(logs: _RunLogs, first_rank: int, settings: LaunchSettings, attempt: int) -> None:
    """Show why the attempt before this one failed."""
    if attempt > 1 and (failures := _reported(logs, first_rank)):
        show(failures, checkpoint=newest_checkpoint(logs))
        restart = {"attempt": attempt, "restart": attempt - 1, "max_restarts": settings.max_restarts}
        record(Kind.RESTARTED, level=logging.ERROR, **restart)


def _reported(logs: _RunLogs, first_rank: int, before_s: float = inf) -> tuple[Failure, ...]:
    """Return the failures that stand in the error files of the last attempt and were written before a time."""
    attempts = logs.glob("attempt_*")
    last = max(attempts, key=lambda folder: folder.stat().st_mtime, default=None)
    found = () if last is None else last.glob("*/error.json")
    files = {first_rank + int(file.parent.name): file for file in found}
    reports = ((rank, read_report(file)) for rank, file in sorted(files.items()))
    failures = (Failure.of(rank, 1, report) for rank, report in reports if report)
    return tuple(
        replace(failure, exit_code=failure.reported_code or 1) for failure in failures if failure.time_s < before_s
    )


def _notes(logs: _RunLogs) -> frozenset[str]:
    return frozenset(file.name for file in logs.glob("attempt_*/*/*"))


def newest_checkpoint(logs: Path | _RunLogs) -> Path | Address | None:
    """Return the newest checkpoint that ranks of this machine have written, in any attempt; no folder that is gone.

    Args:
        logs: with a folder `attempt_<number>/<local rank>` for each process, in which it leaves its notes.
    """
    notes = logs.glob(f"attempt_*/*/{CHECKPOINT}")
    last = max(notes, key=lambda note: note.stat().st_mtime, default=None)
    place = None if last is None else check_place("newest_checkpoint", last.read_text(encoding="utf-8"))
    return place if isinstance(place, Address) or (place is not None and place.is_dir()) else None


def read_report(file: Path) -> dict[str, Any]:
    """Return what a process has left in its error file, in torch's form; empty if it is unreadable."""
    left: dict[str, Any] = {}
    with suppress(json.JSONDecodeError):  # it was ended while it wrote
        left = json.loads(file.read_text(encoding="utf-8"))
    return left


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for the length of a block. It is locked, so that systemd, which cleans /tmp, leaves it alone."""
    with tempfile.TemporaryDirectory(prefix="farflung_", ignore_cleanup_errors=True) as folder:
        opened = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(opened)


@contextmanager
def _agent_logs(settings: LaunchSettings) -> Iterator[None]:
    """Keep the agent's log lines back: what they say of a failure, our report says once and shorter.

    Its errors are shown if another attempt may follow, for which there is no report.
    """
    if settings.debug or environ.text("LOGLEVEL"):
        yield
        return
    least = logging.ERROR if settings.max_restarts and not settings.json else logging.CRITICAL + 1
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items() if name.startswith(_LOGGERS)]
    before = [(logger, logger.level) for logger in loggers if isinstance(logger, logging.Logger)]
    for logger, _ in before:
        logger.setLevel(least)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@dataclass
class _Heard:
    """The signals that this launcher got."""

    passed_on: set[int] = field(default_factory=set)  # to the ranks
    ended_by: int = 0
    end_at: float = inf  # when it was first asked to end, in seconds since 1970


@contextmanager
def _signals(error: Callable[[str, signal.Signals], Exception], saves: bool, logs: _RunLogs) -> Iterator[_Heard]:
    """Pass warnings on to the ranks, and end these at other signals by the agent's `error`; yields which came.

    A rank may be writing a checkpoint, or be stuck in a collective: the user who presses Ctrl-C knows which, so a line
    says if ranks are slow to end. Ranks that save (`saves`) get the first SIGTERM as a warning too, and the time that
    the scheduler gives. A signal that finds no ranks ends the launcher.
    """
    heard, courier = _Heard(), SignalForwarder(logs.glob)
    others = {child.pid for child in psutil.Process().children()}  # a notebook's, which are no ranks
    slow = threading.Timer(_PATIENCE_S, record, [Kind.ENDING], {"level": logging.ERROR, "message": _SLOW})
    slow.daemon = True

    def act(request: Request) -> None:
        number = request.number
        ranks = {child.pid for child in psutil.Process().children()} - others
        if ranks and (number in WARNINGS or (saves and number == signal.SIGTERM and request.count == 1)):
            heard.passed_on.add(number)
            courier.pass_on(number, ranks)
            return
        heard.ended_by, heard.end_at = number, min(heard.end_at, request.at)
        if number == signal.SIGINT and not slow.ident:
            slow.start()
        raise error("ended", signal.Signals(number) if number in END else signal.SIGTERM)

    try:
        with handled(act, (*END, *WARNINGS)):
            yield heard
    finally:
        slow.cancel()
