# SPDX-License-Identifier: Apache-2.0
"""What does it cost in loss that a replica dies and comes back? Four replicas of which one does so twice, next to four
and three that nothing happens to, by the work done: a byte-level GPT on the standard library's sources.

`python benchmarks/bench_elastic_loss.py --seeds 0 1 2` starts each run with `farflung launch --elastic`. The one that
dies kills itself in the middle of a round, and its launcher starts it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _measure import report
from torch import Tensor, nn

from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import Shape
from farflung.demo.text import load_text
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, Round, diloco

SHAPE, BATCH, LR, EVERY, WARMUP = Shape(depth=2, width=64, heads=4, context=64), 8, 3e-3, 16, 50
EVALUATED_EVERY, SEQUENCES = 5, 256  # rounds, and held-out pieces
ROWS = {"4": (4, False), "4, one dies twice": (4, True), "3": (3, False)}
DIES_AT = (0.25, 0.55)  # of the steps


def train(steps: int, seed: int, dies: bool, log: Path) -> None:
    """Train one replica."""
    torch.set_num_threads(1)
    text = load_text(None)
    pieces = torch.frombuffer(bytearray(text.train), dtype=torch.uint8).unfold(0, SHAPE.context + 1, 1)
    held_out = torch.frombuffer(bytearray(text.validation), dtype=torch.uint8).unfold(0, SHAPE.context + 1, 1)
    held_out = held_out[:: len(held_out) // SEQUENCES]
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    membership = launched_membership()
    assert membership is not None
    me = membership.member
    deaths = [] if not dies else [round(share * steps) // EVERY * EVERY + EVERY // 2 for share in DIES_AT]
    generator = torch.Generator().manual_seed(1000 * seed + me)
    rounds: list[Round] = []
    with OuterLoop(model, diloco(EVERY), membership=membership) as outer:
        outer.listeners.append(rounds.append)
        begins = outer.position
        while outer.position < steps:
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (outer.position - begins + 1) / WARMUP)
            batch = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            if rounds:
                this = rounds.pop()
                if me == min(this.members):
                    is_judged = this.number % EVALUATED_EVERY == 0 or outer.position >= steps
                    with open(log, "a", encoding="utf-8") as file, torch.no_grad():
                        judged = {"loss": loss_of(model, held_out).item()} if is_judged else {}
                        done = EVERY * sum(weight > 0 for weight in this.weights)
                        file.write(json.dumps({"step": this.step, "done": done, **judged}) + "\n")
            if me == max(membership.record.ids) > 3 and any(outer.position == at for at in deaths):
                os.kill(os.getpid(), signal.SIGKILL)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean()


def run(replicas: int, dies: bool, steps: int, seed: int) -> list[dict[str, Any]]:
    """Start a run; return its rounds, with the replicas' steps that are in the weights after each of them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "rounds.jsonl"
        command = [sys.executable, "-m", "farflung", "launch", "--cpu", "--elastic", f"{replicas}:{replicas}"]
        own = ["--log", str(log), "--steps", str(steps), "--seeds", str(seed), *(["--dies"] if dies else [])]
        subprocess.run([*command, __file__, *own], check=True, stdout=subprocess.DEVNULL)
        rounds = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    work = 0
    for this in rounds:
        work += this["done"]
        this["work"] = work
    return rounds


def loss_at(rounds: list[dict[str, Any]], work: float) -> float:
    """Return the held-out loss after so much work, between the two evaluations around it."""
    judged = [one for one in rounds if "loss" in one]
    before = max((one for one in judged if one["work"] <= work), key=lambda one: one["work"])
    after = min((one for one in judged if one["work"] >= work), key=lambda one: one["work"])
    if before is after:
        return float(before["loss"])
    share = (work - before["work"]) / (after["work"] - before["work"])
    return float(before["loss"] + share * (after["loss"] - before["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.log:
        train(chosen.steps, chosen.seeds[0], chosen.dies, chosen.log)
        return
    work = 4 * chosen.steps
    losses: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in chosen.seeds:
        for name, (replicas, dies) in ROWS.items():
            more = chosen.steps * (1.0 if name == "4" else 4 / 3 + 0.05)
            rounds = run(replicas, dies, round(more) // EVERY * EVERY + EVERY, seed)
            losses[name].append(round(loss_at(rounds, work), 4))
            figures = {"loss": losses[name][-1], "steps": rounds[-1]["step"], "work": rounds[-1]["work"]}
            alone = sum(one["done"] < EVERY * replicas for one in rounds)
            print(seed, name, figures, f"{alone} of {len(rounds)} rounds with fewer", flush=True)
    means = {name: round(statistics.mean(values), 4) for name, values in losses.items()}
    next_to = {name: round(mean / means["4"] - 1, 4) for name, mean in means.items()}
    report(
        "What does it cost in loss that replicas die and come back?",
        {"loss": losses, "next_to_4": next_to},
        seed=chosen.seeds[0],
        write_to="elastic_loss.jsonl" if chosen.write else None,
        steps=chosen.steps,
        work=work,
        every=EVERY,
    )


if __name__ == "__main__":
    main()
