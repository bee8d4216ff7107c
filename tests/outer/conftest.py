# SPDX-License-Identifier: Apache-2.0
"""Where replicas of elastic runs meet."""

import pytest

LONG = "bucket", "folder with a key", "store with a key"


@pytest.fixture(params=["store", "folder", *(pytest.param(one, marks=pytest.mark.long) for one in LONG)])
def address(request, tmp_path, monkeypatch):
    """The address of a run in a folder or in a bucket; None: its replicas meet at a store."""
    if request.param.endswith("key"):
        monkeypatch.setenv("FARFLUNG_KEY", "5" * 64)
    if request.param == "bucket":
        return request.getfixturevalue("bucket")
    return tmp_path.as_uri() if request.param.startswith("folder") else None
