# SPDX-License-Identifier: Apache-2.0
"""The methods that a forecast compares, in the cost model's plain numbers, each with the flags that select it.

How often replicas synchronize is chosen for the line, for the most goodput, but no more often than was measured
(`evidence.py`). A test compares each row with what `method_of` derives from its recipe.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from farflung.base.sizes import FEW_ROUNDS, bucket_bytes_for
from farflung.base.words import counted
from farflung.codec.wire_sizes import blockwise_bytes, top_k_bytes
from farflung.config.outer import OuterSettings
from farflung.cost.evidence import EFFICIENCY, PARAMETERS, STEPS, Measured
from farflung.cost.model import Cost, Method, Workload, cost_of

_MIB = 2**20
_DDP_BUCKET_BYTES = 25 * _MIB  # torch's own
_FP32_BYTES = 4
_LONGEST = 500  # steps of a round, in the papers
LATEST = 4  # a fragment lands at most a quarter of its interval late, as in the evidence
_LONGER = 1.1  # by which the next interval that is tried is longer, at least


@dataclass(frozen=True)
class Efficiency:
    """How many of DDP's steps reach the same loss as a run, for each of its steps, in our tests."""

    mean: float
    error: float  # its standard error
    replicas: int  # in these tests
    is_extrapolated: bool = False  # our tests had more rounds, or another number of replicas

    def said(self, utilization: float) -> str:
        """Say what a run's goodput is that spends this share of its time computing."""
        mean, error = self.mean * utilization, self.error * utilization
        spread = f" ({mean - error:.2f} to {min(mean + error, 1.0):.2f})" if error else ""
        return f"{'about ' * self.is_extrapolated}{mean:.2f} of DDP on a free line{spread}"

    @property
    def tests(self) -> str:
        return f"up to {PARAMETERS:,} parameters in {counted(self.replicas, 'replica')}"


@dataclass(frozen=True)
class Row:
    """What a method costs, and what selects it: an outer loop (None for data-parallel training), or the script."""

    cost: Cost
    outer: OuterSettings | None
    efficiency: Efficiency
    script: str = ""

    @property
    def method(self) -> Method:
        return self.cost.method

    @property
    def goodput(self) -> float:
        """How far it gets in a time, next to DDP on a line that costs nothing."""
        return self.efficiency.mean * self.cost.utilization

    @property
    def order(self) -> tuple[float, ...]:
        """By which rows are sorted; those whose goodput differs by less than 0.01 by their bytes."""
        return -round(self.goodput, 2), bool(self.script), self.cost.bytes_sent_per_step

    @property
    def flags(self) -> str:
        """The flags of `farflung launch` that select it; empty if it is what happens without any."""
        return "" if self.outer is None else flags_of(self.outer)


