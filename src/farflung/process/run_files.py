# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a launched run write into its folder: lines of JSON, a log each, and a heartbeat each second.

Writers only append, one whole line at a time, so a rank that is killed leaves whole lines. The folder is for people
who look: if it can't be written, training continues without it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import copy
from functools import partial
from io import BufferedWriter, FileIO, StringIO, TextIOWrapper
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

from farflung.base.events import EVENTS as SINKS, FILES_ONLY, Event, Kind, Sink, record, tell
from farflung.base.files import open_lines
from farflung.comm.frames import innermost_calls, user_call
from farflung.config import environ
from farflung.process.failure import ERROR_FILE
from farflung.process.identity import this_process
from farflung.process.place import Place

ROUNDS, METRICS, EVENTS, STEPS = "rounds.jsonl", "metrics.jsonl", "events.jsonl", "steps.jsonl"
LOGS, RANKS = "logs", "ranks"
_LOOK_S, _FIRST_LOOK_S = 1.0, 0.02
_STEPS_S = 5.0  # between two lines about how many steps were made
_STUCK_S = 3.0  # how long a rank is in one call before its stack is written too
_RECORD_BYTES, _MOST_WORDS = 4096, 400  # and characters of an error in it, each at most six bytes
_STRICT = json.JSONEncoder(allow_nan=False)  # made once: json.dumps would make one for each line


def run_folder() -> Path | None:
    """Return the folder of this process's run; None without one."""
    named = environ.text(environ.RUN_FOLDER)
    return Path(named) if named else None


def who() -> dict[str, Any]:
    """Return the numbers of this rank, its replica and its life, as its lines have them."""
    numbers = {"attempt": environ.integer(environ.RUN_ATTEMPT), "member": Place.launched().member}
    numbers["restart"] = environ.integer("TORCHELASTIC_RESTART_COUNT") or None
    return {name: number for name, number in numbers.items() if number is not None} | {
        "rank": environ.integer("RANK") or 0
    }


class _RunEvents(Sink):
    """Writes the events of this process to the run's folder, if there is one."""

    is_folder = True

    def show(self, event: Event) -> None:
        if (folder := run_folder()) is not None:
            add_lines(folder / EVENTS, [event.row() | who()])


def keep_events() -> None:
    """Write the events of this process, and the warnings it shows, to the run's folder from now on.

    In a notebook the launcher is in this process, and writes the events.
    """
    if not any(isinstance(sink, Sink) and sink.is_folder for sink in SINKS.handlers):
        SINKS.addHandler(_RunEvents())
    if getattr(warnings.showwarning, "func", None) is not _show_warning:
        warnings.showwarning = partial(_show_warning, warnings.showwarning)


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
) -> None:
    """Record a warning of ours or of the script's, as Python shows it: equal ones once."""
    show(message, category, filename, lineno, *more)
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").endswith("warnings"):
        frame = frame.f_back
    if frame is None:
        return
    is_ours = str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]
    if is_ours or "-packages" not in frame.f_code.co_filename:
        facts = {"message": str(message), "category": category.__name__, "at": f"{filename}:{lineno}"}
        record(Kind.WARNING, level=FILES_ONLY, **facts)


def note_model(model: Any, strategy: str, island: int, ranks: int) -> None:
    """Say in the run's folder what is trained, from which the bytes of its gradients follow."""
    trained = [x for x in model.parameters() if x.requires_grad]
    facts = {"strategy": strategy, "island": island, "parameters": sum(x.numel() for x in trained), "ranks": ranks}
    record(Kind.MODEL, level=FILES_ONLY, bytes=sum(x.numel() * x.element_size() for x in trained), **facts)


def add_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to a file that several processes may write to, in the form of `json_line`."""
    text = "".join(map(json_line, rows))
    with suppress(OSError), open_lines(path, is_shared=True) as file:
        file.write(text)


def plain(value: Any) -> Any:
    """Return what JSON has a word for, or Python's `json`, for NaN and infinities."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if hasattr(value, "tolist"):  # a tensor, or an array or a number of NumPy's
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return float(value) if isinstance(value, Real) else str(value)


