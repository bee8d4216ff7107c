# SPDX-License-Identifier: Apache-2.0
"""What OpenSSH does for a run before and after it: ask hosts what they have, copy a folder there and files back."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from farflung.base.words import counted
from farflung.config.engines import Host
from farflung.launch.codes import EngineFailure
from farflung.launch.engines import probe
from farflung.launch.engines.connections import GONE
from farflung.observe.folder import RUNS, SUBMITTED
from farflung.process.run_files import LOGS, RANKS
from farflung.process.tether import SIGN_S

OPTIONS = {
    "python": "the Python there",
    "folder": "the working folder there",
    "ssh": "more arguments of ssh: -F lab.conf",
}
# Of an option that ssh hears twice the first value counts. A dead connection ends after 15 s.
_SSH = ("BatchMode=yes", "ConnectTimeout=10", f"ServerAliveInterval={SIGN_S:g}", "ServerAliveCountMax=3")
_NOT_COPIED = (".git", RUNS, ".venv", "__pycache__")
_ANSWER_S = 30.0
_MOST_LINES = 8


class SshClient:
    """Runs commands of OpenSSH's client.

    Args:
        options: by the keys of `OPTIONS`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.python = options.get("python", sys.executable)
        self.folder = options.get("folder", os.getcwd())
        own = (word for option in _SSH for word in ("-o", option))
        self._words = ("ssh", "-T", *shlex.split(options.get("ssh", "")), *own)

    def command(self, host: Host, words: str) -> list[str]:
        """Return ssh's command that has a shell on `host` run `words` in the working folder."""
        return [*self._words, "--", host.target, f"cd {shlex.quote(self.folder)} && {words}"]

    def probe(self, hosts: Sequence[Host], script: str, kind: str) -> dict[str, dict[str, Any]]:
        """Return what each host answers to the probe, by name; raise EngineFailure if one can't be used."""

        def asked(host: Host) -> str:
            words = shlex.join(("exec", self.python, "-", script, kind))
            try:
                done = subprocess.run(
                    self.command(host, f'{words} "$SSH_CONNECTION"'),
                    input=inspect.getsource(probe).encode(),
                    capture_output=True,
                    timeout=_ANSWER_S,
                    start_new_session=True,
                )
            except subprocess.TimeoutExpired:
                return f"no answer for {_ANSWER_S:g} s"
            if done.returncode:
                said = [f"exit code {done.returncode}", *done.stderr.decode(errors="replace").split("\n")]
                names = "; name them by --engine-options python=PYTHON,folder=FOLDER" if done.returncode != GONE else ""
                return [line for line in said if line.strip()][-1].strip() + names
            answers[host.name] = json.loads(done.stdout.splitlines()[-1])
            if "missing" in (answers[host.name]["farflung"], answers[host.name]["torch"]):
                return f"{self.python} has no farflung or no torch there; another one: --engine-options python=PYTHON"
            is_there = answers[host.name]["script"] != "missing"
            return "" if is_there else f"there is no {script} in {self.folder}; --sync copies the folder"

        answers: dict[str, dict[str, Any]] = {}
        _all_of(hosts, asked, "can't be used", 32)
        return {host.name: answers[host.name] for host in hosts}

    def rsync(self, hosts: Sequence[Host]) -> None:
        """Copy this machine's working folder to that of each host; raise EngineFailure if rsync can't."""
        if shutil.which("rsync") is None:
            raise EngineFailure("--sync needs the program rsync, here and on each host. This machine has none.")
        there = shlex.quote(self.folder)
        words = ["rsync", "-az", "-e", shlex.join(self._words), "--rsync-path", f"mkdir -p {there} && rsync"]
        words += [f"--exclude={name}" for name in _NOT_COPIED]

        def copied(host: Host) -> str:
            at = host.target.replace(host.name, f"[{host.name}]") if ":" in host.name else host.target
            command = [*words, f"{os.getcwd()}/", f"{at}:{self.folder}/"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            said = [line for line in done.stderr.splitlines() if line and not line.startswith("rsync")]
            return "" if not done.returncode else said[-1] if said else f"rsync: exit code {done.returncode}"

        _all_of(hosts, copied, "did not get the folder by rsync, which must be there too", 8)

    def collect(self, host: Host, there: str, into: Path) -> bool:
        """Add what a host has in the run's folder to that of this machine, if it is another; return if that worked."""
        at = shlex.quote(there)
        done = f"{at}/.copied"  # hosts may share a disk that this machine does not see
        words = f"test ! -d {at} || test -e {at}/{SUBMITTED} || test -e {done} || {{ tar -C {at} -c . && : > {done}; }}"
        ssh = subprocess.Popen(self.command(host, words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        with ssh, suppress(tarfile.ReadError), tarfile.open(fileobj=ssh.stdout, mode="r|") as packed:  # or nothing
            for one in packed:
                *folders, name = Path(one.name).parts or ("",)
                source, is_log = packed.extractfile(one), folders in ([LOGS], [RANKS])
                if source is not None and (is_log or (not folders and name.endswith(".jsonl"))):
                    into.joinpath(*folders).mkdir(exist_ok=True)
                    with into.joinpath(*folders, name).open("wb" if is_log else "ab") as file:
                        shutil.copyfileobj(source, file)
        return ssh.returncode == 0


def _all_of(hosts: Sequence[Host], attempt: Callable[[Host], str], what: str, at_once: int) -> None:
    """Do something for each host; raise EngineFailure with what it returns for those where it does not work."""
    with ThreadPoolExecutor(at_once) as pool:
        said = zip(hosts, pool.map(attempt, hosts), strict=True)
        failed = [f"  {host.name}: {why}" for host, why in said if why]
    if failed:
        more = [f"  and {len(failed) - _MOST_LINES} more"] if len(failed) > _MOST_LINES else []
        head = f"{len(failed)} of {counted(len(hosts), 'host')} {what}. Nothing was started."
        raise EngineFailure("\n".join([head, *failed[:_MOST_LINES], *more]))


def table_of_differences(
    here: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]], more: Collection[str]
) -> str:
    """Return a table of what differs between hosts, or between them and this machine; empty if nothing does.

    Args:
        here: what the probe says of this machine, whose script and farflung count.
        more: what else must be alike on the hosts.
    """
    columns = []
    for name in ("python", "torch", "farflung", "script", *more):
        seen = [here[name]] if name in ("farflung", "script") else []
        seen += [answer[name] for answer in answers.values()]
        alike = {"python": lambda value: value.rpartition(".")[0], "torch": lambda value: value.partition("+")[0]}
        if len({alike.get(name, str)(value) for value in seen}) > 1:
            columns.append(name)
    if not columns:
        return ""
    from rich.console import Console  # late: only a refusal needs it
    from rich.table import Table

    table = Table("host", *columns)
    rows = {"this machine": here, **answers}
    for host in list(rows)[: _MOST_LINES + 1]:
        table.add_row(host, *(str(rows[host][name]) for name in columns))
    console = Console(file=StringIO(), width=100)
    console.print(table)
    advice = " --sync copies the folder to each host." if "script" in columns else ""
    said = f"The hosts differ in {' and '.join(columns)}; nothing was started.{advice}"
    return f"{said}\n{console.file.getvalue().rstrip()}"  # type: ignore[attr-defined]
