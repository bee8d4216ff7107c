# SPDX-License-Identifier: Apache-2.0
"""Tests of the command see no file and no variable of the machine they run on."""

from tests.config.conftest import home

__all__ = ["home"]
