# SPDX-License-Identifier: Apache-2.0
"""Reading what others wrote: tensors, numbers and texts, never code. Damage is an error that names the file."""

from __future__ import annotations

import pickle
from codecs import encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from farflung.base.errors import CheckpointError
from farflung.base.files import utf8_name
from farflung.checkpoint.files import is_file

_NUMPY_CORE: Any = getattr(np, "_core", None) or np.core  # its name until numpy 1
# What an array of numbers is made of when it is unpickled. None of them runs code of the file's choosing.
_ARRAYS = (
    _NUMPY_CORE.multiarray._reconstruct,
    _NUMPY_CORE.multiarray.scalar,
    np.ndarray,
    np.dtype,
    encode,
    *{type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"},
)


# numpy 1 and numpy 2 write different names.
_NAMED = [
    (function, f"{core}.{function.__name__}")
    for core in ("numpy.core.multiarray", "numpy._core.multiarray")
    for function in _ARRAYS[:2]
]


@contextmanager
def damage_as(what: str) -> Iterator[None]:
    """Raise CheckpointError, which begins with `what`, for all that broken content makes readers raise."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error


def allowed() -> list[Any]:
    """Return what a file may hold in addition to torch's own and what the script has allowed: numpy's arrays."""
    there = torch.serialization.get_safe_globals()  # `safe_globals` takes away at its end all that it was given
    return [one for one in (*_ARRAYS, *_NAMED) if one not in there]


def unsafe_names(path: Path) -> list[str]:
    """Return what stands in a file that `load` would refuse. Changes nothing, as several threads may ask at a time."""
    names = {name for _, name in _NAMED} | {f"{one.__module__}.{one.__qualname__}" for one in _ARRAYS}
    return [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name not in names]


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what `torch.save` wrote to `f`, a path or an open file; by default only tensors and plain data, no code.

    `map_location` and `kwargs` are those of `torch.load`; `weights_only=False` unpickles anything.
    """
    with torch.serialization.safe_globals(allowed()):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def read_torch(path: Path) -> Any:
    """Return what `torch.save` wrote, on the CPU; CheckpointError if it is damaged, not there, or would run code."""
    is_file(path)
    with reading(path):
        return load(path, map_location="cpu")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError for all that is wrong with a file, or a folder of shards, that is read in this block."""
    with damage_as(f"{path} can't be read, so it is damaged"):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{path} does not exist.") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} was not loaded: {_reason(error)}. Only tensors, numbers, texts and their lists and "
                "dictionaries are; a class of yours that is safe to build may be named with "
                "torch.serialization.add_safe_globals."
            ) from error


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights in a file of either format, by name; CheckpointError if it holds something else."""
    is_file(path)
    with reading(path):
        if path.suffix == ".safetensors":
            with utf8_name(path) as name:
                weights: Any = load_file(name, device="cpu")
        else:
            weights = load(path, map_location="cpu")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path} holds a {type(weights).__name__}, not weights by name.")
    return weights


def _reason(error: BaseException) -> str:
    """Return the first lines of an error that say something; torch's fill a page."""
    message = repr(error) if isinstance(error, KeyError) else str(error)  # of a KeyError that is the key alone
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    unsupported = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), None)
    return (unsupported or (lines[0] if lines else type(error).__name__))[:300]
