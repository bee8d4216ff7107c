# SPDX-License-Identifier: Apache-2.0
"""The bare torch loop learns its task, alone and under torchrun, and never heard of an Accelerator."""

import re

import pytest

from tests.examples.scripts import FOLDER
from tests.python import run_python

FILE = FOLDER / "bare_torch_diloco.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]


@pytest.mark.parametrize(("launch", "sent"), [([], 0), (TORCHRUN, 21 * 4 * 129)])
@pytest.mark.usefixtures("warm")
def test_the_task_is_learnt_and_the_bytes_are_those_of_twenty_rounds(launch, sent):
    ended = run_python(*launch, FILE)
    accuracy, rounds, found = re.search(r"([\d.]+)% of .*\n(\d+) rounds, (\d+) bytes", ended.stdout).groups()
    assert float(accuracy) > 90
    assert int(rounds) == 20
    assert int(found) == pytest.approx(sent, abs=4 * 129)  # the last round, of nothing, may cost a bucket


def test_it_needs_no_accelerator_and_is_short():
    source = FILE.read_text()
    assert "from farflung import" not in source
    assert len(source.splitlines()) <= 60
