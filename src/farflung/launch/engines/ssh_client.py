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
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from farflung.base.words import counted, shortened
from farflung.config.engines import Host
from farflung.launch.codes import EngineFailure
from farflung.launch.engines import probe
from farflung.launch.engines.connections import GONE
from farflung.launch.folder import SUBMITTED
from farflung.launch.shell import shell_line
from farflung.observe.folder import RUNS
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
_FOLDERS = (LOGS, RANKS)  # of a run's, whose files come back
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
        flags = (word for option in _SSH for word in ("-o", option))
        self._words = ("ssh", "-T", *shlex.split(options.get("ssh", "")), *flags)

    def command(self, host: Host, words: Sequence[str], more: str = "") -> list[str]:
        """Return ssh's command that runs `words` on `host` in the working folder, whatever its login shell is.

        Args:
            more: text for a POSIX shell that is added to the words.
        """
        there = ("/bin/sh", "-c", f'cd "$0" && exec "$@"{more}', self.folder, *words)
        return [*self._words, "--", host.target, f"exec {shell_line(there)}"]

    def probe(self, hosts: Sequence[Host], script: str, kind: str) -> dict[str, dict[str, Any]]:
        """Return what each host answers to the probe, by name; raise EngineFailure if one can't be used."""

        def asked(host: Host) -> str:
            word = os.urandom(16).hex()
            command = self.command(host, (self.python, "-", word, "probe", script, kind), ' "$SSH_CONNECTION"')
            try:
                done = subprocess.run(
                    command, input=_source(), capture_output=True, timeout=_ANSWER_S, start_new_session=True
                )
            except subprocess.TimeoutExpired:
                return f"no answer for {_ANSWER_S:g} s"
            if done.returncode:
                names = "; name them by --engine-options python=PYTHON,folder=FOLDER" if done.returncode != GONE else ""
                return [f"exit code {done.returncode}", *_lines(done.stderr)][-1] + names
            answer = BytesIO(done.stdout)
            if not _has_begun(answer, word):
                printed = [*_lines(done.stderr), *_lines(done.stdout)]
                shown = f"printed {printed[-1]!r}" if printed else "printed nothing"
                return f"its shell {shown} and ran no command; `ssh {host.target} echo hello` must print hello"
            answers[host.name] = found = json.loads(answer.readline())
            if "missing" in (found["farflung"], found["torch"]):
                return f"{self.python} has no farflung or no torch there; another one: --engine-options python=PYTHON"
            is_there = found["script"] != "missing"
            return "" if is_there else f"there is no {script} in {self.folder}; --sync copies the folder"

        answers: dict[str, dict[str, Any]] = {}
        _all_of(hosts, asked, "can't be used", 32)
        return {host.name: answers[host.name] for host in hosts}

    def rsync(self, hosts: Sequence[Host]) -> None:
        """Copy this machine's working folder to that of each host; raise EngineFailure if rsync can't."""
        if shutil.which("rsync") is None:
            raise EngineFailure("--sync needs the program rsync, here and on each host. This machine has none.")
        there = shell_line(("/bin/sh", "-c", 'mkdir -p "$0" && cd "$0" && exec rsync "$@"', self.folder))
        words = ["rsync", "-az", "-e", shlex.join(self._words), "--rsync-path", there]
        words += [f"--exclude={name}" for name in _NOT_COPIED]

        def copied(host: Host) -> str:
            at = host.target.replace(host.name, f"[{host.name}]") if ":" in host.name else host.target
            done = subprocess.run([*words, "./", f"{at}:."], stdin=subprocess.DEVNULL, capture_output=True)
            printed = [line for line in _lines(done.stderr) if not line.startswith(("rsync", "("))]
            if any("is your shell clean" in line for line in printed):
                return f"its shell prints something, which rsync can't read: `ssh {host.target} true` must be silent"
            return "" if not done.returncode else [f"rsync: exit code {done.returncode}", *printed][-1]

        _all_of(hosts, copied, "did not get the folder by rsync, which must be there too", 8)

    def collect(self, host: Host, there: str, into: Path) -> str:
        """Add what a host has in the run's folder to that of this machine, if it is another.

        Returns:
            Why that has failed; empty if it has not.
        """
        word = os.urandom(16).hex()
        command = self.command(host, (self.python, "-", word, "pack", there, SUBMITTED, *_FOLDERS))
        pipe = subprocess.PIPE
        try:
            with TemporaryFile() as errors, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as ssh:
                assert ssh.stdin is not None
                assert ssh.stdout is not None
                with ssh.stdin:
                    ssh.stdin.write(_source())
                if has_begun := _has_begun(ssh.stdout, word):
                    _unpack(ssh.stdout, into)
                code = ssh.wait()
                errors.seek(0)
                if has_begun and code == 0:
                    return ""
                return [f"it sent nothing, exit code {code}", *_lines(errors.read())][-1]
        except (OSError, tarfile.TarError, EOFError, ValueError) as error:
            return str(error)


def _source() -> bytes:
    return inspect.getsource(probe).encode()


def _has_begun(stream: IO[bytes], word: str) -> bool:
    """Read up to the line that only what we have started knows: a host's shell may print before it."""
    return any(line.strip() == word.encode() for line in stream)


def _lines(output: bytes) -> list[str]:
    """Return the lines of a foreign program, short and without what a terminal would obey."""
    lines = ("".join(filter(str.isprintable, line)).strip() for line in output.decode(errors="replace").splitlines())
    return [shortened(line) for line in lines if line]


def _unpack(stream: IO[bytes], into: Path) -> None:
    """Write the files of a host's tar: logs take the place of what is there, lines are added to it."""
    with tarfile.open(fileobj=stream, mode="r|") as packed:
        for entry in packed:
            folder, _, name = entry.name.rpartition("/")
            is_wanted = folder in _FOLDERS or (not folder and name.endswith(".jsonl"))
            source = packed.extractfile(entry) if entry.isreg() else None
            if source is not None and is_wanted and name not in ("", ".", ".."):
                into.joinpath(folder).mkdir(exist_ok=True)
                with into.joinpath(folder, name).open("wb" if folder else "ab") as file:
                    shutil.copyfileobj(source, file)


def _all_of(hosts: Sequence[Host], attempt: Callable[[Host], str], what: str, at_once: int) -> None:
    """Do something for each host; raise EngineFailure with what it returns for those if it does not work."""
    with ThreadPoolExecutor(at_once) as pool:
        results = zip(hosts, pool.map(attempt, hosts), strict=True)
        failed = [f"  {host.name}: {why}" for host, why in results if why]
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
    message = f"The hosts differ in {' and '.join(columns)}; nothing was started.{advice}"
    return f"{message}\n{console.file.getvalue().rstrip()}"  # type: ignore[attr-defined]
