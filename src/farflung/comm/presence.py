# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group publish outside their collectives: which of them left, are alive, or are late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import count
from typing import Any

import torch.distributed as dist

from farflung.base.causes import Cause
from farflung.base.torch_internals import default_store
from farflung.base.words import numbered

REPORT_S = 10.0  # how long a wait that ran out of time waits for the watchdog's report: a turn of others', and its own

_OVERDUE = "overdue"
_AGREE_WAIT_S = 5.0  # how long `agree_min` waits for ranks that are alive
_ALIVE_WAIT_S = 1.0  # how long the ranks of a broken group wait for each other's heartbeat


class PresenceStore:
    """What the ranks of one group publish for each other, in the store of the default process group.

    If the store is gone, `post`, `posts`, `ask`, `asked` and `publish_hang` raise a `DistError`; for the others that
    is one more thing that is known about a broken group.

    Args:
        own_connection: talk to the store apart from everybody else in this process, who may be waiting in it.
    """

    def __init__(self, prefix: str, rank: int, size: int, own_connection: bool = False) -> None:
        self.prefix = prefix
        self.rank = rank
        self.size = size
        self._has_checked_alive = False
        self._read: list[tuple[str, int]] = []  # keys, and how often each rank has left once nobody reads them again
        self.hosts: dict[int, str] = {}  # names and addresses of the ranks' machines, as far as they are known
        self.loader_numbers = count(1)  # one for each loader, the same on all ranks that have as many
        self._clone = default_store().clone() if own_connection else None

    # ---- what each rank says, under a name of one or more words

    def post(self, text: str, *name: object) -> None:
        """Publish something, in place of what this rank said under that name before."""
        self._store.set(self._key(*name, self.rank), text)

    def posts(self, *name: object, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return what each of `ranks` (None: all) has published under a name; only of those that have."""
        keys = {rank: self._key(*name, rank) for rank in (range(self.size) if ranks is None else ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def publish(self, name: str, text: str) -> None:
        """Publish something of the whole run, which any rank may replace; `published` returns it."""
        self._store.set(self._key(name), text)

    def answer_to(self, name: str, number: int, rank: int, text: str) -> None:
        """Publish what `rank` waits for in `answer`."""
        self._store.set(self._key(name, number, rank), text)

    def answer(self, name: str, number: int) -> str | None:
        """Return, once, what was published for this rank by `answer_to`; None as long as nothing was."""
        key = self._key(name, number, self.rank)
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        self._store.delete_key(key)
        return text

    # ---- being on a machine

    def publish_host(self, host: str) -> None:
        """Publish the name and the address of this rank's machine, with a space between them."""
        self.hosts[self.rank] = host
        self.post(host, "host")

    def read_hosts(self) -> None:
        """Read those of the other ranks' machines, as soon as all of them are there."""
        others = [rank for rank in range(self.size) if rank not in self.hosts]
        if others and self._store.check([self._key("host", rank) for rank in others]):
            self.hosts |= self.posts("host", ranks=others)

    def describe(self, ranks: Iterable[int]) -> str:
        """Return `rank 1`, or with several machines `ranks 2 and 3 on node1`; those of one name by address too."""
        if len(self.hosts) < self.size or len(set(self.hosts.values())) == 1:
            return numbered("rank", ranks)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        names = [host.partition(" ")[0] for host in set(self.hosts.values())]

        def called(host: str) -> str:
            name, _, address = host.partition(" ")
            return name if names.count(name) == 1 else f"{name} ({address})"

        return " and ".join(f"{numbered('rank', there)} on {called(host)}" for host, there in by_host.items())

    # ---- leaving

    def mark_left(self, reason: str, cause: Cause = Cause.OWN) -> None:
        """Publish that this rank will not come to the collectives that the others wait in."""
        # A rank may leave, come back and leave again. Only those that left more often than this one are gone.
        with suppress(dist.DistError):  # if the store is gone, there is nobody to tell
            times = self._store.add(self._key("left", self.rank), 1)
            post = json.dumps({"reason": reason, "cause": cause.value})
            for key, text in ((self._key("left", times, self.rank), post), (self._key("left", "any", times), "")):
                self._store.set(key, text)
                self._read.append((key, times))

    def describe_left(self) -> str:
        """Name the ranks that have left more often than this one, with their reasons; empty when there is none."""
        with suppress(dist.DistError):  # without a store the collective itself ends with an error
            store = self._store
            times = store.add(self._key("left", self.rank), 0) + 1
            if store.check([self._key("left", "any", times)]):
                gone = {rank: json.loads(post) for rank, post in self.posts("left", times).items()}
                # Ranks that left because others had left say nothing new.
                first = {rank: post for rank, post in gone.items() if not Cause(post["cause"]).is_of_others} or gone
                return "; ".join(f"rank {rank} left ({post['reason']})" for rank, post in first.items())
        return ""

    def mark_ended(self) -> None:
        """Publish that this rank comes to nothing more, unless it begins another run in the same group."""
        self._store.add(self._key("ended", self.rank), 1)

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Return those of `ranks` that have ended more often than this one."""
        own, *times = [self._store.add(self._key("ended", rank), 0) for rank in (self.rank, *ranks)]
        return [rank for rank, count in zip(ranks, times, strict=True) if count > own]

    # ---- tidying the store

    def forget(self, closed: Iterable[str]) -> None:
        """Delete what nobody will read again, and the keys of `closed` groups, where all ranks have come together."""
        store, read = self._store, self._read
        expired = []
        if read:
            least = min(store.add(self._key("left", rank), 0) for rank in range(self.size))
            expired = [key for key, times in read if times <= least]
            self._read = [(key, times) for key, times in read if times > least]
        for name in closed:
            expired += [key for key in store.list_keys() if key.startswith(f"{name}/")]
        for key in expired:
            store.delete_key(key)

    # ---- what can not end

    def has_alarm(self) -> bool:
        """Return whether a rank has reported a stuck collective, or checked the others because of one."""
        with suppress(dist.DistError):
            return bool(self._store.check([self._key("alarm")]))
        return False

    def check_alive(self, closed: Callable[[], set[int]]) -> str:
        """Send a heartbeat, wait a moment for those of the other ranks, and name those that are gone.

        Args:
            closed: returns the ranks that have closed their connection with this one. A rank that is gone has, and one
                that closed it because of that gave a sign before; one that is busy has not, and is not to blame.
        """
        self._has_checked_alive = True
        try:
            store = self._store
            store.set(self._key("alarm"), "")
            self.post("", "alive")
            silent = [rank for rank in range(self.size) if rank != self.rank]
            deadline = time.monotonic() + _ALIVE_WAIT_S
            while silent and time.monotonic() < deadline:
                time.sleep(_ALIVE_WAIT_S / 50)
                silent = [rank for rank in silent if not store.check([self._key("alive", rank)])]
            if _OVERDUE in self.posts("alive").values() and (report := self.await_hang()):
                return report
        except dist.DistError:
            others = self.describe(rank for rank in range(self.size) if rank != self.rank)
            return (
                f"{others} can't be asked, as the run's store is gone too: the process that serves it (rank 0, or its "
                "launcher) has probably died"
            )
        if gone := [rank for rank in silent if rank in closed()]:
            return (
                f"{self.describe(gone)} sent no heartbeat for {_ALIVE_WAIT_S:g} s and the connection is closed, so "
                "the process died or has ended"
            )
        if silent:
            return (
                f"{self.describe(silent)} sent no heartbeat for {_ALIVE_WAIT_S:g} s, so the process died, has ended "
                "or is busy elsewhere"
            )
        return "every rank is alive, so they passed different sizes to one collective, or the network failed"

    def agree_min(self, number: int, name: str) -> int:
        """Publish `number` under `name`, wait for the other ranks that still live, and return the smallest."""
        try:
            store = self._store
            self.post("", "alive")
            self.post(str(number), "agree_min", name)
            keys = [self._key("agree_min", name, rank) for rank in range(self.size)]
            self._read.append((keys[self.rank], 0))
            began = time.monotonic()
            patience = 0.0 if self._has_checked_alive else _ALIVE_WAIT_S  # then all that live have given a sign already
            while time.monotonic() < began + _AGREE_WAIT_S:
                silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                is_late = time.monotonic() > began + patience
                if not silent or (is_late and not any(store.check([self._key("alive", rank)]) for rank in silent)):
                    break
                time.sleep(_ALIVE_WAIT_S / 50)
            return min(map(int, self.posts("agree_min", name).values()))
        except dist.DistError:
            return number

    # ---- waiting for each other

    def publish_mismatch(self, text: str) -> None:
        """Publish that ranks wait for each other in different calls. The first text stays."""
        if self._store.add(self._key("mismatches"), 1) == 1:
            self._store.set(self._key("mismatch"), text)
            self._store.set(self._key("alarm"), "")
            self.ask()

    # ---- being late

    def ask(self) -> int:
        """Ask all ranks where they are; return the number of the question."""
        return int(self._store.add(self._key("questions"), 1))

    def asked(self) -> int:
        """Return the number of the latest question; a report counts as one too."""
        return int(self._store.add(self._key("questions"), 0))

    def mark_overdue(self) -> None:
        """Publish that this rank is alive, though its collective ran out of time, which closes connections."""
        with suppress(dist.DistError):
            self.post(_OVERDUE, "alive")

    def await_hang(self) -> str:
        """Return the report of a rank whose collective ran out of time; empty if none comes."""
        deadline = time.monotonic() + REPORT_S
        while not (report := self.published("hang")) and time.monotonic() < deadline:
            time.sleep(REPORT_S / 200)
        return report

    def publish_hang(self, report: str) -> None:
        """Publish which ranks are late, for all that wait."""
        self._store.set(self._key("hang"), report)
        self._store.set(self._key("alarm"), "")
        self.ask()

    def published(self, name: str) -> str:
        """Return the text of a `mismatch`, a `hang` or of `publish`; empty if there is none, or no store."""
        with suppress(dist.DistError):
            if self._store.check([self._key(name)]):
                return str(self._store.get(self._key(name)).decode())
        return ""

    @property
    def _store(self) -> Any:
        return self._clone or default_store()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.prefix, *parts)))
