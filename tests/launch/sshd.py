# SPDX-License-Identifier: Apache-2.0
"""Two machines that ssh reaches: an sshd in each namespace of the lab, with keys and settings in a folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from farflung.launch.network import get_free_port
from tests.launch.machines import ADDRESSES, NAMES, Machines, two_machines, why_impossible
from tests.waits import until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_no_sshd() -> str:
    """Say why there can be no machines with sshd here; empty where there can."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "OpenSSH's server is not installed"
    return why_impossible()


def _prepare(folder: Path, addresses: Sequence[str], port: int) -> tuple[Path, Path]:
    """Make keys; return the settings of a server, and those by which ssh knows `NAMES` at these addresses."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)
    server, client = folder / "sshd", folder / "ssh_config"
    server.write_text(
        f"Port {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\n"
        "StrictModes no\nPermitRootLogin yes\nUseDNS no\n"
    )
    key = (folder / "host.pub").read_text()
    at = {address: address if port == 22 else f"[{address}]:{port}" for address in addresses}
    (folder / "known").write_text("".join(f"{at[address]} {key}" for address in addresses))
    hosts = "".join(f"Host {n}\nHostName {a}\n" for n, a in zip(NAMES, addresses, strict=False))
    common = f"Port {port}\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n"
    client.write_text(f"{hosts}Host *\n{common}")
    return server, client


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Machines, Path]]:
    """Keep two machines with sshd for the length of a block; also the settings by which ssh knows them by name."""
    server, client = _prepare(folder, ADDRESSES, 22)
    with two_machines() as machines:
        for machine in range(2):
            machines.start(machine, [SSHD, "-D", "-e", "-f", str(server)], folder)
        for address in ADDRESSES:
            reach = ["ssh", "-F", str(client), address, "true"]
            until(lambda reach=reach: machines.start(0, reach, folder).wait() == 0)
        yield machines, client


@contextmanager
def host_with_shell(folder: Path, shell: str) -> Iterator[Path]:
    """Keep an sshd on this machine, for which `shell` is root's login shell; yield ssh's settings for `NAMES[0]`."""
    server, client = _prepare(folder, ["127.0.0.1"], get_free_port())
    users = Path("/etc/passwd").read_text().splitlines()
    path = shutil.which(shell)
    users = [f"{line.rpartition(':')[0]}:{path}" if line.startswith("root:") else line for line in users]
    (folder / "passwd").write_text("\n".join(users) + "\n")
    (folder / "sh").write_text(f"mount --bind {folder}/passwd /etc/passwd && exec {SSHD} -D -e -f {server}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["unshare", "--mount", "sh", str(folder / "sh")], stdout=log, stderr=log)
    try:
        reach = ["ssh", "-F", str(client), NAMES[0], "exit 0"]
        until(lambda: subprocess.run(reach, check=False).returncode == 0, (folder / "log").read_text)
        yield client
    finally:
        process.terminate()
        process.wait()
