# SPDX-License-Identifier: Apache-2.0
"""Probes of the machine itself. torch is loaded by the two that ask it, so that the others answer where it can't be."""

from __future__ import annotations

import os
import platform
import re
import resource
import secrets
import time
from pathlib import Path
from typing import Any

from farflung.base.optional import installed_version
from farflung.base.words import counted, in_bytes
from farflung.doctor.probe import Found, unknown

PROBED_BYTES = 64_000_000
_NVIDIA = Path("/proc/driver/nvidia/version")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHM = Path("/dev/shm")
# Loaders hand batches to the training process in shared memory: some workers with a few batches of some MB each.
_LEAST_SHM_BYTES = 1_000_000_000
# Each tensor that a worker hands over, each connection and each file is one; 1024, a common default, is soon used up.
_LEAST_OPEN_FILES = 4096
_LEAST_FREE = 0.1  # of the memory
_SLOW_FOLDER_BYTES_S = 20e6  # a checkpoint of 1 GB would take a minute


def versions() -> Found:
    """Find the versions of Python, Farflung and torch, and for what torch was built."""
    figures = {"python": platform.python_version(), "farflung": installed_version("farflung")}
    said = f"Python {figures['python']}, Farflung {figures['farflung']}"
    try:
        import torch
    except Exception as error:
        why = f"it can't be loaded ({type(error).__name__}: {error})"
        return Found(f"{said}, torch not known: {why}", figures, (f"torch: {why}. Install it again.",))
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return Found(
        f"{said}, torch {torch.__version__} ({build})", {**figures, "torch": torch.__version__, "build": build}
    )


def devices() -> Found:
    """Find the accelerators that torch sees, with their memory and the driver."""
    import torch

    is_nvidia = _NVIDIA.exists()
    driver = _driver()
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        todo: tuple[str, ...] = ()
        if is_nvidia:
            why = "torch sees none of its GPUs" if torch.version.cuda else "torch was built for the CPU alone"
            fix = "Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES." if torch.version.cuda else "Install a CUDA build."
            todo = (f"devices: there is an NVIDIA driver ({driver}), but {why}. {fix}",)
        return Found("no accelerator: training runs on the CPU", {"devices": [], "driver": driver}, todo)
    found = [_device(torch, str(kind), index) for index in range(torch.accelerator.device_count())]
    named = [f"{one['name']}, {in_bytes(one['memory']) if one['memory'] else 'memory not known'}" for one in found]
    listed = ", ".join(f"{named.count(name)} x {name}" for name in dict.fromkeys(named))
    return Found(f"{listed}; driver {driver or 'not known'}", {"devices": found, "driver": driver})


def _device(torch: Any, kind: str, index: int) -> dict[str, Any]:
    module = torch.get_device_module(kind)
    ask = getattr(module, "get_device_properties", None)  # MPS has none
    known = ask(index) if ask is not None else None
    return {"name": getattr(known, "name", kind), "memory": getattr(known, "total_memory", None)}


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, None where it is not known; torch does not tell it."""
    try:
        said = re.search(r"(?:Kernel Module\D*|x86_64|aarch64)\s+(\d[\d.]+)", _NVIDIA.read_text(encoding="utf-8"))
    except OSError:
        return None
    return said[1] if said else None


def shared_memory() -> Found:
    """Find how large /dev/shm is, in which the workers of loaders hand over batches."""
    if not _SHM.is_dir():
        return unknown(f"this system has no {_SHM}")
    found = os.statvfs(_SHM)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    todo = f"shared memory: only {in_bytes(free)} of {_SHM} is free, and loaders with workers hand over batches there."
    fix = "Start the container with --shm-size=8g or --ipc=host, or use num_workers=0."
    figures = {"bytes": size, "free_bytes": free}
    return Found(
        f"{in_bytes(free)} of {in_bytes(size)} free", figures, (f"{todo} {fix}",) if free < _LEAST_SHM_BYTES else ()
    )


def open_files() -> Found:
    """Find how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"soft": soft, "hard": hard}
    words = {name: "no limit" if limit == resource.RLIM_INFINITY else str(limit) for name, limit in limits.items()}
    todo: tuple[str, ...] = ()
    if soft != resource.RLIM_INFINITY and soft < _LEAST_OPEN_FILES:
        most = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
        how = f"ulimit -n {most}" if hard == resource.RLIM_INFINITY or hard > soft else "raise the hard limit, as root"
        todo = (
            f"open files: at most {soft}, fewer than {_LEAST_OPEN_FILES}: loaders and connections need more. {how}",
        )
    return Found(f"{words['soft']}, at most {words['hard']}", limits, todo)


