# SPDX-License-Identifier: Apache-2.0
"""LoRA with peft: only the adapters train, and only they travel between the processes.

Run it with `python lora.py`, or `farflung launch --num_processes 2 lora.py --model gpt2 --text my.txt --lr 2e-4`.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from text_data import load
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.outer import diloco
from farflung.utils import set_seed


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the hub, or a folder; otherwise a small one is made")
    parser.add_argument("--text", help="a file to train on; otherwise this project's licence")
    parser.add_argument("--target", default="c_attn,c_fc,c_proj", help="modules with adapters; q_proj,v_proj for Llama")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4, help="blocks in a step, of each process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save", help="a folder for the adapters")
    flags = parser.parse_args(given)

    set_seed(0)
    accelerator = Accelerator()
    network, blocks = load(flags.model, flags.text)
    network = get_peft_model(network, LoraConfig(r=flags.rank, target_modules=flags.target.split(",")))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=flags.lr)
    loader = DataLoader(blocks, flags.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = []
    with accelerator.outer(model, diloco(every=8, max_momentum=0.5)) as outer:
        for epoch in range(flags.epochs):
            for batch in loader:
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
    sizes = sum(one.numel() for one in trained), sum(one.numel() for one in network.parameters())
    sent = outer.stats().bytes_sent
    accelerator.print(f"{sizes[0]} of {sizes[1]} values train; each process sent {sent / 1e6:.2f} MB", flush=True)
    if flags.save and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(flags.save)
    accelerator.end_training()
    return {"losses": losses, "trained": sizes[0], "rounds": outer.stats().rounds, "bytes_sent": sent}


if __name__ == "__main__":
    main()
