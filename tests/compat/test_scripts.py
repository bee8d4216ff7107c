# SPDX-License-Identifier: Apache-2.0
"""Programs that were written against Accelerate's API, run with it and with `accelerate` changed to `farflung`."""

from __future__ import annotations

import re
from pathlib import Path

import accelerate
import pytest

from farflung.config import environ
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks

pytestmark = pytest.mark.package

PROGRAMS = Path(__file__).parent / "programs"
NAMES = ("clm", "glue", "ner", "qa")


def run(name, library, folder):
    """What a program returns on this process, with one library's imports."""
    source = re.sub(r"^from accelerate\b", f"from {library}", (PROGRAMS / f"{name}.py").read_text(), flags=re.M)
    scope = {"__name__": name}
    exec(compile(source, f"{library}:{name}.py", "exec"), scope)
    return scope["main"](str(folder / library / name))


def run_all(folder):
    """What each program returns with each library; both talk through one process group."""
    seen = {}
    with environ.patched({"ACCELERATE_USE_CPU": "true"}):
        for name in NAMES:
            for library in ("accelerate", "farflung"):
                seen[name, library] = run(name, library, folder)
                accelerate.state.AcceleratorState._reset_state()
                accelerate.state.GradientState._reset_state()
                AcceleratorState._reset_state()
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_programs_with_the_import_changed_see_the_same_losses_and_metrics(size, tmp_path):
    for seen in run_ranks(run_all, size, tmp_path, connect=False, timeout_s=100.0):
        for name in NAMES:
            assert seen[name, "farflung"] == seen[name, "accelerate"], name