def flags_of(settings: OuterSettings) -> str:
    """Return the flags of `farflung launch` that select an outer loop."""
    options = "".join(f" --outer-{name.replace('_', '-')} {value}" for name, value in settings.given().items())
    return f"--outer {settings.recipe}{options}"


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
        bucket_bytes: for all rows; each method's own by default.
        longest: the most steps that a round may have; a tenth of the run by default.

    Attributes:
        chosen: a row for each method, that with the most goodput first.
        left_out: the names of methods that had fewer than ten rounds of the shortest interval that was measured.
    """

    def __init__(self, run: Workload, steps: int, bucket_bytes: int | None = None, longest: int | None = None) -> None:
        self._run, self._steps, self._given = run, steps, bucket_bytes
        self._bucket_bytes = bucket_bytes or bucket_bytes_for(_FP32_BYTES * run.parameters)
        kinds = [kind for kind in _KINDS if kind.recipe != _STREAMING or run.layers > 1]
        longest = min(longest or steps // FEW_ROUNDS, _LONGEST)
        enough = [kind for kind in kinds if self._measured(kind)[0] <= longest]
        self.left_out = tuple(kind.name for kind in kinds if kind not in enough)
        by_gradients = gradients(run, bucket_bytes) if run.is_direct else ()  # an address takes rounds alone
        rows = [*by_gradients, *(self._best(kind, longest) for kind in enough)]
        self.chosen = tuple(sorted(rows, key=lambda row: row.order))

    def _measured(self, kind: _Kind) -> list[int]:
        return sorted(measurements(kind.name, self._run.replicas)[1])

    def _best(self, kind: _Kind, longest: int) -> Row:
        measured = self._measured(kind)
        intervals, every = {longest, *measured}, measured[0]
        while every < longest:
            intervals.add(every)
            every = max(every + 1, round(_LONGER * every))
        rows = [row for every in intervals if every <= longest for row in self._rows(kind, every)]
        return min(rows, key=lambda row: row.order)

    def _rows(self, kind: _Kind, every: int) -> list[Row]:
        if kind.recipe != _STREAMING:
            return [self._with(kind, every, 1, every if kind.recipe == _EAGER else 0)]
        # Of three layers, as in arXiv:2501.18512; small models were measured layer by layer (benchmarks/).
        layers = self._run.layers
        fragments = min(layers // 3 if layers >= 6 else 3, layers, every)
        late = range(2, every // LATEST + 1)
        if not late:
            return [self._with(kind, every, fragments, 1)]
        most = self._with(kind, every, fragments, late[-1]).cost.utilization
        place = bisect_left(
            late, True, key=lambda delay: self._with(kind, every, fragments, delay).cost.utilization >= most
        )
        return [self._with(kind, every, fragments, delay) for delay in (1, late[place])]

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
        run, name = self._run, name_of(kind.recipe, kind.flag, delay) or kind.name
        return Row(cost_of(run, method), config, efficiency(name, every, run.replicas, steps))


def synchronizations(run: Workload) -> dict[str, float]:
    """Return how many seconds a synchronization of all parameters takes by each recipe, if nothing hides it."""
    bucket_bytes = bucket_bytes_for(_FP32_BYTES * run.parameters)
    found = {}
    for kind in _KINDS:
        bits = bits_on_the_wire(kind.wire_bytes, run.parameters, 1, bucket_bytes)
        method = Method(kind.name, bits=bits, confirmed=True, bucket_bytes=bucket_bytes, **kind.numbers)
        found[kind.name] = cost_of(run, method).seconds_per_step - run.step_s
    return found


def name_of(recipe: str | None, codec: str | None, delay: int = 0) -> str | None:
    """Return what the evidence calls a recipe with this codec (None: its own); None if it has no such row."""
    found = next((kind.name for kind in _KINDS if (kind.recipe, kind.flag) == (recipe, codec)), None)
    return f"{found}, late" if found and recipe == _STREAMING and delay > 1 else found


def measurements(name: str, replicas: int) -> tuple[int, Measured]:
    """Return the nearest number of replicas that a method was measured with, and what was, by interval."""
    there = [number for number, by_name in EFFICIENCY.items() if name in by_name]
    found = min(there, key=lambda number: abs(math.log(number / replicas)))
    return found, EFFICIENCY[found][name]


def efficiency(name: str, every: int, replicas: int, steps: int = STEPS) -> Efficiency:
    """Return a method's efficiency with rounds of `every` steps.

    Between two intervals that were measured it is on the straight line over the logarithm of the interval. Beyond them,
    what it is above that of a replica alone falls as rounds get longer.

    Args:
        steps: of the run. In one that is shorter than our tests rounds count as longer, by the square root: in a
            quarter of the steps as twice as long. In longer ones they count as they are.
    """
    number, measured = measurements(name, replicas)
    length = every * math.sqrt(max(1.0, STEPS / max(steps, 1)))
    near = min(max(length, min(measured)), max(measured))
    below, above = max(one for one in measured if one <= near), min(one for one in measured if one >= near)
    part = math.log(near / below) / math.log(above / below) if above > below else 0.0
    mean, error = (a + part * (b - a) for a, b in zip(measured[below], measured[above], strict=True))
    alone, _ = EFFICIENCY[number]["alone"][1]
    mean = min(mean, alone + (mean - alone) * near / length) if length > near else mean
    return Efficiency(mean, error, number, is_extrapolated=length != near or replicas != number)


def gradients(run: Workload, bucket_bytes: int | None) -> tuple[Row, Row]:
    """Return data-parallel training, with gradients as they are and in 16 bits."""
    method = Method("DDP", during_backward=True, bucket_bytes=bucket_bytes or _DDP_BUCKET_BYTES)
    narrow = replace(method, name="DDP bf16", bits=16)
    bucket = [] if bucket_bytes is None else [f"bucket_cap_mb={math.ceil(bucket_bytes / _MIB)}"]
    hook = [*bucket, "comm_hook=DDPCommunicationHookType.BF16"]
    exact, rounded = (efficiency(name, 1, run.replicas) for name in ("DDP", "DDP bf16"))
    return (
        Row(cost_of(run, method), None, exact, script=_handler(bucket) if bucket else ""),
        Row(cost_of(run, narrow), None, rounded, script=_handler(hook)),
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
