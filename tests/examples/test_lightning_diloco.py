# SPDX-License-Identifier: Apache-2.0
"""The example for Lightning ends with the same weights on both ranks."""

import re

import pytest

from tests.examples.scripts import FOLDER
from tests.python import run_farflung


@pytest.mark.package("lightning")
def test_replicas_of_a_fit_end_alike(tmp_path):
    flags = ("--num_processes", "2", "--cpu", "--outer", "diloco", "--outer-every", "8")
    run = run_farflung("launch", *flags, FOLDER / "lightning_diloco.py", "--epochs", "1", cwd=tmp_path)
    ends = re.findall(r"rank (\d): (.*)", run.stdout)
    assert [rank for rank, _ in sorted(ends)] == ["0", "1"]
    assert len({end for _, end in ends}) == 1
    assert "over 2 replicas of a DDP model" in run.stderr
