# SPDX-License-Identifier: Apache-2.0
"""What do `ema` and `skip_nonfinite` add to a step of 10M values? Beside a plain step and AveragedModel, in one run.

Each costs a pass over weights or gradients, whatever the batch is, so it is a smaller part of a step on more rows. 512
rows are few: a step of a language model has thousands of tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _measure import interleave, medians_us, ratios, report
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from farflung import Accelerator

DECAY, SEED = 0.999, 0


def contestant(kind: str, rows: int) -> Callable[[], None]:
    torch.manual_seed(SEED)
    chosen = {"ema": {"ema": DECAY}, "skip_nonfinite": {"skip_nonfinite": 10}}.get(kind, {})
    accelerator = Accelerator(cpu=True, **chosen)
    bare: nn.Module = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)])
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True))
    averaged = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if kind == "AveragedModel" else None
    data = torch.randn(rows, 1000)

    def step() -> None:
        accelerator.backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(bare)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write-to", metavar="FILE", help="in benchmarks/results")
    chosen = parser.parse_args()
    for rows in chosen.rows:
        kinds = ("none", "ema", "AveragedModel", "skip_nonfinite")
        seconds = interleave({kind: contestant(kind, rows) for kind in kinds}, chosen.rounds, warmup=3)
        medians = medians_us(seconds)
        figures = {"step_us": medians, "times_none": ratios(medians, "none")}
        report(__doc__.splitlines()[0], figures, seed=SEED, write_to=chosen.write_to, rows=rows)


if __name__ == "__main__":
    main()
