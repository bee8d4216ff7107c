# SPDX-License-Identifier: Apache-2.0
"""The example of small runs trains each of its rows, and prints what they lost and sent."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.testing.patience import patience

FILE = Path(__file__).parents[2] / "examples" / "small_runs.py"


@pytest.mark.usefixtures("warm")
def test_every_row_is_run():
    ended = subprocess.run(
        [sys.executable, str(FILE), "--steps", "6"], capture_output=True, text=True, timeout=patience(90)
    )
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"^(.+?) +loss ([\d.]+) +([\d.]+) MB sent$", ended.stdout, re.MULTILINE)
    assert len(rows) == 8
    assert all(4 < float(loss) < 6 for _, loss, _ in rows)  # log(256) is 5.5
    sent = {name: float(megabytes) for name, _, megabytes in rows}
    assert sent["DDP"] > 5 * sent["local_sgd(8)"]
