# SPDX-License-Identifier: Apache-2.0
"""The cost model: what a method of training together costs in time, bytes and memory, as plain arithmetic.

    payload = N/P * bits                               what one of P fragments of N parameters weighs on the wire
    sent    = 2(M-1)/M * payload   reduced             by each of M replicas, for one fragment
              (M-1)    * payload   gathered            everybody's payload, to everybody
              payload              paired              to one other replica
              reduced where that saves enough, else gathered: either
    t       = (collectives / 2 + votes) * hops * latency + sent / bandwidth + values * (encode + wires * decode)
    stall   = max(0, t - the compute done meanwhile)
    step    = T + sum over the fragments of stall / H  seconds, where a round is H steps of T seconds

What travels during the backward pass (`Method.during_backward`) goes bucket by bucket, as layers become ready. That is
the model behind the published table of Streaming DiLoCo (arXiv:2501.18512, table 4): a backward pass takes 2/3 of a
step, layer l from the bottom of L is ready (L-l)/L of the way through it, and the link carries one thing at a time.

Numbers that can't be, here and in the room's other files, raise ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from farflung.base.checks import check_number, check_whole, check_word
from farflung.base.errors import ConfigError
from farflung.base.sizes import (
    CAP_BYTES,
    HOP_BYTES,
    HOP_BYTES_OF_REQUESTS,
    lie_in_names,
    num_buffers_among,
    saves_by_two_hops,
)
from farflung.base.words import counted

Exchange = Literal["reduced", "gathered", "paired", "either"]

_BACKWARD = 2 / 3  # of a step: the backward pass computes twice what the forward pass does
_FP32 = 4
_UNDER_WAY = 2  # collectives at a time, which wait for the line together: the outer loop's buckets, gloo's threads


@dataclass(frozen=True)
class Workload:
    """What is trained, on what."""

    parameters: int  # trainable ones; they are taken to be spread evenly over the layers
    layers: int  # of the model, such as its transformer blocks
    step_s: float  # seconds of one optimizer step of a replica that trains alone
    replicas: int  # how many train together
    bandwidth_bps: float  # bits a second of each replica's line, each way at the same time; `math.inf` for no limit
    latency_s: float = 0.0  # seconds from one replica to another, one way: half of what `ping` shows
    island_size: int = 1  # ranks that train one replica; of several, each keeps a round until all of them have it
    # Seconds of a request, if replicas meet at an address (`meeting.py`); `latency_s` has no effect then.
    request_s: float | None = None
    lists_at_once: bool = False  # as buckets do, and folders don't: see `Group`
    # Bytes of the model's buffers, such as tables of positions: DDP broadcasts them before each forward pass.
    buffer_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_counts(self, parameters=1, layers=1, replicas=1, island_size=1)
        check_number("step_s", self.step_s, above=0)
        check_number("bandwidth_bps", self.bandwidth_bps, above=0, finite=False)
        check_number("latency_s", self.latency_s, least=0)
        check_number("request_s", self.request_s or 0, least=0)
        check_number("buffer_bytes", self.buffer_bytes, least=0)

    @property
    def is_direct(self) -> bool:
        """Whether replicas are connected with each other."""
        return self.request_s is None

    @property
    def vote_requests(self) -> int:
        """How many requests a vote takes at an address, one after the other: a write, and reads or one listing."""
        return 2 if lie_in_names(self.replicas, self.lists_at_once) else self.replicas


@dataclass(frozen=True)
class Method:
    """A way of training together, in plain numbers."""

    name: str  # for people
    every: int = 1  # H, the steps in which each parameter is exchanged once: 1 for data-parallel training
    fragments: int = 1  # P, the parts in which the model is exchanged, at equal distances within those steps
    delay: int = 0  # steps between a fragment's launch and its landing
    bits: float = 32  # sent for each parameter, with its share of scales and indices
    # Reduced on the way (all-reduce, or reduce-scatter and all-gather), gathered from all by all, or paired with one
    # other replica. Either: reduced if the bytes that this saves are worth a hop, else gathered.
    exchange: Exchange = "reduced"
    # What travels leaves bucket by bucket while the backward pass of its step still computes. True of gradients; false
    # of weights, which move in the step after it.
    during_backward: bool = False
    voted: bool = False  # a vote comes before each fragment, which is not sent until all have voted
    confirmed: bool = False  # a fragment lands once all of more than two replicas have said that they received it
    anchor: bool = False  # an agreed point is kept in addition to the weights
    outer_state: int = 0  # fp32 values that the outer optimizer keeps for each parameter: 1 is momentum
    feedback: bool = False  # another fp32 value is kept for each parameter, such as what the codec left out
    bucket_bytes: int = CAP_BYTES  # fp32 bytes in one collective
    encode_s: float = 0.0  # seconds to encode one value
    decode_s: float = 0.0  # seconds to decode one value of one wire
    state_bits: float = 0.0  # of the inner optimizer's state, averaged with each parameter by an all-reduce of its own
    # Rounds among neighbours in between: pairs of steps between them and how many replicas meet. After a step at which
    # several are due only the widest is held. They are taken to stay within a machine: bytes, no time.
    levels: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self, every=1, fragments=1, delay=0, outer_state=0, bucket_bytes=1)
        if self.fragments > self.every:
            raise ConfigError(
                f"{self.name}: {self.fragments} fragments in {counted(self.every, 'step')}. "
                "At most one can be sent after each step."
            )
        if self.delay > self.every:
            raise ConfigError(
                f"{self.name}: delay={self.delay} is more than every={self.every}, so a fragment would be sent "
                "again before its last exchange was applied."
            )
        check_word(f"{self.name}: exchange", self.exchange, get_args(Exchange))
        if any(every < 1 or size < 2 for every, size in self.levels):
            raise ConfigError(
                f"{self.name}: levels={self.levels} are pairs of steps, 1 or more, and replicas, 2 or more."
            )
        for name in ("bits", "encode_s", "decode_s", "state_bits"):
            check_number(f"{self.name}: {name}", getattr(self, name), least=0)


@dataclass(frozen=True)
class Memory:
    """Bytes that a replica needs beyond those of training alone."""

    anchor: float
    outer_state: float
    feedback: float
    buffers: float

    @property
    def total(self) -> float:
        return self.anchor + self.outer_state + self.feedback + self.buffers


@dataclass(frozen=True)
class Cost:
    """What a method costs in a run; bytes are those of one replica."""

    method: Method
    seconds_per_step: float  # on the average over a round
    utilization: float  # the share of the time in which it computes
    bytes_sent_per_round: float  # in `Method.every` steps, without votes and the network's own headers
    bytes_received_per_round: float  # as many, except from an address
    bytes_near_per_round: float  # those of the sent ones that stay among neighbours
    memory: Memory

    @property
    def bytes_sent_per_step(self) -> float:
        return self.bytes_sent_per_round / self.method.every


def cost_of(run: Workload, method: Method) -> Cost:
    """Forecast what `method` costs in `run`, whose model must have a layer for each fragment."""
    if method.fragments > run.layers:
        raise ConfigError(
            f"{method.name}: {method.fragments} fragments of {counted(run.layers, 'layer')}. Each needs at least one."
        )
    stated, method = method, replace(method, exchange=_way(run, method))
    seconds = run.step_s + _exposed_s(run, method) / method.every
    # In a ring, and among pairs, each replica passes on as much as it gets; at an address it writes all once.
    came = copies(method.exchange, run.replicas) * method.bits
    came += copies(_way_of_state(run, method), run.replicas) * method.state_bits
    far = came if run.is_direct else (run.replicas > 1) * (method.bits + method.state_bits)
    near = run.parameters / 8 * _near_bits(run, method) + method.every * _broadcast_bytes(run, method)
    travels, came = (run.parameters / 8 * bits + near for bits in (far, came))
    return Cost(stated, seconds, run.step_s / seconds, travels, came, near, _memory(run, method))


def needed_bandwidth(run: Workload, method: Method, utilization: float) -> float:
    """Return the bits a second from which `method` reaches `utilization`, whatever the bandwidth of `run`.

    It is `math.inf` if no bandwidth is enough, as latency or codec alone cost too much, and 0 if nothing is sent.
    """
    if not (0 < utilization < 1):
        raise ConfigError(f"utilization={utilization!r} must be above 0 and below 1.")

    def reached(bandwidth: float) -> bool:
        return cost_of(replace(run, bandwidth_bps=bandwidth), method).utilization >= utilization

    if not reached(math.inf):
        return math.inf
    if reached(low := 1e-3):
        return 0.0
    high = low
    while not reached(high):
        low, high = high, 2 * high
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def copies(exchange: Exchange, replicas: int) -> float:
    """How often a replica sends a payload: what a ring passes on, counted by what each brings."""
    return hops(exchange, replicas) / (replicas if exchange == "reduced" else 1)


def num_collectives(run: Workload, method: Method) -> int:
    """Return how many collectives a round has at an address, with votes and words that all has arrived."""
    layers = [len(range(fragment, run.layers, method.fragments)) for fragment in range(method.fragments)]
    buckets = sum(_num_buckets(method, run.parameters * count / run.layers) for count in layers)
    of_state = _num_buckets(method, run.parameters * bool(method.state_bits))
    num_hops = [1 + (way == "reduced") for way in (_way(run, method), _way_of_state(run, method))]
    return num_hops[0] * buckets + 2 * method.fragments + num_hops[1] * of_state


def hops(exchange: Exchange, replicas: int) -> int:
    """How many messages follow one another in a collective."""
    if exchange == "reduced":
        return 2 * (replicas - 1)
    return replicas - 1 if exchange == "gathered" else int(replicas > 1)


def _way(run: Workload, method: Method) -> Exchange:
    """Return which of two exchanges a method takes, if it takes either. At an address all read all, unless two save."""
    if method.exchange == "either" or (method.exchange == "reduced" and not run.is_direct):
        return "reduced" if _two_hops_save(run, method, method.bits) else "gathered"
    return method.exchange


def _way_of_state(run: Workload, method: Method) -> Exchange:
    return "reduced" if run.is_direct or _two_hops_save(run, method, method.state_bits) else "gathered"


def _two_hops_save(run: Workload, method: Method, bits: float) -> bool:
    values = min(run.parameters / method.fragments, method.bucket_bytes / _FP32)
    return saves_by_two_hops(values * bits / 8, run.replicas, HOP_BYTES if run.is_direct else HOP_BYTES_OF_REQUESTS)


def _exposed_s(run: Workload, method: Method) -> float:
    """Seconds of a round in which nothing is computed."""
    if run.replicas == 1:
        return 0.0
    busy, stalls = 0.0, 0.0
    meeting_s = _turn_s(run, "gathered") if run.request_s is None else run.vote_requests * run.request_s
    hidden = (method.delay + (_BACKWARD if method.during_backward else 0)) * run.step_s
    for fragment in range(method.fragments):
        end = (method.voted or not run.is_direct) * meeting_s
        for ready, seconds in _transfers(run, method, fragment):
            end = max(end, ready) + seconds
            busy += seconds
        end += method.confirmed * (run.replicas > 2 or not run.is_direct) * meeting_s
        stalls += max(0.0, end - hidden)
    way = _way_of_state(run, method)
    averaging = _waits(run, method, way, run.parameters * bool(method.state_bits))
    averaging += _passes(run, way) * run.parameters * method.state_bits / run.bandwidth_bps
    # Fragments that fly at the same time share one line: a round lasts as long as it is busy, at least.
    # Buffers come before a forward pass, which can't hide them.
    broadcasts = method.every * 8 * _broadcast_bytes(run, method) / run.bandwidth_bps
    return max(stalls, busy - method.every * run.step_s) + averaging + broadcasts


def _broadcast_bytes(run: Workload, method: Method) -> float:
    """Return the bytes of buffers that a replica sends in a step: once along a chain. Rounds take weights alone."""
    return run.buffer_bytes * (method.during_backward and run.replicas > 1)


def _transfers(run: Workload, method: Method, fragment: int) -> Iterator[tuple[float, float]]:
    """Yield when each send of a fragment is ready, in seconds from when the first could be, and how long it takes.

    Fragment p of P is the layers p, p + P, p + 2P ..., strided as in the paper: that spreads over the backward pass.
    """
    layers = range(fragment, run.layers, method.fragments)[::-1]  # the top of the model has its gradients first
    if not method.during_backward:
        yield 0.0, _seconds(run, method, len(layers))
        return
    in_bucket = max(1, method.bucket_bytes * run.layers // (_FP32 * run.parameters))
    for start in range(0, len(layers), in_bucket):
        together = layers[start : start + in_bucket]
        yield (run.layers - together[-1]) / run.layers * _BACKWARD * run.step_s, _seconds(run, method, len(together))


def _seconds(run: Workload, method: Method, num_layers: int) -> float:
    """How long the values of some layers take from one replica's memory to all others'."""
    values = run.parameters * num_layers / run.layers
    waiting = _waits(run, method, method.exchange, values)
    sending = _passes(run, method.exchange) * values * method.bits / run.bandwidth_bps
    wires = run.replicas if method.exchange == "gathered" else 1
    return waiting + sending + values * (method.encode_s + wires * method.decode_s)


def _waits(run: Workload, method: Method, exchange: Exchange, values: float) -> float:
    under_way = _UNDER_WAY if run.is_direct else 1
    turns = math.ceil(_FP32 * values / method.bucket_bytes / under_way)
    return turns * _turn_s(run, exchange)


def _turn_s(run: Workload, exchange: Exchange) -> float:
    """Seconds of a collective without its bytes: at an address a write, and a read of each share that it gets."""
    if run.request_s is None:
        return hops(exchange, run.replicas) * run.latency_s
    num_requests = 2 if exchange == "paired" else (1 + (exchange == "reduced")) * run.replicas
    return num_requests * run.request_s


def _passes(run: Workload, exchange: Exchange) -> float:
    """How often a payload is on a replica's line: at an address its own, and then what it reads."""
    return copies(exchange, run.replicas) + (not run.is_direct)


