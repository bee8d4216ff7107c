# SPDX-License-Identifier: Apache-2.0
"""Replicas that die, hang, leave and join, as real processes: the others lose no step and wait for nobody."""

import signal

import pytest

from tests.outer.elastic_run import PHASES, ElasticRun, wrong

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("phase", [one for one in PHASES if one != "admission"])
def test_a_replica_may_die_at_any_time_and_come_back(phase):
    with ElasticRun(expected=3, grace_s=20.0) as run:
        first, second = run.start(0), run.start(1)
        lost = run.start(2, dies=(phase, 17 if phase == "local step" else 4), saves=3)
        run.until(lambda: run.has_ended(lost))
        back = run.start(2)
        run.until(lambda: run.joined(back))
        said = run.finish()
        assert not wrong(said)
        ends = {one["member"]: one["end"] for one in said if "end" in one}
        assert ends.keys() == {first, second, back} and len(set(ends.values())) == 1
        assert any("replica 2 is out: killed by SIGKILL" in event for event in run.events)
        assert any("replica 2 joined; 3 replicas train" in event for event in run.events)
