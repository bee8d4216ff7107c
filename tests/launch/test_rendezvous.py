# SPDX-License-Identifier: Apache-2.0
"""Machines that meet again after a failure find a store in which nothing is left of the attempt before."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousTimeoutError

from farflung.launch.network import get_free_port
from farflung.launch.rendezvous import FreshStores, registered

LEFT_BEHIND = timedelta(seconds=0.2)


def machine(rank, port, size=2, **conf):
    conf = {"rank": rank, "timeout": 20, "listen": None, "begins": lambda attempt: None} | conf
    return FreshStores(RendezvousParameters(registered(), f"127.0.0.1:{port}", "run", size, size, **conf))


def test_each_attempt_of_two_machines_has_a_store_of_its_own_at_the_same_port():
    port, begun = get_free_port(), []
    first, second = machine(0, port, begins=begun.append), machine(1, port)
    old = first.next_rendezvous().store
    assert second.next_rendezvous().rank == 1
    old.set("rank0", "listens here")
    found = []
    late = threading.Thread(target=lambda: found.append(second.next_rendezvous()))
    late.start()  # before machine 0 has noticed a failure: it must not take the store of the attempt before
    late.join(0.5)
    assert not found
    new = first.next_rendezvous()
    late.join()
    assert (begun, new.bootstrap_store_info.master_port) == ([1, 2], port)
    new.store.set("rank1", "is new")
    assert found[0].store.get("rank1") == b"is new"
    with pytest.raises(DistError):
        found[0].store.wait(["rank0"], LEFT_BEHIND)
    assert found[0].store.timeout == timedelta(seconds=20)
    first.set_closed()
    assert (first.is_closed(), first.num_nodes_waiting(), first.get_run_id()) == (False, 0, "run")


def test_a_machine_that_waits_in_vain_for_another_attempt_says_so():
    port = get_free_port()
    first, second = machine(0, port), machine(1, port, timeout=1)
    first.next_rendezvous()
    second.next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match="not begun another attempt within 1 s after ranks of machine 1"):
        second.next_rendezvous()


def test_an_address_that_is_not_of_this_machine_is_refused():
    with pytest.raises(RendezvousConnectionError, match=r"can't listen at 203\.0\.113\.1"):
        machine(0, 0, listen="203.0.113.1").next_rendezvous()
