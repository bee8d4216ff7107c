# SPDX-License-Identifier: Apache-2.0
"""A replica that is asked to end stays for one more round only while the run's store answers."""

import os
import signal
import time

from farflung.comm.group import SoloGroup
from farflung.members.leaving import LeavingOnSignal
from farflung.testing.patience import patience
from farflung.testing.ranks import fork_context


def leaves(within_s, silent_s):
    LeavingOnSignal(within_s, SoloGroup(), "loop1", lambda: silent_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)  # in code that calls no handler of Python


def ended_s(within_s, silent_s):
    process = fork_context().Process(target=leaves, args=(within_s, silent_s))
    began = time.monotonic()
    process.start()
    process.join(patience(60))
    assert process.exitcode == 128 + signal.SIGTERM
    return time.monotonic() - began


def test_it_ends_at_its_limit_or_as_soon_as_the_store_is_silent():
    assert ended_s(within_s=2.0, silent_s=0.0) >= 2.0
    assert ended_s(within_s=20.0, silent_s=3.0) < 20.0
