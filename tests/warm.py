# SPDX-License-Identifier: Apache-2.0
"""A Python that has torch loaded: what it runs begins in a tenth of a second and not in several, most of them torch's.

A server loads what most scripts need, and forks for each program. What tests call in place of `python` is a small
client: it hands over its arguments, environment, folder and streams, passes signals on and ends as the program does.
It is for tests that are about neither the start of a process nor its signals, sessions and parents. What the server
can't do as Python would (flags, code on the command line, another PYTHONPATH, a pipe for reports) is left to a fresh
Python.
"""

import atexit
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

from farflung.launch.shell import CURRENT_LAST

_LOADED = """
farflung.testing.preload farflung.launch.run farflung.launch.elastic torch.distributed.launcher.api numpy yaml
farflung.accelerator.accelerator farflung.accelerator.checkpointer farflung.elastic
farflung.hosts.data_parallel farflung.launch.replicas farflung.strategy.sharded
"""
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = {words} + sys.argv[1:]
program = words[words[:1] == ["-u"]:]
is_ours = program[:1] == ["-c"] and program[1].startswith({ours!r})
is_plain = program and (program[0] == "-m" or is_ours or not program[0].startswith("-"))
has_pipe = "FARFLUNG_REPORTS" in os.environ  # a stream that is not handed over
if has_pipe or not is_plain or {{k: v for k, v in os.environ.items() if k.startswith("PYTHON")}} != {python_words!r}:
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({where!r})
request = json.dumps([os.getpid(), words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(4) or sys.exit("the server of warm programs failed"), "big")
def pass_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended, and its code is on the way
        pass
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}}:
    signal.signal(number, pass_on)
code = int.from_bytes(server.recv(4) or sys.exit("the server of warm programs failed"), "big", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def serving() -> Iterator[str]:
    """Serve programs for the length of a block; yields the path of a `python`, which has a `farflung` beside it."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        yield sys.executable
        return
    with TemporaryDirectory(prefix="warm_") as folder, socket.socket(socket.AF_UNIX) as door:
        python_words = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
        where, python = f"{folder}/server", f"{folder}/python"
        told = {"python": sys.executable, "python_words": python_words, "where": where, "ours": CURRENT_LAST}
        for path, words in (python, []), (f"{folder}/farflung", ["-m", "farflung"]):
            Path(path).write_text(_CLIENT.format(**told, words=words))
            Path(path).chmod(0o700)
        door.bind(where)
        door.listen(64)  # so that a client may knock while the server is loading
        command = [sys.executable, __file__, str(door.fileno()), python]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}  # read when torch is loaded; the launcher sets it too
        options = {"stdin": subprocess.PIPE, "pass_fds": [door.fileno()], "env": quiet}
        # Not in the folder of the test that comes first, which may end all that runs there.
        with subprocess.Popen(command, cwd=folder, **options) as server:
            door.close()  # so that nobody waits at the door of a server that has ended
            yield python
            server.kill()


class Program(NamedTuple):
    """What a client asks for: its process, the arguments behind `python`, folder and environment."""

    client: int
    words: list[str]
    folder: str
    variables: dict[str, str]

    def run(self) -> None:
        """Be this program, in this process."""
        self._enter_namespaces()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.variables)
        unbuffered = "-u" in self.words[:1]
        sys.argv = self.words[unbuffered:]
        if unbuffered:
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        elif os.isatty(1):  # the server's was none
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        is_module, is_code = sys.argv[0] == "-m", sys.argv[0] == "-c"
        code = sys.argv.pop(1) if is_code else ""
        if is_module:
            del sys.argv[0]
        sys.path[0] = "" if is_code else self.folder if is_module else str(Path(sys.argv[0]).resolve().parent)
        torch = import_module("torch")
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        torch.default_generator.seed()  # as a fresh torch is: differently in each process
        import_module("numpy").random.seed()
        main = sys.modules["__main__"] = ModuleType("__main__")
        if is_code:
            exec(code, main.__dict__)
        elif is_module:
            runpy._run_module_as_main(sys.argv[0])
        else:
            main.__file__ = sys.argv[0]
            exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec", dont_inherit=True), main.__dict__)

    def _enter_namespaces(self) -> None:
        """Go where the client is, which may be a machine made of namespaces."""
        there = Path(f"/proc/{self.client}/ns")
        for kind in ("net", "uts", "mnt"):
            if os.readlink(there / kind) != os.readlink(f"/proc/self/ns/{kind}"):
                descriptor = os.open(there / kind, os.O_RDONLY)
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), f"setns({kind})")
                os.close(descriptor)


def serve(door: socket.socket) -> Program | None:
    """Fork for each client until the standard input ends; returns None then, and in each fork what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets forks that have ended
    while True:
        ready, _, _ = select.select([door, 0], [], [])
        if 0 in ready:
            return None
        client, _ = door.accept()
        with client:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                return _attend(client)


def _attend(client: socket.socket) -> Program:
    """Fork once more, for the program of a client; tells the client its process and its end, and ends itself."""
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    asked = client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    pid = os.fork()
    if pid == 0:
        client.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return Program(*json.loads(asked))
    for stream in streams:
        os.close(stream)
    with suppress(OSError):  # the client is gone, which `select` shows too
        client.sendall(pid.to_bytes(4, "big"))
    if client in select.select([client, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        client.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def leave(codes: list[int]) -> None:
    """End with a code, after all that is done at exit, and spare a third of a second in which torch is taken apart."""
    if not codes:
        return
    sys.modules["__main__"].__dict__.clear()  # closes what the program left open
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(codes[0])


def main() -> None:
    codes: list[int] = []
    atexit.register(leave, codes)  # before all others, so that it is the last to be called
    gc.disable()
    for name in _LOADED.split():
        import_module(name)
    gc.freeze()
    gc.enable()
    sys.executable = sys.argv[2]
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is None:
        return
    try:
        program.run()
    except KeyboardInterrupt:
        raise  # Python ends by the signal
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except BaseException:
        codes.append(1)
        raise
    codes.append(0)


if __name__ == "__main__":
    main()
