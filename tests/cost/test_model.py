# SPDX-License-Identifier: Apache-2.0
"""The cost model: the published table and hours, limits, and what more of anything may and may not do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from farflung.base.errors import ConfigError
from farflung.cost.methods import Rows
from farflung.cost.model import Method, Workload, cost_of, needed_bandwidth

GRID = np.logspace(-1, 3, 50)  # Gbit/s
UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)

# Streaming DiLoCo (arXiv:2501.18512), table 4: Gbit/s for each of these utilizations. Rows: data-parallel, DiLoCo,
# streaming, streaming with one step of overlap, the same with 4 bits.
PUBLISHED = {
    (1_000_000_000, 24, 0.1): """
        86.8 152.6 184.2 222.3 569.0
        1.4 6.2 13.3 23.3 86.8
        1.4 5.2 9.1 16.0 28.1
        1.4 4.3 6.2 9.1 11.0
        0.4 0.9 1.7 2.0 3.0""",
    (10_000_000_000, 48, 0.8): """
        104.8 222.3 222.3 268.3 471.5
        1.7 7.5 16.0 33.9 104.8
        1.7 5.2 9.1 13.3 19.3
        1.7 3.6 5.2 6.2 7.5
        0.4 0.9 1.4 1.4 1.7""",
    (100_000_000_000, 108, 4.9): """
        184.2 323.8 390.7 390.7 471.5
        3.0 11.0 23.3 49.4 184.2
        2.4 6.2 9.1 11.0 19.3
        1.7 3.6 4.3 5.2 5.2
        0.5 0.9 1.1 1.1 1.4""",
}


def published_methods(layers):
    """Those of the paper: 16 bits unless said otherwise, fragments of 3 layers, sent during the backward pass."""
    streaming = Method("streaming", every=100, fragments=layers // 3, bits=16, during_backward=True)
    return (
        Method("data-parallel", bits=16, during_backward=True),
        Method("DiLoCo", every=100, bits=16, during_backward=True),
        streaming,
        replace(streaming, delay=1),
        replace(streaming, delay=1, bits=4),
    )


def grid_point(run, method, utilization):
    """The last point of the grid below `utilization`, as the paper counts it."""
    enough = [cost_of(replace(run, bandwidth_bps=x * 1e9), method).utilization >= utilization for x in GRID]
    return enough.index(True) - 1


def differences():
    """How many points of the grid lie between the model and each published cell."""
    for (parameters, layers, step_s), rows in PUBLISHED.items():
        run = Workload(parameters, layers, step_s, replicas=2, bandwidth_bps=math.inf)
        for method, row in zip(published_methods(layers), rows.strip().splitlines(), strict=True):
            for utilization, cell in zip(UTILIZATIONS, row.split(), strict=True):
                published = int(np.argmin(abs(np.log(GRID / float(cell)))))  # the paper rounds to a tenth
                yield grid_point(run, method, utilization) - published


def test_the_published_table_of_bandwidths_is_reproduced():
    found = list(differences())
    assert len(found) == 75
    assert max(abs(difference) for difference in found) <= 1
    assert found.count(0) >= 60


@pytest.mark.parametrize(
    ("published", "steps"),
    # Table 1, 1B at 1 Gbit/s: hours of data-parallel training, of streaming with overlap and 4 bits, and without limit
    # for 25, 100 and 250 billion tokens. The last ones say how many steps of 0.1 s those are: 1.03 million tokens each.
    [((109, 0.88, 0.67), 24_300), ((438, 3.5, 2.7), 97_200), ((1097, 8.75, 6.75), 243_000)],
)
def test_the_published_hours_are_reproduced(published, steps):
    run = Workload(1_000_000_000, 24, 0.1, replicas=2, bandwidth_bps=1e9)
    data_parallel, *_, streaming = published_methods(24)
    unlimited = replace(run, bandwidth_bps=math.inf)
    step_s = [seconds(run, data_parallel), seconds(run, streaming), seconds(unlimited, streaming)]
    assert [one * steps / 3600 for one in step_s] == pytest.approx(published, rel=0.03)


METHODS = st.builds(
    Method,
    name=st.just("any"),
    every=st.integers(8, 200),
    fragments=st.integers(1, 4),
    delay=st.integers(0, 8),
    bits=st.floats(0.1, 32),
    exchange=st.sampled_from(["reduced", "gathered", "paired"]),
    during_backward=st.booleans(),
    voted=st.booleans(),
    bucket_bytes=st.sampled_from([2**12, 2**20, 2**25]),
    encode_s=st.floats(0, 1e-8),
    decode_s=st.floats(0, 1e-8),
)
RUNS = st.builds(
    Workload,
    parameters=st.integers(1000, 10**10),
    layers=st.integers(4, 40),
    step_s=st.floats(1e-3, 10),
    replicas=st.integers(1, 16),
    bandwidth_bps=st.floats(1e5, 1e12),
    latency_s=st.floats(0, 0.3),
)
anything = given(RUNS, METHODS)
often = settings(max_examples=60)


def seconds(run, method):
    return cost_of(run, method).seconds_per_step


def no_slower(fast, slow):
    """fast <= slow, but for rounding."""
    return fast <= slow * (1 + 1e-12)


@often
@anything
def test_a_worse_network_more_bits_more_work_and_less_overlap_are_never_faster(run, method):
    assert no_slower(seconds(replace(run, bandwidth_bps=2 * run.bandwidth_bps), method), seconds(run, method))
    assert no_slower(seconds(run, method), seconds(replace(run, latency_s=run.latency_s + 0.1), method))
    assert no_slower(seconds(run, method), seconds(replace(run, replicas=run.replicas + 1), method))
    delay = min(method.every, method.delay + 1)
    better = {"bits": method.bits / 2, "encode_s": 0.0, "decode_s": 0.0, "voted": False, "delay": delay}
    for name, value in better.items():
        assert no_slower(seconds(run, replace(method, **{name: value})), seconds(run, method)), name


@often
@anything
def test_talking_half_as_often_halves_the_bytes_and_is_never_slower(run, method):
    now, seldom = (cost_of(run, each) for each in (method, replace(method, every=2 * method.every)))
    assert no_slower(seldom.seconds_per_step, now.seconds_per_step)
    assert seldom.bytes_sent_per_step == pytest.approx(now.bytes_sent_per_step / 2)
    assert seldom.bytes_sent_per_round == now.bytes_sent_per_round


@often
@anything
def test_time_is_compute_and_what_is_exposed_and_the_line_is_never_overdrawn(run, method):
    cost = cost_of(run, method)
    assert cost.seconds_per_step >= run.step_s
    assert 0 < cost.utilization <= 1
    assert cost.seconds_per_step * cost.utilization == pytest.approx(run.step_s)
    assert no_slower(8 * cost.bytes_sent_per_step / run.bandwidth_bps, cost.seconds_per_step + 1e-9)
    # Without limits or company a step costs what it computes.
    free = replace(method, encode_s=0.0, decode_s=0.0)
    assert seconds(replace(run, bandwidth_bps=math.inf, latency_s=0.0), free) == run.step_s
    alone = cost_of(replace(run, replicas=1), method)
    assert alone.seconds_per_step == run.step_s
    assert alone.bytes_sent_per_round == alone.memory.buffers == 0


@often
@anything
def test_the_bandwidth_needed_is_where_the_utilization_is_reached(run, method):
    needed = needed_bandwidth(run, method, 0.9)
    if needed < math.inf:
        assert cost_of(replace(run, bandwidth_bps=needed or 1e-3), method).utilization >= 0.9
    if needed > 0:
        assert cost_of(replace(run, bandwidth_bps=0.999 * needed), method).utilization < 0.9


RUN = Workload(parameters=10**9, layers=10, step_s=1.0, replicas=4, bandwidth_bps=8e9, latency_s=0.01)


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        (Method("reduced"), 6e9),  # 2 * 3/4 of 4 GB
        (Method("reduced in 16 bits", every=10, bits=16), 3e9),
        (Method("fragments send the same", every=10, fragments=5), 6e9),
        (Method("gathered in 4 bits", bits=4, exchange="gathered"), 1.5e9),  # 3 times 0.5 GB
        (Method("paired", exchange="paired"), 4e9),
    ],
)
def test_bytes_follow_the_law_of_their_exchange(method, sent):
    cost = cost_of(RUN, method)
    assert cost.bytes_sent_per_round == pytest.approx(sent)
    assert cost.bytes_sent_per_step * method.every == pytest.approx(sent)


def test_a_round_in_the_open_costs_its_waits_its_bytes_its_codec_and_its_vote():
    method = Method("m", every=10, bits=16, bucket_bytes=10**9, voted=True, encode_s=1e-9, decode_s=2e-9)
    waits = 2 * 6 * 0.01  # four buckets, two at a time, six messages one after the other
    assert seconds(RUN, method) == pytest.approx(1 + (waits + 3.0 + 3.0 + 3 * 0.01) / 10)
    gathered = replace(method, exchange="gathered")
    assert seconds(RUN, gathered) == pytest.approx(1 + (2 * 3 * 0.01 + 6.0 + 1 + 4 * 2 + 3 * 0.01) / 10)
    in_five = replace(method, fragments=5, bucket_bytes=2**40)  # five times one bucket, and a vote before each
    assert seconds(RUN, in_five) == pytest.approx(1 + (5 * 6 * 0.01 + 3.0 + 3.0 + 5 * 3 * 0.01) / 10)


def test_rounds_among_neighbours_and_averaged_states_have_bytes_of_their_own():
    levels = Method("m", every=12, levels=((2, 2), (4, 3)))  # after steps 2, 6, 10 two meet, after 4 and 8 three do
    cost = cost_of(RUN, levels)
    assert cost.bytes_near_per_round == pytest.approx(4e9 * (3 * 1 + 2 * 4 / 3))
    assert cost.bytes_sent_per_round == pytest.approx(6e9 + cost.bytes_near_per_round)
    assert cost.seconds_per_step == seconds(RUN, Method("m", every=12))
    crooked = Method("m", every=3, levels=((2, 2),))  # after 2 of the first 6, never 6: twice in two rounds
    assert cost_of(RUN, crooked).bytes_near_per_round == pytest.approx(4e9)
    adam = Method("m", every=10, bits=8, exchange="gathered", state_bits=64, bucket_bytes=2**40)
    assert cost_of(RUN, adam).bytes_sent_per_round == pytest.approx(3e9 + 12e9)
    assert seconds(RUN, adam) == pytest.approx(1 + (3 * 0.01 + 3 + 6 * 0.01 + 12) / 10)


def test_who_confirms_waits_once_more_and_flights_hide_that_and_the_vote():
    plain = Method("m", every=10, bucket_bytes=2**40)
    meeting = 3 * 0.01
    assert seconds(RUN, replace(plain, confirmed=True)) == pytest.approx(seconds(RUN, plain) + meeting / 10)
    both = replace(plain, voted=True, confirmed=True)
    assert seconds(RUN, both) == pytest.approx(seconds(RUN, plain) + 2 * meeting / 10)
    assert seconds(RUN, replace(both, delay=10)) == 1
    two = replace(RUN, replicas=2)
    assert seconds(two, replace(plain, confirmed=True)) == seconds(two, plain)


def test_a_delay_hides_that_many_steps_and_nothing_hides_more_than_the_line_carries():
    network = replace(RUN, latency_s=0.0)
    blocking = Method("m", every=10, fragments=2, bucket_bytes=2**30)
    assert seconds(network, blocking) == pytest.approx(1 + 6 / 10)
    assert seconds(network, replace(blocking, delay=1)) == pytest.approx(1 + 4 / 10)  # each of two hides one second
    assert seconds(network, replace(blocking, delay=5)) == 1
    busy = replace(network, bandwidth_bps=8e8)  # 60 s of sending in 10 s of computing, two fragments at a time
    assert seconds(busy, replace(blocking, delay=10)) == pytest.approx(6)


def test_gradients_in_one_bucket_wait_for_the_whole_backward_pass():
    network = replace(RUN, latency_s=0.0)
    gradients = Method("m", during_backward=True, bucket_bytes=2**40)
    assert seconds(network, gradients) == pytest.approx(1 + 6)
    by_layer = replace(gradients, bucket_bytes=4 * 10**8)  # the first layer is ready after a tenth of two thirds
    assert seconds(network, by_layer) == pytest.approx(1 + 6 - 0.9 * 2 / 3)


def test_memory_is_what_is_kept_and_what_is_under_way():
    def memory(run=RUN, **settings):
        found = cost_of(run, Method("m", **settings)).memory
        assert found.total == found.anchor + found.outer_state + found.feedback + found.buffers
        return found.anchor, found.outer_state, found.feedback, found.buffers

    bucket = 10**6
    assert memory(every=8, bucket_bytes=bucket) == (0, 0, 0, 4 * bucket)
    assert memory(replace(RUN, replicas=2), every=8, bucket_bytes=bucket) == (0, 0, 0, 2 * bucket)
    assert memory(every=8, bucket_bytes=bucket, anchor=True, outer_state=2, feedback=True)[:3] == (4e9, 8e9, 4e9)
    assert memory(every=8, bucket_bytes=2**40)[3] == 4e9  # no more than there is
    assert memory(every=8, bucket_bytes=bucket, bits=8) == (0, 0, 0, 4.5 * bucket)
    assert memory(every=8, bucket_bytes=bucket, bits=8, exchange="gathered")[3] == 4 * bucket + 4 * bucket / 2
    assert memory(during_backward=True)[3] == 4e9
    assert memory(every=10, fragments=5, delay=1)[3] == pytest.approx(0.8e9)
    assert memory(every=10, fragments=5, delay=4)[3] == pytest.approx(1.6e9)  # two fly at a time


def test_the_usual_methods_go_with_any_number_of_layers_and_send_what_their_papers_say():
    for layers in (1, 2, 3, 24, 1000):
        run = replace(RUN, layers=layers)
        rows = Rows(run, 20_000).chosen
        costs = {row.method.name.split("(")[0]: cost_of(run, row.method) for row in rows}
        assert len({row.method.name for row in rows}) == len(rows)
    dense, sparse = Method("dense", exchange="gathered"), costs["sparse_loco"]
    fewer = cost_of(RUN, dense).bytes_sent_per_round / sparse.bytes_sent_per_round
    assert fewer == pytest.approx(32 / (64 * 14 + 32) * 4096, rel=0.001)  # 146 times below fp32; two levels a chunk
    every = costs["local_sgd"].method.every
    assert costs["local_sgd"].bytes_sent_per_step * every == pytest.approx(costs["DDP"].bytes_sent_per_step)


@often
@anything
def test_buffers_cost_data_parallel_training_their_bytes_in_each_step_and_rounds_nothing(run, method):
    buffered = replace(run, buffer_bytes=10**6)
    now, then = cost_of(run, method), cost_of(buffered, method)
    more = 10**6 * (method.during_backward and run.replicas > 1)
    sent, took = now.bytes_sent_per_step, now.seconds_per_step
    assert then.bytes_sent_per_step - sent == pytest.approx(more, rel=1e-3, abs=1e-6 * sent)
    assert then.seconds_per_step - took == pytest.approx(8 * more / run.bandwidth_bps, rel=1e-3, abs=1e-9 * took)


DILOCO = Method("diloco(8)", every=8, anchor=True, outer_state=1, confirmed=True)
WRONG = [
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
]


@pytest.mark.parametrize(("use", "words"), WRONG)
def test_what_cannot_be_is_refused(use, words):
    with pytest.raises(ConfigError, match=words):
        use()
