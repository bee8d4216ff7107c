# SPDX-License-Identifier: Apache-2.0
"""Tests that start the command do it as those of the launcher."""

from tests.launch.conftest import farflung as farflung
