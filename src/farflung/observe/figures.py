# SPDX-License-Identifier: Apache-2.0
"""What a run has cost: how it spent its time, and how many bytes it sent next to what DDP would have sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from farflung.base.events import Kind
from farflung.base.words import in_bytes
from farflung.observe.records import Row
from farflung.observe.run import Rank, Run

SHARES = ("computing", "waiting", "saving", "recovering", "starting")
_GB = 1e9


class Span(NamedTuple):
    """What a replica did for a while; times in seconds since the epoch."""

    name: str  # one of `SHARES`, or a part of a round
    begin: float
    end: float


@dataclass(frozen=True)
class Figures:
    """A run in figures. Sums are over all replicas that write into its folder."""

    seconds: dict[str, float]  # of replicas, by what they did (`SHARES`)
    replica_hours: float
    steps: int  # of the replica that has made the most
    rounds: int
    dropped: int
    lost: int
    joined: int
    bytes_sent: float | None  # None: not known
    bytes_ddp: float | None  # what DDP's ring all-reduce of each step's gradients would have sent; None: not known
    loss: float | None  # the last one
    usd: float | None = None  # by the prices that were given

    def __str__(self) -> str:
        whole = sum(self.seconds.values()) or 1.0
        shares = [f"{name} {self.seconds[name] / whole:.0%}" for name in SHARES if self.seconds[name] >= 0.005 * whole]
        said = [", ".join(shares) or "nothing yet", f"{self.replica_hours:.3g} replica-hours"]
        if self.bytes_sent is not None:
            beside = ""
            if self.bytes_ddp is not None and self.bytes_ddp != self.bytes_sent:
                beside = f", DDP would have sent {in_bytes(round(self.bytes_ddp))}"
            said.append(f"sent {in_bytes(round(self.bytes_sent))}{beside}")
        if self.usd is not None:
            said.append(f"{self.usd:.2f} USD")
        return "; ".join(said)


def figures(run: Run, price_hour: float | None = None, price_gb: float | None = None) -> Figures:
    """Return a run's figures; prices in US dollars, of an hour of one replica and of a GB sent."""
    seconds = dict.fromkeys(SHARES, 0.0)
    for one in writers(run):
        for span in spans(run, one):
            seconds[span.name] += span.end - span.begin
    leaders = [one for one in run.ranks if one.row.get("rank", 0) % _island(run) == 0]
    hours = sum(one.row["time"] - one.row["begun"] for one in leaders) / 3600
    sent, ddp = _bytes(run, leaders)
    usd = None
    if price_hour is not None or price_gb is not None:
        usd = hours * (price_hour or 0.0) + (sent or 0.0) / _GB * (price_gb or 0.0)
    voted = [lines[0] for lines in run.voted]
    values = [value for _, _, value in run.series()]
    return Figures(
        seconds=seconds,
        replica_hours=hours,
        steps=max((one.step for one in run.ranks), default=0),
        rounds=len(voted),
        dropped=sum(row["dropped"] for row in voted),
        lost=sum(len(row["lost"]) for row in voted),
        joined=sum(len(row["joined"]) for row in voted),
        bytes_sent=sent,
        bytes_ddp=ddp,
        loss=values[-1] if values else None,
        usd=usd,
    )


def writers(run: Run) -> list[Rank]:
    """Return the ranks that write about rounds: the first one of each replica that comes and goes, else rank 0."""
    return [one for one in run.ranks if one.row.get("rank", 0) == 0]


def own_rounds(run: Run, one: Rank) -> list[Row]:
    """Return the lines about rounds that a rank has written."""
    return [row for row in run.rounds if row.get("member") == one.row.get("member")]


def spans(run: Run, one: Rank) -> list[Span]:
    """Return what a rank did from its start to its last sign, without a gap and without an overlap."""
    begun, last = float(one.row["begun"]), float(one.row["time"])
    marks = []
    own = [line for line in run.steps if all(line.get(name) == one.row.get(name) for name in ("member", "rank"))]
    if own or not one.step:
        marks.append(Span("starting", begun, own[0]["time"] - own[0]["step"] / max(one.rate, 1e-9) if own else last))
    for row in own_rounds(run, one):
        since = row["time"] - row["seconds_exposed"]
        marks += [Span("waiting", since, row["time"]), Span("recovering", since - row["seconds_recovering"], since)]
    for event in run.events:
        if event.kind is Kind.SAVING and event.facts.get("member") == one.row.get("member"):
            marks.append(Span("saving", event.time - event.facts["seconds"], event.time))
    return list(_filled(sorted(marks, key=lambda span: span.end), begun, last))


def _filled(marks: list[Span], begin: float, end: float) -> Iterator[Span]:
    """Yield spans that cover a time: those that are marked, each cut where the one before ends, and computing."""
    for span in marks:
        since, until = max(span.begin, begin), min(span.end, end)
        if until <= since:
            continue
        if since > begin:
            yield Span("computing", begin, since)
        yield Span(span.name, since, until)
        begin = until
    if end > begin:
        yield Span("computing", begin, end)


def round_spans(row: Row) -> list[Span]:
    """Return a round as its writer saw it: the whole, and within it the vote, encoding, and the exchange until it has
    landed, which are one wait."""
    end, vote, encode = row["time"], row["seconds_voting"], row["seconds_encoding"]
    whole = max(row["seconds_exposed"] + row["seconds_hidden"], vote + encode + row["seconds_landing"])
    edges = [min(edge, end) for edge in (end - whole, end - whole + vote, end - whole + vote + encode, end)]
    return [Span("round", end - whole, end), *map(Span, ("vote", "encode", "exchange"), edges, edges[1:])]


def ddp_bytes_per_step(run: Run, replicas: float) -> float | None:
    """Return what one of so many replicas sends in a step of DDP: a ring all-reduce of its gradients."""
    model = model_of(run)
    return None if model is None or replicas < 1 else 2 * (replicas - 1) / replicas * model["bytes"]


def _bytes(run: Run, leaders: list[Rank]) -> tuple[float | None, float | None]:
    """Return what all replicas have sent, and what DDP would have."""
    voted = [lines[0] for lines in run.voted]
    many = sum(len(row["members"]) for row in voted) / len(voted) if voted else float(len(leaders))
    each = ddp_bytes_per_step(run, many)
    ddp = None if each is None else each * sum(one.step for one in leaders)
    if not voted:
        return ddp, ddp  # without rounds, the gradients of each step
    is_elastic = "member" in voted[0]
    return sum(row["bytes_sent"] * (1 if is_elastic else len(row["members"])) for row in run.rounds), ddp


def model_of(run: Run) -> Row | None:
    """Return the facts of the model that the run trains; None before a rank has prepared it."""
    return next((event.facts for event in run.events if event.kind is Kind.MODEL), None)


def _island(run: Run) -> int:
    model = model_of(run)
    return 1 if model is None else max(1, int(model["island"]))
