# SPDX-License-Identifier: Apache-2.0
"""Tensors as pieces of memory: which are the same one or have the same bits, their bytes, and which can be sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy

from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.recording import unrecorded
from farflung.comm.shards import local

_NO_NUMBERS = (torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2)
_HALVES = (torch.float16, torch.bfloat16)
_ROW = 4096  # words of 8 bytes
_SMALL = 64 * 1024  # bytes; a tensor of fewer takes longer to look at than to copy


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for two dense tensors, that are not empty, only if they are the same piece of memory.

    A conjugate or negated view has its base's address, shape and strides, and other values.
    """
    lazily = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazily


def bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, whose dimensions of one element may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def host_bytes(x: Tensor) -> Any:
    """Return the values of a dense tensor as a numpy array `[n]` of bytes; no copy if they lie so on the CPU."""
    return _flat(x.cpu()).numpy()


def check_exchangeable(named: Iterable[tuple[str, Tensor]], takes_float8: bool = False, is_sent: bool = True) -> None:
    """Raise an error for parameters and buffers that can't go from one process to another.

    Args:
        takes_float8: the backend sends floats of 8 bits, as NCCL does.
        is_sent: False: they are only compared, as frozen parameters are.

    Raises:
        ConfigError: a tensor has no shape yet.
        Unsupported: its values are no plain numbers in one piece of memory.
    """
    for name, tensor in named:
        if is_lazy(tensor):
            raise ConfigError("has no shape yet. Run one batch through the model first.", name)
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = f"a sparse tensor ({tensor.layout})" if tensor.layout is not torch.strided else "a nested tensor"
            raise Unsupported(
                f"is {kind}, which several processes can't train or exchange. Store it dense (to_dense(), "
                "to_padded_tensor()), or keep it outside of the model's parameters and buffers.",
                name,
            )
        if not is_sent:
            continue
        if tensor.is_quantized or tensor.dtype in _NO_NUMBERS:
            raise Unsupported(
                f"is a {tensor.dtype} tensor, which can't be sent between processes, or averaged. Store its integers, "
                "of a quantized one int_repr() and q_scale(), as tensors of plain dtypes, or register the buffer with "
                "persistent=False.",
                name,
            )
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 and not takes_float8:
            raise Unsupported(
                f"is a {tensor.dtype} tensor, which can't be sent between processes on CPUs, or averaged. Store its "
                "bits as uint8 (.view(torch.uint8)), or another floating type.",
                name,
            )


@torch.no_grad()
def fingerprint(x: Tensor) -> int:
    """Return a whole number of 48 bits in which tensors differ that have other bits, or the same ones in other places.

    The bits are added up along rows and along columns: on a device, in one look at its memory for each.
    """
    flat = _flat(x)
    if flat.storage_offset() % 8 or len(flat) % 8:
        flat = pad(flat, (0, -len(flat) % 8)).clone()
    words = flat.view(torch.int64)
    rows = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :]]).cpu()
    return int.from_bytes(hashlib.blake2b(sums.numpy().tobytes(), digest_size=6).digest(), "big")


@contextmanager
def lent(
    model: nn.Module, tensors: Callable[[], Sequence[Tensor]], lend: Callable[[list[tuple[Tensor, Tensor]]], None]
) -> Iterator[None]:
    """Put other values into tensors for the length of the block; then restore those that no script has overwritten.

    Args:
        model: has these tensors. Its embeddings with a `max_norm` shorten rows in every forward pass.
        tensors: returns this rank's parts, in the same order each time: a model may be moved or cast meanwhile.
        lend: puts the other values there, given the tensors with their own.
    """
    embeddings = [one for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm]
    with unrecorded():
        own = [(tensor, tensor.clone()) for tensor in tensors()]
    shortened = [local(one.weight).data_ptr() for one in embeddings]
    there: list[int] = []
    longer: dict[int, Tensor] = {}
    try:
        with unrecorded():
            lend(own)
            longer |= {n: x.clone() for n, (x, _) in enumerate(own) if x.data_ptr() in shortened}
            there += [fingerprint(tensor) for tensor, _ in own]
        yield
    finally:
        with unrecorded():
            for number, (now, (before, value)) in enumerate(zip(tensors(), own, strict=True)):
                if there and fingerprint(before) != there[number] and not _is_shortened(before, longer.get(number)):
                    continue
                if now.data_ptr() != before.data_ptr() and _is_copy(now, before):
                    now.copy_(value)
                before.copy_(value)  # also if a script has put other memory in its place


def _is_shortened(x: Tensor, of: Tensor | None) -> bool:
    """Return whether each row of a tensor is that of another one, or a multiple of it by less than 1."""
    if of is None or x.dim() != 2:
        return False
    now, before, rounding = x.float(), of.float(), 2 * torch.finfo(x.dtype).eps + 2e-6
    ratio = now.norm(dim=1, keepdim=True) / before.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return bool((ratio < 1 + rounding).all()) and torch.allclose(now, before * ratio, rtol=rounding)


def _is_copy(x: Tensor, of: Tensor) -> bool:
    """Return whether a tensor has the values of another one, moved, cast, or cast to 16 bits and back."""
    there, kinds = of.to(x.device), (of.dtype, *(_HALVES if of.is_floating_point() else ()))
    return any(torch.equal(x, there.to(kind).to(x.dtype)) for kind in kinds)


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return numbers like `fingerprint`'s for several tensors: one each for large ones, and one for all small ones."""
    found: list[int] = []
    small: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        if x.nbytes > _SMALL:
            found.append(fingerprint(x))
        else:
            small.setdefault(x.device, []).append(_flat(x))
    return found + [fingerprint(torch.cat(parts)) for parts in small.values()]


def _flat(x: Tensor) -> Tensor:
    return bytes_of(x.detach().resolve_conj().resolve_neg().contiguous())
