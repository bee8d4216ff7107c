# SPDX-License-Identifier: Apache-2.0
"""What the README shows works without the names that the oldest torch we declare has not got."""

from pathlib import Path

import pytest

from tests.python import run_farflung

SCRIPT = Path(__file__).parent / "older_torch.py"


@pytest.mark.parametrize(
    ("flags", "layout"), [((), "loops"), (("--outer", "diloco", "--outer-every", "2"), "outer by a flag"), ((), "fsdp")]
)
def test_the_readmes_loops_train_on_the_oldest_torch_that_is_declared(flags, layout):
    done = run_farflung("launch", "--cpu", "--num_processes", "2", *flags, SCRIPT, layout)
    assert "trained" in done.stdout
