# SPDX-License-Identifier: Apache-2.0
"""Starts a launcher of ours on each of several hosts by OpenSSH. What runs there ends with that connection.

OpenSSH also does what a run needs before and after it: ask hosts what they have, copy a folder there and files back.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.words import counted, plural, shortened
from farflung.config.engines import Host, parse_hosts
from farflung.config.key import run_key
from farflung.config.launch import DEFAULT_PORT, LaunchSettings, flags_for
from farflung.launch.codes import EngineFailure
from farflung.launch.engines import probe
from farflung.launch.engines.connections import GONE, Connections, ForegroundEngine, SshConnection
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.folder import SUBMITTED
from farflung.launch.network import is_loopback
from farflung.launch.shell import CURRENT_LAST, shell_line, start_of
from farflung.observe.folder import RUNS
from farflung.process.identity import this_process
from farflung.process.run_files import LOGS, RANKS
from farflung.process.tether import SIGN_S

_OPTIONS = ("python", "folder", "ssh")  # keys of `engine_options`
# Of an option that ssh hears twice the first value counts. A dead connection ends after 15 s.
_SSH = ("BatchMode=yes", "ConnectTimeout=10", f"ServerAliveInterval={SIGN_S:g}", "ServerAliveCountMax=3")
_NOT_COPIED = (".git", RUNS, ".venv", "__pycache__")
_FOLDERS = (LOGS, RANKS)  # of a run's, whose files come back
_ANSWER_S = 30.0
_MOST_LINES = 8


class SshClient:
    """Runs commands of OpenSSH's client.

    Args:
        options: the job's `engine_options`.
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
                with suppress(BrokenPipeError), ssh.stdin:  # if it has ended, its exit code and its words tell why
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
    return f"{CURRENT_LAST}exec({inspect.getsource(probe)!r})".encode()


def _has_begun(stream: IO[bytes], word: str) -> bool:
    """Read up to the line that only what we have started knows: a host's shell may print before it."""
    return any(line.strip() == word.encode() for line in stream)


def _lines(output: bytes) -> list[str]:
    """Return the lines of a foreign program, short and without what a terminal would obey."""
    lines = ("".join(filter(str.isprintable, line)).strip() for line in output.decode(errors="replace").splitlines())
    return [shortened(line) for line in lines if line]


def _unpack(stream: IO[bytes], into: Path) -> None:
    """Unpack a host's tar into a run's folder: log files are replaced, `*.jsonl` files are appended to."""
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


