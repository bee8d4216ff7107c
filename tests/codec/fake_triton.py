# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for `triton` and `triton.language` that run a kernel in numpy, one program after the other.

They show that a kernel's arithmetic and addresses are right, not that Triton compiles it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class Block(np.ndarray):
    """What a kernel computes with."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


def block(values, dtype=None) -> Block:
    return np.asarray(values, dtype).view(Block)


class Pointer:
    """Addresses in one array."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset

    def __add__(self, step):
        return Pointer(self.array, self.offset + step)


class Kernel:
    """A function, and the loop over its programs."""

    def __init__(self, language, function):
        self.language, self.function = language, function

    def __call__(self, *args):
        return self.function(*args)

    def __getitem__(self, grid):
        def launch(*args, num_warps, enable_fp_fusion):
            assert not enable_fp_fusion
            args = [Pointer(arg.numpy()) if hasattr(arg, "numpy") else arg for arg in args]
            args = [np.float32(arg) if isinstance(arg, float) else arg for arg in args]
            for program in range(grid[0]):
                self.language.program = program
                with np.errstate(all="ignore"):
                    self.function(*args)

        return launch


def load(pointer, mask=None, other=0):
    offset = np.asarray(pointer.offset)
    if mask is None:
        return block(pointer.array[offset])
    inside = np.where(mask, offset, 0)
    return block(np.where(mask, pointer.array[inside], pointer.array.dtype.type(other)))


def store(pointer, value, mask=None):
    offset = np.asarray(pointer.offset)
    value = np.broadcast_to(np.asarray(value), offset.shape)
    if mask is None:
        pointer.array[offset] = value
    else:
        pointer.array[offset[mask]] = value[mask]


def where(condition, a, b):
    dtype = next(np.asarray(x).dtype for x in (a, b) if isinstance(x, (np.ndarray, np.generic)))
    return block(np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype)))


def modules() -> dict[str, ModuleType]:
    """Return what to put into `sys.modules`."""
    triton: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    language.math = ModuleType("triton.language.math")
    language.math.div_rn = lambda x, y: block(np.divide(np.float32(x), y))
    language.program_id = lambda axis: block(language.program, np.int32)
    language.arange = lambda start, end: block(np.arange(start, end), np.int32)
    language.max = lambda x, axis: block(np.fmax.reduce(np.asarray(x), axis=axis))  # a NaN is passed over
    language.abs = lambda x: block(np.abs(x))
    language.maximum = lambda x, y: block(np.maximum(x, y))
    language.minimum = lambda x, y: block(np.minimum(x, y))
    language.load, language.store, language.where = load, store, where
    language.constexpr = object
    for name in ("int32", "int64", "uint8", "float32"):
        setattr(language, name, getattr(np, name))
    triton.jit = lambda function: Kernel(language, function)
    triton.language = language
    return {"triton": triton, "triton.language": language}
