# SPDX-License-Identifier: Apache-2.0
"""A clock for engines that look at a cluster every few seconds, for minutes."""

from __future__ import annotations

import time

import pytest

from farflung.comm import patience
from farflung.launch.engines import kubernetes, kubernetes_api, slurm


class Clock:
    """Time that passes in sleeps alone, which are short."""

    def __init__(self) -> None:
        self.now, self.pause_s = 0.0, 0.005

    def monotonic(self) -> float:
        return self.now

    def sleep(self, wait_s: float) -> None:
        self.now += wait_s
        time.sleep(self.pause_s)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (kubernetes, kubernetes_api, slurm, patience):
        monkeypatch.setattr(module, "time", made)
    return made
