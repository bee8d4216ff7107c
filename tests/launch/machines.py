# SPDX-License-Identifier: Apache-2.0
"""Two machines on one: namespaces joined by a cable, each with a host name that is its own loopback address, as on
Debian and Ubuntu; or with no way to each other, but to a third one. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

DEVICE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("node0", "node1")
SERVER = "10.78.{}.1"  # the address of the third machine, on its cable to each other one
LISTENING = """
import json, os
import psutil
from farflung import Accelerator
accelerator = Accelerator()
rank, mine = accelerator.process_index, (os.getpid(), os.getppid())
open(f"rank{rank}.json", "w").write(json.dumps(
    [each.laddr.ip for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.pid in mine]
))
accelerator.wait_for_everyone()
"""  # where a rank and its launcher listen


def why_impossible() -> str:
    """Say why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    name = f"farflung-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this system allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Machines:
    """Two machines with a cable between them.

    Args:
        megabits: that it carries a second, in each direction; None: as many as it can.
    """

    names = NAMES

    def __init__(self, megabits: float | None = None) -> None:
        self._shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
        self._is_slow = megabits is not None
        self.spaces = [f"farflung-{os.getpid()}-{name}" for name in self.names]
        self.running: list[subprocess.Popen[str]] = []

    def start(
        self, machine: int, command: Sequence[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Start `command` on a machine, in `folder`, with its two streams in one."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[machine], *command]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.spaces[machine], *inside],
            cwd=folder,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def cut(self) -> None:
        """Cut the cable: packets vanish, and nobody is told."""
        _ip("-n", self.spaces[1], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """Mend the cable."""
        _ip("-n", self.spaces[1], "link", "set", DEVICE, "up")

    def lose_sent(self, machine: int) -> None:
        """Lose what a machine sends, and let the other direction be: it calls the other one by a wrong number."""
        self._call(machine, "replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def carry_sent(self, machine: int) -> None:
        """Carry what a machine sends again."""
        self._call(machine, "del")

    def _call(self, machine: int, verb: str, *by: str) -> None:
        _ip("-n", self.spaces[machine], "neigh", verb, ADDRESSES[1 - machine], *by, "dev", DEVICE)

    def kill(self, machine: int) -> None:
        """Kill all that runs on a machine."""
        found = subprocess.run(["ip", "netns", "pids", self.spaces[machine]], capture_output=True, text=True)
        subprocess.run(["kill", "-9", *found.stdout.split()], capture_output=True)

    def set_up(self) -> None:
        """Make the namespaces, their /etc/hosts and the cable."""
        self._make()
        first, second = self.spaces
        _ip("link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", space, "link", "set", device, "up")
            if self._is_slow:
                self._slow_down(space, DEVICE)

    def _slow_down(self, space: str, device: str) -> None:
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, *self._shape], check=True)

    def _make(self) -> None:
        for space, name in zip(self.spaces, self.names, strict=True):
            _ip("netns", "add", space)
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")

    def take_down(self) -> None:
        """End all that still runs, and remove what `set_up` made."""
        for machine, space in enumerate(self.spaces):
            self.kill(machine)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        for process in self.running:
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


class Apart(Machines):
    """Two machines without a way to each other; each has a line to a third one, which forwards nothing."""

    names = (*NAMES, "server")

    def set_up(self) -> None:
        self._make()
        *machines, server = self.spaces
        for space in self.spaces:
            _ip("-n", space, "link", "set", "lo", "up")
        for number, space in enumerate(machines):
            there = f"{DEVICE}-{number}"
            _ip("link", "add", DEVICE, "netns", space, "type", "veth", "peer", "name", there, "netns", server)
            here, address = SERVER.format(number).removesuffix("1") + "2", SERVER.format(number)
            for end, device, own in ((space, DEVICE, here), (server, there, address)):
                _ip("-n", end, "addr", "add", f"{own}/24", "dev", device)
                _ip("-n", end, "link", "set", device, "up")
                self._slow_down(end, device)


@contextmanager
def two_machines(machines: Machines | None = None) -> Iterator[Machines]:
    """Keep two machines for the length of a block."""
    machines = machines or Machines()
    try:
        machines.set_up()
        yield machines
    finally:
        machines.take_down()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
