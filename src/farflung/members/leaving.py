# SPDX-License-Identifier: Apache-2.0
"""On SIGTERM or SIGUSR1, a replica of an elastic run takes part in one more round, and then ends.

A scheduler that reclaims its machine, or a launcher that was asked to end, gives a process some seconds. A signal
handler can't run a round, so it sets a flag, which the loop checks after each step. Several ranks that train a replica
hear of a signal at different steps, or one alone does: they vote on the step after which they all leave.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from farflung.address.member_store import ASKED
from farflung.base.signals import end_by
from farflung.comm.group import Group
from farflung.comm.patience import waiting
from farflung.comm.preemption import PreemptionVote
from farflung.comm.presence import PresenceStore
from farflung.comm.threads import start_until_exit

_WITHIN_S = 20.0  # launchers wait for 30 s
_ANSWER_S = 1.0  # without an answer of the run's store, once this replica is to end
_TICK_S = 0.5  # how often a rank looks whether others have got a signal


class LeavingOnSignal:
    """Hears a scheduler's signals, unless the script has handlers of its own for them.

    Args:
        within_s: seconds after which the process ends, however far the round is.
        name: of the loop, the same on these ranks.
        silent_s: for how long the run's store has given no answer. Without it there is no round to wait for.
    """

    reason = ASKED

    def __init__(self, within_s: float, island: Group, name: str, silent_s: Callable[[], float]) -> None:
        self._within_s, self._silent_s = min(within_s, _WITHIN_S), silent_s
        self._vote = PreemptionVote(island.rank, island.size, self._hear)
        self._is_ending = False
        self._halt = threading.Event()
        if island.size > 1:
            store = PresenceStore(f"farflung/leaving/{name}", island.rank, island.size, own_connection=True)
            start_until_exit(partial(self._watch, store), "hear who is asked to end", self._halt.set)

    def is_due(self) -> bool:
        return self._vote.passes()

    def leave(self) -> None:
        end_by(signal.SIGTERM)

    def stop(self) -> None:
        self._vote.release()
        self._halt.set()

    def _watch(self, store: PresenceStore) -> None:
        with suppress(dist.DistError):  # nobody votes without the store
            while not self._halt.wait(_TICK_S):
                self._vote.look(store)
                if self._vote.why:
                    self._hear()
            store.mark_ended()
        self._vote.end()

    def _hear(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            _thread.start_new_thread(self._end, ())  # without threading's locks, which the main thread may hold

    def _end(self) -> None:
        """End this process after a while, even while its main thread waits in code that calls no handler of Python."""
        for _ in waiting(_ANSWER_S / 10, self._within_s):
            if self._silent_s() > _ANSWER_S:
                break
        os._exit(128 + signal.SIGTERM)
