# SPDX-License-Identifier: Apache-2.0
"""What a run has cost: how it spent its time, and how many bytes it sent next to what DDP would have sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from farflung.base.events import Kind
from farflung.base.words import in_bytes
from farflung.cost.evidence import STEPS
from farflung.cost.methods import Efficiency, efficiency, name_of
from farflung.observe.records import RoundLine, Row, is_setting
from farflung.observe.run import ObservedRun, Rank

SHARES = ("computing", "waiting", "saving", "recovering", "starting")
_GB = 1e9


class Span(NamedTuple):
    """What a replica did for a while; times in seconds since the epoch."""

    name: str  # one of `SHARES`, or a part of a round
    begin: float
    end: float


@dataclass(frozen=True)
class Figures:
    """The latest attempt of a run in figures. Sums are over all replicas that write into its folder."""

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
    efficiency: Efficiency | None = None  # of its recipe in our tests; None: not known

    def share(self, name: str) -> float:
        """Return the share of the time since training began that replicas spent so, from 0 to 1."""
        return self.seconds[name] / max(sum(self.seconds.values()) - self.seconds["starting"], 1e-9)

    @property
    def goodput(self) -> list[str]:
        """How far it gets in a time, in words; empty if nothing is known of its recipe."""
        return [] if self.efficiency is None else [self.efficiency.said(self.share("computing"))]

    def __str__(self) -> str:
        trained = (name for name in SHARES if name != "starting" and self.share(name) >= 0.005)
        shares = [f"{name} {self.share(name):.0%}" for name in trained]
        said = [", ".join(shares) or "nothing yet", *self.goodput, f"{self.replica_hours:.3g} replica-hours"]
        if self.bytes_sent is not None:
            beside = ""
            if self.bytes_ddp is not None and self.bytes_ddp != self.bytes_sent:
                beside = f", DDP would have sent {in_bytes(round(self.bytes_ddp))}"
            said.append(f"sent {in_bytes(round(self.bytes_sent))}{beside}")
        if self.usd is not None:
            said.append(f"{self.usd:.2f} USD")
        return "; ".join(said)


def figures(run: ObservedRun, price_hour: float | None = None, price_gb: float | None = None) -> Figures:
    """Return a run's figures; prices in US dollars, of an hour of one replica and of a GB sent."""
    seconds = dict.fromkeys(SHARES, 0.0)
    for one in writers(run):
        for span in spans(run, one):
            seconds[span.name] += span.end - span.begin
    model = model_of(run)
    island = 1 if model is None else max(1, int(model["island"]))
    leaders = [one for one in run.lives if one.row["rank"] % island == 0]
    # The signs of a rank that was restarted in place are of its latest life alone.
    begun = [run.attempts.latest.begun if one.row.get("restart") else one.row["begun"] for one in leaders]
    hours = (sum(one.row["time"] for one in leaders) - sum(begun)) / 3600
    sent, ddp = _bytes(run, leaders, island)
    usd = None
    if price_hour is not None or price_gb is not None:
        usd = hours * (price_hour or 0.0) + (sent or 0.0) / _GB * (price_gb or 0.0)
    voted, loss = run.voted, run.curves.loss
    return Figures(
        seconds=seconds,
        replica_hours=hours,
        steps=max((one.step for one in run.ranks), default=0),
        rounds=len(voted),
        dropped=sum(row.dropped for row in voted),
        lost=sum(len(row.lost) for row in voted),
        joined=sum(len(row.joined) for row in voted),
        bytes_sent=sent,
        bytes_ddp=ddp,
        loss=None if loss is None else loss.last,
        usd=usd,
        efficiency=_efficiency(run, len(voted[-1].members)) if voted else None,
    )


def writers(run: ObservedRun) -> list[Rank]:
    """Return the ranks that write about rounds: the first one of each replica's life, else rank 0."""
    return [one for one in run.lives if one.row["rank"] == 0]


def spans(run: ObservedRun, one: Rank) -> list[Span]:
    """Return what a rank did from its start to its last sign, without a gap and without an overlap."""
    begun, last = float(one.row["begun"]), float(one.row["time"])
    marks = []
    member, steps = one.row.get("member"), run.steps_of(one.row)
    ready = [event.time for event in run.models.get(member, ())][:1]
    if steps is not None:
        ready.append(steps.first["time"] - steps.first["step"] / max(one.rate, 1e-9))
    if ready or not one.step:
        marks.append(Span("starting", begun, max(ready) if one.step else last))
    for row in run.rounds_of(member):
        since = row.time - row.seconds_exposed
        marks += [Span("waiting", since, row.time), Span("recovering", since - row.seconds_recovering, since)]
    for event in run.saving.get(member, ()):
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


def round_spans(row: RoundLine) -> list[Span]:
    """Return a round as its writer saw it: the whole, and within it the vote, encoding, and the exchange until it has
    landed, which are one wait."""
    end, vote, encode = row.time, row.seconds_voting, row.seconds_encoding
    whole = max(row.seconds_exposed + row.seconds_hidden, vote + encode + row.seconds_landing)
    edges = [min(edge, end) for edge in (end - whole, end - whole + vote, end - whole + vote + encode, end)]
    return [Span("round", end - whole, end), *map(Span, ("vote", "encode", "exchange"), edges, edges[1:])]


def ddp_bytes_per_step(run: ObservedRun, replicas: float) -> float | None:
    """Return what one of so many replicas sends in a step of DDP: a ring all-reduce of its gradients."""
    model = model_of(run)
    return None if model is None or replicas < 1 else 2 * (replicas - 1) / replicas * model["bytes"]


def _bytes(run: ObservedRun, leaders: list[Rank], island: int) -> tuple[float | None, float | None]:
    """Return the bytes that all replicas, of `island` ranks each, have sent, and those that DDP would have sent."""
    voted = run.voted
    many = sum(len(row.members) for row in voted) / len(voted) if voted else float(len(leaders))
    each = ddp_bytes_per_step(run, many)
    ddp = None if each is None else each * sum(one.step for one in leaders)
    if not voted:
        return ddp, ddp  # without rounds, the gradients of each step
    is_elastic = voted[0].member is not None
    return island * sum(row.bytes_sent * (1 if is_elastic else len(row.members)) for row in run.rounds), ddp


def model_of(run: ObservedRun) -> Row | None:
    """Return the facts of the models that the run trains, with the bytes of all; None before a rank has prepared one.

    Each is trained in as many steps.
    """
    models = next((models for models in run.models.values()), None)
    return None if models is None else {**models[0].facts, "bytes": sum(event.facts["bytes"] for event in models)}


def _efficiency(run: ObservedRun, replicas: int) -> Efficiency | None:
    """Return what our tests say of the recipe that a run has now."""
    names = ("recipe", "every", "codec", "delay", "steps")
    given = {name: run.facts["settings"].get(f"outer_{name}") for name in names}
    now = {name: setting["value"] for name, setting in given.items() if is_setting(setting)}
    for event in run.current:
        if event.kind is Kind.CHOSEN and isinstance(options := event.facts.get("options"), dict):
            named = {name: event.facts[name] for name in ("recipe", "steps") if name in event.facts}
            former = {"steps": now.get("steps")} if "recipe" in named else now
            now = former | options | named
    numbers = (str(now.get(name)) for name in ("every", "delay", "steps"))
    every, delay, planned = (int(text) if text.isdecimal() else 0 for text in numbers)
    name = name_of(now.get("recipe"), now.get("codec"), delay)
    if name is None or not every:
        return None
    steps = planned or max([STEPS, *(one.step for one in run.ranks)])
    return efficiency(name, every, replicas, steps)
