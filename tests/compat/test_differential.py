# SPDX-License-Identifier: Apache-2.0
"""Random small programs see the same under both libraries, to the last bit; `choices.py` makes them."""

from __future__ import annotations

import pytest

from tests.compat.choices import make
from tests.compat.differential import both, first_difference


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 300), marks=pytest.mark.long)], ids=str)
def test_random_programs_see_the_same(seeds, processes):
    found = both(list(seeds), processes)
    assert len(found) > len(seeds) / 4
    for seed, ranks in found.items():
        program = make(seed)
        for rank, (theirs, ours) in enumerate(ranks):
            difference = first_difference(theirs, ours)
            assert difference is None, f"rank {rank}, {difference}\n{program}"
            assert len(ours) == len(program.acts)
