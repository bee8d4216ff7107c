# SPDX-License-Identifier: Apache-2.0
"""Runs, methods, layouts and models that no cost can be told of: each is refused with the value seen."""

import math
from dataclasses import replace

import pytest
from torch import nn

from farflung.base.errors import ConfigError
from farflung.cost.memory import ModelSize, RankLayout
from farflung.cost.model import Method, Workload, cost_of, needed_bandwidth
from farflung.cost.modules import size_of

RUN = Workload(parameters=10**9, layers=10, step_s=1.0, replicas=4, bandwidth_bps=8e9, latency_s=0.01)
DILOCO = Method("diloco(8)", every=8, anchor=True, outer_state=1, confirmed=True)
TABLE = [
    (lambda: replace(RUN, parameters=0), "parameters is 0"),
    (lambda: replace(RUN, parameters=1000000000.0), "parameters is 1000000000.0"),
    (lambda: replace(RUN, layers=-1), "layers is -1"),
    (lambda: replace(RUN, replicas=True), "replicas is True"),
    (lambda: replace(RUN, step_s=0.0), "step_s is 0.0"),
    (lambda: replace(RUN, step_s=math.inf), "step_s is inf"),
    (lambda: replace(RUN, bandwidth_bps=0.0), "bandwidth_bps is 0.0"),
    (lambda: replace(RUN, bandwidth_bps=math.nan), "bandwidth_bps is nan"),
    (lambda: replace(RUN, latency_s=-0.1), "latency_s is -0.1"),
    (lambda: replace(RUN, latency_s=math.nan), "latency_s is nan"),
    (lambda: Method("m", every=0), "every is 0"),
    (lambda: Method("m", every=2.5), r"every is 2\.5"),
    (lambda: Method("m", every=4, fragments=5), "5 fragments in 4 steps"),
    (lambda: Method("m", every=4, delay=5), "delay=5 is more than every=4"),
    (lambda: Method("m", delay=-1), "delay is -1"),
    (lambda: Method("m", bits=-1), "bits is -1"),
    (lambda: Method("m", bits=math.nan), "bits is nan"),
    (lambda: Method("m", encode_s=math.inf), "encode_s is inf"),
    (lambda: Method("m", exchange="shouted"), "'shouted'; it must be one of reduced, gathered, paired"),
    (lambda: Method("m", bucket_bytes=0), "bucket_bytes is 0"),
    (lambda: Method("m", levels=((4, 1),)), r"levels=\(\(4, 1\),\)"),
    (lambda: Method("m", state_bits=math.nan), "state_bits is nan"),
    (lambda: cost_of(RUN, Method("m", every=20, fragments=11)), "11 fragments of 10 layers"),
    (lambda: needed_bandwidth(RUN, Method("m"), 0), "utilization=0"),
    (lambda: needed_bandwidth(RUN, Method("m"), 1), "utilization=1"),
    (lambda: needed_bandwidth(RUN, Method("m"), math.nan), "utilization=nan"),
    (lambda: ModelSize(()), r"groups=\(\)"),
    (lambda: ModelSize((10,), trained=11), "trained=11 is more than the 10 parameters"),
    (lambda: ModelSize((10,), value_bytes=3), "value_bytes is 3"),
    (lambda: RankLayout(1, 4, sharded=True, param_bytes=5), "param_bytes is 5"),
    (lambda: RankLayout(1, 4, sharded=True, outer=DILOCO), "one row of ranks"),
    (lambda: size_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())), "2 dtypes"),
    (lambda: size_of(nn.Linear(2, 2).requires_grad_(False)), "0 dtypes"),
]


@pytest.mark.parametrize(("use", "words"), TABLE)
def test_what_cannot_be_is_refused(use, words):
    with pytest.raises(ConfigError, match=words):
        use()
