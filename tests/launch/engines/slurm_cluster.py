# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd; no systemd, cgroups or database.

Both nodes are this host, under names that only their processes can resolve: these see another /etc/hosts.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from farflung.config import environ
from farflung.launch.network import get_free_port
from farflung.process.sockets import address_on_route_to
from farflung.testing.patience import patience
from tests.waits import until

NODES, CORES = ("node0", "node1"), 8
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "unshare")
_ELSEWHERE = "192.0.2.254"  # an address of no machine (RFC 5737), to see where a route to others begins
_CONF = """
ClusterName=farflung
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=30
FirstJobId={first}
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cores}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cpu Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=4:00:00 State=UP
PartitionName=small Nodes={nodes[0]} PriorityTier=1 MaxTime=1:00:00 State=UP
PartitionName=high Nodes=ALL PriorityTier=9 State=UP
"""


def why_impossible() -> str:
    """Return why this machine can't be a cluster, empty where it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a Slurm cluster on this machine needs root"
    missing = [name for name in _NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm is not installed (Debian: slurm-wlm, munge): no {', '.join(missing)}"
    return "" if _own_address() else "this machine has no address but loopback ones"


def _own_address() -> str:
    try:
        return address_on_route_to(_ELSEWHERE)
    except OSError:
        return ""


def _path() -> str:
    return f"{environ.text('PATH')}:/usr/sbin"


@contextmanager
def slurm_cluster() -> Iterator[Path]:
    """Start the daemons in a folder of their own, and yield the path of their slurm.conf; stop them afterwards."""
    with tempfile.TemporaryDirectory(prefix="slurm") as named, ExitStack() as daemons:
        folder, conf = Path(named), Path(named) / "slurm.conf"
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        (folder / "munge.key").touch(0o400)
        (folder / "munge.key").write_bytes(os.urandom(256))
        ports = {"control": get_free_port(), "ports": [get_free_port() for _ in NODES]}
        said = {"folder": folder, "host": socket.gethostname(), "first": random.randrange(1000, 20_000)}
        conf.write_text(_CONF.format(nodes=NODES, cores=CORES, **ports, **said))
        own = "".join(f"{_own_address()} {node}\n" for node in NODES)
        (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n{own}")
        variables = environ.snapshot() | {"SLURM_CONF": str(conf), "PATH": _path()}

        def start(*words: str) -> None:
            with (folder / "daemons.log").open("a") as log:
                process = subprocess.Popen(words, env=variables, stdout=log, stderr=log, start_new_session=True)
            daemons.callback(_stop, process)

        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        start("munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
        until((folder / "munge.sock").exists, lambda: _logs(folder))
        start("slurmctld", "-D", "-f", str(conf))
        for node in NODES:
            start(
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'mount --bind {folder}/hosts /etc/hosts && exec "$@"',
                *(node, "slurmd", "-D", "-N", node, "-f", str(conf)),
            )
        asked = ("sinfo", "--noheader", "--partition=cpu", "--states=idle", "--format=%D")
        until(lambda: _answer(*asked, env=variables) == str(len(NODES)), lambda: _logs(folder))
        yield conf


def _answer(*words: str, env: dict[str, str]) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False).stdout.strip()


def _logs(folder: Path) -> str:
    return "\n".join(file.read_text()[-1000:] for file in sorted(folder.glob("*.log")))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(patience(10))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
