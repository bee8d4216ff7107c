# SPDX-License-Identifier: Apache-2.0
"""The replica that this process belongs to, in a run whose replicas come and go; read once, when a process starts."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.base.errors import ConfigError
from farflung.config import environ


@dataclass(frozen=True)
class Place:
    """A replica of a run of `farflung launch --elastic`, and where it meets the others; `FIXED` in any other run."""

    member: int | None = None  # this replica's id; None: the replicas of the run are fixed
    address: str = ""  # of the run's board, host:port or a URL

    @classmethod
    def launched(cls) -> Place:
        """Read the launcher's variables; raise ConfigError if they can't be understood."""
        address, member = (environ.text(name) or "" for name in environ.MEMBER_VARIABLES)
        if not address:
            return FIXED
        is_known = "://" in address or address.rpartition(":")[2].isdecimal()
        if not is_known or not member.isdecimal():
            raise ConfigError(
                f"{' and '.join(environ.MEMBER_VARIABLES)} are {address!r} and {member!r}; the launcher sets them."
            )
        return cls(int(member), address)


FIXED = Place()
