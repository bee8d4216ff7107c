# SPDX-License-Identifier: Apache-2.0
"""What ranks publish for each other: here, how those of a machine are named."""

from types import SimpleNamespace

import pytest

from farflung.comm.presence import PresenceStore


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["a 10.0.0.1", "a 10.0.0.1", "a 10.0.0.1"], "ranks 0, 1 and 2"),
        (["a 10.0.0.1", "b 10.0.0.2", "b 10.0.0.2"], "rank 0 on a and ranks 1 and 2 on b"),
        (["ubuntu 10.0.0.1", "ubuntu 10.0.0.2", "b "], "rank 0 on ubuntu (10.0.0.1) and rank 1 on ubuntu (10.0.0.2)"),
    ],
)
def test_machines_of_one_name_are_told_apart_by_their_addresses(hosts, said):
    store = SimpleNamespace(hosts=dict(enumerate(hosts)), size=3)
    assert PresenceStore.describe(store, range(3)).startswith(said)
