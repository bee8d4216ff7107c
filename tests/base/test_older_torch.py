# SPDX-License-Identifier: Apache-2.0
"""What the README shows works without the names that the oldest torch we declare has not got."""

import subprocess
import sys
from pathlib import Path

import pytest

from farflung.testing.patience import patience

SCRIPT = Path(__file__).parent / "older_torch.py"


@pytest.mark.parametrize(
    ("flags", "layout"), [((), "loops"), (("--outer", "diloco", "--outer-every", "2"), "outer by a flag"), ((), "fsdp")]
)
def test_the_readmes_loops_train_on_the_oldest_torch_that_is_declared(flags, layout):
    command = [sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", "2", *flags, SCRIPT, layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