def _num_buckets(method: Method, values: float) -> int:
    return math.ceil(_FP32 * values / method.bucket_bytes)


def _near_bits(run: Workload, method: Method) -> float:
    """Bits that are sent to neighbours for each parameter, while each is exchanged with all once."""
    bits = 0.0
    for every, size in method.levels:
        wider = [other for other, _ in method.levels if other > every] + [method.every]
        cycle = math.lcm(every, *wider)
        held = sum(all(step % other for other in wider) for step in range(every, cycle + 1, every))
        bits += held * method.every / cycle * copies(method.exchange, min(size, run.replicas)) * method.bits
    return bits


def _memory(run: Workload, method: Method) -> Memory:
    everything = _FP32 * run.parameters
    fragment = everything * math.ceil(run.layers / method.fragments) / run.layers
    if method.delay or method.during_backward:  # all that is under way waits in memory of its own
        in_buffers = flying = fragment * max(1, math.ceil(method.delay * method.fragments / method.every))
    else:
        in_buffers = min(fragment, num_buffers_among(run.replicas) * method.bucket_bytes)
        flying = min(fragment, _UNDER_WAY * method.bucket_bytes)
    if run.island_size > 1:
        in_buffers = everything
    is_gathered = method.exchange == "gathered"
    wires = run.replicas if is_gathered else 1
    encoded = flying * method.bits / 32 * wires if method.bits < 32 or is_gathered else 0.0
    return Memory(
        anchor=everything * method.anchor,
        outer_state=everything * method.outer_state,
        feedback=everything * method.feedback,
        buffers=in_buffers + encoded if run.replicas > 1 else 0.0,
    )


def _check_counts(owner: Workload | Method, **least: int) -> None:
    for name, smallest in least.items():
        check_whole(name, getattr(owner, name), least=smallest)
