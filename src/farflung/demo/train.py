# SPDX-License-Identifier: Apache-2.0
"""What each process of the demo runs: the same model on the same data, by several ways in turns."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

from farflung import Accelerator
from farflung.auto.choice import Choice, Link, Measurements, choose
from farflung.base.bars import bar
from farflung.checkpoint.writer import FileWriter, write_safetensors
from farflung.comm.ddp_hook import average_hook
from farflung.config.outer import AUTO
from farflung.cost.model import Method, Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import ALONE, MODEL_FILE, DemoSettings, Point, Result, save_results
from farflung.demo.text import load_text
from farflung.methods.arguments import recipe_of
from farflung.outer import OuterLoop, Recipe, diloco, local_sgd, streaming_diloco
from farflung.utils import set_seed

DDP = Method("DDP", during_backward=True, bucket_bytes=25 * 2**20)  # torch's own size of a bucket
NUM_POINTS = 12  # how often the validation loss is taken, about
VALIDATION_SEQUENCES = 256
WARMUP = 0.05  # of all steps
PEAK_LR = 3e-3
MAX_NORM = 1.0
TIMED_STEPS = 10  # that `auto` chooses by


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


def evenly(source: Sequences, most: int) -> Dataset[Tensor]:
    """Return at most so many items of `source`, evenly spread over it."""
    count = min(most, len(source))
    return Subset(source, [index * len(source) // count for index in range(count)])


class GradientMeter:
    """Averages the gradients of a DDP model as DDP does by itself, and counts the bytes that this rank sends."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.bytes_sent = 0
        group, size = model.process_group, dist.get_world_size(model.process_group)
        average = average_hook(lambda: group)

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations as text
            # A ring sends and receives this much on each rank: (M-1)/M to reduce, and again to spread the sums.
            self.bytes_sent += 2 * (size - 1) * bucket.buffer().nbytes // size
            return average(state, bucket)

        model.register_comm_hook(None, hook)


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    recipe: Recipe | None = None  # of the outer loop, if it has one
    note: str = ""  # why `auto` chose it

    @property
    def is_alone(self) -> bool:
        return self.name == ALONE

    @property
    def averages_gradients(self) -> bool:
        return self.recipe is None and not self.is_alone


