# SPDX-License-Identifier: Apache-2.0
"""A GPT on machines with slow lines between them: DiLoCo, four bits for each value, a round every 16 steps.

On each machine, with its own rank, and `--model gpt2 --text my.txt` for more than a toy (docs/meet.md has a tunnel
for lines across the internet):

    farflung launch --num_machines 2 --machine_rank 0 --main_process_ip 10.99.0.1 gpt_slow_lines.py

`farflung plan` says beforehand what it costs on a line.
"""

import argparse

import torch
from text_data import load
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.outer import diloco
from farflung.utils import set_seed


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the hub, or a folder; otherwise a small one is made")
    parser.add_argument("--text", help="a file to train on; otherwise this project's licence")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4, help="blocks in a step, of each process")
    parser.add_argument("--every", type=int, default=16, help="steps that each process takes alone")
    parser.add_argument("--lr", type=float, default=1e-3, help="2e-5 suits a pretrained model")
    flags = parser.parse_args(given)

    set_seed(0)
    accelerator = Accelerator()
    network, blocks = load(flags.model, flags.text)
    optimizer = torch.optim.AdamW(network.parameters(), lr=flags.lr)
    loader = DataLoader(blocks, flags.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = []
    with accelerator.outer(model, diloco(flags.every, codec="e3m0")) as outer:
        for epoch in range(flags.epochs):
            for batch in loader:
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
    stats = outer.stats()
    accelerator.print(f"{stats.rounds} rounds, {stats.bytes_sent / 1e6:.2f} MB sent by each process", flush=True)
    accelerator.end_training()
    return {"losses": losses, "rounds": stats.rounds, "steps": stats.steps, "bytes_sent": stats.bytes_sent}


if __name__ == "__main__":
    main()
