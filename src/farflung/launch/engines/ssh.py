# SPDX-License-Identifier: Apache-2.0
"""Starts a launcher of ours on each of several hosts by OpenSSH. What runs there ends with that connection."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.words import plural
from farflung.config.engines import parse_hosts
from farflung.config.key import run_key
from farflung.config.launch import DEFAULT_PORT, LaunchSettings, flags_for
from farflung.launch.codes import EngineFailure
from farflung.launch.engines import probe
from farflung.launch.engines.connections import Connections, ForegroundEngine, SshConnection, this_launcher
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.engines.ssh_client import OPTIONS, SshClient, table_of_differences
from farflung.launch.network import is_loopback
from farflung.launch.shell import shell_line


class Ssh(ForegroundEngine[SshConnection]):
    """Hosts that ssh reaches without a question: `--hosts a,b,user@c:2`."""

    def __init__(self, job: Job) -> None:
        job.check_options(OPTIONS)
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
            tether = (python, "-m", "farflung.process.tether", "--reports", self._token, *["--key"] * bool(self._key))
            commands[host.name] = self._ssh.command(host, (*tether, *launcher))
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
        return {**this_launcher(), "hosts": [host.name for host in self._hosts]}

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
