# SPDX-License-Identifier: Apache-2.0
"""Random small programs against Accelerate's interface: a seed makes one, and either library runs it.

A program is data: settings, and a list of acts with their options. `Session` carries them out with a library and tells
all that it saw. What rows of docs/migrating.md say differs is never chosen; a comment names the row.

`python -m tests.compat.differential FIRST LAST` compares the programs of those seeds, and prints what differs.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from farflung.testing.ranks import run_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.25),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.125, weight_decay=0.25),
    "two groups": lambda parameters: torch.optim.SGD(
        [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.25
    ),
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
    "share what the processes can not": lambda s: list(s.prepared(s.loader(6, 3))),
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
    """The program of a seed."""
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
    return [*acts, ("end", {})]


def between(random: Random, processes: int, saved: set[str], exact: bool) -> tuple[str, dict[str, Any]]:
    """One act between epochs."""
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


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers from -4 to 4."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


class Samples(Dataset[Any]):
    """Samples that know their index, in the form that a program wants."""

    def __init__(self, length: int, form: str) -> None:
        self.x, self.y, self.form = whole(length, 3, seed=0), whole(length, 2, seed=1), form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if self.form == "pair":
            return torch.cat([self.x[index], torch.tensor([float(index)])]), self.y[index]
        inner = {"x": self.x[index], "index": index}
        return {**inner, "y": self.y[index]} if self.form == "dictionary" else ({"in": inner}, [self.y[index]])


class Stream(IterableDataset[Any]):
    """The same samples one after the other; `epochs` begin each at another place, by the number of the epoch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.epoch = 0

    def __iter__(self) -> Any:
        length = len(self.samples)
        return (self.samples[(self.epoch + index) % length] for index in range(length))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class NumberedStream(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class NumberedSizedStream(NumberedStream, SizedStream):
    pass


class Rotated(SequentialSampler):
    """An order that begins with the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        length = len(self.data_source)
        return iter([(self.epoch + index) % length for index in range(length)])


class Count:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def told(value: Any) -> Any:
    """`value` as plain data that are equal when all bits are; both zeros are one."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), repr((value.detach() + 0).tolist()).replace("-0.0", "0.0")
    if isinstance(value, dict):
        return {key: told(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [told(part) for part in value]
    return repr(value)


def kinds_of(error: Exception) -> tuple[str, ...]:
    """The classes of Python's own that an error is of, nearest first."""
    return ("raised", *(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"))


class Session:
    """One program under one library."""

    def __init__(self, package: Any, program: Program, folder: Path) -> None:
        self.package, self.chosen, self.folder = package, program.settings, folder
        self.utils = import_module(f"{package.__name__}.utils")
        chosen = self.chosen
        self.accelerator = package.Accelerator(
            cpu=True,
            mixed_precision=chosen["precision"],
            step_scheduler_with_optimizer=chosen["scheduled"],
            gradient_accumulation_plugin=self.utils.GradientAccumulationPlugin(
                num_steps=chosen["accumulation"],
                adjust_scheduler=chosen["adjust"],
                sync_with_dataloader=chosen["windows end with data"],
            ),
            dataloader_config=self.utils.DataLoaderConfiguration(
                split_batches=chosen["split"],
                dispatch_batches=chosen["dispatch"],
                even_batches=chosen["even"],
                use_seedable_sampler=chosen["seedable"],
            ),
        )
        self.utils.set_seed(program.seed, device_specific=chosen["device_specific"])
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.begin()

    def begin(self) -> None:
        """Make and prepare what is trained."""
        chosen = self.chosen
        layers = [nn.Linear(3, 4), nn.Dropout(0.25 if chosen["loss"] == "dropout" else 0.0), nn.Linear(4, 2)]
        model: nn.Module = nn.Sequential(*(layers if chosen["loss"] == "dropout" else [nn.Linear(3, 2)]))
        with torch.no_grad():
            for seed, parameter in enumerate(model.parameters()):
                parameter.copy_(whole(*parameter.shape, seed=seed))
        optimizer = OPTIMIZERS[chosen["optimizer"]](list(model.parameters()))
        schedule = SCHEDULERS[chosen["scheduler"]]
        made = [model, optimizer, self.loader(chosen["length"], chosen["batch_size"])]
        made += [schedule(optimizer)] if schedule else []
        prepare = self.accelerator.prepare
        made = [prepare(part) for part in made] if chosen["one by one"] else list(prepare(*made))
        self.model, self.optimizer, self.train_loader = made[:3]
        self.scheduler = made[3] if schedule else None

    def loader(self, length: int, batch_size: int) -> DataLoader[Any]:
        chosen = self.chosen
        samples = Samples(length, chosen["form"])
        shared: dict[str, Any] = {"batch_size": batch_size, "drop_last": chosen["drop_last"]}
        if chosen["data"] != "map":
            sized, numbered = chosen["data"] == "sized stream", chosen["order"] == "epochs"
            kinds = (Stream, NumberedStream, SizedStream, NumberedSizedStream)
            return DataLoader(kinds[2 * sized + numbered](samples), **shared)
        if chosen["order"] == "batch sampler":
            return DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(samples), **shared))
        if chosen["order"] == "generator":
            shared["sampler"] = RandomSampler(samples, generator=torch.Generator().manual_seed(3))
        if chosen["order"] == "epochs":
            shared["sampler"] = Rotated(samples)
        return DataLoader(samples, shuffle=chosen["order"] == "shuffle", **shared)

    def prepared(self, loader: DataLoader[Any]) -> Any:
        return self.accelerator.prepare(loader)

    def parts(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Indices, inputs and targets of a batch."""
        if self.chosen["form"] == "pair":
            return batch[0][:, 3], batch[0][:, :3], batch[1]
        if self.chosen["form"] == "dictionary":
            return batch["index"], batch["x"], batch["y"]
        return batch[0]["in"]["index"], batch[0]["in"]["x"], batch[1][0]

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = self.model(x)
        return (outputs * y).sum() if self.chosen["loss"] == "linear" else nn.functional.mse_loss(outputs, y)

    # The acts: each returns what it saw.

    def epoch(
        self, inside: str, number: int | None = None, stop: int = -1, skip: int = 0, save: int = -1
    ) -> list[dict[str, Any]]:
        if number is not None:
            self.train_loader.set_epoch(number)
        loader = self.accelerator.skip_first_batches(self.train_loader, skip) if skip else self.train_loader
        seen = []
        for position, batch in enumerate(loader):
            indices, x, y = self.parts(batch)
            report = {"batch": told(batch)} | self.trained(position, x, y)
            report["end"] = self.accelerator.gradient_state.end_of_dataloader
            if inside == "gather":
                report["gathered"] = told(self.accelerator.gather({"index": indices, "x": [x]}))
            elif inside == "metrics":
                report["metrics"] = told(self.accelerator.gather_for_metrics((indices, y)))
            elif inside == "reduce":
                report["reduced"] = told(self.accelerator.reduce(x.sum(), "mean"))
            seen.append(report)
            if position == save:
                self.save("middle")
            if position == stop:
                break
        self.count.epochs += 1
        return seen

    def trained(self, position: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """One micro-batch, in the manner of the program."""
        loop, report = self.chosen["loop"], {}
        if loop == "accumulate":
            with self.accelerator.accumulate(self.model):
                loss = self.loss_of(x, y)
                self.accelerator.backward(loss)
                report |= self.stepped(self.accelerator.sync_gradients)
        else:
            due = (position + 1) % self.chosen["window"] == 0
            if loop == "no_sync" and not due:
                with self.accelerator.no_sync(self.model):
                    loss = self.loss_of(x, y)
                    self.accelerator.backward(loss)
            elif loop == "trigger":
                with self.accelerator.no_sync(self.model):
                    loss = self.loss_of(x, y)
                with self.accelerator.trigger_sync_in_backward(self.model):
                    self.accelerator.backward(loss)
            else:
                loss = self.loss_of(x, y)
                self.accelerator.backward(loss)
            if due:
                report |= self.stepped(True)
        report["loss"] = told(loss)
        return report

    def stepped(self, synced: bool) -> dict[str, Any]:
        """Clip, step and schedule; `synced` says whether the gradients are whole."""
        report: dict[str, Any] = {"synced": synced}
        if synced:  # "`clip_grad_norm_` inside an accumulation window"
            report["gradients"] = [told(parameter.grad) for parameter in self.model.parameters()]
            if self.chosen["clip"] == "value":
                self.accelerator.clip_grad_value_(self.model.parameters(), 2.0)
            elif self.chosen["clip"]:
                norm = 2 if self.chosen["clip"] == "norm" else float("inf")
                report["norm"] = told(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0, norm))
        self.optimizer.step()
        report["skipped"] = self.accelerator.optimizer_step_was_skipped
        if self.scheduler is not None:
            self.scheduler.step()
            report["rates"] = repr(self.scheduler.get_last_lr())
        self.optimizer.zero_grad()
        return report

    def evaluate(self, length: int, batch_size: int) -> list[Any]:
        loader = self.prepared(DataLoader(Samples(length, "dictionary"), batch_size=batch_size))
        self.model.eval()
        seen = []
        if self.chosen["even"] and not (self.chosen["dispatch"] and self.size > 1 and length < 0):
            with torch.no_grad():
                for batch in loader:
                    outputs = self.model(batch["x"])
                    seen.append(told(self.accelerator.gather_for_metrics({"out": outputs, "index": batch["index"]})))
        self.model.train()
        return seen

    def save(self, name: str) -> None:
        if self.is_between_windows():
            self.accelerator.save_state(str(self.folder / name))

    def is_between_windows(self) -> bool:
        # "load in the middle of an accumulation window"
        return all(parameter.grad is None for parameter in self.model.parameters())

    def load(self, name: str) -> Any:
        there = (self.folder / name).exists()
        self.accelerator.wait_for_everyone()
        if there and self.is_between_windows():
            self.accelerator.load_state(str(self.folder / name))
        return there, self.count.epochs, self.weights()

    def weights(self) -> dict[str, Any]:
        state = self.accelerator.get_state_dict(self.model)
        whole_model = self.accelerator.unwrap_model(self.model)
        return {"state": told(dict(state)), "whole": told(dict(whole_model.state_dict()))}

    def nested(self, value: int, kinds: int = 6) -> Any:
        """Values of this rank, in a structure of some kind."""
        random = Random(value)
        tensors = [
            whole(2, 3, seed=value + self.rank),
            whole(4, seed=value - self.rank).double(),
            whole(4, 1, seed=value * self.rank),
            whole(1, seed=value + 2 * self.rank).long(),
            whole(3, 1, 2, seed=value + self.rank).bool(),
            whole(2, 2, seed=value + self.rank).half(),
        ]
        tensors = tensors[:kinds]
        random.shuffle(tensors)
        one, other, third = tensors[:3]
        return random.choice((one, [one, other], (one, {"a": other}), {"a": [one, (other,)], "b": third}))

    def gather(self, value: int) -> Any:
        return told(self.accelerator.gather(self.nested(value)))

    def broadcast(self, value: int) -> Any:
        return told(self.utils.broadcast(self.nested(value), from_process=value % self.size))

    def reduce(self, value: int, by: str) -> Any:
        # "`reduce` booleans, or integers to their mean"
        return told(self.accelerator.reduce(self.nested(value, 4 if by == "sum" else 3), by))

    def pad(self, value: int, **options: Any) -> Any:
        ragged = whole(1 + (value + self.rank) % 3, 2 + (value // 3 * self.rank) % 2, seed=value)
        return told(self.accelerator.pad_across_processes([ragged, {"a": ragged.long()}], **options))

    def objects(self) -> Any:
        mine = [{"rank": self.rank, "text": "x" * self.rank}, None, (self.rank, 1.5)]
        gathered = self.utils.gather_object([mine])
        self.utils.broadcast_object_list(mine, from_process=self.size - 1)
        return repr((gathered, mine))

    def trigger(self, sets: int | None) -> Any:
        if sets == self.rank:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger(), self.accelerator.check_trigger()

    def share(self, kind: str, length: int, padded: bool) -> Any:
        items: Any = list(range(length))
        if kind == "dictionary":
            items = {"a": items, "b": [str(item) for item in items]}
        items = {"tuple": tuple, "tensor": torch.tensor}.get(kind, lambda same: same)(items)
        with self.accelerator.split_between_processes(items, apply_padding=padded) as mine:
            return told(mine)

    def wrong(self, what: str) -> Any:
        return told(WRONG[what](self))

    def random(self) -> Any:
        return told(torch.rand(2))

    def join(self) -> Any:
        # "`join_uneven_inputs` on processes without GPUs": where data are even nothing is to be joined
        with self.accelerator.join_uneven_inputs([self.model]):
            return "joined"

    def cast(self) -> Any:
        with self.accelerator.autocast(), torch.no_grad():
            return told(self.accelerator.unwrap_model(self.model)(whole(2, 3, seed=7)))

    def accumulate(self) -> Any:
        return self.accelerator.gradient_accumulation_steps, self.accelerator.sync_gradients

    def lengths(self) -> Any:
        # "`len` of a loader over iterable data, or with `even_batches=False`"
        return len(self.train_loader) if self.chosen["data"] == "map" and self.chosen["even"] else None

    def save_model(self) -> Any:
        self.accelerator.save_model(self.model, str(self.folder / "model"))
        self.accelerator.wait_for_everyone()
        return sorted(path.name for path in (self.folder / "model").iterdir())

    def free(self) -> Any:
        parts = (self.model, self.optimizer, self.train_loader, self.scheduler)
        freed = self.accelerator.free_memory(*parts)
        self.begin()
        return freed

    def end(self) -> Any:
        return self.weights()


def run(library: str, seeds: list[int], folder: str, verbose: bool = False) -> list[list[Any]]:
    """Run programs one after the other in this process; return what each saw."""
    warnings.simplefilter("ignore")
    package, state = import_module(library), import_module(f"{library}.state")
    return [run_one(package, state, make(seed), Path(folder) / str(seed), verbose) for seed in seeds]


def run_one(package: Any, state: Any, program: Program, folder: Path, verbose: bool) -> list[Any]:
    seen: list[Any] = []
    try:
        session = Session(package, program, folder)
        for name, options in program.acts:
            try:
                seen.append((name, options, getattr(session, name)(**options)))
            except Exception as error:
                seen.append((name, options, kinds_of(error)))
                if verbose and name != "wrong":
                    print(package.__name__, program.seed, name, options, repr(error)[:300], file=sys.stderr)
    except Exception as error:
        seen.append(("error", {}, kinds_of(error)))
        if verbose:
            traceback.print_exc()
    state.AcceleratorState._reset_state()
    state.GradientState._reset_state()
    return seen


def both(seeds: list[int], processes: int, verbose: bool = False) -> dict[int, list[tuple[Any, Any]]]:
    """What each rank saw of each program, with Accelerate and with Farflung."""
    chosen = [seed for seed in seeds if make(seed).processes == processes]
    of_libraries = []
    for library in ("accelerate", "farflung"):
        with tempfile.TemporaryDirectory() as folder:
            of_ranks = run_ranks(run, processes, library, chosen, folder, verbose, connect=False, timeout_s=300.0)
        of_libraries.append([dict(zip(chosen, seen, strict=True)) for seen in of_ranks])
    return {seed: [(one[seed], two[seed]) for one, two in zip(*of_libraries, strict=True)] for seed in chosen}


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two reports differ first, and what stands there; None if they are the same."""
    if one == other:
        return None
    if is_error(one) and is_error(other) and one[1] in other:
        return None  # "compare the text of an error or of a log line": its errors are ValueErrors, TypeErrors ... too
    if type(one) is type(other) and isinstance(one, (list, tuple)):
        for place, (a, b) in enumerate(zip_longest(one, other, fillvalue="nothing")):
            if found := first_difference(a, b, f"{path}[{place}]"):
                return found
        return None
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            if found := first_difference(one.get(key, "nothing"), other.get(key, "nothing"), f"{path}.{key}"):
                return found
        return None
    return f"{path}: {str(one)[:300]} against {str(other)[:300]}"


def is_error(seen: Any) -> bool:
    return isinstance(seen, tuple) and seen[:1] == ("raised",)


def main(first: int, last: int) -> None:
    """Compare the programs of some seeds."""
    seeds = list(range(first, last))
    for processes in (1, 2):
        found = both(seeds, processes, verbose=True)
        for seed, ranks in found.items():
            for rank, (theirs, ours) in enumerate(ranks):
                if found := first_difference(theirs, ours):
                    print(f"{seed} rank {rank} of {processes}: {found}")
                    break


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
