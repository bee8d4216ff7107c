# SPDX-License-Identifier: Apache-2.0
"""How the members of a generation meet: the seam between membership of replicas and what carries their values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from farflung.address.board import Board
from farflung.base.errors import RankFailure
from farflung.comm.group import Group


class Entered(NamedTuple):
    """A collective that this rank has started: which one, of how many bytes.

    Attributes:
        missing: the ranks in the generation that have not come; empty if that is not known.
    """

    place: str
    nbytes: int
    missing: tuple[int, ...] = ()


class Watch(Protocol):
    """What the groups of a generation ask while they wait."""

    connect_s: float  # how long members wait for each other's connections

    def look(self, entered: Entered, waited_s: float) -> None:
        """Raise RankFailure if this wait can't end."""

    def note_end(self, entered: Entered, took_s: float) -> None:
        """Record a completed collective, and how long its values took at most."""

    def break_off(self, reason: str, author: int | None = None) -> RankFailure:
        """Tell all members that the generation is over, and return an error that says so.

        Args:
            author: the rank in the generation that has sent what it can't have meant.
        """


class Transport(Protocol):
    """The records of a run, and groups of its members.

    Attributes:
        is_lasting: what is written there stays when all processes have ended.
    """

    is_lasting: bool = False

    @property
    def board(self) -> Board:
        """The records."""

    @property
    def address(self) -> str:
        """The address by which other processes find the run."""

    def connect(self, name: str, rank: int, size: int, watch: Watch) -> Group:
        """Return the members of a generation as a group of their own, whose end affects no other one.

        Args:
            name: the same for its members, and for no other group of the run. Keys on the board begin with it, if
                there are any.
        """

    def check(self) -> None:
        """Raise Unreachable once another run has begun at the address."""
        return None

    def renew(self) -> None:
        """Write the way to the run again, as a purge or a rule on old objects deletes what is old."""
        return None

    def close(self) -> None:
        """Release all that groups have left behind."""
