# SPDX-License-Identifier: Apache-2.0
"""The efficiency of each method in our tests: how many of DDP's steps end at the same loss, for each of its steps.

By the numbers of parameters and replicas, and by the steps between rounds: the mean, and its standard error. A replica
that trains `alone` has one, too. Streaming was measured with a delay of one step, and, as `late`, with one of a quarter
of its interval. Written by benchmarks/evidence/plan.py from benchmarks/results/evidence.jsonl; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Measured: TypeAlias = Mapping[int, tuple[float, float]]

STEPS = 1_000  # of each run
EFFICIENCY: Mapping[tuple[int, int], Mapping[str, Measured]] = {
    (100_000, 2): {
        "alone": {1: (0.651, 0.062)},
        "DDP": {1: (1.0, 0.0)},
        "diloco e3m0": {
            8: (0.945, 0.037),
            16: (0.975, 0.02),
            32: (0.934, 0.022),
            64: (0.822, 0.033),
            128: (0.732, 0.081),
        },
        "local_sgd": {8: (0.854, 0.041), 32: (0.767, 0.059)},
        "sparse_loco": {8: (0.83, 0.085), 32: (0.616, 0.038)},
        "streaming_diloco e3m0": {8: (0.859, 0.031), 32: (0.826, 0.07)},
        "streaming_diloco e3m0, late": {8: (0.844, 0.065), 32: (0.784, 0.069)},
    },
    (100_000, 4): {
        "DDP": {1: (1.0, 0.0)},
        "alone": {1: (0.394, 0.033)},
        "diloco e3m0": {
            4: (0.786, 0.021),
            8: (0.856, 0.014),
            16: (0.813, 0.031),
            32: (0.715, 0.035),
            64: (0.557, 0.024),
            128: (0.481, 0.034),
        },
        "diloco": {8: (0.845, 0.03), 32: (0.707, 0.041), 128: (0.47, 0.037)},
        "local_sgd": {8: (0.654, 0.032), 32: (0.516, 0.018), 128: (0.436, 0.03)},
        "streaming_diloco e3m0": {8: (0.698, 0.042), 32: (0.606, 0.052), 128: (0.466, 0.035)},
        "streaming_diloco e3m0, late": {8: (0.701, 0.051), 32: (0.545, 0.021), 128: (0.444, 0.029)},
        "sparse_loco": {8: (0.653, 0.037), 32: (0.427, 0.038)},
        "eager_diloco int8": {8: (0.323, 0.022), 32: (0.288, 0.009)},
        "DDP bf16": {1: (1.0, 0.0)},
    },
}
