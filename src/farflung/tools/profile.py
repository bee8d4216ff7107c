# SPDX-License-Identifier: Apache-2.0
"""torch's profiler, with the arguments of a `ProfileKwargs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from farflung.base.errors import ConfigError
from farflung.config.handlers import ProfileKwargs


@contextmanager
def profile(handler: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; write `profile_{rank}.json` into `handler.output_trace_dir` where that is set.

    Raises:
        ConfigError: an activity that torch's profiler does not have.
    """
    with torch.profiler.profile(
        activities=None if handler.activities is None else [_activity(name) for name in handler.activities],
        schedule=None if handler.schedule_option is None else torch.profiler.schedule(**handler.schedule_option),
        on_trace_ready=handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    ) as profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    known = torch.profiler.ProfilerActivity.__members__
    if name.upper() not in known:
        raise ConfigError(f"ProfileKwargs: activity {name!r} is not one of {sorted(word.lower() for word in known)}.")
    return known[name.upper()]
