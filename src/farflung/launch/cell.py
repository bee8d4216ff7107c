# SPDX-License-Identifier: Apache-2.0
"""A replica of an elastic run that trains in a notebook's own process, with its launcher in a thread of that process.

The model stays where the cell has it, and a GPU that the notebook has used already can be used. Interrupting the cell
ends the replica: the others continue, and the cell can be run again.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from farflung.base.errors import ConfigError, StateError
from farflung.base.events import tell
from farflung.comm.threads import ThreadedCall
from farflung.config import environ
from farflung.config.resolve import resolve
from farflung.hosts.rounds import stop_recording
from farflung.launch.codes import EngineFailure
from farflung.launch.plan import Script, has_launchers
from farflung.launch.start import launch_script
from farflung.observe.run import ObservedRun
from farflung.observe.watch import screen
from farflung.process.bootstrap import leave_world
from farflung.process.failure import ERROR_FILE
from farflung.process.run_files import recorded
from farflung.process.world import current_world

_T = TypeVar("_T")

_LOOK_S = 0.05
_DRAW_S = 5.0  # between two pictures of the run
_WIDTH = 100  # of a picture, in characters


def train_in_notebook(function: Callable[..., _T], args: Sequence[Any], settings: Mapping[str, str]) -> _T:
    """Return what `function(*args)` does in this process, as a replica of the run that `settings` name.

    Args:
        settings: of `farflung launch`, by name.

    Raises:
        ConfigError: they can't work.
        StateError: this process has joined a world already.
    """
    refuse_joined("join another run")
    resolved = resolve({**settings, "replicas": "1", "max_restarts": "0"})
    if has_launchers(resolved.settings):
        raise ConfigError("A replica in a notebook is one process: leave ranks_per_replica, tee and log_dir out of it.")
    replica = _NotebookReplica(getattr(function, "__name__", "notebook"))
    script = Script(replica.name, start=replica.start)
    launcher = ThreadedCall(partial(launch_script, resolved, script), "launch a replica of this notebook")
    with _drawn(replica):
        try:
            return replica.run(function, args, launcher)
        finally:
            leave_world()
            stop_recording()
            launcher.result()


def refuse_joined(what: str) -> None:
    """Raise StateError if this process has joined a world already; `what` it can't do then."""
    if (joined := current_world()) is not None:
        raise StateError(
            f"This process is rank {joined.rank} of {joined.size} already, so it can't {what}. Restart the notebook "
            "and make the `Accelerator` inside the function only."
        )


class _NotebookReplica:
    """The function of a cell, as a launcher sees a process."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, os.getpid()
        self._code: int | None = None
        self.variables: Mapping[str, str] = {}
        self._is_started = threading.Event()

    def start(self, variables: Mapping[str, str]) -> _NotebookReplica:
        self.variables = {name: value for name, value in variables.items() if name != ERROR_FILE}  # errors are raised
        self._is_started.set()
        return self

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def run(self, function: Callable[..., _T], args: Sequence[Any], launcher: ThreadedCall[int]) -> _T:
        """Call the function once the launcher has started this replica; raise the launcher's error if it doesn't."""
        code, before = 1, sys.argv
        try:
            while not self._is_started.wait(_LOOK_S):
                if launcher.is_over and not self._is_started.is_set():
                    code = launcher.result()
                    raise EngineFailure(f"The launcher ended with exit code {code} before it started this replica.")
            with environ.patched(self.variables), recorded():
                sys.argv = [self.name]  # a kernel's own one names a file that no other kernel has
                result = function(*args)
            code = 0
            return result
        except KeyboardInterrupt:
            code = -signal.SIGINT
            raise
        finally:
            sys.argv, self._code = before, code


@contextmanager
def _drawn(replica: _NotebookReplica) -> Iterator[None]:
    """Show in a notebook what `farflung watch` shows of the replica's run, until the block ends and once more."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        yield
        return
    shown, is_over = ipython.display.display({"text/plain": ""}, raw=True, display_id=True), threading.Event()

    def draw() -> None:
        if folder := replica.variables.get(environ.RUN_FOLDER):
            console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
            console.print(screen(ObservedRun(Path(folder)), _WIDTH))
            page = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", clear=False)
            shown.update({"text/html": page, "text/plain": console.export_text()}, raw=True)

    def keep_drawing() -> None:
        try:
            while not is_over.wait(_DRAW_S):
                draw()
            draw()
        except Exception as error:  # whatever it is, it must not cost the training's result
            tell(f"farflung: the run is not drawn any more: {error}")

    drawing = ThreadedCall(keep_drawing, "draw the run")
    try:
        yield
    finally:
        is_over.set()
        drawing.result()
