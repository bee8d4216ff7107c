# SPDX-License-Identifier: Apache-2.0
"""How long a training would have taken on a slow line, by the cost model, from measured computing and bytes."""

from __future__ import annotations

from dataclasses import replace

from farflung.cost.model import Method, Run, copies, cost_of


def seconds_on_line(
    method: Method,
    *,
    steps: int,
    computing_s: float,
    bytes_sent: float,
    parameters: int,
    layers: int,
    replicas: int,
    bandwidth_bps: float,
) -> float:
    """Return the seconds of `steps` steps on a line without latency.

    Args:
        method: what travels when; its own number of bits is not used.
        computing_s: of all steps: CPU seconds, which other programs on the machine hardly change.
        bytes_sent: by one replica in all steps, as measured.
    """
    exchanges = steps / method.every * copies(method.exchange, replicas)
    measured = replace(method, bits=8 * bytes_sent / (exchanges * parameters))
    run = Run(parameters, layers, computing_s / steps, replicas, bandwidth_bps)
    return steps * cost_of(run, measured).seconds_per_step
