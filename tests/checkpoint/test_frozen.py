# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were written once and are kept: each is loaded as it was then, to the last bit."""

import json

import pytest

from farflung.testing.ranks import run_ranks
from tests.checkpoint.frozen_runs import EXPECTED, loaded, names_for


def expected(names, ranks):
    golden = json.loads(EXPECTED.read_text())
    return {name: golden[f"{name} on {ranks}"] for name in names}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_before_is_gone_on_from_as_before(ranks):
    names = names_for(ranks)
    found = run_ranks(loaded, ranks, names, ranks)
    assert {name: [one[name] for one in found] for name in names} == expected(names, ranks)
