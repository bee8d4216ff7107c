# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with DiLoCo: two more lines than without.

Run it with `farflung launch --as-accelerate --num_processes 2 trainer_diloco.py --model gpt2 --text my.txt`.
"""

import argparse

from text_data import load
from transformers import Trainer, TrainingArguments

from farflung.integrations.transformers import OuterCallback


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the hub, or a folder; otherwise a small one is made")
    parser.add_argument("--text", help="a file to train on; otherwise this project's licence")
    parser.add_argument("--output", default="trainer-diloco", help="folder for checkpoints")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--every", type=int, default=16, help="steps that each process takes alone")
    parser.add_argument("--lr", type=float, default=1e-3, help="2e-5 suits a pretrained model")
    parser.add_argument("--cpu", action="store_true")
    flags = parser.parse_args(given)

    network, blocks = load(flags.model, flags.text)
    settings = TrainingArguments(
        flags.output,
        num_train_epochs=flags.epochs,
        per_device_train_batch_size=4,
        learning_rate=flags.lr,
        logging_steps=flags.every,
        report_to=[],
        use_cpu=flags.cpu,
    )
    trainer = Trainer(network, settings, train_dataset=[{"input_ids": block, "labels": block} for block in blocks])
    outer = OuterCallback(trainer, "diloco", every=flags.every)
    trainer.add_callback(outer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    stats = outer.loop.stats()
    if trainer.is_world_process_zero():
        print(f"{stats.rounds} rounds, {stats.bytes_sent / 1e6:.2f} MB sent by each process")
    return {"losses": losses, "rounds": stats.rounds}


if __name__ == "__main__":
    main()
