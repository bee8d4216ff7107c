# SPDX-License-Identifier: Apache-2.0
"""One file at a time: written with its size and checksum known at the end, and on the disk before anyone says so."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import struct
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.base.bars import Bar
from farflung.base.errors import ConfigError
from farflung.base.files import atomic_file
from farflung.base.tree import leaves_of
from farflung.comm.checksum import crc32
from farflung.comm.tensor_memory import host_bytes, memory_of

_logger = logging.getLogger("farflung.utils.other")

# Bytes at a time, as manifests count blocks; small enough to stay in a processor's cache between disk and checksum.
BLOCK = 4 * 2**20
_BLOCKS = 3  # of a file that is written: one is filled, one is on its way, one waits

# safetensors' words for torch's types (https://github.com/huggingface/safetensors, "Format").
_SAFE_TYPES = {torch.bfloat16: "BF16", torch.bool: "BOOL", torch.complex64: "C64"}
_SAFE_TYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_SAFE_TYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)}
_SAFE_TYPES |= {
    getattr(torch, f"{kind}{n}"): f"{kind[0].upper()}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)
}


class FileWriter:
    """A new file that counts and sums what goes through it; leaving the block puts it on the disk, and in its place.

    What fills a block of memory is written by a thread while the next block is filled, and past the system's cache
    if the file system has a way (`O_DIRECT`): nobody reads a checkpoint soon, it would push out what is read, and
    finding memory for a copy of it and waiting for the disk at the end takes longer than the disk alone. `threaded` is
    False if no thread may start any more. `bar` counts what was taken. `blocks` gets the checksum of each block too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        threaded: bool = True,
        bar: Bar | None = None,
        blocks: list[int] | None = None,
    ) -> None:
        self._open = ExitStack()
        self._disk = _Disk(self._open.enter_context(atomic_file(path)))
        self._open.callback(self._disk.close)
        self._threaded, self._bar, self._blocks = threaded, bar, blocks
        self.num_bytes = 0
        self.crc32 = 0  # of what was written; of all of it once the block has been left
        self.failure: OSError | None = None  # when the system could not write
        self._block: memoryview | None = None
        self._filled = 0  # bytes of the block
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._thread: Thread | None = None

    def write(self, data: Any) -> int:
        """Take all of `data`, which is anything with a buffer, and return how many bytes that was."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            block = self._block = self._block or _page_aligned()
            count = min(len(view) - done, len(block) - self._filled)
            # numpy copies outside of Python's lock, so that training continues.
            np.copyto(np.asarray(block[self._filled : self._filled + count]), view[done : done + count])
            self._filled += count
            done += count
            if self._bar is not None:
                self._bar.advance(count)
            if self._filled == len(block):
                self._hand_over(block)
        self.num_bytes += done
        return done

    def tell(self) -> int:
        """Return how many bytes were written, for DCP's writer."""
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing, here and in `close`: torch's writers call both, and leaving the block flushes and closes."""

    close = flush

    def _sum(self, block: memoryview) -> None:
        self.crc32 = crc32(block, self.crc32)  # while a processor's cache has it
        if self._blocks is not None and len(block):
            self._blocks.append(crc32(block))

    def _hand_over(self, block: memoryview) -> None:
        self._sum(block)
        if not self._threaded:
            self._put(block)
        else:
            if self._thread is None:
                for _ in range(_BLOCKS - 1):
                    self._free.put(_page_aligned())
                self._thread = Thread(target=self._work, name="farflung writer")
                self._thread.start()
            self._full.put(block)
            self._block = self._free.get()
        self._filled = 0
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        while (block := self._full.get()) is not None:
            self._put(block)
            self._free.put(block)

    def _put(self, view: memoryview) -> None:
        if self.failure is None:
            try:
                self._disk.put(view)
            except OSError as error:  # raised by whoever writes or leaves the block next
                self.failure = error

    def _finish(self) -> None:
        if self._block is not None:
            rest = self._block[: self._filled]
            self._sum(rest)
            self._put(rest)
        if self.failure is not None:
            raise self.failure
        self._disk.sync()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._open:
            if self._thread is not None:
                self._full.put(None)
                self._thread.join()
            if self.failure is not None and isinstance(error, RuntimeError):
                raise self.failure from None  # torch only says that its file is not as long as it should be
            if error is not None:
                raise error
            self._finish()


