# SPDX-License-Identifier: Apache-2.0
"""Random small programs see the same under both libraries, to the last bit; `choices.py` makes them."""

from __future__ import annotations

from functools import cache

import pytest

from tests.compat.choices import make
from tests.compat.differential import both, first_difference

SEEDS = range(200)


@cache
def reports(processes):
    return both(list(SEEDS), processes)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_sees_the_same(seed):
    program = make(seed)
    for rank, (theirs, ours) in enumerate(reports(program.processes)[seed]):
        difference = first_difference(theirs, ours)
        assert difference is None, f"rank {rank}, {difference}\n{program}"
        assert len(ours) == len(program.acts)
