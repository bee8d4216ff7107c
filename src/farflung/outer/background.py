# SPDX-License-Identifier: Apache-2.0
"""Lets rounds go on beside the training: on a thread, and on CUDA a stream, of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from farflung.comm.group import Group


class Job:
    """A job under way.

    Attributes:
        seconds: from when it was given until it was done; 0 until then.
    """

    def __init__(
        self, job: Callable[[], None], device: torch.device, watch: Callable[[Future[None]], None] | None
    ) -> None:
        self.seconds = 0.0
        self._watch = watch
        self._begun = time.perf_counter()
        self._job = job
        self._device = device
        self._ready = _mark(device)
        self._done: torch.cuda.Event | None = None
        self.future: Future[None] | None = None

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Do it, behind all that was on the caller's stream when it was given."""
        try:
            with torch.no_grad():
                if stream is None:
                    self._job()
                    return
                with torch.cuda.stream(stream):
                    assert self._ready is not None
                    stream.wait_event(self._ready)
                    self._job()
                    self._done = _mark(self._device)
                    assert self._done is not None
                    self._done.synchronize()
        finally:
            self.seconds = time.perf_counter() - self._begun

    def wait(self) -> float:
        """Return when it is done; raise what it raised. The value is how many seconds that took."""
        start = time.perf_counter()
        assert self.future is not None
        if self._watch is not None:
            self._watch(self.future)
        try:
            self.future.result()
        except BaseException:
            self.future = None  # its error knows this frame, and so all that the round holds: its groups' connections
            raise
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return time.perf_counter() - start


class BackgroundWorker:
    """Runs jobs one after the other, in the order in which they are given.

    Args:
        device: where the jobs' tensors are.
        group: what the jobs talk through, in a thread of their own. None: a job runs at once, where it is given, and
            what it raises comes out of its `wait`.
    """

    def __init__(self, device: torch.device, group: Group | None) -> None:
        self._device = device
        self._group = group
        self._pool = None if group is None else ThreadPoolExecutor(1, thread_name_prefix="farflung-outer")
        on_gpu = group is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def submit(self, call: Callable[[], None]) -> Job:
        job = Job(call, self._device, None if self._group is None else self._group.hand_over())
        if self._pool is None:
            job.future = Future()
            try:
                job.run(None)
                job.future.set_result(None)
            except BaseException as error:  # handed on by `wait`
                job.future.set_exception(error)
        else:
            job.future = self._pool.submit(job.run, self._stream)
        return job

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
