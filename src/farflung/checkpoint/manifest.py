# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: which files, how long, with which checksums. Whoever reads it knows what is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from farflung.base.errors import CheckpointError
from farflung.checkpoint import paths
from farflung.checkpoint.files import inside, is_file
from farflung.checkpoint.reader import damage_as
from farflung.checkpoint.writer import BLOCK, FileWriter

_FORMAT = 1


class FileRecord(NamedTuple):
    """A file: its size in bytes and its checksum."""

    num_bytes: int
    crc32: int
    blocks: tuple[int, ...] = ()  # the checksums of its blocks of `BLOCK` bytes, so that each can be fetched alone


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and facts of the run that wrote it."""

    files: dict[str, FileRecord]  # by name, relative to the folder
    step: int = 0  # micro-batches since the data began
    optimizer_steps: list[int | None] | None = None  # completed ones; None: written before they were counted
    iteration: int = 0  # which checkpoint of its run it is
    world_size: int = 1  # how many processes wrote it
    written_at: float = 0.0  # seconds since 1970
    versions: dict[str, str] = field(default_factory=dict)  # of farflung and torch

    @property
    def completed_steps(self) -> int | None:
        """The optimizer steps of the run, those of its busiest optimizer; None: not known, or there is no optimizer."""
        known = [steps for steps in self.optimizer_steps or () if steps is not None]
        return max(known, default=None)

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())

    def write(self, path: Path) -> None:
        """Write the manifest, the last file of a checkpoint, and wait for the disk."""
        files = {name: _row(record) for name, record in sorted(self.files.items())}
        content = {"format": _FORMAT, **asdict(self), "files": files}
        with FileWriter(path) as file:
            file.write(json.dumps({**content, "crc32": _digest(content)}, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder, None if there is none; CheckpointError if it is damaged."""
        path = folder / paths.MANIFEST
        if not is_file(path):
            return None
        with damage_as(f"{path} is damaged"):
            content = json.loads(path.read_bytes())
            digest = content.pop("crc32")
            if digest != _digest(content):
                raise ValueError("it was changed after it was written")
            number = content.pop("format")
            if number != _FORMAT:
                raise CheckpointError(f"{path} has format {number}; this version of Farflung reads format {_FORMAT}.")
            files = {name: _record(row) for name, row in content.pop("files").items()}
            manifest = cls(files=files, **content)
            if not all(steps is None or type(steps) is int for steps in manifest.optimizer_steps or ()):
                raise ValueError(f"optimizer_steps is {manifest.optimizer_steps}")
        for name in files:
            inside(name)
        return manifest


def _row(record: FileRecord) -> dict[str, Any]:
    blocks = {"blocks": "".join(f"{crc32:08x}" for crc32 in record.blocks)} if record.blocks else {}
    return {"bytes": record.num_bytes, "crc32": f"{record.crc32:08x}", **blocks}


def _record(row: Mapping[str, Any]) -> FileRecord:
    num_bytes, sums = int(row["bytes"]), row.get("blocks", "")
    blocks = tuple(int(sums[start : start + 8], 16) for start in range(0, len(sums), 8))
    if blocks and len(blocks) != -(-num_bytes // BLOCK):
        raise ValueError(f"{num_bytes} bytes have no {len(blocks)} blocks")
    return FileRecord(num_bytes, int(row["crc32"], 16), blocks)


def names_of(folder: Path) -> set[str]:
    """Return the names of the files that belong to the checkpoint in a folder; none if no manifest says so."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:  # damaged
        return set()
    return set() if manifest is None else set(manifest.files)


def _digest(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