class Trial:
    """One way to train: a fresh model, and what it came to so far. All trials start from the same weights."""

    def __init__(self, way: Way, accelerator: Accelerator, settings: DemoSettings) -> None:
        set_seed(settings.seed)
        model = GPT(settings.shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
        # A prepared scheduler counts the batches of all processes.
        horizon = settings.steps * (1 if way.is_alone else accelerator.num_processes)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rise_and_fall(step / horizon))
        self.way = way
        self.accelerator = accelerator
        self.settings = settings
        prepared: Any = (
            (model, optimizer, schedule) if way.is_alone else accelerator.prepare(model, optimizer, schedule)
        )
        self.model, self.optimizer, self.schedule = prepared
        self.judged_after = checkpoints(settings.steps, (way.recipe and way.recipe.every) or settings.every)
        self.step = 0
        self.seconds = self.cpu_seconds = 0.0
        self.curve: list[Point] = []
        self._open = ExitStack()
        self._meter = GradientMeter(self.model) if way.averages_gradients else None
        self._loop: OuterLoop | None = None

    def __enter__(self) -> Trial:
        if self.way.recipe is not None:
            self._loop = self._open.enter_context(self.accelerator.outer(self.model, self.way.recipe))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def learn(self, batch: Tensor) -> None:
        """Take one step on `batch` `[sequences, context + 1]`."""
        loss = loss_per_sequence(self.model(batch[:, :-1]), batch[:, 1:]).mean()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1

    @contextmanager
    def on_the_clock(self) -> Iterator[None]:
        """Count the seconds of a block, from when all processes have come to it."""
        self.accelerator.wait_for_everyone()
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += time.process_time() - cpu_start

    def finish(self) -> None:
        """Average for the last time."""
        with self.on_the_clock():
            self._open.close()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def bytes_sent(self) -> int:
        """The bytes that this process sent so far."""
        if self._meter is not None:
            return self._meter.bytes_sent
        if self._loop is None:
            return 0
        stats = self._loop.stats()
        return stats.bytes_sent + stats.bytes_voting

    @torch.no_grad()
    def judge(self, batches: Iterable[Tensor], *, at_the_end: bool = False) -> None:
        """Note where the curve stands: the loss of what the processes agree on, on all of their `batches` together.

        Of replicas that are alone each takes the loss on its own batches.
        """
        bytes_sent = self.bytes_sent
        # With an anchor the replicas agree on weights at any time; without one they are equal at the end of a round.
        recipe = self.way.recipe
        lends = self._loop is not None and recipe is not None and recipe.optimizer is not None
        with self._loop.synced() if self._loop and lends and not at_the_end else nullcontext():
            self.model.eval()
            losses = [
                self.accelerator.gather_for_metrics(loss_per_sequence(self.model(batch[:, :-1]), batch[:, 1:]))
                for batch in batches
            ]
            self.model.train()
        self.curve.append(Point(self.step, bytes_sent, torch.cat(losses).mean().item()))

    def result(self) -> Result:
        """Return what the training came to, here and on the slow line."""
        settings, way, parameters = self.settings, self.way, self.num_parameters
        method = DDP if way.recipe is None else method_of(way.recipe, parameters, name=way.name)
        # Computing takes CPU seconds, which other programs hardly change.
        step_s = self.cpu_seconds / self.step
        run = Workload(parameters, settings.shape.depth, step_s, settings.processes, settings.bandwidth_bps)
        line_seconds = seconds_on_line(method, run, self.step, self.bytes_sent)
        return Result(way.name, self.curve, self.seconds, self.bytes_sent, line_seconds, way.note)


def seconds_on_line(method: Method, run: Workload, steps: int, bytes_sent: float) -> float:
    """Return the seconds that `steps` steps take by the cost model, for the bytes measured in place of the method's."""
    computed = steps * cost_of(run, method).bytes_sent_per_step
    measured = replace(method, bits=method.bits * bytes_sent / computed if bytes_sent else 0.0)
    return steps * cost_of(run, measured).seconds_per_step


def choice_for_line(accelerator: Accelerator, settings: DemoSettings) -> Choice:
    """Return what `auto` chooses for the slow line: a collective that times some steps.

    In a run it would measure the line, too; here that is the one between processes of one machine.
    """
    shape, trial = settings.shape, Trial(Way(ALONE), accelerator, settings)
    batch = torch.zeros(settings.batch, shape.context + 1, dtype=torch.uint8)
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.process_time()
        trial.learn(batch)
        seconds.append(time.process_time() - start)
    step_s = accelerator.gather(torch.tensor([statistics.median(seconds)])).tolist()
    return choose(
        Measurements(
            Link(settings.bandwidth_bps, turn_s=0.0),
            tuple(step_s),
            settings.processes,
            trial.num_parameters,
            shape.depth,
            buffer_bytes=0,
            island_size=1,
            steps=settings.steps,
            pass_steps=None,
            is_direct=True,
            is_averaged=False,
            may_average=True,
        )
    )


def ways(settings: DemoSettings, choice: Choice) -> list[Way]:
    """Return all ways in the order of the table; `choice` is that of `auto`."""
    every = settings.every
    return [
        Way(DDP.name),
        Way("Local SGD", local_sgd(every)),
        Way("DiLoCo", diloco(every)),
        Way("Streaming DiLoCo", streaming_diloco(every, min(every, settings.shape.depth))),
        Way(AUTO, None if choice.is_data_parallel else recipe_of(choice.settings, local_size=1), choice.why),
        Way(ALONE),
    ]


