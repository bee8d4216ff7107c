# SPDX-License-Identifier: Apache-2.0
"""Tests of the command see no file and no variable of the machine they run on, and start it as a user does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from farflung.config.launch import FIELDS
from farflung.testing.patience import patience


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home that is the working directory too, and an environment that sets nothing."""
    for name in [entry.variable for entry in FIELDS] + ["HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def farflung(home) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `farflung` with arguments in the empty home; a hang is ended after a minute."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "farflung", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(90))

    return run
