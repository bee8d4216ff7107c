# SPDX-License-Identifier: Apache-2.0
"""The launch settings about what starts the processes: this launcher, ssh, Slurm, Ray or Kubernetes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config.setting import setting

LOCAL = "local"
ENGINES = (LOCAL, "ssh", "slurm", "ray", "kubernetes")

_HOST = re.compile(r"(?P<user>[\w.+][\w.+-]*@)?(?P<name>[\w.][\w.-]*|\[[\w:.%]+\])((:|\s+slots\s*=\s*)(?P<count>\d+))?")

_LONGEST_NAME = 255  # of a file; a list of hosts may be longer


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches."""

    target: str  # as ssh is to call it: name or user@name
    count: int | None  # processes, or replicas, on it

    @property
    def name(self) -> str:
        """Its name without the user's."""
        return self.target.rpartition("@")[2]


def parse_hosts(stated: str) -> Sequence[Host]:
    """Return the machines that the setting `hosts` names, in order: one or more, each once.

    It is a list, `a,b,user@c:2`, or a file with one a line, `c:2` or `c slots=2`; `#` begins a comment there.

    Raises:
        ConfigError: a name that is none, one that is there twice, a count of 0, a file that names nobody.
    """
    file = Path(stated)
    is_file = len(os.fsencode(file.name)) <= _LONGEST_NAME and file.is_file()
    if not is_file and (file.suffix in (".txt", ".hosts") or "/" in stated):
        raise ConfigError(f"is {stated!r}, and there is no such file. Name one, or the hosts: a,b,user@c:2.", "hosts")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines() if is_file else stated.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"is {stated!r}, which can't be read as text in UTF-8: {error}.", "hosts") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        word = line.partition("#")[0].strip() if is_file else line.strip()
        if is_file and not word:
            continue
        where, match = f"{file}:{number}: " if is_file else "", _HOST.fullmatch(word)
        if match is None or match["count"] == "0":
            raise ConfigError(
                f"{where}hosts holds {word!r}; use a name that ssh knows, such as node1, user@10.0.0.2 or, for two "
                "processes or replicas there, node1:2."
            )
        count = int(match["count"]) if match["count"] else None
        host = Host((match["user"] or "") + match["name"].strip("[]"), count)
        if host.name in hosts:
            raise ConfigError(f"{where}hosts names {host.name} twice. For several processes there use {host.name}:2.")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(
            f"is {stated!r}, which names no machine. Name some: a,b,user@c:2; in a file one a line.", "hosts"
        )
    return tuple(hosts.values())


@dataclass(frozen=True)
class EngineSettings:
    """What starts the processes, and what it needs to know."""

    engine: str | None = setting(
        None,
        "What starts the processes: local, this machine; ssh, on each of `hosts`; slurm, ray or kubernetes, as a job. "
        "[ssh with --hosts, else local]",
        choices=ENGINES,
    )
    hosts: str | None = setting(
        None, "Machines to start on by ssh: a,b,user@c:2 (2 processes or replicas there); or a file with one a line."
    )
    sync: bool = setting(False, "Copy the working folder to each of `hosts` first, by rsync.")
    engine_options: str = setting(
        "", "What else the engine needs: key=value,key=value, such as partition=gpu,time=4:00:00 for slurm."
    )

    @property
    def is_local(self) -> bool:
        """Whether this launcher starts the processes itself, on this machine."""
        return self.engine == LOCAL or (self.engine is None and self.hosts is None)

    def check_engine(self, **of_this_machine: str | None) -> None:
        """Raise ConfigError for settings that need another engine, or that no engine can heed."""
        for name in ("hosts", "sync"):
            if getattr(self, name) and self.engine not in (None, LOCAL, "ssh"):
                raise ConfigError(f"is for --engine ssh, but engine is {self.engine}.", name)
        if self.engine == "ssh" and self.hosts is None:
            raise ConfigError("is ssh, but no hosts are named. Add --hosts a,b or --hosts FILE.", "engine")
        if self.sync and self.hosts is None:
            raise ConfigError("copies the working folder to other hosts, but none are named. Add --hosts a,b.", "sync")
        if self.engine_options and self.is_local:
            raise ConfigError(
                f"is {self.engine_options!r}, but no engine is named. Add --engine slurm.", "engine_options"
            )
        for name, value in of_this_machine.items():
            if value and not self.is_local:
                raise ConfigError(f"is for a run on this machine, but engine is {self.engine or 'ssh'}.", name)
