# SPDX-License-Identifier: Apache-2.0
"""Where replicas of elastic runs meet."""

import pytest


@pytest.fixture(params=["store", "folder", pytest.param("bucket", marks=pytest.mark.long)])
def address(request, tmp_path):
    """The address of a run in a folder or in a bucket; None: its replicas meet at a store."""
    if request.param == "bucket":
        return request.getfixturevalue("bucket")
    return tmp_path.as_uri() if request.param == "folder" else None
