# SPDX-License-Identifier: Apache-2.0
"""The example of small runs trains each of its rows, and prints what they lost and sent."""

import re

import pytest

from tests.examples.scripts import FOLDER
from tests.python import run_python

FILE = FOLDER / "small_runs.py"


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_every_row_is_run():
    ended = run_python(FILE, "--steps", "6", timeout_s=90)
    rows = re.findall(r"^(.+?) +loss ([\d.]+) +([\d.]+) MB sent$", ended.stdout, re.MULTILINE)
    assert len(rows) == 8
    assert all(4 < float(loss) < 6 for _, loss, _ in rows)  # log(256) is 5.5
    sent = {name: float(megabytes) for name, _, megabytes in rows}
    assert sent["DDP"] > 5 * sent["local_sgd(8)"]