class _Disk:
    """A new file, written from its beginning to its end: whole blocks past the system's cache if that can be."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct: int | None = None
        self._place = 0  # of the next byte
        self._is_cached = not hasattr(os, "O_DIRECT")

    def put(self, view: memoryview) -> None:
        while view:
            done = self._put_direct(view) if len(view) == BLOCK and not self._is_cached else 0
            done = done or os.pwrite(self._file, view, self._place)
            self._place += done
            view = view[done:]

    def _put_direct(self, view: memoryview) -> int:
        """Write past the cache, and return how many bytes; 0: that can't be here."""
        try:
            if self._direct is None:
                self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT)
            return os.pwrite(self._direct, view, self._place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_cached = True
            return 0

    def sync(self) -> None:
        """Wait until the disk has all of it, and knows how long it is."""
        sync(self._file)

    def close(self) -> None:
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)


def _page_aligned() -> memoryview:
    return memoryview(mmap.mmap(-1, BLOCK))


def sync(descriptor: int) -> None:
    """Wait until the disk has what was written to a file or folder, or warn that its file system can't be asked to."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # CIFS, sshfs and some of FUSE
            raise
        warnings.warn(
            f"The file system of what is saved can't put it on the disk on request (fsync: {error.strerror}). Whether "
            "it outlives a crash of the machine depends on how that file system is mounted.",
            stacklevel=2,
        )


def sync_folder(path: Path) -> None:
    """Wait until the disk has the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def save_object(
    obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False, bar: Bar | None = None
) -> None:
    """Write `obj` to `path`: with `torch.save`, or a flat dictionary of tensors as safetensors.

    Of tensors that share their memory (tied weights), safetensors gets the first name alone.
    """
    if safe_serialization and not (isinstance(obj, dict) and all(isinstance(value, Tensor) for value in obj.values())):
        raise ConfigError(
            "safe_serialization=True can only save a dictionary of tensors by name; this is something else."
        )
    if not safe_serialization and hasattr(path, "write"):
        torch.save(obj, path)
        return
    with FileWriter(path, bar=bar) as file:
        if safe_serialization:
            write_safetensors(obj, file)  # not safetensors' own writer, whose files nobody else may read
        else:
            torch.save(obj, file)  # type: ignore[arg-type]


def write_safetensors(tensors: Mapping[str, Tensor], file: FileWriter, metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as safetensors, from where they are: no copy of those that are contiguous on the CPU.

    Of names for the same piece of memory (tied weights) the first alone is written. ConfigError: something is no dense
    tensor of a type that the format knows.
    """
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    ordered = sorted(without_aliases(tensors).items(), key=lambda item: -item[1].element_size())  # all are aligned so
    for name, tensor in ordered:
        if tensor.dtype not in _SAFE_TYPES or tensor.layout is not torch.strided:
            raise ConfigError(f"{name} is a {tensor.dtype} tensor ({tensor.layout}), which safetensors can't hold.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _SAFE_TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(host_bytes(tensor))


def tensor_bytes(content: Any) -> int:
    """Return how many bytes the tensors in nested data take."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves_of(content) if isinstance(leaf, Tensor))


def without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with only the first name of each piece of memory; ConfigError if one is no tensor."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    left_out: list[str] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{name} is a {type(tensor).__name__}, which safetensors can't hold. Pass safe_serialization=False."
            )
        if tensor.layout is torch.strided and tensor.numel():
            place = memory_of(tensor)
            if place in seen:
                left_out.append(name)
                continue
            seen.add(place)
        kept[name] = tensor.detach()
    if left_out:
        _logger.warning("Removed shared tensors from the file: other names have what is in %s.", ", ".join(left_out))
    return kept
