# SPDX-License-Identifier: Apache-2.0
"""Which recipe loses how much in a short run: a byte-level GPT, two simulated replicas, some minutes on one core.

Run it with `python small_runs.py`; `--rows DDP "local_sgd(8)" --seed 1` does less, and otherwise.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch

from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import Shape
from farflung.demo.text import load_text
from farflung.outer import AverageState, Int8, diloco, local_sgd, streaming_diloco
from farflung.testing.simulate import simulate

CONTEXT, BATCH, WARMUP = 64, 6, 24
MOMENTUM = 0.6
ROWS = {
    "DDP": None,
    "local_sgd(8)": local_sgd(8),
    "local_sgd(16)": local_sgd(16),
    "local_sgd(16), Adam averaged": replace(local_sgd(16), inner=AverageState()),
    "diloco(16), 0.7 / 0.9": diloco(16, momentum=0.9),
    "diloco(16), 0.7 / 0.6": diloco(16, momentum=MOMENTUM),
    "the same, int8": diloco(16, momentum=MOMENTUM, codec=Int8()),
    "streaming 4 bits, P 3, tau 3, alpha 0.5": streaming_diloco(16, 3, delay=3, momentum=MOMENTUM),
}
SHAPE = Shape(depth=3, width=96, heads=4, context=CONTEXT)
TEXT = load_text(None)


def pieces(text):
    """All pieces of a text with the byte that follows each: `[len(text) - CONTEXT, CONTEXT + 1]`."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)


def batches(rank):
    data = pieces(TEXT.train)
    while True:
        yield data[torch.randint(len(data), (BATCH,))]


def loss(model, batch):
    return loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean()


def warmed_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    held_out = pieces(TEXT.validation)[::640]
    for row in chosen.rows:
        found = simulate(
            lambda: GPT(SHAPE),
            batches,
            ROWS[row],
            replicas=2,
            steps=chosen.steps,
            make_optimizer=partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
            make_scheduler=warmed_up,
            max_norm=1.0,
            loss=loss,
            seed=chosen.seed,
            evaluate=lambda model: loss(model, held_out).item(),
        )
        print(f"{row:40} loss {found.value:.3f}  {found.bytes_sent / 1e6:8.2f} MB sent", flush=True)


if __name__ == "__main__":
    main()
