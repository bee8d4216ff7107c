# SPDX-License-Identifier: Apache-2.0
"""The time on a slow line follows from what was measured, and is the one that `farflung plan` would forecast."""

from dataclasses import replace

import pytest

from farflung.cost.model import Method, Workload, cost_of
from farflung.demo.train import seconds_on_line

RUN = Workload(parameters=1000, layers=2, step_s=0.05, replicas=2, bandwidth_bps=8000.0)


def test_what_nothing_hides_is_computing_and_bytes_over_the_line():
    # 4000 bytes a second pass in each direction: 8000 bits a second are 1000 bytes.
    method = Method("m", every=10, bits=1.0)  # whose bits are not those that were measured
    assert seconds_on_line(method, RUN, 100, 40_000) == pytest.approx(5.0 + 40.0)


def test_what_travels_while_training_goes_on_takes_no_time_of_its_own():
    method = Method("m", every=10, delay=5, exchange="gathered")
    assert seconds_on_line(method, RUN, 100, 2_000) == pytest.approx(5.0)
    assert seconds_on_line(method, RUN, 100, 40_000) == pytest.approx(45.0 - 10 * 0.25)  # five steps a round


@pytest.mark.parametrize("exchange", ["reduced", "gathered"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_with_the_bytes_of_the_model_it_is_the_forecast(exchange, replicas):
    method = Method("m", every=10, fragments=2, delay=1, exchange=exchange)
    run = replace(RUN, replicas=replicas)
    cost = cost_of(run, method)
    found = seconds_on_line(method, run, 100, 100 * cost.bytes_sent_per_step)
    assert found == pytest.approx(100 * cost.seconds_per_step)
