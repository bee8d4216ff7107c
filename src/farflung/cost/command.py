# SPDX-License-Identifier: Apache-2.0
"""The command `farflung plan`: what each way of training together would cost on a network, before it is rented."""

from __future__ import annotations

from pathlib import Path

import click

from farflung.base.errors import ConfigError
from farflung.base.optional import is_available
from farflung.base.sizes import num_bytes
from farflung.config.setting import BOTH_SPELLINGS
from farflung.cost.forecast import Forecast
from farflung.cost.units import parse_count, parse_rate, parse_seconds

_AT_LEAST_ONE = click.IntRange(min=1)


@click.command(context_settings=BOTH_SPELLINGS | {"show_default": True})
@click.option("--parameters", required=True, metavar="COUNT", help="Number of trainable parameters: 366k, 124M, 1.1B.")
@click.option(
    "--step_seconds", required=True, metavar="TIME", help="Duration of one optimizer step without communication: 0.5."
)
@click.option(
    "--bandwidth", required=True, metavar="RATE", help="Bandwidth of each replica's link: 100Mbit, 1Gbit/s, 12.5MB/s."
)
@click.option("--steps", required=True, metavar="COUNT", help="Number of optimizer steps of the whole run: 500, 20k.")
@click.option("--latency", default="0ms", metavar="TIME", help="One-way latency, half of a ping's round trip: 25ms.")
@click.option("--replicas", default=2, type=_AT_LEAST_ONE, help="Number of replicas.")
@click.option("--layers", default=24, type=_AT_LEAST_ONE, help="Number of the model's layers.")
@click.option("--bucket", metavar="SIZE", help="Bucket size, counted in fp32: 64MiB. [each method's own default]")
@click.option("--utilization", default=0.9, help="Share of the time spent computing that counts as fast enough.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, in bytes, bits and seconds.")
@click.option("--picture", metavar="FILE", help="Plot utilization against bandwidth to this PNG file.")
def plan(
    parameters: str,
    step_seconds: str,
    bandwidth: str,
    steps: str,
    latency: str,
    replicas: int,
    layers: int,
    bucket: str | None,
    utilization: float,
    as_json: bool,
    picture: str | None,
) -> None:
    """Forecast what DDP, Local SGD and DiLoCo cost on a network: bytes, seconds, memory, and which is fast enough."""
    if picture is not None and not is_available("matplotlib"):
        raise ConfigError("--picture needs matplotlib. Install it with `pip install 'farflung[plot]'`.")
    if not (0 < utilization < 1):
        raise ConfigError(f"--utilization is {utilization}; it must be between 0 and 1 (exclusive), such as 0.9.")
    settings = {
        "parameters": parse_count(parameters, "--parameters"),
        "layers": layers,
        "step_s": parse_seconds(step_seconds, "--step_seconds", bare=True),
        "replicas": replicas,
        "bandwidth_bps": parse_rate(bandwidth, "--bandwidth"),
        "latency_s": parse_seconds(latency, "--latency"),
    }
    bucket_bytes = None if bucket is None else num_bytes(bucket, "--bucket")
    forecast = Forecast.of(settings, parse_count(steps, "--steps"), bucket_bytes, utilization)
    forecast.show(as_json)
    if picture is not None:
        forecast.draw(Path(picture))
        click.echo(f"picture: {picture}", err=as_json)
