# SPDX-License-Identifier: Apache-2.0
"""A tracker whose disk is full warns, and training continues."""

import pytest

from farflung.trackers.jsonl import JSONLTracker


def test_a_full_disk_ends_neither_a_step_nor_the_run(tmp_path):
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    tracker = JSONLTracker("run", tmp_path)
    with pytest.warns(UserWarning, match=r"run.jsonl can't be written: No space left"):
        tracker.start()
    with pytest.warns(UserWarning, match="Training continues"):
        tracker.log({"loss": 1.0}, step=1)
    with pytest.warns(UserWarning, match="Training continues"):
        tracker.finish()
