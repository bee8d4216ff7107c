# SPDX-License-Identifier: Apache-2.0
"""What replicas that meet at an address ask of it: requests, bytes and money.

Each collective is one share of each of M replicas: it is written once, and read by the M - 1 others, whole or in parts.
A bucket takes h collectives: 1, in which each replica reads all payloads; or 2, if that saves enough bytes, in which it
sums a part of each and reads the other sums. So a fragment in b buckets takes h b + 2, as a vote comes before it and a
word that all has arrived after it. The time is that of reads one after the other, though slow ones overlap.

    writes = h b + 2;  reads = (M - 1) (h b + 2)     of a replica, for one fragment
    r      = M - 1 payloads that it reads, or 2(M-1)/M
    t      = M (h b + 2) * request + (1 + r) * payload / bandwidth

In a bucket more than three replicas put votes and words into the names of objects: one listing has what M - 1 reads
would, so the 2 becomes 4/M in `t`, and 0 in the reads.

Not counted are repeated reads of a share that a slower replica has not written yet, one in each pause of the wait. The
first member also writes the shared state while it trains: the weights, and the outer optimizer's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from farflung.base.checks import check_number, check_word
from farflung.base.sizes import lie_in_names
from farflung.cost.model import Cost, Workload, num_collectives

_MONTH_S = 30 * 86_400.0
_GB = 1e9
_STATES = 3  # that lie there at most: two, and the next one while it is written


class _Form(NamedTuple):
    scheme: str
    request_s: float  # by default
    sign_s: float  # between two heartbeats of a launcher


FORMS = {
    "folder": _Form("file", 0.005, 1.0),
    "s3": _Form("s3", 0.05, 10.0),
    "gs": _Form("gs", 0.05, 10.0),
    "az": _Form("az", 0.05, 10.0),
    "hf": _Form("hf", 0.1, 20.0),
}


class Prices(NamedTuple):
    """US dollars."""

    writes: float  # for 1,000 requests, also those that list keys
    reads: float  # for 1,000 requests
    moved: float  # for a GB that is read
    stored: float  # for a GB in a month


@dataclass(frozen=True)
class Traffic:
    """What a method asks of the address."""

    writes_per_round: float  # by one replica, in the `Method.every` steps in which each fragment is exchanged once
    reads_per_round: float
    lists_per_round: float  # of small shares, which lie in names
    records_per_round: float  # heartbeats of its launcher, and its part of the looks for newcomers
    bytes_written_per_round: float
    bytes_read_per_round: float
    state_bytes: float  # of the shared state, which the first member writes every few rounds
    bytes_stored: float  # of all replicas, with their states, at most
    usd: float | None  # of all replicas, in the whole run; None without prices


@dataclass(frozen=True)
class MeetingPlace:
    """An address at which replicas meet.

    Args:
        address: one of `FORMS`, or an address that begins with a scheme of theirs.
        prices: None: unknown.

    Raises:
        ConfigError: there is no such form, or a price is below zero.
    """

    address: str
    prices: Prices | None = None

    def __post_init__(self) -> None:
        check_word("--meet", self._form, FORMS)
        for name, price in (self.prices or Prices(0, 0, 0, 0))._asdict().items():
            check_number(f"--prices: {name}", price, least=0)

    @property
    def _form(self) -> str:
        scheme, is_address, _ = self.address.partition("://")
        return next((name for name, one in FORMS.items() if is_address and one.scheme == scheme), self.address)

    @property
    def request_s(self) -> float:
        """How long a request takes, by default."""
        return FORMS[self._form].request_s

    @property
    def lists_at_once(self) -> bool:
        return self._form != "folder"

    @property
    def flag(self) -> str:
        """The flag of `farflung launch` that names it."""
        form = FORMS.get(self.address)
        path = "/shared/run" if self.address == "folder" else "bucket/run"
        return f"--meet {self.address if form is None else f'{form.scheme}://{path}'}"

    def traffic(self, run: Workload, cost: Cost, steps: int) -> Traffic:
        """Return what a run of so many steps asks, if one replica sends nothing."""
        method, others = cost.method, run.replicas - 1
        writes = float(num_collectives(run, method)) if others else 0.0
        lists = 2.0 * method.fragments if lie_in_names(run.replicas, self.lists_at_once) else 0.0
        swaps = max(0.0, writes - 2 * method.fragments) if method.exchange == "paired" else 0.0
        reads = (writes - lists - swaps) * others + swaps
        round_s, rounds = method.every * cost.seconds_per_step, steps / method.every
        records = round_s / FORMS[self._form].sign_s + method.fragments / run.replicas
        written, read = cost.bytes_sent_per_round, cost.bytes_received_per_round
        # A share is deleted once its author sees that all have read it, in the round after its own.
        flying = 1 + max(1, math.ceil(method.delay * method.fragments / method.every))
        state = 4.0 * run.parameters * (1 + method.outer_state) + run.buffer_bytes
        stored = min(flying, method.fragments + 1) * run.replicas * written / method.fragments + _STATES * state
        usd = None
        if self.prices is not None:
            requests = (writes + records + lists) * self.prices.writes + reads * self.prices.reads
            a_round = requests / 1000 + read / _GB * self.prices.moved
            kept = stored / _GB * self.prices.stored * steps * cost.seconds_per_step / _MONTH_S
            usd = run.replicas * rounds * a_round + kept
        return Traffic(writes, reads, lists, records, written, read, state, stored, usd)
