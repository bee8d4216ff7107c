# SPDX-License-Identifier: Apache-2.0
"""Golden traces: weights, states and bytes of every recipe are what they were, to the last bit."""

import json

import pytest

from tests.outer.traces import CASES, PATH, golden_part, of_loops

GOLDEN = json.loads(PATH.read_text())


@pytest.mark.filterwarnings("ignore:Rank .. a round was dropped")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recipe_leaves_the_weights_states_and_bytes_that_it_left_before(case):
    trace, golden = golden_part(case), GOLDEN[", ".join(map(str, case))]
    assert trace.pop("weights", []) == [pytest.approx(rank, rel=1e-4, abs=1e-4) for rank in golden.pop("weights", [])]
    assert trace == golden


def test_everyday_loops_leave_the_weights_and_losses_that_they_left_before():
    for name, trace in of_loops().items():
        assert trace == GOLDEN[name], name