def json_line(row: Any) -> str:
    """Return a row as a line of JSON; NaN and infinities become texts of these names."""
    try:
        return _STRICT.encode(row) + "\n"
    except ValueError:  # JSON has no word for them
        return json.dumps(json.loads(json.dumps(row), parse_constant=str)) + "\n"


def _kept(value: Any) -> Any:
    """Return a value that stays: a copy of what may change, unless that is as quick to read, so that nobody waits."""
    if isinstance(value, Mapping):
        return {name: _kept(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_kept(item) for item in value]
    if hasattr(value, "detach"):
        return value.tolist() if value.is_cpu and value.numel() == 1 else value.detach().clone()
    return copy(value) if hasattr(value, "tolist") else value


class Metrics:
    """Writes what a script logs to the run's folder, a moment later and in a thread: a step only keeps its values.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._who = folder / METRICS, who()
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._writer: threading.Timer | None = None
        atexit.register(self.write)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metrics, (self._path.parent,)  # a copy of an Accelerator has its own lines to write

    @classmethod
    def of_run(cls) -> Metrics | None:
        """Return what writes to the folder of the run that this process belongs to; None without one."""
        folder = run_folder()
        return None if folder is None else cls(folder)

    def add(self, values: Mapping[str, Any], step: int | None) -> None:
        """Write values, of the step `step` if that is known."""
        row = {"time": time.time(), **self._who, "step": _kept(step), "values": _kept(values)}
        with self._lock:
            self._rows.append(row)
            if self._writer is None:
                self._writer = threading.Timer(_LOOK_S, self.write)
                self._writer.daemon = True
                self._writer.start()

    def write(self) -> None:
        """Write what was added and is not there yet."""
        with self._lock:
            rows, self._rows, self._writer = self._rows, [], None
        if rows:
            add_lines(self._path, [plain(row) for row in rows])


class OutputLog:
    """A file that a rank's output is copied to. It has no buffer: what a full disk has refused can't fail again later.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        open_lines(path).close()  # which ends a line that was torn
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._file, text.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        file, self._file = self._file, -1  # writing to it later is an OSError
        with suppress(OSError):
            os.close(file)


class _Tee(FileIO):
    """The file that a launcher with `--tee` has a rank write to. What a full disk refuses is lost, not tried again."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def lossy(stream: Any, name: str) -> Any:
    """Return a stream of this rank, `stdout` or `stderr`; of a `--tee`, one that loses text if the disk is full."""
    path = environ.text(ERROR_FILE)
    try:
        is_tee = path is not None and os.path.samefile(stream.fileno(), Path(path).with_name(f"{name}.log"))
    except (OSError, ValueError, AttributeError):  # a terminal, a pipe
        is_tee = False
    if not is_tee:
        return stream
    file = BufferedWriter(_Tee(stream.fileno(), "w", closefd=False))
    return TextIOWrapper(file, stream.encoding, stream.errors)


class _Copied:
    """A stream of text that is also written to a log, where each line begins with the time."""

    def __init__(self, stream: TextIO, log: OutputLog) -> None:
        self._stream, self._log, self._is_new = stream, log, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        for line in StringIO("" if text.startswith("\r") else text):  # bars draw over their line all the time
            self._log.write((time.strftime("%H:%M:%S ") if self._is_new else "") + line)
            self._is_new = line.endswith("\n")
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


class Steps:
    """Counts the steps of a process's optimizers, whoever calls them: of the one that has made the most."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.is_on = False

    def look(self) -> None:
        """Begin to count, once torch is loaded."""
        if hasattr(sys.modules.get("torch"), "optim") and not self.is_on:  # which is set when it is whole
            self.is_on = True
            sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: Any, *_: Any) -> None:
        self._counts[id(optimizer)] += 1

    @property
    def number(self) -> int:
        return max(list(self._counts.values()), default=0)


