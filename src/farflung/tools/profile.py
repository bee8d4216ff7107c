# SPDX-License-Identifier: Apache-2.0
"""torch's profiler, with the arguments of a `ProfileKwargs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.base.errors import StateError
from farflung.base.words import counted
from farflung.config.handlers import ProfileKwargs

if TYPE_CHECKING:
    import torch


@contextmanager
def profile(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; write `profile_{rank}.json` into `handler.output_trace_dir` where that is set.

    Raises StateError if there is nothing to write, as the schedule has recorded no step.
    """
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is None:
        return
    if profiler.profiler is None:
        raise StateError(
            f"profile: no step was recorded with the schedule {handler.schedule_option} in "
            f"{counted(profiler.step_num, 'step')}. "
            "Call profiler.step() once a step, and profile more of them."
        )
    folder = Path(handler.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))
