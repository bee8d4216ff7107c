# SPDX-License-Identifier: Apache-2.0
"""run_ranks: values by rank, and one clear report when a rank fails, hangs or dies; limits grow with the load."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from farflung.base.errors import RankFailure
from farflung.config import environ
from farflung.testing import patience as limits
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks


def connected(offset):
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank() + offset, x.item(), torch.get_num_threads()


def test_values_come_back_by_rank():
    assert run_ranks(connected, 3, 10) == [(10, 3.0, 1), (11, 3.0, 1), (12, 3.0, 1)]


def test_each_call_hands_on_its_own_environment():
    with environ.patched({"OF_THIS_CALL": "1"}):
        assert run_ranks(os.getenv, 1, "OF_THIS_CALL") == ["1"]
    assert run_ranks(os.getenv, 1, "OF_THIS_CALL") == [None]


def raises_on(rank):
    dist.barrier()  # a rank that ends while another one still connects would fail that one
    if dist.get_rank() == rank:
        raise KeyError("the seventh seal")


def test_a_traceback_comes_back_with_its_rank():
    with pytest.raises(RankFailure, match=r"rank 1: Traceback(.|\n)*raises_on(.|\n)*the seventh seal"):
        run_ranks(raises_on, 2, 1)


def sleeps_on(rank):
    if dist.get_rank() == rank:
        time.sleep(3600)


@pytest.mark.long
def test_a_rank_that_hangs_is_named_in_time():
    deadline = time.monotonic() + patience(15)
    with pytest.raises(RankFailure, match=r"rank 2 did not return within \d[\d.]* s"):
        run_ranks(sleeps_on, 3, 2, timeout_s=4)  # in which they have to connect, on a busy machine too
    assert time.monotonic() < deadline


def dies_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(RankFailure, match="rank 0: the process died with exit code -9"):
        run_ranks(dies_on, 2, 0)


@pytest.mark.parametrize(
    ("work_s", "load", "factor"),
    [
        (limits._LOOPS_S, 0.5, 1),
        (limits._LOOPS_S / 4, 0.0, 1),  # a faster machine gets no less time
        (3 * limits._LOOPS_S, 0.5, 3),
        (limits._LOOPS_S, 8.0, 4),
    ],
)
def test_a_limit_grows_by_the_larger_of_slowness_and_load(work_s, load, factor, monkeypatch):
    monkeypatch.setattr(limits, "_work_s", lambda moment: work_s)
    monkeypatch.setattr(limits.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(limits.os, "cpu_count", lambda: 2)
    assert patience(10) == pytest.approx(10 * factor)


def test_this_test_may_take_what_its_own_limit_and_the_machine_allow(request):
    limit_s = request.node.get_closest_marker("timeout").args[0]
    assert limit_s >= float(request.config.getini("timeout"))
