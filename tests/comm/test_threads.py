# SPDX-License-Identifier: Apache-2.0
"""Threads in torch's code when Python ends: they are stopped, and never make the process abort."""

from tests.python import run_python

SCRIPT = """
import threading, time
import torch.distributed as dist
from datetime import timedelta
from farflung.comm.threads import start_until_exit
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
over = threading.Event()

def wait():
    while not over.is_set():
        try:
            store.wait(["never"], timedelta(milliseconds=20))  # in C++, without Python's lock
        except dist.DistError:
            pass
    print("ended")

start_until_exit(wait, "waits", over.set)
start_until_exit(lambda: None, "has ended").join()
time.sleep(0.1)
"""


def test_a_thread_is_stopped_before_python_ends():
    done = run_python("-c", SCRIPT)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
