# SPDX-License-Identifier: Apache-2.0
"""The commands of `docs/islands.md` run one script in six layouts on four processes: what each holds, and who meets."""

import shlex
import warnings

import pytest

from farflung.config import environ
from farflung.config.launch import rank_variables
from farflung.config.resolve import resolve
from farflung.launch.face import launch
from farflung.launch.options import given
from farflung.testing.ranks import run_ranks
from tests.examples.scripts import FOLDER, run_script

START = "farflung launch --cpu --num_processes 4 "
PAGE = (FOLDER.parent / "docs" / "islands.md").read_text(encoding="utf-8")
COMMANDS = [line.removeprefix(START) for line in PAGE.splitlines() if line.startswith(START)]
# In the page's order: in how many parts the model lies, and whether there are rounds of an outer loop.
EXPECTED = [(1, False), (1, True), (4, False), (2, False), (2, True), (1, True)]


def told_to_ranks(command):
    """The variables that the launcher sets for a command."""
    parsed = launch.make_context("launch", shlex.split(command))
    return rank_variables(resolve(given(parsed.params)).settings)


def run_all(variables):
    """Run the script in this process with what the launcher would tell it, layout by layout."""
    warnings.simplefilter("error")
    found = []
    for told in variables:
        with environ.patched(told):
            found.append(run_script("features/layouts", "--cpu --epochs 3 --lr 0.03"))
    return found


@pytest.fixture(scope="module")
def by_rank():
    return run_ranks(run_all, 4, [told_to_ranks(command) for command in COMMANDS], timeout_s=120, connect=False)


def test_the_page_shows_a_command_for_each_row_of_its_table():
    assert len(COMMANDS) == len(EXPECTED)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=lambda number: COMMANDS[number])
def test_a_command_runs_the_script_in_its_layout(by_rank, number):
    parts, has_rounds = EXPECTED[number]
    found = [ranks[number] for ranks in by_rank]
    assert all(one["accuracy"] == found[0]["accuracy"] > 0.9 for one in found)
    most = found[0]["values"] / parts + 10 * 34  # a row more of each weight, where they don't divide
    assert all(one["held"] <= most for one in found)
    assert sum(one["held"] for one in found) == 4 // parts * found[0]["values"]
    assert all((one["rounds"] > 0) == has_rounds for one in found)
