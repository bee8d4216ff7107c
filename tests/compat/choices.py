# SPDX-License-Identifier: Apache-2.0
"""Random small programs against Accelerate's interface: a seed makes one.

A program is data: settings, and a list of acts with their options, which `differential.py` carries out with either
library. What rows of docs/migrating.md say differs is never chosen; a comment names the row.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.optim import lr_scheduler

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.25),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.125, weight_decay=0.25),
    "two groups": lambda parts: torch.optim.SGD([{"params": parts[:1], "lr": 0.5}, {"params": parts[1:]}], lr=0.25),
}
SCHEDULERS = {
    "none": None,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "inverse": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=500),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, total_iters=8),
}
WRONG = {
    "gather a number": lambda s: s.accelerator.gather(5),
    "gather a text": lambda s: s.accelerator.gather({"x": "text"}),
    "load what is not there": lambda s: s.accelerator.load_state(str(s.folder / "nowhere")),
    "pad a text": lambda s: s.accelerator.pad_across_processes(["text"]),
    "register a number": lambda s: s.accelerator.register_for_checkpointing(5),
    "share what the processes can not": lambda s: list(s.accelerator.prepare(s.loader(6, 3))),
}


@dataclass(frozen=True)
class Program:
    """Settings and acts of one program.

    Attributes:
        settings: what the accelerator, the data and the training are made with.
        acts: the names of methods of `Session`, with their arguments.
    """

    seed: int
    processes: int
    settings: dict[str, Any]
    acts: list[tuple[str, dict[str, Any]]]


def rounds_of(length: int, chosen: dict[str, Any], processes: int) -> int:
    """How many batches each process gets of even data."""
    in_round = chosen["batch_size"] * (1 if chosen["split"] else processes)
    return length // in_round if chosen["drop_last"] else -(-length // in_round)


def make(seed: int) -> Program:
    random = Random(seed)
    processes = random.choice((1, 2, 2))
    chosen: dict[str, Any] = {
        "split": random.random() < 0.25,
        "dispatch": random.choice((None, None, False, True)),
        "even": random.random() < 0.85,
        "seedable": random.random() < 0.25,
        "drop_last": random.random() < 0.3,
        "data": random.choice(("map", "map", "map", "stream", "sized stream")),
        "order": random.choice(("given", "given", "shuffle", "generator", "batch sampler", "epochs")),
        "form": random.choice(("dictionary", "pair", "nested")),
        "length": random.randint(1, 24),
        "precision": random.choice(("no", "no", "no", "bf16")),
        "accumulation": random.choice((1, 1, 2, 3, 4)),
        "adjust": random.random() < 0.8,
        "loop": random.choice(("accumulate", "accumulate", "accumulate", "no_sync", "trigger")),
        "scheduled": random.random() < 0.75,
        "optimizer": random.choice(list(OPTIMIZERS)),
        "scheduler": random.choice(list(SCHEDULERS)),
        "loss": random.choice(("linear", "square", "dropout")),
        "clip": random.choice((None, None, "norm", "largest", "value")),
        "one by one": random.random() < 0.3,
        "device_specific": random.random() < 0.2,
    }
    chosen["batch_size"] = random.choice((2, 4) if chosen["split"] else (1, 2, 3, 4))
    avoid_rows(random, chosen, processes)
    return Program(seed, processes, chosen, acts_of(random, chosen, processes))


def avoid_rows(random: Random, chosen: dict[str, Any], processes: int) -> None:
    """Change what would be a difference that has its row."""
    dispatched = chosen["dispatch"] or (chosen["dispatch"] is None and chosen["data"] != "map")
    in_round = chosen["batch_size"] * (1 if chosen["split"] else processes)
    if chosen["data"] != "map":
        chosen["order"] = "epochs" if chosen["order"] == "epochs" else "given"
    if chosen["data"] != "map" or dispatched or chosen["order"] == "batch sampler":
        # "`even_batches=False` with iterable or dispatched data"
        chosen["even"] = True
    # "`gather_for_metrics` over a loader that drops its last batch by its `batch_sampler`"
    chosen["drop_last"] &= chosen["order"] != "batch sampler"
    if not chosen["even"]:
        # "train a model whose passes wait for other ranks on uneven data": all ranks have as many batches
        chosen["length"] = in_round * random.randint(1, 4)
    if rounds_of(chosen["length"], chosen, processes) == 0:
        # "dispatch fewer samples than one round needs, with `drop_last=True`", and no training without batches
        chosen["length"] += in_round
    # "prepare a loader with a sampler that is no `RandomSampler` and has no generator, with `use_seedable_sampler`"
    chosen["seedable"] &= chosen["order"] in ("given", "shuffle", "generator")
    if chosen["loop"] != "accumulate":
        chosen["window"], chosen["accumulation"] = chosen["accumulation"], 1
    rounds = rounds_of(chosen["length"], chosen, processes)
    # "let the data end inside an accumulation window"
    chosen["breaks"] = chosen["accumulation"] == 1 or rounds % chosen["accumulation"] > 0 or random.random() < 0.3
    chosen["windows end with data"] = chosen["accumulation"] == 1 or not chosen["breaks"]
    # "`gather_for_metrics` over iterable data with `dispatch_batches=False`"
    padded = chosen["data"] != "map" and not dispatched and chosen["length"] % in_round > 0
    chosen["metrics"] = not padded or chosen["drop_last"] or processes == 1
    # "skip_first_batches(loader, n)` of a dispatched loader over data with indices"
    chosen["skips"] = processes == 1 or not (dispatched and chosen["data"] == "map")
    # "`set_seed(seed, device_specific=True)` with `use_seedable_sampler=True`"
    chosen["device_specific"] &= not chosen["seedable"]
    chosen["exact resume"] = chosen["order"] == "given" and chosen["loss"] != "dropout"
    # "leave an epoch with `break`, with `use_seedable_sampler=True` or a sampler or dataset that has `set_epoch`", and
    # "`skip_first_batches` with a sampler that has `set_epoch`"
    chosen["numbered"] = chosen["order"] == "epochs" or chosen["seedable"]


def acts_of(random: Random, chosen: dict[str, Any], processes: int) -> list[tuple[str, dict[str, Any]]]:
    """Epochs of training, and between them what scripts do there."""
    rounds = rounds_of(chosen["length"], chosen, processes)
    acts: list[tuple[str, dict[str, Any]]] = []
    saved: set[str] = set()
    positions: dict[str, int] = {}
    for _ in range(random.randint(1, 4)):
        for _ in range(random.randint(0, 2)):
            acts.append(between(random, processes, saved, chosen["exact resume"]))
        epoch: dict[str, Any] = {"inside": random.choice(("nothing", "gather", "metrics", "reduce"))}
        if epoch["inside"] == "metrics" and not chosen["metrics"]:
            epoch["inside"] = "gather"
        if chosen["order"] == "epochs" and random.random() < 0.5:
            epoch["number"] = random.randint(0, 5)
        freely = chosen["breaks"] and not chosen["numbered"]
        if freely and rounds > 2 and random.random() < 0.3:
            epoch["stop"] = random.randrange(rounds - 2)  # not the last: "leave a loop with `break` at its last batch"
        elif freely and chosen["skips"] and rounds > 1 and random.random() < 0.3:
            # "`gather_for_metrics` over a loader whose first batches are skipped"
            epoch |= {"skip": random.randrange(1, rounds), "inside": "gather"}
        elif freely and chosen["skips"] and rounds > 2 and chosen["exact resume"] and random.random() < 0.4:
            # What draws numbers: "load in the middle of an epoch"
            epoch["save"] = positions["middle"] = random.randrange(rounds - 2)
        acts.append(("epoch", epoch))
        if "middle" in positions and random.random() < 0.7:
            acts += [("load", {"name": "middle"}), ("epoch", {"inside": "gather", "skip": positions["middle"] + 1})]
    acts += [between(random, processes, saved, chosen["exact resume"]) for _ in range(random.randint(1, 3))]
    if random.random() < 0.2:
        acts += [("free", {}), ("epoch", {"inside": "gather"})]
    if chosen["order"] == "epochs":
        # "load a checkpoint of an earlier epoch, with a sampler or dataset that has `set_epoch`"
        acts = [act for act in acts if act[0] != "load"]
    return [*acts, ("end", {})]


def between(random: Random, processes: int, saved: set[str], exact: bool) -> tuple[str, dict[str, Any]]:
    value = random.randrange(10**6)
    name = random.choice(
        ("save", "load", "evaluate", "gather", "reduce", "pad", "broadcast", "objects", "trigger", "share", "wrong")
        + ("weights", "join", "cast", "accumulate", "lengths", "save_model")
        + (() if exact else ("random",))  # "load in the middle of an epoch"
    )
    if name == "save":
        saved.add(f"at {len(saved)}")
        return name, {"name": f"at {len(saved) - 1}"}
    if name == "load":
        return (name, {"name": random.choice(sorted(saved))}) if saved else ("weights", {})
    if name == "evaluate":
        return name, {"length": random.randint(1, 13), "batch_size": random.choice((2, 4))}
    if name in ("gather", "broadcast"):
        return name, {"value": value}
    if name == "reduce":
        return name, {"value": value, "by": random.choice(("sum", "mean"))}  # "call `reduce(x, "avg")`"
    if name == "pad":
        sides = {"dim": random.choice((0, 1, -1)), "pad_index": random.choice((0, -100))}
        return name, {"value": value, **sides, "pad_first": random.random() < 0.5}
    if name == "trigger":
        return name, {"sets": random.choice((None, 0, 1))}
    if name == "share":
        kind = random.choice(("list", "tuple", "tensor", "dictionary"))
        padded = kind != "tuple" and random.random() < 0.5  # "`split_between_processes` a tuple with"
        return name, {"kind": kind, "length": random.randint(1, 7), "padded": padded}
    if name == "wrong":
        # "`gather` or `broadcast` a string or a number, on one process"
        return name, {"what": random.choice([what for what in WRONG if processes > 1 or "gather" not in what])}
    return name, {}
