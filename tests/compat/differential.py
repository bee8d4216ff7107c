# SPDX-License-Identifier: Apache-2.0
"""Random programs of `choices.py`, run with Accelerate and with Farflung: `Session` tells all that one saw."""

import gc
import tempfile
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from farflung.testing.ranks import run_ranks
from tests.compat.choices import OPTIMIZERS, SCHEDULERS, WRONG, Program, make


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

    epoch = 0

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

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

    epochs = 0

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
    def __init__(self, package: Any, program: Program, folder: Path) -> None:
        self.package, self.chosen, self.folder = package, program.settings, folder
        self.utils, chosen = import_module(f"{package.__name__}.utils"), program.settings
        self.accelerator = package.Accelerator(
            cpu=True,
            mixed_precision=chosen["precision"],
            step_scheduler_with_optimizer=chosen["scheduled"],
            gradient_accumulation_plugin=self.utils.GradientAccumulationPlugin(
                chosen["accumulation"], chosen["adjust"], chosen["windows end with data"]
            ),
            dataloader_config=self.utils.DataLoaderConfiguration(
                chosen["split"], chosen["dispatch"], chosen["even"], chosen["seedable"]
            ),
        )
        self.utils.set_seed(program.seed, device_specific=chosen["device_specific"])
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        self.begin()

    def begin(self) -> None:
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

    def epoch(self, inside: str, number: int | None = None, stop: int = -1, skip: int = 0, save: int = -1) -> list[Any]:
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
            if loop == "trigger":
                with self.accelerator.no_sync(self.model):
                    loss = self.loss_of(x, y)
                with self.accelerator.trigger_sync_in_backward(self.model):
                    self.accelerator.backward(loss)
            else:
                with nullcontext() if due else self.accelerator.no_sync(self.model):
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
        loader = self.accelerator.prepare(DataLoader(Samples(length, "dictionary"), batch_size=batch_size))
        self.model.eval()
        seen = []
        with torch.no_grad():
            for batch in loader if self.chosen["even"] else ():  # "pass different numbers of rows"
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

    end = weights

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
        ][:kinds]
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
        names = sorted(path.name for path in (self.folder / "model").iterdir())
        self.accelerator.wait_for_everyone()  # else the next save may be under way where another rank looks
        return names

    def free(self) -> Any:
        parts = (self.model, self.optimizer, self.train_loader, self.scheduler)
        freed = self.accelerator.free_memory(*parts)
        self.begin()
        return freed


def run(library: str, seeds: list[int], folder: str) -> list[list[Any]]:
    """Run programs one after the other in this process; return what each saw."""
    warnings.simplefilter("ignore")
    package, state = import_module(library), import_module(f"{library}.state")
    gc.freeze()  # or else `free_memory` looks through all of torch each time
    return [run_one(package, state, make(seed), Path(folder) / str(seed)) for seed in seeds]


def run_one(package: Any, state: Any, program: Program, folder: Path) -> list[Any]:
    seen: list[Any] = []
    try:
        session = Session(package, program, folder)
        for name, options in program.acts:
            try:
                seen.append((name, options, getattr(session, name)(**options)))
            except Exception as error:
                seen.append((name, options, kinds_of(error)))
    except Exception as error:
        seen.append(("error", {}, kinds_of(error)))
    state.AcceleratorState._reset_state()
    state.GradientState._reset_state()
    return seen


def both(seeds: list[int], processes: int) -> dict[int, list[tuple[Any, Any]]]:
    """What each rank saw of each program, with Accelerate and with Farflung."""
    chosen = [seed for seed in seeds if make(seed).processes == processes]
    of_libraries = []
    for library in ("accelerate", "farflung"):
        with tempfile.TemporaryDirectory() as folder:
            of_ranks = run_ranks(run, processes, library, chosen, folder, connect=False, timeout_s=300.0)
        of_libraries.append([dict(zip(chosen, seen, strict=True)) for seen in of_ranks])
    return {seed: [(one[seed], two[seed]) for one, two in zip(*of_libraries, strict=True)] for seed in chosen}


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two reports differ first, and what stands there; None if they are the same."""
    if one == other:
        return None
    if is_error(one) and is_error(other) and one[1] in other:
        return None  # "compare the text of an error or of a log line": its errors are ValueErrors, TypeErrors ... too
    if type(one) is type(other) and isinstance(one, (dict, list, tuple)):
        parts, others = (each if isinstance(each, dict) else dict(enumerate(each)) for each in (one, other))
        keys = parts | others
        found = (
            first_difference(parts.get(key, "nothing"), others.get(key, "nothing"), f"{path}[{key}]") for key in keys
        )
        return next(filter(None, found), None)
    return f"{path}: {str(one)[:300]} against {str(other)[:300]}"


def is_error(seen: Any) -> bool:
    return isinstance(seen, tuple) and seen[:1] == ("raised",)
