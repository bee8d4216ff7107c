# SPDX-License-Identifier: Apache-2.0
"""Runs rounds in the background of training: on a thread, and on CUDA a stream, of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from farflung.comm.group import Group, SoloGroup


@dataclass(eq=False)
class BackgroundJob:
    """A job under way.

    Attributes:
        watch: returns when a future is done; raises an error if a rank is lost meanwhile.
        seconds: from its submission to its end; 0 until then.
        waited: how many of these seconds a thread has waited for it.
    """

    watch: Callable[[Future[None]], None]
    future: Future[None] | None = None
    done: torch.cuda.Event | None = None
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def hidden_s(self) -> float:
        """How many seconds of it overlapped with training."""
        return max(0.0, self.seconds - self.waited)

    def wait(self) -> None:
        """Return when it is done; raise its error, once."""
        start = time.perf_counter()
        try:
            if self.future is not None:
                self.watch(self.future)
                self.future.result()
        except BaseException:
            self.future = None  # its error knows this frame, and so all that the round holds: its groups' connections
            raise
        if self.done is not None:
            self.done.wait(torch.cuda.current_stream(self.done.device))
        self.waited += time.perf_counter() - start


class BackgroundWorker:
    """Runs jobs one after the other, in the order in which they are given.

    Args:
        group: the group through which the jobs communicate, in a thread of their own. None: a job runs at once, on the
            caller's thread, and its `wait` raises its error.
    """

    def __init__(self, device: torch.device, group: Group | None) -> None:
        self._group = group or SoloGroup()
        self._pool = None if group is None else ThreadPoolExecutor(1, thread_name_prefix="farflung-outer")
        on_gpu = group is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def submit(self, call: Callable[[], None]) -> BackgroundJob:
        """Run `call` after all that is on the caller's stream now."""
        job, begun = BackgroundJob(self._group.hand_over()), time.perf_counter()
        ready = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

        def run() -> None:
            try:
                with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    if self._stream is not None and ready is not None:
                        self._stream.wait_event(ready)
                    call()
                    if self._stream is not None:
                        job.done = self._stream.record_event()
                        job.done.synchronize()
            finally:
                job.seconds = time.perf_counter() - begun

        if self._pool is not None:
            job.future = self._pool.submit(run)
            return job
        job.future = Future()
        try:
            run()
            job.future.set_result(None)
        except BaseException as error:  # handed on by `wait`
            job.future.set_exception(error)
        return job

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