def cores(num_cores: int) -> Found:
    """Find how busy the cores are that this process may use."""
    load, on_host = os.getloadavg()[0], max(num_cores, os.cpu_count() or 1)  # the load is the host's, for all its cores
    todo = f"cores: programs ask for {load:.1f} of {counted(on_host, 'core')}. What is measured here will be slow."
    return Found(
        f"{num_cores}, load {load:.2f} in the last minute",
        {"cores": num_cores, "load": load},
        (f"{todo} End what else runs.",) if load > on_host else (),
    )


def memory() -> Found:
    """Find how much memory there is, with the limit of the container."""
    import psutil  # type: ignore[import-untyped]  # as in launch/network.py

    found = psutil.virtual_memory()
    try:
        limit = int(_MEMORY_LIMIT.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none: `max`
        limit = None
    size = min(found.total, limit or found.total)
    figures = {"bytes": found.total, "available_bytes": found.available, "container_bytes": limit}
    contained = f"; the container may use {in_bytes(limit)}" if limit is not None and limit < found.total else ""
    todo = f"memory: only {in_bytes(found.available)} are available. End what else runs."
    return Found(
        f"{in_bytes(found.available)} of {in_bytes(found.total)} available{contained}",
        figures,
        (todo,) if found.available < _LEAST_FREE * size else (),
    )


def folder(path: Path) -> Found:
    """Measure how fast a folder takes 64 MB until they are safe (fsync), and gives them back; nothing is left there."""
    file = path / f".farflung-doctor-{secrets.token_hex(8)}"
    block = secrets.token_bytes(1_000_000)
    try:
        began = time.perf_counter()
        try:
            with open(file, "wb", buffering=0) as out:
                for _ in range(PROBED_BYTES // len(block)):
                    out.write(block)
                os.fsync(out.fileno())
                write_s = time.perf_counter() - began
                is_dropped = hasattr(os, "posix_fadvise")
                if is_dropped:  # from the file cache, or else that would be what is measured
                    os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with open(file, "rb", buffering=0) as back:
                while back.read(len(block)):
                    pass
            read_s = time.perf_counter() - began
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        why = f"{path}: {error.strerror}"
        return unknown(why, f"folder: {why}. Checkpoints can't be written there; name another one with --folder.")
    written, read = PROBED_BYTES / write_s, PROBED_BYTES / read_s
    todo = f"folder: {path} takes {in_bytes(written)} a second, so 1 GB of a checkpoint waits {1e9 / written:.0f} s."
    cached = "" if is_dropped else ", perhaps from the file cache"
    return Found(
        f"{path}: 64 MB written at {in_bytes(written)}/s, with fsync; read at {in_bytes(read)}/s{cached}",
        {"folder": str(path), "write_bytes_per_s": written, "read_bytes_per_s": read, "from_cache": not is_dropped},
        (f"{todo} Use a faster one, or save less often.",) if written < _SLOW_FOLDER_BYTES_S else (),
    )


def clock() -> Found:
    """Find what time it is here."""
    now = time.time()
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return Found(f"{said}; not known: whether NTP keeps it", {"unix_s": now, "ntp": None})
