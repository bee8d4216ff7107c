# SPDX-License-Identifier: Apache-2.0
"""One file at a time: written with its size and checksum known at the end, and on the disk before anyone says so."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from laconic.base.errors import CheckpointError, ConfigError

_AHEAD = 64 * 2**20  # bytes after which the disk is given work, while more is written
_PIECE = 4 * 2**20  # read at a time; small enough to stay in a cache between the disk and the checksum

# safetensors' words for torch's types (https://github.com/huggingface/safetensors, "Format").
_SAFE_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


class Sink:
    """A new file that counts and sums what goes through it; leaving the block puts it on the disk.

    Attributes:
        num_bytes: how many were written.
        crc32: their checksum, as zlib's.
        failure: what the system said when it could not write.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  closed when the block is left
        self.num_bytes = 0
        self.crc32 = 0
        self.failure: OSError | None = None
        self._flusher = ThreadPoolExecutor(1, "laconic flusher")
        self._flushed: Future[None] | None = None
        self._pending = 0  # bytes since the flusher was last sent

    def write(self, data: Any) -> int:
        """Write all of `data`, which is anything with a buffer, and return how many bytes that was."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:]) or 0
        except OSError as error:
            self.failure = error
            raise
        self.num_bytes += written
        self._pending += written
        if self._pending >= _AHEAD and (self._flushed is None or self._flushed.done()):
            self._pending = 0
            self._flushed = self._flusher.submit(os.fsync, self._file.fileno())
        return written

    def flush(self) -> None:
        """Wait until the disk has it."""
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._flusher.shutdown()
            self._file.close()


def sync_folder(path: Path) -> None:
    """Wait until the disk has the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sums_of(path: Path) -> tuple[int, int]:
    """Return the size and the checksum of a file, as it is on the disk now."""
    total = crc = 0
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            total += count
    return total, crc


def write_torch(obj: Any, sink: Sink) -> None:
    """Write any object in torch's format."""
    try:
        torch.save(obj, sink)  # type: ignore[arg-type]
    except RuntimeError:
        if sink.failure is not None:  # torch says that its file is not as long as it should be
            raise sink.failure from None
        raise


def write_safetensors(tensors: Mapping[str, Tensor], sink: Sink, metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as safetensors, from where they are: no copy of those that are contiguous on the CPU.

    Of names for the same piece of memory (tied weights) the first alone is written.

    Raises:
        ConfigError: something is no dense tensor of a type that the format knows.
    """
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    ordered = sorted(without_aliases(tensors).items(), key=lambda item: -item[1].element_size())  # all are aligned so
    for name, tensor in ordered:
        if tensor.dtype not in _SAFE_TYPES or tensor.layout is not torch.strided or tensor.is_quantized:
            raise ConfigError(f"{name} is a {tensor.dtype} tensor ({tensor.layout}), which safetensors can't hold.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _SAFE_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        if tensor.numel():
            sink.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with only the first name of those that are the same piece of memory."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if place in seen:
                continue
            seen.add(place)
        kept[name] = tensor.detach()
    return kept


def unsafe_names(path: Path) -> list[str]:
    """Return what in a file that torch wrote would need code to be run, and so would not be loaded."""
    try:
        found: list[str] = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except ValueError as error:
        raise CheckpointError(f"{path.name} can't be looked through: {error}") from error
    return found
