# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of before it is files: named entries, written as they are or copied aside first."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.base.bars import Bar
from farflung.base.errors import ConfigError
from farflung.checkpoint.manifest import FileRecord
from farflung.checkpoint.reader import unsafe_names
from farflung.checkpoint.writer import FileWriter, write_safetensors
from farflung.comm.recording import lasting
from farflung.comm.tensor_memory import memory_of

_LEAST_PINNED = 2**20  # bytes; smaller memory may share its pages with other memory


@dataclass(frozen=True)
class Entry:
    """A file that will be written."""

    name: str  # in the folder of the checkpoint
    content: Any  # named tensors, or for a file in torch's format anything that it can hold
    safe: bool = False  # write it as safetensors
    origin: str = ""  # what the content is the state of, for errors

    def write(self, folder: Path, threaded: bool = True, bar: Bar | None = None) -> Any:
        """Write it and wait for the disk; return its record, or what `finish` has to know of it on another rank."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileWriter(path, threaded, bar) as writer:
            if self.safe:
                write_safetensors(self.content, writer)
            else:
                torch.save(self.content, writer)  # type: ignore[arg-type]
        if not self.safe and (unsafe := unsafe_names(path)):
            raise ConfigError(
                f"The state of {self.origin or self.name} holds {', '.join(unsafe)}, which can't be loaded without "
                "running code. Have state_dict() return tensors, numbers, strings, lists and dictionaries of them, "
                "or allow a class that is safe to build with torch.serialization.add_safe_globals."
            )
        return FileRecord(writer.num_bytes, writer.crc32)

    def finish(self, folder: Path, written: Sequence[Any]) -> dict[str, FileRecord]:
        """Return the records of its files, once it is written, by all ranks that have an entry of its name."""
        return {self.name: written[0]}


class Staging:
    """Host memory for copies of entries, made once and used for each save."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._devices: set[torch.device] = set()  # GPUs whose tensors were copied

    @lasting()
    def copied(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return copies of the entries, in the memory of those before; tensors that share memory still do."""
        copies = [replace(entry, content=self._copied(entry.content, entry.name, {})) for entry in entries]
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _copied(self, node: Any, name: str, done: dict[Any, Tensor]) -> Any:
        if isinstance(node, Tensor):
            return self._tensor(node.detach(), name, done)
        kind = type(node)
        if kind is list or kind is tuple:
            return kind(self._copied(value, name, done) for value in node)
        if isinstance(node, dict):  # also such as the OrderedDict of a module
            other = {} if kind is dict else copy.copy(node)
            other.update((key, self._copied(value, name, done)) for key, value in node.items())
            return other
        return copy.deepcopy(node)

    def _tensor(self, tensor: Tensor, name: str, done: dict[Any, Tensor]) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.clone()
        place = memory_of(tensor)
        if place not in done:
            key = (name, len(done))
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[key] = _host_memory(tensor)
            if tensor.is_cuda:
                self._devices.add(tensor.device)
            done[place] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return done[place]


def _host_memory(like: Tensor) -> Tensor:
    """Return memory for a copy of `like`; of a GPU's tensor it is locked, and so copied without another copy between.

    torch's own locked memory is up to twice as large as the tensor.
    """
    memory = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if like.is_cuda and memory.nbytes >= _LEAST_PINNED:
        cudart, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
        weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return memory