class Ssh(ForegroundEngine[SshConnection]):
    """Hosts that ssh reaches without a question: `--hosts a,b,user@c:2`."""

    def __init__(self, job: Job) -> None:
        job.check_options(_OPTIONS)
        self._job, self._ssh, self._token = job, SshClient(job.options), secrets.token_hex(16)
        self._hosts = () if job.handle else parse_hosts(job.settings.hosts or "")
        self._counts = [] if job.handle else self._shared_out(job.settings)
        self._key = run_key(job.settings.key_file) if job.is_elastic and not job.handle else None

    def _shared_out(self, settings: LaunchSettings) -> list[int | None]:
        """Return how many replicas or processes each host gets; None: one for each GPU."""
        size, counts = len(self._hosts), [host.count for host in self._hosts]
        name, total = (
            ("replicas", settings.replicas) if self._job.is_elastic else ("num_processes", settings.num_processes)
        )
        asked = f"hosts asks for {', '.join(f'{host.name}:{host.count or 1}' for host in self._hosts)}"
        if settings.num_machines not in (1, size) or settings.machine_rank:
            words = f"num_machines is {settings.num_machines} and machine_rank {settings.machine_rank}"
            raise ConfigError(f"{words}, but hosts names {size} in their order. Leave both out.")
        if any(counts):
            counts = [count or 1 for count in counts]
            stated = sum(count or 0 for count in counts)
            if total not in (None, stated):
                raise ConfigError(f"{name} is {total}, but {asked}, which makes {stated}. Leave one of them out.")
        elif self._job.is_elastic:
            total = total or max(settings.bounds[0], size)
            counts = [(total + size - 1 - k) // size for k in range(size)]
        elif total is not None:
            if total % size:
                raise ConfigError(f"num_processes is {total}, but hosts names {size}; use a multiple of {size}.")
            counts = [total // size] * size
        total, (least, most) = sum(count or 0 for count in counts), settings.bounds
        if self._job.is_elastic and not max(least, size) <= total <= most:
            limits = f"elastic is {settings.elastic}, and each host has at least one"
            raise ConfigError(f"{total} {plural('replica')} are to start, but {limits}: {asked}.")
        if not self._job.is_elastic and len(set(counts)) > 1:
            raise ConfigError(
                f"{asked}, but each machine of a fixed run has as many processes as the others. Use the same number "
                "for all, or --elastic, where hosts may differ."
            )
        return counts

    def check(self) -> Job:
        """Ask each host what it has; raise EngineFailure if one can't be reached or has other versions or code."""
        settings = self._job.settings
        kind = "module" if settings.module else "program" if settings.no_python else "script"
        if settings.sync:
            self._ssh.rsync(self._hosts)
        try:
            answers = self._ssh.probe(self._hosts, self._job.script, kind)
        except FileNotFoundError:
            raise EngineFailure("There is no program ssh on this machine. Install OpenSSH's client.") from None
        by_gpus = not (settings.use_cpu or self._job.is_elastic or any(self._counts))
        differences = table_of_differences(probe.probe(self._job.script, kind), answers, ("GPUs",) if by_gpus else ())
        if differences:
            raise EngineFailure(differences)
        return replace(self._job, settings=self._placed(settings, answers[self._hosts[0].name]))

    def _placed(self, settings: LaunchSettings, first: Mapping[str, Any]) -> LaunchSettings:
        """Return the settings with the number of processes and where the others reach the first host.

        Args:
            first: that host's answer. Its address is the one by which ssh has reached it.
        """
        size, port = len(self._hosts), settings.main_process_port or first["port"]
        if self._job.is_elastic:
            settings = replace(settings, replicas=sum(count or 0 for count in self._counts))
        else:
            each = self._counts[0] or (1 if settings.use_cpu else len(settings.gpu_list) or first["GPUs"] or 1)
            settings = replace(settings, num_machines=size, num_processes=size * each)
        if size == 1 or settings.meet:
            return settings
        address = settings.main_process_ip or first["address"] or self._hosts[0].name
        if not settings.main_process_ip and (is_loopback(address) or address == "localhost"):
            raise ConfigError(
                f"{self._hosts[0].name} was reached at {address}, which is each host's own. Give its address on their "
                "network as --main_process_ip, or in hosts."
            )
        if not self._job.is_elastic:
            return replace(settings, main_process_ip=address, main_process_port=port)
        at = f"[{address}]" if ":" in address else address
        return replace(settings, meet=f"tcp://{at}:{port}", main_process_ip=None, main_process_port=None)

    @property
    def _folder_there(self) -> Path:
        """The run's folder on the hosts: in the working folder there, if it is in that of this machine."""
        folder = self._job.folder
        return Path(self._ssh.folder) / folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder

    def _commands(self) -> dict[str, list[str]]:
        """Return ssh's commands by host."""
        job, python, commands = replace(self._job, folder=self._folder_there), self._ssh.python, {}
        for k, (host, count) in enumerate(zip(self._hosts, self._counts, strict=True)):
            place: dict[str, Any] = {"replicas": count} if job.is_elastic else {"machine_rank": k}
            launcher = launcher_command(job.command(json=True, key_file=None, **place), python)
            tether = (*start_of("farflung.process.tether", python), "--reports", self._token)
            commands[host.name] = self._ssh.command(host, (*tether, *["--key"] * bool(self._key), *launcher))
        return commands

    def described(self) -> str:
        """Return ssh's commands; the first host's address and port are known once it was asked."""
        guess = {"address": self._hosts[0].name, "port": DEFAULT_PORT, "GPUs": 0}
        planned = Ssh(replace(self._job, settings=self._placed(self._job.settings, guess)))
        lines = [f"{host}: {shell_line(command)}" for host, command in planned._commands().items()]
        return "\n".join(["nothing is started (--dry-run)", *lines])

    def submit(self) -> Mapping[str, Any]:
        commands = self._commands()
        self._connections = Connections(
            self._job.settings, self._token, lambda host: SshConnection(host, commands[host], self._key), commands
        )
        return {**this_process(), "hosts": [host.name for host in self._hosts]}

    def follow(self) -> int:
        """Print what the hosts print until all have ended; then take over what they have written on disks of theirs."""
        code = super().follow()
        for host in self._hosts:
            there, into = str(self._folder_there), self._job.folder
            if not self._connections.all[host.name].is_gone and (why := self._ssh.collect(host, there, into)):
                message = f"what {host.name} has in {there} could not be copied to {into}: {why}"
                record(Kind.NOTE, level=logging.ERROR, message=message)
        return code

    def scale(self, count: int) -> str:
        """Raise EngineFailure: replicas are added by one more launch, and end with the launcher that started them."""
        settings = self._job.settings
        without = ("hosts", "replicas", "run_dir", "sync")
        flags = shell_line([*flags_for(settings, without=without), self._job.script, *self._job.arguments])
        add = f"`farflung launch --hosts HOST:n {flags}`" if settings.meet else "the `--join` line that it has printed"
        raise EngineFailure(
            f"{self._job.name} was started by ssh on {', '.join(self._job.handle['hosts'])}, which starts no more by "
            f"itself. To add replicas: {add}. To end some: end that launch, by Ctrl-C or `farflung cancel`."
        )
