# SPDX-License-Identifier: Apache-2.0
"""A thread's place is told from its frames: the call of ours or of torch's that the script is in, and its own lines."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import farflung
from farflung.comm.frames import innermost_calls, user_call

OURS, TORCH = Path(farflung.__file__).parent, Path(torch.__file__).parent
HERE = Path("/home/me/torch/train.py")  # a script in a folder of that name is no part of torch
CALLS = "def {name}(*inner):\n    return inner[0](*inner[1:])\n"


def within(calls, act):
    """Let these functions call each other, in a thread, and the last one `act` with its frame."""
    made = []
    for path, name in calls:
        scope = {}
        exec(compile(CALLS.format(name=name), str(path), "exec"), scope)
        made.append(scope[name])
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(*made, lambda: act(sys._getframe(1))).result()


@pytest.mark.parametrize(
    ("calls", "name", "functions"),
    [
        ([(HERE, "main"), (OURS / "comm/group.py", "reduce"), (OURS / "comm/waits.py", "wait")], "reduce", ["main"]),
        ([(HERE, "main"), (HERE, "train"), (TORCH / "nn/modules/module.py", "run")], "run", ["train", "main"]),
        ([(OURS / "launch/rank.py", "start"), (HERE, "main")], "", ["main"]),
        ([(HERE, "main"), (OURS / "data/loader.py", "load"), (HERE, "read")], "", ["read", "main"]),
        ([(OURS / "process/watchdog.py", "watch")], "watch", []),
    ],
)
def test_the_outermost_function_that_is_not_the_scripts_is_named_with_the_line_that_called_it(calls, name, functions):
    call = within(calls, user_call)
    assert (call.name, [function for function, _ in call.lines]) == (name, functions)
    assert call.at == ("train.py:2" if functions else "")
    where = f" ({HERE}:2: ``)" if functions else ""
    assert str(call) == (f"`{name}`" if name else "a collective") + where


def test_a_place_changes_when_the_script_moves_on():
    def places():
        yield user_call(sys._getframe()).place
        yield user_call(sys._getframe()).place

    assert len({*places()}) == 2
    stays = within([(HERE, "main"), (OURS / "comm/group.py", "reduce")], lambda at: [user_call(at), user_call(at)])
    assert stays[0].place == stays[1].place


def test_the_innermost_calls_begin_with_the_script():
    calls = [(OURS / "launch/rank.py", "start"), *[(HERE, f"level{k}") for k in range(20)]]
    assert [call.name for call in within(calls, innermost_calls)] == [f"level{k}" for k in range(8, 20)]
    found = within([*calls, (OURS / "launch/rank.py", "other"), calls[1]], innermost_calls)
    assert [call.name for call in found] == ["level0"]
    assert list(innermost_calls(None)) == []
    assert user_call(None).at == ""
