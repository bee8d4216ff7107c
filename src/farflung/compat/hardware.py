# SPDX-License-Identifier: Apache-2.0
"""What this machine's GPUs and kernel are, asked without waking a GPU where that can be."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from functools import lru_cache
from importlib import util

import torch

from farflung.base.errors import Unsupported
from farflung.base.optional import compare_release
from farflung.compat.probes import is_rocm_available
from farflung.compat.variables import parse_flag_from_env

_OLDEST_KERNEL = "5.5.0"  # older ones let processes hang, says Accelerate
_WITHOUT_P2P = "RTX 40"  # GPUs that can neither talk to each other nor to InfiniBand ...
_DRIVER_WITH_P2P = "550.40.07"  # ... until this driver

_logger = logging.getLogger(__name__)


def _nvidia_smi(question: str) -> list[str]:
    """Return the answer of nvidia-smi, one line a GPU."""
    command = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of this machine's NVIDIA GPUs and how many they are; FileNotFoundError without nvidia-smi."""
    names = [line.split(",")[1].strip() for line in _nvidia_smi("count,name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver; FileNotFoundError without nvidia-smi."""
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Say whether several GPUs of this machine can talk to each other and to InfiniBand; True where it is not known."""
    try:
        names, count = get_gpu_info()
        if count > 1 and any(_WITHOUT_P2P in name for name in names):
            return compare_release(get_driver_version(), ">=", _DRIVER_WITH_P2P)
    except (OSError, subprocess.SubprocessError, LookupError):
        pass
    return True


@lru_cache
def check_cuda_fp8_capability() -> bool:
    """Say whether the first GPU computes in fp8: compute capability 8.9 or higher."""
    return torch.cuda.get_device_capability() >= (8, 9)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this thread run on the cores near GPU `local_process_index`; without GPUs, do nothing.

    Needs pynvml, and NVIDIA's GPUs. `verbose` logs the cores, by default as `ACCELERATE_DEBUG_MODE` says.
    """
    if not torch.cuda.is_available():
        return
    if is_rocm_available():
        raise Unsupported("Binding processes to the cores near AMD's GPUs is not supported. Use numactl.")
    if util.find_spec("pynvml") is None:
        raise ImportError("Binding processes to the cores near a GPU needs pynvml: `pip install nvidia-ml-py`.")
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByIndex(local_process_index))
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _logger.info("process %s runs on the cores %s", local_process_index, sorted(os.sched_getaffinity(0)))


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do what `override_numa_affinity` does, the first time that it is called for a GPU."""
    override_numa_affinity(local_process_index, verbose)


def check_os_kernel() -> None:
    """Log a warning where this machine's Linux is so old that processes are known to hang."""
    info = platform.uname()
    if info.system == "Linux" and compare_release(info.release, "<", _OLDEST_KERNEL):
        _logger.warning(f"Linux {info.release} is older than {_OLDEST_KERNEL}, so processes may hang.")
