# SPDX-License-Identifier: Apache-2.0
"""The methods that a forecast compares, in the cost model's plain numbers, each with what asks for it.

They stand in the order in which to try them: what changes training least comes first, by the losses that
`docs/recipes.md` shows and by how long replicas train alone. A test compares each with what `method_of` makes of its
recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from farflung.base.sizes import bucket_bytes_for
from farflung.codec.wire_sizes import blockwise_bytes, top_k_bytes
from farflung.config.outer import OuterSettings
from farflung.cost.model import Method, Run

_MIB = 2**20
_DDP_BUCKET_BYTES = 25 * _MIB  # torch's own
_FP32_BYTES = 4


@dataclass(frozen=True)
class Row:
    """A method, and what asks for it: an outer loop (None for data-parallel training), or a line of the script."""

    method: Method
    outer: OuterSettings | None
    script: str = ""

    @property
    def flags(self) -> str:
        """The flags of `farflung launch` that ask for it; empty where it is what happens without any."""
        if self.outer is None:
            return ""
        options = {"outer": self.outer.recipe, **{f"outer-{name}": value for name, value in self.outer.given().items()}}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def rows_for(run: Run, bucket_bytes: int | None = None, steps: int | None = None) -> tuple[Row, ...]:
    """Return what is worth comparing in a run of any length; `steps` are for the flags, `bucket_bytes` for all rows."""
    # Of three layers, as in arXiv:2501.18512; small models were measured layer by layer (benchmarks/).
    fragments = min(run.layers // 3, 100) if run.layers >= 6 else min(run.layers, 3)
    delay = min(5, 100 // fragments)
    size = bucket_bytes or bucket_bytes_for(_FP32_BYTES * run.parameters)

    def outer(
        config: OuterSettings,
        name: str = "",
        wire_bytes: Callable[[int], int] = lambda n: _FP32_BYTES * n,
        **numbers: Any,
    ) -> Row:
        every, parts = config.every or 1, config.fragments or 1
        bits = bits_on_the_wire(wire_bytes, run.parameters, parts, size)
        method = Method(
            f"{config.recipe}({every}){name}",
            every=every,
            fragments=parts,
            bits=bits,
            confirmed=True,
            anchor=config.recipe != "local_sgd",
            bucket_bytes=size,
            **numbers,
        )
        return Row(method, config)

    def plain(recipe: str, every: int, **options: int) -> OuterSettings:
        return OuterSettings(recipe, every=every, bucket_bytes=bucket_bytes, steps=steps, **options)

    def top_k(n: int) -> int:
        return sum(top_k_bytes(n, k=64, chunk=4096, bits=2))

    gathered: dict[str, Any] = {"exchange": "gathered", "voted": True}
    e3m0, int8 = partial(blockwise_bytes, bits=4, block=128), partial(blockwise_bytes, bits=8, block=256)
    streaming = []
    if fragments > 1:
        config = plain("streaming_diloco", 100, fragments=fragments, delay=delay)
        streaming.append(outer(config, " e3m0", e3m0, delay=delay, outer_state=1, **gathered))
    return (
        *_gradients(bucket_bytes),
        outer(plain("local_sgd", 8)),
        outer(plain("diloco", 32), outer_state=1),
        *streaming,
        outer(plain("diloco", 128), outer_state=1),
        outer(plain("eager_diloco", 32), " int8", int8, delay=32, outer_state=1, feedback=True, **gathered),
        outer(plain("sparse_loco", 30), "", top_k, feedback=True, **gathered),
        outer(plain("diloco", 500), outer_state=1),
    )


def _gradients(bucket_bytes: int | None) -> tuple[Row, Row]:
    """Return data-parallel training, with gradients as they are and in 16 bits."""
    method = Method("DDP", during_backward=True, bucket_bytes=bucket_bytes or _DDP_BUCKET_BYTES)
    bucket = [] if bucket_bytes is None else [f"bucket_cap_mb={math.ceil(bucket_bytes / _MIB)}"]
    hook = [*bucket, "comm_hook=DDPCommunicationHookType.BF16"]
    return (
        Row(method, None, _handler(bucket) if bucket else ""),
        Row(replace(method, name="DDP bf16", bits=16), None, _handler(hook)),
    )


def _handler(arguments: list[str]) -> str:
    return f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({', '.join(arguments)})])"


def bits_on_the_wire(wire_bytes: Callable[[int], int], parameters: int, fragments: int, bucket_bytes: int) -> float:
    """Return the bits for each parameter, with its share of scales and indices, of fragments cut into fp32 buckets."""
    cap = max(1, bucket_bytes // _FP32_BYTES)
    num_bytes = 0
    for fragment in range(fragments):
        values = parameters * (fragment + 1) // fragments - parameters * fragment // fragments
        num_bytes += values // cap * wire_bytes(cap) + wire_bytes(values % cap)
    return 8 * num_bytes / parameters
