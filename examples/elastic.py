# SPDX-License-Identifier: Apache-2.0
"""Replicas that you may kill, stop and start while they train: a byte-level GPT on the standard library's sources.

Start two with `farflung launch --cpu --elastic 1:4 --replicas 2 elastic.py`, kill one of them (`kill -9` and the number
that its lines begin with), and let another one join with the command that the launcher has printed.
"""

import argparse
import json
import os
import signal
import time
from dataclasses import asdict

import torch

from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import Shape
from farflung.demo.text import load_text
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco

CONTEXT, BATCH = 64, 8


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--every", type=int, default=16, help="steps that each replica takes alone")
    parser.add_argument("--pause", type=float, default=0.015, help="seconds more for a step, so that you can watch")
    parser.add_argument("--dies_at", type=int, help="the replica that came last kills itself after this step, once")
    parser.add_argument("--log", help="append a line of JSON for each round to this file")
    chosen = parser.parse_args()
    me = os.getpid()

    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(load_text(None).train), dtype=torch.uint8)
    pieces = text.unfold(0, CONTEXT + 1, 1)  # of 64 bytes, each with the byte that follows
    torch.manual_seed(me)  # each replica draws pieces of its own
    model = GPT(Shape(depth=1, width=48, heads=4, context=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def note(this):  # called after each round
        if chosen.log:
            with open(chosen.log, "a") as file:
                who = {"process": me, "member": membership.member if membership else 0}
                file.write(json.dumps({"at": time.time(), **who, **asdict(this)}) + "\n")

    membership = launched_membership()  # None where nobody comes or goes, as under torchrun
    # A newcomer waits here until the others let it in; then it has their weights and their position.
    with OuterLoop(model, diloco(chosen.every), membership=membership) as outer:
        outer.listeners.append(note)
        print(f"process {me}: begins at step {outer.position}\n", end="", flush=True)
        dies = membership and outer.position == 0 and membership.member == max(membership.record.ids)
        while outer.position < chosen.steps:
            batch = pieces[torch.randint(len(pieces), (BATCH,))]
            loss = loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(chosen.pause)
            outer.step()  # every 16th time, exchange what changed with those that are there
            if dies and outer.position == chosen.dies_at:
                os.kill(me, signal.SIGKILL)
            if outer.position % (10 * chosen.every) == 0:
                print(f"process {me}: step {outer.position}, loss {loss:.2f}\n", end="", flush=True)
    stats = outer.stats()
    changes = f"{stats.replicas_lost} lost, {stats.replicas_joined} joined"
    print(f"process {me}: {stats.rounds} rounds, {changes}, loss {loss:.2f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