class Heartbeat:
    """Writes each second where this rank is: its step, and what its main thread has been in since when.

    A record has one size and place, so that it is replaced by one write; it has the stack of a rank that stays where it
    is. How many steps were made goes into a file of lines now and then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._who = folder, who()
        self._name = name_of(self._who)
        self._begun, self._process = time.time(), this_process()
        self._steps, self._told, self._told_at, self._steps_at = Steps(), 0, -inf, -inf
        self._place: Any = None
        self._moved_at = time.monotonic()  # the clock of the day may be set
        self._main = threading.main_thread().ident
        self._halt = threading.Event()
        (folder / RANKS).mkdir(exist_ok=True)
        self._file = os.open(folder / RANKS / f"{self._name}.json", os.O_WRONLY | os.O_CREAT, 0o644)
        self._steps.look()
        self._thread = threading.Thread(target=self._run, name="farflung heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._halt.wait(_LOOK_S if self._steps.is_on else _FIRST_LOOK_S):
            self._steps.look()
            if time.monotonic() - self._told_at >= _LOOK_S * 0.9:
                self._tell()

    def _tell(self, **more: Any) -> None:
        now, at, step = time.time(), time.monotonic(), self._steps.number
        frame = sys._current_frames().get(self._main or 0)
        call = user_call(frame)
        place = (step, call.name, call.place)
        if place != self._place:
            self._place, self._moved_at = place, at
        since = now - (at - self._moved_at)
        row = {"time": now, **self._who, **self._process, "begun": self._begun, "step": step}
        row |= {"call": call.name, "at": call.at, "since": since, **more}
        if at - self._moved_at > _STUCK_S and frame is not None:
            row["stack"] = [f"{made.filename}:{made.lineno} in {made.name}" for made in innermost_calls(frame)]
        self._told_at = at
        text = json.dumps(row)
        if len(text) >= _RECORD_BYTES:
            text = json.dumps({name: value for name, value in row.items() if name != "stack"})
        with suppress(OSError):
            os.pwrite(self._file, text.ljust(_RECORD_BYTES - 1).encode()[: _RECORD_BYTES - 1] + b"\n", 0)
        if step > self._told and (more or at - self._steps_at > _STEPS_S):
            self._told, self._steps_at = step, at
            add_lines(self._folder / STEPS, [{"time": now, **self._who, "step": step}])

    def stop(self) -> None:
        """Write that a program is about to take this process's place, so that no heartbeat follows, and no end."""
        self._halt.set()
        self._thread.join(_LOOK_S)
        self._tell(program=True)

    def close(self, code: int, why: str = "") -> None:
        """Write how this rank ends."""
        self._halt.set()
        self._thread.join(_LOOK_S)
        self._tell(ended=code, why=why[:_MOST_WORDS])
        with suppress(OSError):  # a file server that reports late that its disk is full
            os.close(self._file)


def name_of(one: Mapping[str, Any], called: str = "") -> str:
    """Return the name that a rank's record has: `rank0`, `replica3`, `replica3.rank1`; `called`: of its replica."""
    member, rank = one.get("member"), one.get("rank", 0)
    if member is None:
        return f"rank{rank}"
    return (called or f"replica{member}") + (f".rank{rank}" if rank else "")


@contextmanager
def recorded() -> Iterator[Heartbeat | None]:
    """Keep the log of this rank, its events and its heartbeat in the run's folder, if there is one, for a block."""
    folder = run_folder()
    if folder is None:
        yield None
        return
    keep_events()
    out, err = sys.stdout, sys.stderr
    with ExitStack() as kept:
        heartbeat: Heartbeat | None = None
        try:
            (folder / LOGS).mkdir(exist_ok=True)
            # As launchers call the replica: one that is started again continues its log.
            name = name_of(who(), re.sub(r"\W+", "-", environ.text(environ.REPLICA) or ""))
            log = kept.enter_context(closing(OutputLog(folder / LOGS / f"{name}.log")))
            sys.stdout, sys.stderr = _Copied(out, log), _Copied(err, log)
            heartbeat = Heartbeat(folder)
        except OSError as error:
            tell(f"farflung: the run's folder {folder} can't be written: {error.strerror}")
        code, why = 0, ""
        try:
            yield heartbeat
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except BaseException as error:
            code, why = 130 if isinstance(error, KeyboardInterrupt) else 1, f"{type(error).__name__}: {error}"
            raise
        finally:
            sys.stdout, sys.stderr = out, err
            if heartbeat is not None:
                heartbeat.close(code, why)
