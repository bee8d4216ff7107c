# SPDX-License-Identifier: Apache-2.0
"""What each process of the demo runs: the same model on the same data, by DDP, Local SGD and DiLoCo in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from farflung import Accelerator
from farflung.checkpoint.sink import Sink, write_safetensors
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.meter import GradientMeter
from farflung.demo.settings import MODEL_FILE, DemoSettings, Point, Result, save_results
from farflung.demo.text import load_text
from farflung.outer import Stats, diloco, local_sgd
from farflung.utils import set_seed

WAYS = ("DDP", "Local SGD", "DiLoCo")
NUM_POINTS = 12  # how often the validation loss is taken, about
VALIDATION_SEQUENCES = 256
WARMUP = 0.05  # of all steps
PEAK_LR = 3e-3
MAX_NORM = 1.0

Traffic: TypeAlias = Callable[[], tuple[int, float]]  # bytes that this process sent, seconds that it waited, so far


class Sequences(Dataset[Tensor]):
    """A text cut into pieces of `context` bytes, each with the byte that follows it: `[context + 1]` uint8."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1]


class Spread(Dataset[Tensor]):
    """At most `count` items of `source`, evenly spread over it."""

    def __init__(self, source: Sequences, count: int) -> None:
        self.source = source
        self.count = min(count, len(source))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.source[index * len(self.source) // self.count]


class Trial:
    """A fresh model with all that it needs to learn and to be judged; each trial starts from the same numbers."""

    def __init__(self, accelerator: Accelerator, settings: DemoSettings, train: Sequences, held_out: Spread) -> None:
        set_seed(settings.seed)
        model = GPT(settings.shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
        horizon = settings.steps * accelerator.num_processes  # a prepared scheduler counts the batches of all processes
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rise_and_fall(step / horizon))
        batches = DataLoader(train, batch_size=settings.batch, shuffle=True, drop_last=True)
        judges = DataLoader(held_out, batch_size=32)
        self.accelerator = accelerator
        self.model, self.optimizer, self.schedule, self.batches, self.judges = accelerator.prepare(
            model, optimizer, schedule, batches, judges
        )

    def learn(self, batch: Tensor) -> None:
        """Take one step on `batch` `[sequences, context + 1]`."""
        loss = loss_per_sequence(self.model(batch[:, :-1]), batch[:, 1:]).mean()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def judge(self) -> float:
        """Return the loss on the validation text, of all processes together."""
        self.model.eval()
        losses = [
            self.accelerator.gather_for_metrics(loss_per_sequence(self.model(batch[:, :-1]), batch[:, 1:]))
            for batch in self.judges
        ]
        self.model.train()
        return torch.cat(losses).mean().item()


@contextmanager
def on_the_wire(way: str, trial: Trial, settings: DemoSettings) -> Iterator[Traffic]:
    """Let the processes of a trial talk to each other in one of `WAYS`, and tell what that costs."""
    if way == "DDP":
        meter = GradientMeter(trial.model)
        yield lambda: (meter.bytes_sent, meter.waited_s)
        return
    every = settings.every
    recipe = diloco(every, rounds=-(-settings.steps // every)) if way == "DiLoCo" else local_sgd(every)
    with trial.accelerator.outer(trial.model, recipe) as outer:
        yield lambda: _traffic_of(outer.stats())


def _traffic_of(stats: Stats) -> tuple[int, float]:
    return stats.bytes_sent + stats.bytes_voting, stats.seconds_exposed


def run_trial(way: str, trial: Trial, settings: DemoSettings, show: Callable[[int, float], None]) -> Result:
    """Train for `settings.steps` steps; `show(step, tokens_per_second)` is called after each."""
    tokens_per_step = settings.batch * settings.shape.context * settings.processes
    judged_after = checkpoints(settings.steps, settings.every)
    batches = endless(trial.batches)
    curve: list[Point] = []
    start, judging_s = time.perf_counter(), 0.0
    with on_the_wire(way, trial, settings) as traffic:
        for step in range(1, settings.steps + 1):
            trial.learn(next(batches))
            show(step, step * tokens_per_step / (time.perf_counter() - start - judging_s))
            if step in judged_after:
                paused = time.perf_counter()
                curve.append(Point(step, traffic()[0], trial.judge()))
                judging_s += time.perf_counter() - paused
    seconds = time.perf_counter() - start - judging_s
    batches.close()
    bytes_sent, waited_s = traffic()
    curve.append(Point(settings.steps, bytes_sent, trial.judge()))
    return Result(way, curve, settings.steps * tokens_per_step, seconds, bytes_sent, waited_s)


def checkpoints(steps: int, every: int) -> set[int]:
    """Return the steps before the last one to judge after: ends of rounds, for then the processes agree.

    Their distance grows, because the picture's axis of bytes is logarithmic.
    """
    rounds = steps // every
    return {every * round(rounds ** (i / NUM_POINTS)) for i in range(NUM_POINTS)} - {steps, 0} if rounds else set()


def endless(loader: DataLoader[Tensor]) -> Generator[Tensor, None, None]:
    """Go through `loader` again and again."""
    while True:
        yield from loader


def _rise_and_fall(done: float) -> float:
    return min((done + 1e-3) / WARMUP, (1 - done) / (1 - WARMUP))


@contextmanager
def progress_bars(accelerator: Accelerator, steps: int) -> Iterator[Callable[[str], Callable[[int, float], None]]]:
    """Draw one bar for each way on the main process; yield what makes the `show` of a way."""
    columns = ("{task.description:10}", BarColumn(), MofNCompleteColumn(), "{task.fields[speed]}", TimeElapsedColumn())
    with Progress(*columns, refresh_per_second=4, disable=not accelerator.is_main_process) as progress:
        tasks = {way: progress.add_task(way, total=steps, start=False, speed="") for way in WAYS}

        def shower(way: str) -> Callable[[int, float], None]:
            task: TaskID = tasks[way]
            progress.start_task(task)
            return lambda step, rate: progress.update(task, completed=step, speed=f"{rate:,.0f} tokens/s")

        yield shower


def save_model(model: nn.Module, settings: DemoSettings, way: str) -> None:
    """Write the weights to the output folder, with the words that `generate` needs to build the model again."""
    with Sink(settings.path(MODEL_FILE)) as sink:  # safetensors' own writer makes files that nobody else may read
        write_safetensors(model.state_dict(), sink, metadata={"size": settings.size, "way": way})


def main(settings_file: str) -> None:
    """Train in the three ways, and let the main process save what came of it: the results, and the best model."""
    torch.set_num_threads(1)
    settings = DemoSettings.load(settings_file)
    accelerator = Accelerator(cpu=True)
    text = load_text(settings.data)
    train = Sequences(text.train, settings.shape.context)
    held_out = Spread(Sequences(text.validation, settings.shape.context), VALIDATION_SEQUENCES)
    results: list[Result] = []
    with progress_bars(accelerator, settings.steps) as shower:
        for way in WAYS:
            trial = Trial(accelerator, settings, train, held_out)
            results.append(run_trial(way, trial, settings, shower(way)))
            if accelerator.is_main_process and results[-1].loss == min(result.loss for result in results):
                save_model(accelerator.unwrap_model(trial.model), settings, way)
            accelerator.free_memory()
    if accelerator.is_main_process:
        save_results(settings, results)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
