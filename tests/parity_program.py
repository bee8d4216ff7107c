# SPDX-License-Identifier: Apache-2.0
"""One training script, written once, that runs with Accelerate or with Farflung and tells all that it saw."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from farflung.config import environ

EPOCHS = 2
WIDTH = 3


@dataclass(frozen=True)
class Case:
    """One setting of the script; it runs on each number of `processes`.

    Attributes:
        data: `map`, `stream` (iterable, length unknown) or `sized` (iterable, length known).
        order: `given`, `shuffle` (as `shuffle=True`) or `generator` (a RandomSampler with a generator of its own).
        train: False only goes through the data.
        skip: batches left out at the beginning.
        local_sgd: optimizer steps between two averagings, in place of DDP's.
        join: inside `join_uneven_inputs` without `even_batches`.
        tells_remainder: report `gradient_state.remainder` too.
        is_second: left to the longer run, as `make test` has one of the same kind.
    """

    name: str
    processes: tuple[int, ...] = (1, 2)
    precision: str = "no"
    accumulation: int = 1
    sync_with_dataloader: bool = True
    split: bool = False
    dispatch: bool | None = None
    even: bool = True
    seedable: bool = False
    drop_last: bool = False
    data: str = "map"
    order: str = "given"
    length: int = 16
    batch_size: int = 2
    num_workers: int = 0
    schedule: str = "inverse"
    schedule_follows: bool = True
    max_norm: float = 0.1
    train: bool = True
    skip: int = 0
    local_sgd: int = 0
    join: bool = False
    tells_remainder: bool = False
    is_second: bool = False

    @property
    def is_map(self) -> bool:
        return self.data == "map"

    @property
    def dispatches(self) -> bool:
        return not self.is_map if self.dispatch is None else self.dispatch

    def per_round(self, processes: int) -> int:
        """Samples that all processes together consume in one step."""
        return self.batch_size if self.split else self.batch_size * processes

    def left(self, processes: int) -> int:
        """Samples in a last round that is not whole, 0 when there is none."""
        return self.length % self.per_round(processes)


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples that know their index."""

    def __init__(self, length: int) -> None:
        self.x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index), "x": self.x[index], "y": self.x[index].sum(0, keepdim=True)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self.samples = Samples(length)

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


def run(library: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Run the script for each of `cases` in this process; return what each saw."""
    environ.export({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    package, state = import_module(library), import_module(f"{library}.state")
    seen = []
    for case in cases:
        try:
            seen.append(script(package, case))
        except (TypeError, ValueError) as error:  # which all ranks raise alike, where there is a row for it
            seen.append({"error": str(error)})
        state.AcceleratorState._reset_state()
        state.GradientState._reset_state()
    return seen


def script(package: Any, case: Case) -> dict[str, Any]:
    utils = import_module(f"{package.__name__}.utils")
    utils.set_seed(11)
    accelerator = package.Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(
            num_steps=case.accumulation, sync_with_dataloader=case.sync_with_dataloader
        ),
        step_scheduler_with_optimizer=case.schedule_follows,
        dataloader_config=utils.DataLoaderConfiguration(
            split_batches=case.split,
            dispatch_batches=case.dispatch,
            even_batches=case.even,
            use_seedable_sampler=case.seedable,
        ),
    )
    loader = accelerator.prepare(loader_of(case))
    if case.skip:
        loader = accelerator.skip_first_batches(loader, case.skip)
    report: dict[str, Any] = {
        "length": known(lambda: len(loader)),
        "total_batch_size": known(lambda: loader.total_batch_size),
    }
    if not case.train:
        return report | read(accelerator, case, loader)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    made = accelerator.prepare(model, optimizer, schedule_of(case, optimizer))
    if case.local_sgd:
        local = import_module(f"{package.__name__}.local_sgd").LocalSGD
        with local(accelerator=accelerator, model=made[0], local_sgd_steps=case.local_sgd) as local_sgd:
            report |= trained(accelerator, case, loader, *made, local_sgd.step)
    else:
        joined = accelerator.join_uneven_inputs(made[:1], even_batches=False) if case.join else nullcontext()
        with joined:
            report |= trained(accelerator, case, loader, *made)
    report["weights"] = [p.detach().numpy().copy() for p in accelerator.unwrap_model(made[0]).parameters()]
    return report | {"batches": len(report["indices"])}


def loader_of(case: Case) -> DataLoader[Any]:
    shared: dict[str, Any] = {"batch_size": case.batch_size, "drop_last": case.drop_last}
    if not case.is_map:
        return DataLoader((Stream if case.data == "stream" else SizedStream)(case.length), **shared)
    samples = Samples(case.length)
    if case.order == "generator":
        shared["sampler"] = RandomSampler(samples, generator=torch.Generator().manual_seed(3))
    return DataLoader(samples, shuffle=case.order == "shuffle", num_workers=case.num_workers, **shared)


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    if case.schedule == "onecycle":
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    if case.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=40)
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def trained(
    accelerator: Any, case: Case, loader: Any, model: Any, optimizer: Any, scheduler: Any, average: Any = None
) -> dict[str, Any]:
    seen: dict[str, list[Any]] = {name: [] for name in ("indices", "loss", "rate", "norm", "syncs", "end")}
    told: dict[str, list[Any]] = {name: [] for name in ("gathered", "mean_loss", "remainder", "predictions")}
    evaluation = accelerator.prepare(DataLoader(Samples(7), batch_size=2))
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), case.max_norm)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if average is not None:
                average()
            seen["indices"].append(batch["index"].tolist())
            seen["loss"].append(loss.item())
            seen["rate"].append(scheduler.get_last_lr())
            seen["syncs"].append(accelerator.sync_gradients)
            seen["end"].append(accelerator.gradient_state.end_of_dataloader)
            if case.tells_remainder:
                told["remainder"].append(accelerator.gradient_state.remainder)
            if not case.join:
                told["gathered"].append(accelerator.gather_for_metrics(batch["index"]).tolist())
                told["mean_loss"].append(float(accelerator.reduce(loss.detach(), "mean")))
        if not case.join:
            with torch.no_grad():
                for batch in evaluation:
                    told["predictions"] += accelerator.gather_for_metrics(model(batch["x"])).flatten().tolist()
    return seen | told


def read(accelerator: Any, case: Case, loader: Any) -> dict[str, Any]:
    report: dict[str, list[Any]] = {name: [] for name in ("indices", "end", "gathered")}
    for _ in range(EPOCHS):
        for batch in loader:
            report["indices"].append(batch["index"].tolist())
            report["end"].append(accelerator.gradient_state.end_of_dataloader)
            if case.even:  # otherwise ranks may bring different numbers of rows, which Accelerate does not survive
                report["gathered"].append(accelerator.gather_for_metrics(batch["index"]).tolist())
    return report | {"batches": len(report["indices"])}


def known(action: Any) -> Any:
    try:
        return action()
    except (AttributeError, TypeError):
        return "unknown"
