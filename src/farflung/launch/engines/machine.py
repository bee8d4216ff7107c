# SPDX-License-Identifier: Apache-2.0
"""A machine of a Ray cluster: the actor there, which runs a launcher of ours, and the line to it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from farflung.launch.engines.engine import launcher
from farflung.launch.engines.lines import GONE, Line
from farflung.launch.network import get_free_port
from farflung.process.tether import SIGN_S

_ANSWER_WITHIN_S = 1.0
# Ray kills the processes that a worker has started when that ends, but not theirs: they are to end by themselves.
_APART = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & wait $!', "sh")


class Machine:
    """What runs on a node, as an actor of several threads: a launcher, and the lines that it prints."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._open = len(self._lines)
        self._news = threading.Condition()

    def where(self) -> tuple[str, str, int]:
        """Return the node's address, its id, and a port that is free there."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), get_free_port()

    def begin(self, words: Sequence[str], folder: str) -> None:
        """Start a launcher: `words` follow `python -m farflung`."""
        command = [*_APART, *(sys.executable, "-m", "farflung.process.tether"), *launcher(words, sys.executable)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise RuntimeError(f"nothing could be started in {folder}: {error.strerror}") from None
        for name in self._lines:
            threading.Thread(target=self._keep, args=(name,), daemon=True).start()
        threading.Thread(target=self._give_signs, daemon=True).start()

    def read(self, name: str) -> tuple[list[bytes], int | None]:
        """Return the lines of a stream that nobody has read, and the exit code once there are no more."""
        with self._news:
            self._news.wait_for(lambda: self._lines[name] or not self._open, _ANSWER_WITHIN_S)
            lines, self._lines[name] = self._lines[name], []
            is_all = not self._open
        return lines, self._process.wait() if is_all and self._process else None

    def tell(self, number: int) -> None:
        """Send the launcher a signal; 0: only that somebody is here."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.write(bytes([number]))
                self._process.stdin.flush()

    def _keep(self, name: str) -> None:
        assert self._process is not None
        for line in getattr(self._process, name):
            with self._news:
                self._lines[name].append(line)
                self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    def _give_signs(self) -> None:
        while self._process and self._process.poll() is None:
            self.tell(0)
            time.sleep(SIGN_S)


class RayLine(Line):
    """The connection to an actor."""

    def __init__(self, ray: Any, actor: Any, number: int) -> None:
        super().__init__(str(number))
        self._ray, self._actor, self.number = ray, actor, number
        self.node, self.leaves = "", False  # the node's id, once it has one; whether it was asked to leave
        self._code: int | None = None
        self._begun: Any = None

    @property
    def code(self) -> int | None:
        return self._code

    @property
    def sources(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        return self._read("stdout"), self._read("stderr")

    def begin(self, words: Sequence[str], folder: str) -> None:
        """Have the actor start a launcher, once it has a node."""
        self._begun = self._actor.begin.remote(list(words), folder)

    def where(self, *wait_s: float) -> tuple[str, str, int]:
        """Wait until the actor has a node, and return what it says of it."""
        found: tuple[str, str, int] = self._ray.get(self._actor.where.remote(), timeout=wait_s[0] if wait_s else None)
        self.host, self.node = f"{self.number}@{found[0]}", found[1]
        return found

    def tell(self, number: int = 0) -> None:
        if number and not self.node:  # it waits for one
            self.kill()
        elif number:
            self._actor.tell.remote(number)

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def _read(self, name: str) -> Iterator[bytes]:
        code = None
        try:
            self.where()
            self._ray.get(self._begun)
            while code is None:
                lines, code = self._ray.get(self._actor.read.remote(name))
                yield from lines
        except self._ray.exceptions.RayError as error:
            self.said, code = in_short(error), GONE
        self._code = code


def in_short(error: Exception) -> str:
    """Return the last sentence of Ray's error, which is the reason."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line), lines[-1] if lines else type(error).__name__)
