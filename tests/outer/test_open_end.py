# SPDX-License-Identifier: Apache-2.0
"""A loop that nobody ends is reported, if its replicas are not alike; one that was ended or left never is."""

import gc
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from farflung.methods.recipes import post_local_sgd, streaming_diloco
from farflung.outer import OuterLoop, Recipe, Streaming, by_bytes, diloco, gossip, hierarchical
from farflung.testing.sim import run_replicas

KEPT = []


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests(capsys):
    gc.collect()
    capsys.readouterr()


def trained(group, end, recipe=None, steps=3):
    """Make some steps, and end the loop by `end(loop)` or not at all."""
    model = torch.nn.Linear(2, 1)
    outer = OuterLoop(model, recipe or diloco(every=2), group)
    for _ in range(steps):
        with torch.no_grad():
            model.weight += 1 + group.rank
        outer.average_gradients()
        outer.step()
    end(outer)


def failing(outer):
    with pytest.raises(ValueError, match="a bad value"), outer:
        raise ValueError("a bad value")


QUIET = {
    "closed": lambda outer: outer.close(),
    "flushed": lambda outer: outer.flush(),
    "detached": lambda outer: outer.detach(),
    "left by an error": failing,
}


@pytest.mark.parametrize("end", QUIET.values(), ids=QUIET)
def test_a_loop_that_is_ended_says_nothing(capsys, end):
    run_replicas(trained, 2, end)
    gc.collect()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("recipe", "steps", "said"),
    [
        (diloco(every=2), 3, "Its last step was"),
        (diloco(every=4), 7, "Its last 3 steps were"),
        (streaming_diloco(every=4, fragments=2, delay=1), 8, "Its last 8 steps were"),
        # One part of the weights, some steps ago, a part of the way, of two replicas: no round makes all alike.
        (Recipe(Streaming(4, 2), fragments=by_bytes), 4, "Its last 4 steps were"),
        (replace(diloco(every=4), schedule=Streaming(4, 1, 1)), 8, "Its last 8 steps were"),
        (streaming_diloco(every=4, fragments=1, delay=0), 4, "Its last 4 steps were"),
        (gossip(every=2), 4, "Its last 4 steps were"),
        (diloco(every=2), 4, ""),  # it has ended with a round
        (post_local_sgd(warmup=3, every=4), 3, ""),  # all have taken the same steps
        (post_local_sgd(warmup=3, every=4), 5, "Its last 2 steps were"),
        (hierarchical({2: 2, 8: None}), 4, "Its last 4 steps were"),  # and not with one of all
    ],
)
def test_one_that_is_dropped_is_reported(capsys, recipe, steps, said):
    run_replicas(trained, 2, lambda outer: None, recipe, steps)
    gc.collect()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 * bool(said)
    assert all(said in line and "an OuterLoop was not closed" in line and "call close()" in line for line in lines)


def test_one_replica_alone_has_nothing_to_report(capsys):
    run_replicas(trained, 1, lambda outer: None)
    gc.collect()
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_the_end_of_a_process_reports_it_unless_an_error_ends_it():
    program = (
        "from tests.outer.test_open_end import KEPT, run_replicas, trained\n"
        "run_replicas(trained, 2, KEPT.append)\n"
        "import os\n"
        "if os.fork() == 0: raise SystemError('a cause')\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("an OuterLoop was not closed") == 2  # of the parent alone
    assert "SystemError: a cause" in done.stderr
