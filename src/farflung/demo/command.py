# SPDX-License-Identifier: Apache-2.0
"""The command `farflung demo`: ways to train one small GPT on real text, and what each of them costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflung.base.lazy import LazyModule
from farflung.cost.units import parse_rate
from farflung.demo.settings import DEFAULT_OUTPUT, SIZES, DemoSettings

if TYPE_CHECKING:
    from farflung.demo import compare, gpt
else:
    compare = LazyModule("farflung.demo.compare")
    gpt = LazyModule("farflung.demo.gpt")

AT_LEAST_ONE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=480, type=AT_LEAST_ONE, help="Optimizer steps of each run.")
@click.option("--processes", default=2, type=click.IntRange(min=2), help="Number of processes.")
@click.option("--size", default="small", type=click.Choice(list(SIZES)), help="Size of the model.")
@click.option("--data", metavar="FOLDER", help="Folder of text to train on.  [default: the standard library's sources]")
@click.option("--output", default=DEFAULT_OUTPUT, metavar="FOLDER", help="Folder for results.")
@click.option("--every", default=16, type=AT_LEAST_ONE, help="Sync interval H, in steps.")
@click.option("--batch", default=8, type=AT_LEAST_ONE, help="Sequences per step, per process.")
@click.option("--bandwidth", default="20Mbit", metavar="RATE", help="Line to compute times for: 100Mbit, 1Gbit.")
@click.option("--seed", default=0, help="Seed of weights, data order and generated text.")
@click.option("--generate", metavar="TEXT", help="Don't train; have the saved model continue TEXT.")
@click.option("--length", default=400, type=AT_LEAST_ONE, help="Number of bytes to generate.")
def demo(generate: str | None, length: int, output: str, seed: int, bandwidth: str, **knobs: Any) -> None:
    """Train a small GPT by DDP, Local SGD, DiLoCo, streaming DiLoCo, the recipe of `--outer auto`, and alone.

    All start from the same weights and see the same data in the same order. What they would take on a slow line, for
    which `auto` chooses, is computed from what was measured. The output folder receives the results, a picture of the
    loss against time and against bytes, and the best model.
    """
    if generate is not None:
        click.echo(gpt.continued(Path(output), generate, length, seed))
    else:
        bandwidth_bps = parse_rate(bandwidth, "--bandwidth")
        compare.run(DemoSettings(output=output, seed=seed, bandwidth_bps=bandwidth_bps, **knobs))
