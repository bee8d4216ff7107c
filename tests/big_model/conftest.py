# SPDX-License-Identifier: Apache-2.0
"""A model of this room, for tests that need no other."""

import pytest

from tests.big_model.models import made


@pytest.fixture
def model():
    """A tiny model with all that makes placement hard."""
    return made()[0]


@pytest.fixture
def expected():
    """What that model gives for `IDS`."""
    return made()[1]
