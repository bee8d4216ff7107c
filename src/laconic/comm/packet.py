# SPDX-License-Identifier: Apache-2.0
"""Nested data as bytes: where each leaf lies in one flat buffer, so that all shapes and dtypes travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGN = 16  # bytes; the widest dtype, complex128, needs no more


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to the next place where a leaf may begin."""
    return -(-num_bytes // ALIGN) * ALIGN


def is_plain(x: Tensor) -> bool:
    """Say whether `x` is a dense tensor whose elements are bytes in memory (not sparse, quantized, nested or meta)."""
    return x.layout is torch.strided and not x.is_quantized and not x.is_nested and not x.is_meta


def raw(buffer: Tensor) -> memoryview:
    """Return the bytes of `buffer` `[n]` uint8 on the CPU; writing them writes the tensor."""
    return buffer.numpy().data


class Layout:
    """Where tensors of given shapes and dtypes lie in a payload: sorted by dtype, each at a multiple of 16 bytes.

    Attributes:
        nbytes: bytes of the whole payload, a multiple of 16.
        regions: for each dtype its first byte and the byte after its last one.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self.numels = [_product(shape) for shape in self.shapes]
        self.offsets = [0] * len(self.shapes)
        self.regions: dict[torch.dtype, tuple[int, int]] = {}
        self.nbytes = 0
        for k in sorted(range(len(self.shapes)), key=lambda k: str(self.dtypes[k])):
            dtype = self.dtypes[k]
            first, _ = self.regions.get(dtype, (self.nbytes, 0))
            self.offsets[k] = self.nbytes
            end = self.nbytes + self.numels[k] * dtype.itemsize
            self.regions[dtype] = (first, end)
            self.nbytes = aligned(end)

    def views(self, payload: Tensor) -> list[Tensor]:
        """Return each leaf's place in `payload` as a typed view.

        Args:
            payload: `[..., n]` uint8 with n >= `nbytes`; each of its rows begins at a multiple of 16 bytes.

        Returns:
            for each leaf a view `[..., *shape]`.
        """
        rows = payload[..., : self.nbytes]
        typed = {dtype: rows.view(dtype) for dtype in self.regions}
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            whole = typed[dtype]
            size = (*whole.shape[:-1], *shape)
            stride = (*whole.stride()[:-1], *_strides(shape))
            views.append(whole.as_strided(size, stride, whole.storage_offset() + offset // dtype.itemsize))
        return views


def _product(shape: Sequence[int]) -> int:
    numel = 1
    for n in shape:
        numel *= n
    return numel


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 1, 0, -1):
        strides[k - 1] = strides[k] * shape[k]
    return strides
