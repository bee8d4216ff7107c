# SPDX-License-Identifier: Apache-2.0
"""The interface that leads to the main machine is found, and what can't work is refused."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import Resolved
from farflung.launch import elastic, network
from farflung.launch.network import Interface, choose_interface, interfaces, loopback_interface
from farflung.launch.plan import make_plan
from farflung.launch.start import Script

LO, ETH, IB = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.2"), Interface("ib0", "10.1.0.2")


def settings(rank: int = 1, **said) -> LaunchSettings:
    return LaunchSettings(num_machines=2, machine_rank=rank, use_cpu=True, **({"main_process_ip": "10.0.0.1"} | said))


@pytest.fixture
def machine(monkeypatch):
    """A machine with these interfaces, on which the route to any other address begins at `here`."""

    def make(*there: Interface, here: str = "10.0.0.2", **names: str) -> None:
        monkeypatch.setattr(network, "interfaces", lambda: [LO, *there])
        monkeypatch.setattr(network, "_address_towards", lambda address: here)
        known = {"localhost": "127.0.0.1"} | names
        monkeypatch.setattr(network, "resolve_host", lambda host, wait_s=0.0: known.get(host, host))

    return make


def test_this_machine_has_a_loopback_interface(monkeypatch):
    assert LO in interfaces()
    assert choose_interface(settings(main_process_ip="127.0.0.1"), "127.0.0.1") == LO
    kinds = {socket.AF_INET6: "fe80::2%eth0", -1: "00:00", socket.AF_INET: "10.0.0.2"}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [Mock(family=k, address=kinds[k]) for k in kinds]})
    assert interfaces() == [Interface("eth0", "fe80::2"), ETH]


def test_the_interface_of_the_route_is_taken_and_told_to_the_ranks(machine, home):
    machine(ETH, IB, here=IB.address)
    plan = make_plan(settings(), __file__, [])
    assert (plan.meeting.interface, plan.meeting.address) == (IB, IB.address)
    assert make_plan(settings(0), __file__, []).meeting.listen == IB.address
    told = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert plan.variables.items() >= told.items()
    assert "TORCH_CPP_LOG_LEVEL" not in make_plan(settings(debug=True), __file__, []).variables
    alone = make_plan(LaunchSettings(use_cpu=True, num_processes=2), __file__, [])
    assert alone.variables["GLOO_SOCKET_IFNAME"] == loopback_interface() == LO.name
    with environ.patched({"GLOO_SOCKET_IFNAME": "eth0"}):
        assert "GLOO_SOCKET_IFNAME" not in make_plan(LaunchSettings(use_cpu=True), __file__, []).variables
    assert not {"NCCL_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL"} & alone.variables.keys()


def test_the_flag_counts_before_a_variable_and_that_before_the_route(machine, home):
    machine(ETH, IB)
    with environ.patched({"GLOO_SOCKET_IFNAME": "eth9"}):
        assert str(choose_interface(settings(), "10.0.0.1")) == "eth9 (GLOO_SOCKET_IFNAME)"
    with environ.patched({"GLOO_SOCKET_IFNAME": "ib0,eth0", "NCCL_SOCKET_IFNAME": "ib1"}):
        plan = make_plan(settings(), __file__, [])
        assert plan.meeting.interface == Interface("ib0,eth0", IB.address)
        assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & plan.variables.keys()
        plan = make_plan(settings(network_interface="eth0"), __file__, [])
        assert plan.meeting.interface == ETH
        assert (plan.variables["GLOO_SOCKET_IFNAME"], plan.variables["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0")
    machine(ETH, Interface("eth0", "fe80::2"), IB)
    why = r"'eth9', and this machine has no such interface; it has lo .*, eth0 \(10.0.0.2\), ib0"
    with pytest.raises(ConfigError, match=why):
        choose_interface(settings(network_interface="eth9"), "10.0.0.1")


def test_a_name_that_means_loopback_is_of_use_to_the_main_machine_alone(machine):
    machine(ETH, node0="127.0.1.1")
    assert choose_interface(settings(0), "node0") == ETH  # there is but one way out
    assert network.address_towards("node0", ETH) == ETH.address
    machine(ETH, here=LO.address, node0="127.0.1.1")
    assert choose_interface(settings(1), "localhost") == LO
    with pytest.raises(
        ConfigError, match=r"^main_process_ip is 'node0', which means 127.0.1.1 on this .*number 1, has lo"
    ):
        choose_interface(settings(1), "node0")
    machine(ETH, IB, node0="127.0.1.1")
    with pytest.raises(ConfigError, match="Give machine 0's address on the network"):
        choose_interface(settings(0), "node0")


def test_a_route_that_begins_at_no_interface_is_told(machine):
    machine(ETH, here="10.9.9.9")
    with pytest.raises(
        ConfigError, match=r"10.9.9.9, which belongs to none of its interfaces \(lo .*, eth0 .*Name one with --n"
    ):
        choose_interface(settings(), "10.0.0.1")


def test_a_machine_without_a_route_is_told_so(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=OSError(101, "Network is unreachable")))
    with pytest.raises(
        ConfigError, match=r"no route to .*\(10.0.0.1\): Network is unreachable. Check the address, and"
    ):
        choose_interface(settings(), "10.0.0.1")


@pytest.fixture
def names(monkeypatch):
    """A clock and a network in which names resolve from `since` on; what is recorded."""
    now, told = [0.0], []

    def make(since: float) -> tuple[list[float], list[str]]:
        def look_up(host, port, **options):
            if now[0] < since and host != "127.0.0.1":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

        monkeypatch.setattr(network.socket, "getaddrinfo", look_up)
        monkeypatch.setattr("farflung.comm.patience.time.monotonic", lambda: now[0])
        monkeypatch.setattr("farflung.comm.patience.time.sleep", lambda s: now.__setitem__(0, now[0] + s))
        monkeypatch.setattr(network, "record", lambda kind, **facts: told.append(facts["message"]))
        return now, told

    return make


def test_the_name_of_machine_0_may_resolve_later(names):
    now, told = names(12.0)
    assert network.resolve_host("job-0.svc", network.NAME_WAIT_S) == "10.0.0.1"
    assert 12 <= now[0] <= 14
    assert told == ["waiting up to 60 s for the name of machine 0, job-0.svc: Name or service not known"]


@pytest.mark.parametrize("option", [{"join": "job-0.svc:29500"}, {"elastic": "1:2", "meet": "tcp://job-0.svc:29500"}])
def test_replicas_wait_for_the_name_of_the_machine_that_they_join(option, names, home):
    now, told = names(1e9)
    replicas = elastic.Replicas(Resolved(LaunchSettings(use_cpu=True, **option), {}, None), Script(__file__))
    with pytest.raises(ConfigError, match="can't resolve even after 60 s"):
        replicas.prepare()
    assert (now[0], len(told)) == (60, 1)


def test_a_name_that_never_resolves_is_waited_for_only_where_it_is_another_machines(names, home):
    now, told = names(1e9)
    with pytest.raises(
        ConfigError, match=r"can't resolve even after 60 s: Name or service not known. Give the name .* 10.0.0.1;"
    ):
        make_plan(settings(main_process_ip="job-0.svc"), __file__, [])
    assert (now[0], len(told)) == (60, 1)
    for chosen in (
        *(settings(main_process_ip=host) for host in ("999.1.1.1", "10.0.0")),
        LaunchSettings(use_cpu=True, main_process_ip="job-0.svc"),
        settings(main_process_ip="job-0.svc", dry_run=True),
    ):
        with pytest.raises(ConfigError, match="can't resolve: Name"):
            make_plan(chosen, __file__, [])
    assert (now[0], len(told)) == (60, 1)
