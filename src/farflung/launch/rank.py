# SPDX-License-Identifier: Apache-2.0
"""The start of a rank: runs a script as Python would, and has its failure reported wherever it happens.

Its arguments are `[-m] SCRIPT [its arguments]`, or `--exec` and a program that is no Python, with its arguments. A
script that fails before it makes an `Accelerator`, or that knows nothing of Farflung, leaves its traceback for the
launcher too. If the launcher will show the report, nothing is printed here. Does without torch, whose loading is the
script's business, unless there is an outer loop to run or to miss.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import sys
from contextlib import redirect_stderr
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from farflung.base.events import FILES_ONLY, Kind, record, tell
from farflung.base.lazy import LazyModule
from farflung.comm.threads import await_gloo
from farflung.config import environ
from farflung.hosts.rounds import record_rounds
from farflung.hosts.trainer_log import keep_trainer_logs
from farflung.launch.codes import ENGINE, refused
from farflung.process.failure import PREEMPTED, has_note, has_report, record_exit, record_failure
from farflung.process.heard import record_signals
from farflung.process.place import Place
from farflung.process.run_files import Metrics, lossy, recorded
from farflung.process.tether import end_with_launcher

if TYPE_CHECKING:
    from farflung.data import slots
    from farflung.hosts import data_parallel, elastic
    from farflung.integrations import as_accelerate
else:
    slots = LazyModule("farflung.data.slots")
    data_parallel = LazyModule("farflung.hosts.data_parallel")
    elastic = LazyModule("farflung.hosts.elastic")
    as_accelerate = LazyModule("farflung.integrations.as_accelerate")


def run(arguments: list[str]) -> None:
    """Run the script in `arguments`, and exit as it does.

    If the launcher asks for an outer loop, torch's DDP is taken over before, and the loops end after the script.
    """
    has_agent = environ.text(environ.LAUNCHER) is not None
    end_with_launcher()
    if arguments[0] == "--exec":
        _become(arguments[1:])
    record_signals()
    atexit.register(await_gloo)  # first, so that it is the last to be called
    outer = None
    try:
        if environ.text("FARFLUNG_OUTER_RECIPE"):
            outer = data_parallel.take_over(slots.Slots)
            if outer.place.member is not None:
                as_accelerate.install_for_replica()
        elif Place.launched().member is not None:
            elastic.require_loop()
        code, main = _loaded_module(arguments[1:]) if arguments[0] == "-m" else _loaded_script(arguments)
        sys.modules["__main__"] = main
        ended: SystemExit | None = None
        try:
            exec(code, main.__dict__)
        except SystemExit as end:
            if end.code:
                raise
            ended = end
        if outer is not None:
            outer.close()
        if ended is not None:
            raise ended
    except SystemExit as end:
        if outer is not None and end.code:
            outer.leave(end)
        if has_agent and has_note(PREEMPTED):  # the launcher knows by it; after a failure it would end the other ranks
            sys.exit(0)
        record_exit(end.code, end.__traceback__)
        raise
    except KeyboardInterrupt:
        if has_report():  # who pressed Ctrl-C knows it, and one traceback for each rank would only hide the rest
            sys.excepthook = lambda *error: None
        raise
    except BaseException as error:
        if outer is not None:
            outer.leave(error)
        while (trace := error.__traceback__) is not None and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next
        _report(error)
        sys.exit(1)


def _become(program: list[str]) -> None:
    """Turn this process into a program that is no Python."""
    try:
        os.execvp(program[0], program)
    except OSError as error:
        failure = refused(error)
        record_failure(failure)
        if not has_report():
            tell(f"{type(failure).__name__}: {failure}")
        sys.exit(ENGINE)


def _report(error: BaseException) -> None:
    """Do what the interpreter does with an error that nobody catches, and leave a report for the launcher."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    printed = io.StringIO()
    with redirect_stderr(printed):
        sys.excepthook(type(error), error, error.__traceback__)
    record_failure(error)  # unless a hook did
    record(Kind.FAILED, level=FILES_ONLY, why=f"{type(error).__name__}: {error}")
    if not has_report():
        tell(printed.getvalue().removesuffix("\n"))


def _loaded_script(arguments: list[str]) -> tuple[CodeType, ModuleType]:
    """Return the code of the script and the module that it is to run in, with `sys` as Python would set it."""
    sys.argv = arguments
    path = Path(arguments[0]).absolute()
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        sys.path.insert(0, str(path))
        return _loaded(PathFinder.find_spec("__main__", [str(path)]), arguments[0])
    _look_in(path.resolve().parent)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __loader__=SourceFileLoader("__main__", str(path)))
    return compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main


def _loaded_module(arguments: list[str]) -> tuple[CodeType, ModuleType]:
    """Return the code of a module, or of a package's `__main__`, and the module that it is to run in."""
    sys.argv = arguments
    _look_in(Path.cwd())
    name = arguments[0]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loaded = _loaded(spec, name)
    sys.argv[0] = str(loaded[1].__file__)
    return loaded


def _look_in(folder: Path) -> None:
    """Have modules looked for there first, as Python does for a script unless it is asked for a safe path."""
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path.insert(0, str(folder))


def _loaded(spec: ModuleSpec | None, name: str) -> tuple[CodeType, ModuleType]:
    get_code = None if spec is None else getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if spec and get_code else None
    if spec is None or code is None:
        raise ImportError(f"{name} has no Python code to run.")
    main = ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent)
    return code, main


def main() -> None:
    """Run the script in this process's arguments."""
    sys.stdout, sys.stderr = lossy(sys.stdout, "stdout"), lossy(sys.stderr, "stderr")
    for stream in (sys.stdout, sys.stderr):  # `-u` has `print` write a line and its end apart, and ranks share a pipe
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    with recorded() as heartbeat:
        if sys.argv[1] == "--exec" and heartbeat is not None:
            heartbeat.stop()
        elif (metrics := Metrics.of_run()) is not None:
            keep_trainer_logs(metrics)
            record_rounds()
        run(sys.argv[1:])
