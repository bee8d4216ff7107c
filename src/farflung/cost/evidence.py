# SPDX-License-Identifier: Apache-2.0
"""What each method kept of DDP's gain over a replica that trains alone, by the steps between rounds, in our tests.

Written by benchmarks/evidence/kept.py from benchmarks/results/evidence.jsonl; a test keeps them equal. Streaming was
measured with a delay of one step, and, as `late`, with one of a quarter of its interval.
"""

from __future__ import annotations

from collections.abc import Mapping

TESTS = "with four replicas of 100k parameters, 1,000 steps, three seeds"
GAIN_KEPT: Mapping[str, Mapping[int, float]] = {
    "DDP": {1: 1.0},
    "DDP bf16": {1: 1.005},
    "diloco e3m0": {4: 0.718, 8: 0.846, 16: 0.777, 32: 0.602, 64: 0.377, 128: 0.221},
    "diloco": {8: 0.836, 32: 0.584, 128: 0.195},
    "local_sgd": {8: 0.509, 32: 0.299, 128: 0.114},
    "streaming_diloco e3m0": {8: 0.576, 32: 0.438, 128: 0.19},
    "streaming_diloco e3m0, late": {8: 0.572, 32: 0.354, 128: 0.135},
    "sparse_loco": {8: 0.529, 32: 0.092},
    "eager_diloco int8": {8: -0.215, 32: -0.297},
}