def compete(
    trials: Sequence[Trial], batches: Iterator[Tensor], judges: Iterable[Tensor], show: Callable[[Trial], None]
) -> None:
    """Train all trials on the same batches, in turns of a round or less: so foreign load falls on all alike."""
    settings = trials[0].settings
    ends = {settings.steps, *range(0, settings.steps, settings.every)}.union(*(trial.judged_after for trial in trials))
    for start, end in pairwise(sorted(ends)):
        turn = list(islice(batches, end - start))
        for trial in trials:
            with trial.on_the_clock():
                for batch in turn:
                    trial.learn(batch)
                    show(trial)
            if trial.step in trial.judged_after:
                trial.judge(judges)
    for trial in trials:
        trial.finish()
        trial.judge(judges, at_the_end=True)


def checkpoints(steps: int, every: int) -> set[int]:
    """Return the steps before the last one to judge after: ends of rounds, for then the processes agree.

    Their distance grows, because the picture's axes are logarithmic.
    """
    rounds = steps // every
    return {every * round(rounds ** (i / NUM_POINTS)) for i in range(NUM_POINTS)} - {steps, 0} if rounds else set()


def endless(loader: DataLoader[Tensor]) -> Generator[Tensor, None, None]:
    """Go through `loader` again and again."""
    while True:
        yield from loader


def rise_and_fall(done: float) -> float:
    """Return the part of the peak learning rate after a part of all steps, both from 0 to 1."""
    return min((done + 1e-3) / WARMUP, (1 - done) / (1 - WARMUP))


@contextmanager
def progress(accelerator: Accelerator, steps: int) -> Iterator[Callable[[Trial], None]]:
    """Draw a bar over the `steps` of all trials on the main process; yield a function that counts a trial's step.

    A pipe or a file gets a line a minute in its place.
    """
    began, minutes, is_main = time.monotonic(), 1, accelerator.is_main_process
    with bar("Training", steps, is_main, of_bytes=False) as drawn:

        def count_step(trial: Trial) -> None:
            nonlocal minutes
            drawn.advance(1)
            if is_main and not sys.stderr.isatty() and time.monotonic() >= began + 60 * minutes:
                done = f"{drawn.num_done:,} of {steps:,} steps after {minutes} min"
                print(f"{done}, the latest by {trial.way.name}", flush=True)
                minutes = 1 + int((time.monotonic() - began) // 60)

        yield count_step


def save_model(model: nn.Module, settings: DemoSettings, way: str) -> None:
    """Write the weights to the output folder, with the words that `generate` needs to build the model again."""
    with FileWriter(settings.path(MODEL_FILE)) as file:  # safetensors' own writer makes files that nobody else may read
        write_safetensors(model.state_dict(), file, metadata={"size": settings.size, "way": way})


def main(settings_file: str) -> None:
    """Train in all ways, and save what came of it on the main process: the results, and the best model."""
    torch.set_num_threads(1)
    settings = DemoSettings.load(settings_file)
    accelerator = Accelerator(cpu=True)
    text = load_text(settings.data)
    context = settings.shape.context
    train = DataLoader(Sequences(text.train, context), batch_size=settings.batch, shuffle=True, drop_last=True)
    held_out = DataLoader(evenly(Sequences(text.validation, context), VALIDATION_SEQUENCES), batch_size=32)
    set_seed(settings.seed)
    train, held_out = accelerator.prepare(train, held_out)
    with ExitStack() as stack:
        choice = choice_for_line(accelerator, settings)
        trials = [stack.enter_context(Trial(way, accelerator, settings)) for way in ways(settings, choice)]
        batches = stack.enter_context(closing(endless(train)))
        show = stack.enter_context(progress(accelerator, len(trials) * settings.steps))
        compete(trials, batches, held_out, show)
    if accelerator.is_main_process:
        save_results(settings, [trial.result() for trial in trials])
        best = min(trials, key=lambda trial: trial.curve[-1].loss)
        save_model(accelerator.unwrap_model(best.model), settings, best.way.name)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
