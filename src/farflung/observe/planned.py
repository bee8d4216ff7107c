# SPDX-License-Identifier: Apache-2.0
"""`farflung plan --from RUN`: the forecast with what a run has measured, where no flag says otherwise."""

from __future__ import annotations

from statistics import median

import click

from farflung.base.errors import ConfigError
from farflung.cost.forecast import plan
from farflung.observe.figures import model_of, round_spans, spans, writers
from farflung.observe.folder import named_run
from farflung.observe.run import ObservedRun


def measured(run: ObservedRun) -> dict[str, str | int]:
    """Return the flags of `farflung plan` that a run gives, by name.

    A step is the time in which the replica with the most steps computed, by its steps. The line's rate is the bytes of
    a round by the time of its exchange, in the median: less than the line where that is not what takes the time. Half
    of the shortest vote is its latency. Without rounds nothing is known of the line, and steps include the exchange of
    gradients.

    Raises:
        ConfigError: no steps were made.
    """
    first = max(writers(run), key=lambda one: one.step, default=None)
    if first is None or not first.step:
        raise ConfigError(f"{run.path} is of a run that made no step, so it has measured nothing.")
    computed = sum(span.end - span.begin for span in spans(run, first) if span.name == "computing")
    own = run.rounds_of(first.row.get("member"))
    found: dict[str, str | int] = {"step_seconds": f"{computed / first.step:.6g}", "steps": str(first.step)}
    found["replicas"] = max((len(row.members) for row in own), default=len(run.ranks))
    model = model_of(run)
    if model is not None:
        found["parameters"] = str(model["parameters"])
    rates = []
    for row in own:
        exchange = round_spans(row)[3]
        if row.bytes_sent and exchange.end > exchange.begin:
            rates.append(8 * row.bytes_sent / (exchange.end - exchange.begin))
    if rates:
        found["bandwidth"] = f"{median(rates) / 1e6:.6g}Mbit"
        found["latency"] = f"{500 * min(row.seconds_voting for row in own):.4g}ms"
    return found


def _take(context: click.Context, option: click.Parameter, name: str | None) -> None:
    if name is None:
        return
    run = ObservedRun(named_run(name))
    found = measured(run)
    context.default_map = {**found, **(context.default_map or {})}
    flags = " ".join(f"--{key} {value}" for key, value in found.items())
    if "bandwidth" not in found and int(found["replicas"]) > 1:
        flags += " (without rounds these seconds include the exchange of gradients; --step_seconds is without it)"
    click.echo(f"farflung: as measured: {flags}{run.unread and f' ({run.unread})'}", err=True)


click.option(
    "--from",
    metavar="RUN",
    is_eager=True,
    expose_value=False,
    callback=_take,
    help="A run's folder: what it has measured counts where no flag says otherwise.",
)(plan)
