# SPDX-License-Identifier: Apache-2.0
"""Time limits grow with the load of the machine."""

import pytest

from farflung.testing import patience


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
