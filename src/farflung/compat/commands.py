# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers for tests that start commands, and for what such tests leave behind."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

from farflung.compat.requirements import device_count
from farflung.config import environ

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunOutput:
    """How a command ended: its code, and the lines that it wrote."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


class SubprocessCallException(Exception):
    """A command that `run_command` started has failed; the message has what it wrote."""


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return a command that begins with `farflung launch` and has each of `kwargs` as a flag; None leaves one out."""
    flags = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in kwargs.items() if value is not None
    ]
    return [sys.executable, "-m", "farflung", "launch", *flags]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def execute_subprocess_async(
    cmd: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command to its end, for `timeout` seconds at most; show it (`echo`) and, unless `quiet`, what it wrote.

    Raises RuntimeError, with what it wrote to stderr, if it fails; TimeoutExpired if it runs too long and is ended.
    """
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    done = subprocess.run(words, env=env, stdin=stdin, timeout=timeout, capture_output=True, text=True)
    if not quiet:
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"'{' '.join(words)}' failed with returncode {done.returncode}\n\n{done.stderr}")
    return RunOutput(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


def run_command(
    command: Sequence[str | Path], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command to its end; return what it wrote, both streams in one, with `return_stdout`."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SubprocessCallException(f"Command `{' '.join(words)}` failed with the following error:\n\n{done.stdout}")
    return done.stdout if return_stdout else None


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path below the folder of the package `farflung`."""
    return _PACKAGE.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, 0 without it."""
    return int((environ.text("PYTEST_XDIST_WORKER") or "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that no other worker of pytest-xdist gets: 29500 and the number of this one."""
    return 29500 + pytest_xdist_worker_id()


@contextmanager
def assert_exception(exception_class: type[Exception], msg: str | None = None) -> Iterator[None]:
    """Check that a block raises an exception of a class, with `msg` in its text."""
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"Expected {msg!r} in the message, which is {str(error)!r}.") from error
    except Exception as error:
        raise AssertionError(f"Expected {exception_class}, but {type(error)} was raised.") from error
    else:
        raise AssertionError(f"Expected {exception_class}, but nothing was raised.")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return what it wrote to stdout."""
    with redirect_stdout(io.StringIO()) as written:
        func(*args, **kwargs)
    return written.getvalue()


class TempDirTestCase(TestCase):
    """Tests that share the folder `self.tmpdir`; it is emptied before each of them unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class MockingTestCase(TestCase):
    """Tests of which each runs with the patches that its `setUp` gives to `add_mocks`."""

    def add_mocks(self, mocks: mock._patch[Any] | Sequence[mock._patch[Any]]) -> None:
        """Start patches; they end with the test."""
        self.mocks: Sequence[mock._patch[Any]] = mocks if isinstance(mocks, Sequence) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)
