# SPDX-License-Identifier: Apache-2.0
"""Golden traces: weights, states and bytes of every recipe are what they were, to the last bit."""

import json

import pytest

from tests.outer.traces import CASES, PATH, machine, of_loops, of_recipe

GOLDEN = json.loads(PATH.read_text())


def check(name, trace):
    """Bits on the kind of machine that wrote them; elsewhere, where sums round otherwise, the norm."""
    golden = GOLDEN[name]
    assert trace.get("rounds") == golden.get("rounds")
    assert trace["norm"] == pytest.approx(golden["norm"], rel=1e-3)
    if GOLDEN["machine"] == machine():
        assert trace["digests"] == golden["digests"]


@pytest.mark.filterwarnings("ignore:Rank .. a round was dropped")
@pytest.mark.parametrize(("name", "size", "kind"), CASES)
def test_a_recipe_leaves_the_weights_states_and_bytes_that_it_left_before(name, size, kind):
    check(f"{name}, {size}, {kind}", of_recipe(name, size, kind))


def test_everyday_loops_leave_the_weights_and_losses_that_they_left_before():
    for name, trace in of_loops().items():
        check(name, trace)
