# SPDX-License-Identifier: Apache-2.0
"""The launch settings about what starts the processes: this launcher, ssh, Slurm, Ray or Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.base.errors import ConfigError
from farflung.config.setting import setting

LOCAL = "local"
ENGINES = (LOCAL, "ssh", "slurm", "ray", "kubernetes")


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
                raise ConfigError(f"{name} is for --engine ssh, but engine is {self.engine}.")
        if self.engine == "ssh" and self.hosts is None:
            raise ConfigError("engine is ssh, but no hosts are named. Add --hosts a,b or --hosts FILE.")
        if self.sync and self.hosts is None:
            raise ConfigError("sync copies the working folder to other hosts, but none are named. Add --hosts a,b.")
        if self.engine_options and self.is_local:
            raise ConfigError(f"engine_options is {self.engine_options!r}, but no engine is named. Add --engine slurm.")
        for name, value in of_this_machine.items():
            if value and not self.is_local:
                raise ConfigError(f"{name} is for a run on this machine, but engine is {self.engine or 'ssh'}.")
