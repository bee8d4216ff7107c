# SPDX-License-Identifier: Apache-2.0
"""What ranks publish for each other: how those of a machine are named, and why one has left."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from farflung.base.causes import Cause
from farflung.comm import presence
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


@pytest.mark.parametrize(
    ("left", "described"),
    [
        ([("ValueError: a", Cause.OWN), ("b", Cause.PEER), ("c", Cause.LATE)], "rank 1 left (ValueError: a)"),
        ([("RankFailureOfMine: a", Cause.OWN), ("Rank 1 is lost", Cause.PEER)], "rank 1 left (RankFailureOfMine: a)"),
        ([("a", Cause.PEER), ("b", Cause.LATE)], "rank 1 left (a); rank 2 left (b)"),
        ([("a", Cause.OWN), ("b", Cause.FAULT)], "rank 1 left (a); rank 2 left (b)"),
        ([], ""),
    ],
)
def test_ranks_that_left_because_others_had_are_not_named_beside_them(left, described, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(presence, "default_store", lambda: store)
    for rank, (reason, cause) in enumerate(left, 1):
        PresenceStore("left", rank, 4).mark_left(reason, cause)
    assert PresenceStore("left", 0, 4).describe_left() == described
