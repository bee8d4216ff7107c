# SPDX-License-Identifier: Apache-2.0
"""Time limits grow with the load of the machine, and which tests start processes is found out."""

import subprocess

import pytest

from farflung.testing import patience
from farflung.testing.ranks import run_ranks
from tests.conftest import starts_processes


@pytest.mark.parametrize(
    ("work_s", "load", "factor"),
    [
        (patience._LOOPS_S, 0.5, 1),
        (patience._LOOPS_S / 4, 0.0, 1),  # a faster machine gets no less time
        (3 * patience._LOOPS_S, 0.5, 3),
        (patience._LOOPS_S, 8.0, 4),
    ],
)
def test_a_limit_grows_by_the_larger_of_slowness_and_load(work_s, load, factor, monkeypatch):
    monkeypatch.setattr(patience, "_work_s", lambda moment: work_s)
    monkeypatch.setattr(patience.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(patience.os, "cpu_count", lambda: 2)
    assert patience.patience(10) == pytest.approx(10 * factor)


def test_this_test_may_take_what_its_own_limit_and_the_machine_allow(request):
    limit_s = request.node.get_closest_marker("timeout").args[0]
    assert limit_s >= float(request.config.getini("timeout"))


def in_ranks():
    return run_ranks(print, 2)


class Starter:
    def start(self):
        return subprocess.run(["true"])


def through_a_class():
    Starter().start()


def through_a_nested_function():
    return [in_ranks() for _ in range(2)]


def starts_nothing():
    return patience.slowness()


@pytest.mark.parametrize("function", [in_ranks, through_a_class, through_a_nested_function])
def test_what_starts_processes_is_known(function):
    assert starts_processes(function, {})


def test_what_starts_none_is_known(request):
    assert not starts_processes(starts_nothing, {})
    assert request.node.get_closest_marker("ranks") is None
