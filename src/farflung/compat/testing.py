# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers for tests: what a test needs, commands and what they leave behind, and the smallest task."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import numpy as np
import torch
from torch import Tensor, nn

from farflung.accelerator.operations import gather
from farflung.accelerator.views import AcceleratorState
from farflung.compat import defined_in, probes
from farflung.compat.variables import parse_flag_from_env
from farflung.config import environ
from farflung.trackers.tracking import get_available_trackers

# ---- what a test needs: without it the test is skipped, and says what it needs


def _nothing() -> int:
    return 0


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of this machine's accelerators (or `cpu`), their number, and what tells the memory in use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu", 1, _nothing
    module: Any = torch.get_device_module(device)
    used: Callable[[], int] = getattr(module, "memory_allocated", getattr(module, "current_allocated_memory", _nothing))
    return device.type, torch.accelerator.device_count(), used


torch_device, device_count, memory_allocated_func = get_backend()


def _needs(what: str, is_there: bool) -> Callable[[Any], Any]:
    def require(test_case: Any) -> Any:
        return unittest.skipUnless(is_there, f"needs {what}")(test_case)

    return require


def skip(test_case: Any) -> Any:
    """Skip a test."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Skip a test unless the environment variable `RUN_SLOW` says yes."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW"), "test is slow")(test_case)


def run_first(test_case: Any) -> Any:
    """Mark a test as one that pytest-order runs first."""
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test if torch is older than `version`."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    return _needs(f"torch {version}", probes.is_torch_version(">=", str(version)))(test_case)


# Each asks the probe of its name: `require_aim` asks `is_aim_available`.
_PROBED = """
    aim bnb clearml comet_ml cuda datasets deepspeed dvclive fp16 fp8 import_timer matplotlib mlflow mlu mps musa neuron
    npu pandas peft pippy schedulefree sdaa swanlab tensorboard timm torchao torchdata_stateful_dataloader torchvision
    trackio transformer_engine transformer_engine_mxfp8 transformers triton wandb xpu
"""
_NEEDED: dict[str, tuple[str, bool]] = {
    **{name: (name, getattr(probes, f"is_{name}_available")()) for name in _PROBED.split()},
    "cpu": ("a machine without accelerators", torch_device == "cpu"),
    "cuda_or_hpu": ("an NVIDIA or AMD GPU or a Gaudi", probes.is_cuda_available() or probes.is_hpu_available()),
    "cuda_or_xpu": ("an NVIDIA, AMD or Intel GPU", probes.is_cuda_available() or probes.is_xpu_available()),
    "fsdp2": ("torch 2.6 or newer", True),
    "huggingface_suite": (
        "transformers and datasets",
        probes.is_transformers_available() and probes.is_datasets_available(),
    ),
    "multi_device": ("several accelerators", device_count > 1),
    "multi_gpu": ("several NVIDIA or AMD GPUs", torch.cuda.device_count() > 1),
    "multi_gpu_or_xpu": (
        "several NVIDIA, AMD or Intel GPUs",
        torch_device in ("cuda", "xpu") and device_count > 1,
    ),
    "multi_xpu": ("several Intel GPUs", torch.xpu.device_count() > 1),
    "non_cpu": ("an accelerator", torch_device != "cpu"),
    "non_hpu": ("another device than a Gaudi", torch_device != "hpu"),
    "non_torch_xla": ("a machine without XLA", not probes.is_torch_xla_available()),
    "non_xpu": ("another device than an Intel GPU", torch_device != "xpu"),
    "single_device": ("exactly one accelerator", torch_device != "cpu" and device_count == 1),
    "single_gpu": ("exactly one NVIDIA or AMD GPU", torch.cuda.device_count() == 1),
    "single_xpu": ("exactly one Intel GPU", torch.xpu.device_count() == 1),
    "tp": ("torch 2.3 and transformers", probes.is_transformers_available()),
    "tpu": ("a TPU", probes.is_torch_xla_available(check_is_tpu=True)),
    "trackers": ("a tracker", len(get_available_trackers()) > 1),  # one of them needs no library
}
globals().update({f"require_{name}": _needs(*needed) for name, needed in _NEEDED.items()})


# ---- commands, and what they leave behind


_PACKAGE = Path(__file__).parents[1]


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
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, for `timeout` seconds at most; show it (`echo`) and, unless `quiet`, what it wrote.

    Returns its code, and the lines that it wrote to stdout and stderr.

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
    return subprocess.CompletedProcess(words, done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


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
    """Tests that each run with the patches that its `setUp` gives to `add_mocks`."""

    def add_mocks(self, mocks: mock._patch[Any] | Sequence[mock._patch[Any]]) -> None:
        """Start patches; they end with the test."""
        self.mocks: Sequence[mock._patch[Any]] = mocks if isinstance(mocks, Sequence) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


# ---- an `Accelerator`, and a line through points


class AccelerateTestCase(TestCase):
    """Tests after each of which this process has no `Accelerator` and no world any more."""

    def tearDown(self) -> None:
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether all processes have brought the same tensor."""
    return all(torch.equal(other, tensor.cpu()) for other in gather(tensor[None]).cpu())


class RegressionDataset:
    """Points near the line `y = a x + b`, with normal noise of 0.1; equal seeds give equal points."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        random = np.random.default_rng(seed)
        self.length = length
        self.x = random.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + random.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The line `a x + b`, of two trained numbers. Its first call prints the dtypes that it computes with."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Any = None) -> Tensor:
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")
            self.first_batch = False
        result: Tensor = x * self.a + self.b
        return result


__all__ = [*defined_in(globals()), "DEFAULT_LAUNCH_COMMAND", "device_count", "memory_allocated_func", "torch_device"]
