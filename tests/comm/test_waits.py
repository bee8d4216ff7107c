# SPDX-License-Identifier: Apache-2.0
"""Which waits of two ranks exclude each other: they are told so, and those that can still end are not."""

import pytest
import torch.distributed as dist

from farflung.comm import presence, waits as module
from farflung.comm.presence import PresenceStore
from farflung.comm.waits import Waits

# What two ranks have started, by group and kind: each waits in the last one. Both are in the groups a and b.
WAITS = {
    "the same": ("a gather", "a gather", False),
    "another kind": ("a gather", "a barrier", True),
    "one is further": ("a gather, a gather", "a gather", False),
    "one is further by another way": ("a gather", "a barrier, a gather", True),
    "one was further back": ("a barrier, a gather", "a gather", True),
    "two groups": ("a gather", "b gather", True),
    "a group that only one is in": ("a gather", "c gather", False),
    "one comes to the other's later": ("a gather, b gather", "a gather", False),
    "kinds that are forgotten": ("a gather", "a barrier" + 16 * ", a gather", False),
}


@pytest.mark.parametrize("case", WAITS)
@pytest.mark.parametrize("turns", [1, -1])
def test_ranks_that_wait_for_each_other_are_told_where_both_are(case, turns, monkeypatch):
    *started, is_excluded = WAITS[case]
    store = dist.HashStore()
    monkeypatch.setattr(presence, "default_store", lambda: store)
    monkeypatch.setattr(module, "_FIRST_CHECK_S", 0.0)
    ranks = [PresenceStore("waits", rank, 2) for rank in range(2)]
    both, last = [Waits(one) for one in ranks], []
    for one, calls in zip(both, started[::turns], strict=True):
        for group in "ab":
            one.join(group)
        last.append([one.enter(*call.split()) for call in calls.split(", ")][-1])
    with both[0].noted(last[0]) as first, both[1].noted(last[1]) as second:
        first()
        assert ranks[0].published("mismatch") == ""
        second()
        told = ranks[0].published("mismatch")
        assert told.startswith("Ranks wait for each other, rank 0 in ") if is_excluded else told == ""
    assert set(ranks[0].posts("wait").values()) == {""}  # or a later wait would meet one that has ended


def test_a_wait_for_another_threads_job_and_a_young_one_are_not_compared(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(presence, "default_store", lambda: store)
    one = Waits(PresenceStore("waits", 0, 1))
    for is_in_background in (True, False):
        with one.noted(one.enter("a", "gather"), is_in_background) as check:
            check()
            assert list(one.waiting.values()) == [("a", 1 + (not is_in_background), "gather")]
        assert one.waiting == {}
    assert PresenceStore("waits", 0, 1).posts("wait") == {}
    one.part("a")
    assert (one.enter("a", "gather"), list(one.kinds["a"])) == (("a", 1, "gather"), ["gather"])
    one.await_report(one.enter("a", "gather"), 3.0)  # from a watchdog, of which there is none
    assert (one.overdue, PresenceStore("waits", 0, 1).posts("alive")) == (None, {0: "overdue"})
