# SPDX-License-Identifier: Apache-2.0
"""Asks a host what it has for a run, and for what a run has written there. The host's Python gets this file as a text,
as Farflung may not be installed there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO


def probe(script: str, kind: str, connection: str = "") -> dict[str, Any]:
    """Return what is on this machine, in the current folder.

    Args:
        script, kind: a path; the name of a `module`, whose top package counts; or of a `program`.
        connection: sshd's variable SSH_CONNECTION, which has the address that this machine was reached at.
    """
    package = _package("farflung")
    program = shutil.which(script) or "" if kind == "program" else script
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "farflung": "missing" if package is None else f"{_version('farflung')} ({_hash(package)})",
        "script": _hash(_package(script.split(".")[0]) if kind == "module" else Path(program)),
        "GPUs": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "address": (connection.split() + [""] * 3)[2],
        "port": port,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    folders = [] if found is None else list(found.submodule_search_locations or [found.origin or ""])
    return Path(folders[0]) if folders else None


def _hash(path: Path | None) -> str:
    """Return some digits of a hash over a file, or over the Python files of a folder."""
    if path is None or path == Path() or not path.exists():
        return "missing"
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def pack(folder: Path, submitted: str, folders: Sequence[str], out: BinaryIO) -> None:
    """Write the lines and logs of a run's folder as a tar: what the reader has not got yet of each file.

    Args:
        submitted: a file that only the reader's own folder has. For hosts that share another disk, and for later runs
            in the folder, a mark there says how much of each file was sent.
        folders: those inside whose files are wanted. Nothing else is read: checkpoints may be large.
    """
    mark = folder / ".copied"
    is_there = not folder.is_dir() or (folder / submitted).exists()
    sent = json.loads(mark.read_text() or "{}") if mark.exists() else {}
    files = (
        [] if is_there else [*folder.glob("*.jsonl"), *(path for name in folders for path in folder.glob(f"{name}/*"))]
    )
    with tarfile.open(fileobj=out, mode="w|") as packed:
        for path in filter(Path.is_file, files):
            with path.open("rb") as file:
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # never a link, whatever names it has
                before, size = sent.get(entry.name), os.fstat(file.fileno()).st_size
                # Lines are appended to the reader's, unless the file is a new one.
                begin = 0 if before is None or before > size or "/" in entry.name else before
                if before != size:
                    file.seek(begin)
                    entry.size, sent[entry.name] = size - begin, size
                    packed.addfile(entry, file)
    if not is_there:
        mark.write_text(json.dumps(sent))


if __name__ == "__main__":
    word, task, *rest = sys.argv[1:]
    print(f"\n{word}", flush=True)  # the shell of the host may have printed before
    if task == "pack":
        pack(Path(rest[0]), rest[1], rest[2:], sys.stdout.buffer)
    else:
        print(json.dumps(probe(*rest)))
