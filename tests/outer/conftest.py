# SPDX-License-Identifier: Apache-2.0
"""Where replicas of elastic runs meet."""

import pytest

PLACES, KEYED = ("store", "folder", "bucket"), ("folder with a key", "store with a key")
LONG = "bucket", "hub", *KEYED


def in_turn(values):
    """Rows of a value and an `address`: all values at each place, and with a key at one place or the other in turn.

    `make test` has each value at a store or in a folder in turn, not at both.
    """
    return [
        pytest.param(value, place, marks=[pytest.mark.long] * (place != PLACES[number % 2]))
        for number, value in enumerate(values)
        for place in (*PLACES, KEYED[number % 2])
    ]


@pytest.fixture(params=["store", "folder", *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def address(request, tmp_path, monkeypatch):
    """The address of a run in a folder or in a bucket; None: its replicas meet at a store."""
    if request.param.endswith("key"):
        monkeypatch.setenv("FARFLUNG_KEY", "5" * 64)
    if request.param in ("bucket", "hub"):
        return request.getfixturevalue(request.param)
    return tmp_path.as_uri() if request.param.startswith("folder") else None
