# SPDX-License-Identifier: Apache-2.0
"""The picture of `docs/elastic.md` is drawn from a run in which replicas were killed, stopped and joined."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_picture_shows_the_run_that_was_kept(tmp_path):
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(ROOT / "docs" / "images" / "elastic.py"))
    run = json.loads(script["RUN"].read_text(encoding="utf-8").splitlines()[-1])["figures"]
    assert [event["signal"] for event in run["events"] if "signal" in event] == ["SIGKILL", "SIGSTOP", "SIGCONT"]
    stays = script["stays"](run)
    assert {name: len(parts) for name, parts in stays.items()} == {
        "replica 0": 1,
        "replica 1": 2,
        "replica 2": 2,
        "replica 0 of another launcher": 1,
    }
    script["draw"](tmp_path / "elastic.png")
    assert (tmp_path / "elastic.png").read_bytes()[:4] == b"\x89PNG"
