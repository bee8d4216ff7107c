# SPDX-License-Identifier: Apache-2.0
"""The efficiency of each method in our tests: how many of DDP's steps end at the same loss, for each of its steps.

By the number of replicas, and by the steps between rounds: the mean of the sizes that were measured, and its standard
error, or half of what two sizes differ by if that is more. A replica that trains `alone` has one, too. Streaming was
measured with a delay of one step, and, as `late`, with one of a quarter of its interval. Written by
benchmarks/evidence/plan.py from benchmarks/results/evidence.jsonl; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Measured: TypeAlias = Mapping[int, tuple[float, float]]

STEPS = 1_000  # of each run
PARAMETERS = 385_000  # of the largest model
EFFICIENCY: Mapping[int, Mapping[str, Measured]] = {
    2: {
        "alone": {1: (0.667, 0.031)},
        "DDP": {1: (1.0, 0.0)},
        "diloco e3m0": {
            8: (0.954, 0.021),
            16: (0.973, 0.013),
            32: (0.934, 0.02),
            64: (0.846, 0.024),
            128: (0.737, 0.041),
        },
        "local_sgd": {8: (0.82, 0.034), 32: (0.742, 0.03)},
        "sparse_loco": {8: (0.893, 0.063), 32: (0.637, 0.022)},
        "streaming_diloco e3m0": {8: (0.866, 0.02), 32: (0.822, 0.036)},
        "streaming_diloco e3m0, late": {8: (0.872, 0.042), 32: (0.784, 0.037)},
    },
    4: {
        "DDP": {1: (1.0, 0.0)},
        "alone": {1: (0.431, 0.037)},
        "diloco e3m0": {
            4: (0.786, 0.021),
            8: (0.884, 0.028),
            16: (0.81, 0.023),
            32: (0.697, 0.02),
            64: (0.59, 0.033),
            128: (0.481, 0.034),
        },
        "diloco": {8: (0.845, 0.03), 32: (0.707, 0.041), 128: (0.47, 0.037)},
        "local_sgd": {8: (0.654, 0.032), 32: (0.516, 0.018), 128: (0.436, 0.03)},
        "streaming_diloco e3m0": {8: (0.696, 0.025), 32: (0.609, 0.028), 128: (0.466, 0.035)},
        "streaming_diloco e3m0, late": {8: (0.701, 0.051), 32: (0.564, 0.019), 128: (0.444, 0.029)},
        "sparse_loco": {8: (0.653, 0.037), 32: (0.427, 0.038)},
        "eager_diloco int8": {8: (0.323, 0.022), 32: (0.288, 0.009)},
        "DDP bf16": {1: (1.0, 0.0)},
    },
}
