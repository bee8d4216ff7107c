# SPDX-License-Identifier: Apache-2.0
"""Two machines that ssh reaches: an sshd in each namespace of the lab, with keys and settings in a folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launch.machines import ADDRESSES, NAMES, Machines, two_machines, why_impossible
from tests.waits import until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_no_sshd() -> str:
    """Say why there can be no machines with sshd here; empty where there can."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "OpenSSH's server is not installed"
    return why_impossible()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Machines, Path]]:
    """Keep two machines with sshd for the length of a block; also the settings by which ssh knows them by name."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    server = folder / "sshd"
    server.write_text(
        f"Port 22\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\n"
        "StrictModes no\nPermitRootLogin yes\nUseDNS no\n"
    )
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text("".join(f"{address} {key}" for address in ADDRESSES))
    common = f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n"
    hosts = "".join(f"Host {n}\nHostName {a}\n" for n, a in zip(NAMES, ADDRESSES, strict=True))
    client = folder / "ssh_config"
    client.write_text(f"{hosts}Host *\n{common}")
    with two_machines() as machines:
        for machine in range(2):
            machines.start(machine, [SSHD, "-D", "-e", "-f", str(server)], folder)
        for address in ADDRESSES:
            reach = ["ssh", "-F", str(client), address, "true"]
            until(lambda reach=reach: machines.start(0, reach, folder).wait() == 0)
        yield machines, client
