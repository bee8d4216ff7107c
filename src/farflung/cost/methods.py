# SPDX-License-Identifier: Apache-2.0
"""The methods that a forecast compares, in the cost model's plain numbers, each with the flags that select it.

How often replicas synchronize is chosen for the line: as often as it allows, but no more often than was measured
(`evidence.py`). A test compares each row with what `method_of` derives from its recipe.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from farflung.base.sizes import bucket_bytes_for
from farflung.codec.wire_sizes import blockwise_bytes, top_k_bytes
from farflung.config.outer import FEW_ROUNDS, OuterSettings
from farflung.cost.evidence import GAIN_KEPT
from farflung.cost.model import Cost, Method, Workload, cost_of

_MIB = 2**20
_DDP_BUCKET_BYTES = 25 * _MIB  # torch's own
_FP32_BYTES = 4
_LONGEST = 500  # steps of a round, in the papers
_LATEST = 4  # a fragment lands at most a quarter of its interval late, as in the evidence
_LATE = ", late"


@dataclass(frozen=True)
class Row:
    """What a method costs, and what selects it: an outer loop (None for data-parallel training), or the script."""

    cost: Cost
    outer: OuterSettings | None
    gain_kept: float  # the share of DDP's gain over a replica that trains alone, in our tests
    is_bound: bool = False  # its rounds are longer than measured ones: it keeps less than `gain_kept`
    script: str = ""

    @property
    def method(self) -> Method:
        return self.cost.method

    @property
    def flags(self) -> str:
        """The flags of `farflung launch` that select it; empty if it is what happens without any."""
        if self.outer is None:
            return ""
        options = {"outer": self.outer.recipe, **{f"outer-{name}": value for name, value in self.outer.given().items()}}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def _fp32(n: int) -> int:
    return _FP32_BYTES * n


def _top_k(n: int) -> int:
    return sum(top_k_bytes(n, k=64, chunk=4096, bits=2))


@dataclass(frozen=True)
class _Kind:
    """What the rows of a recipe share, whatever the interval."""

    recipe: str
    codec: str = ""  # as the evidence names it; "" for fp32
    flag: str | None = None  # the codec if it isn't the recipe's own
    wire_bytes: Callable[[int], int] = _fp32  # of so many values
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.codec}".strip()


_E3M0, _INT8 = partial(blockwise_bytes, bits=4, block=128), partial(blockwise_bytes, bits=8, block=256)
_MOMENTUM = {"anchor": True, "outer_state": 1}
_GATHERED = {"anchor": True, "exchange": "gathered", "voted": True}
_STREAMING, _EAGER = "streaming_diloco", "eager_diloco"
_KINDS = (
    _Kind("local_sgd"),
    _Kind("diloco", numbers=_MOMENTUM),
    _Kind("diloco", "e3m0", "e3m0", _E3M0, _MOMENTUM | {"exchange": "either"}),
    _Kind(_STREAMING, "e3m0", None, _E3M0, _GATHERED | {"outer_state": 1, "exchange": "either"}),
    _Kind(_EAGER, "int8", None, _INT8, _GATHERED | {"outer_state": 1, "feedback": True}),
    _Kind("sparse_loco", "", None, _top_k, _GATHERED | {"feedback": True}),
)


class Rows:
    """The rows of a run.

    Args:
        steps: of the whole run; a round is at most a tenth of them.
        utilization: from which on a method counts as fast enough.
        bucket_bytes: for all rows; each method's own by default.

    Attributes:
        chosen: a row for each method, best first: those that are fast enough by what they keep of DDP's gain, then
            others by how nearly they are.
        left_out: the names of methods that had fewer than ten rounds of the shortest interval that was measured.
    """

    def __init__(self, run: Workload, steps: int, utilization: float, bucket_bytes: int | None = None) -> None:
        self._run, self._steps, self._utilization, self._given = run, steps, utilization, bucket_bytes
        self._bucket_bytes = bucket_bytes or bucket_bytes_for(_FP32_BYTES * run.parameters)
        kinds = [kind for kind in _KINDS if kind.recipe != _STREAMING or run.layers > 1]
        longest = min(steps // FEW_ROUNDS, _LONGEST)
        enough = [kind for kind in kinds if min(GAIN_KEPT[kind.name]) <= longest]
        self.left_out = tuple(kind.name for kind in kinds if kind not in enough)
        by_gradients = gradients(run, bucket_bytes) if run.is_direct else ()  # an address takes rounds alone
        rows = [*by_gradients, *(self._best(kind, longest) for kind in enough)]
        self.chosen = tuple(sorted(rows, key=self._order))

    def suffices(self, row: Row) -> bool:
        """Return whether a row is fast enough."""
        return row.cost.utilization >= self._utilization

    def _order(self, row: Row) -> tuple[float, ...]:
        if not self.suffices(row):
            return 1.0, -row.cost.utilization
        known = row.is_bound if row.gain_kept > 0 else 2  # a bound is worth less than a share, and more than a loss
        return 0.0, known, -round(row.gain_kept, 2), bool(row.script), row.cost.bytes_sent_per_step

    def _best(self, kind: _Kind, longest: int) -> Row:
        """Return the row with the interval that keeps most, of those that are fast enough; if none is, the longest."""
        intervals = range(min(GAIN_KEPT[kind.name]), longest + 1)
        place = bisect_left(intervals, True, key=lambda every: self.suffices(self._row(kind, every)))
        if place == len(intervals):
            return self._row(kind, longest)
        shortest = intervals[place]
        measured = [every for every in GAIN_KEPT[kind.name] if shortest < every <= longest]
        return max((self._row(kind, every) for every in (shortest, *measured)), key=lambda row: row.gain_kept)

    def _row(self, kind: _Kind, every: int) -> Row:
        if kind.recipe == _STREAMING:
            # Of three layers, as in arXiv:2501.18512; small models were measured layer by layer (benchmarks/).
            layers = self._run.layers
            fragments = min(layers // 3 if layers >= 6 else 3, layers, every)
            delays = range(1, max(1, every // _LATEST) + 1)
            place = bisect_left(
                delays, True, key=lambda delay: self.suffices(self._with(kind, every, fragments, delay))
            )
            return self._with(kind, every, fragments, delays[min(place, len(delays) - 1)])
        return self._with(kind, every, 1, every if kind.recipe == _EAGER else 0)

    def _with(self, kind: _Kind, every: int, fragments: int, delay: int) -> Row:
        bits = bits_on_the_wire(kind.wire_bytes, self._run.parameters, fragments, self._bucket_bytes)
        method = Method(
            f"{kind.recipe}({every}) {kind.flag or ''}".strip(),
            every=every,
            fragments=fragments,
            delay=delay,
            bits=bits,
            confirmed=True,
            bucket_bytes=self._bucket_bytes,
            **kind.numbers,
        )
        options = {"fragments": fragments, "delay": delay} if kind.recipe == _STREAMING else {}
        steps, size = self._steps, self._given
        config = OuterSettings(kind.recipe, every=every, codec=kind.flag, steps=steps, bucket_bytes=size, **options)
        is_late = kind.recipe == _STREAMING and delay > 1
        return Row(cost_of(self._run, method), config, *gain_kept(kind.name + _LATE * is_late, every))


def synchronizations(run: Workload) -> dict[str, float]:
    """Return how many seconds a synchronization of all parameters takes by each recipe, if nothing hides it."""
    bucket_bytes = bucket_bytes_for(_FP32_BYTES * run.parameters)
    found = {}
    for kind in _KINDS:
        bits = bits_on_the_wire(kind.wire_bytes, run.parameters, 1, bucket_bytes)
        method = Method(kind.name, bits=bits, confirmed=True, bucket_bytes=bucket_bytes, **kind.numbers)
        found[kind.name] = cost_of(run, method).seconds_per_step - run.step_s
    return found


def gain_kept(name: str, every: int) -> tuple[float, bool]:
    """Return the share of DDP's gain that a method keeps with rounds of `every` steps, and whether it is a bound.

    Between two intervals that were measured it is on the straight line over the logarithm of the interval.
    """
    measured = GAIN_KEPT[name]
    if every > max(measured):
        return measured[max(measured)], True
    below = max(one for one in measured if one <= every)
    above = min(one for one in measured if one >= every)
    part = math.log(every / below) / math.log(above / below) if above > below else 0.0
    return measured[below] + part * (measured[above] - measured[below]), False


def gradients(run: Workload, bucket_bytes: int | None) -> tuple[Row, Row]:
    """Return data-parallel training, with gradients as they are and in 16 bits."""
    method = Method("DDP", during_backward=True, bucket_bytes=bucket_bytes or _DDP_BUCKET_BYTES)
    narrow = replace(method, name="DDP bf16", bits=16)
    bucket = [] if bucket_bytes is None else [f"bucket_cap_mb={math.ceil(bucket_bytes / _MIB)}"]
    hook = [*bucket, "comm_hook=DDPCommunicationHookType.BF16"]
    return (
        Row(cost_of(run, method), None, *gain_kept("DDP", 1), script=_handler(bucket) if bucket else ""),
        Row(cost_of(run, narrow), None, *gain_kept("DDP bf16", 1), script=_handler(hook)),
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
