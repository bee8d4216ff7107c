# SPDX-License-Identifier: Apache-2.0
"""Tests of settings see no file and no variable of the machine they run on."""

from __future__ import annotations

import pytest

from farflung.config.launch import FIELDS


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home that is the working directory too, and an environment that sets nothing."""
    for name in [entry.variable for entry in FIELDS] + ["HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path
