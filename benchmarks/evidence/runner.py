# SPDX-License-Identifier: Apache-2.0
"""Many small training runs at once: the replicas of all of them are rows of one tensor, forward and backward one call.

What a replica does by itself (inner optimizer, clipping) is done here for all rows; every exchange is the package's own
outer loop, one thread a replica, whose model's parameters are views of its row.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

import farflung.outer
from evidence.data_parallel import HOOKS, LowRankDiLoCo
from evidence.inner import AdamW, parts
from evidence.lora import EXACT
from evidence.readouts import Readouts
from evidence.runs import SHAPES, Run, draws, texts
from evidence.tuning import tuned
from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.outer import AverageState, OuterLoop
from farflung.testing.sim import SimGroup, run_replicas

MAX_NORM = 1.0
LOW_RANK = "low_rank_diloco"
ROUNDS = {LOW_RANK: LowRankDiLoCo, **EXACT}  # methods that are no recipes of the package
HELD_OUT_SEQUENCES = 512
READ_EVERY = 8  # steps between two readouts of what has no rounds: those of `diloco(8)`


def loss_of(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a byte of `[batch, length, 256]` logits."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].long().flatten())


@dataclass
class Lane:
    """One run in a stack: its rows and the inner optimizer on them.

    Args:
        weights: `[replicas, parameters]`, this run's rows.
        frozen: `[replicas, parameters]`, what is trained by adapters.
    """

    run: Run
    model: nn.Module
    weights: Tensor
    step: int = 0
    bytes_sent: float = 0.0
    rounds: int = 0
    frozen: Tensor | None = None

    def __post_init__(self) -> None:
        self.inner = list(parts(self.run.inner, self.weights, self.model))
        context = self.model.shape.context
        self._span, self._starts = torch.arange(context + 1), draws(self.run, context)
        settings = self.run.options
        make = HOOKS[settings.pop("hook", "mean")]
        shapes = [parameter.shape for parameter in self.model.parameters()]
        self._exchange = make(self, shapes, **settings) if self.run.method == "DDP" else None
        own = ROUNDS.get(self.run.method)
        self._own_rounds = own(self, shapes, **settings) if own else None
        self.readouts = Readouts()

    @property
    def is_shared(self) -> bool:
        """Whether gradients are averaged in the next step."""
        return self.step < self.run.split

    def batch(self) -> Tensor:
        """Return `[replicas, batch, context + 1]`, the next step's bytes."""
        return self.run.text[0][self._starts[:, self.step, :, None] + self._span]

    def descend(self, gradients: Tensor) -> None:
        """Make a clipped step, each row with its own gradient, or all with what DDP makes of them."""
        idle = [row for row, works in enumerate(self.run.at_work(self.step)) if not works]
        if len(idle) == len(self.weights):
            self.step += 1
            return
        shared: Tensor | None = gradients
        if self.is_shared:
            shared = gradients.mean(0, keepdim=True)
        elif self._exchange is not None:
            shared = self._exchange(gradients)
        lr = self.run.lr * self.run.factor(self.step)
        self.step += 1
        if shared is None:  # still accumulating
            return
        norms = shared.norm(dim=1, keepdim=True)
        shared = shared * (MAX_NORM / (norms + 1e-6)).clamp(max=1.0)
        state = [self.weights, *(one for _, optimizer in self.inner for one in optimizer.state)] if idle else []
        before = [rows[idle] for rows in state]
        for columns, optimizer in self.inner:
            optimizer.step(shared[:, columns], lr)
        for rows, old in zip(state, before, strict=True):
            rows[idle] = old
        if self._own_rounds is not None:
            self._own_rounds.after_step()
        if self.run.readouts and self.run.method in ("alone", "DDP") and self.step % READ_EVERY == 0:
            self.readouts.note(last=self.weights if self.run.method == "alone" else self.weights[:1])


class Stack:
    """Runs of one size, length and batch, done together."""

    def __init__(self, runs: Sequence[Run], shape: Shape | None = None) -> None:
        alike = {run.stacked_by for run in runs}
        assert len(alike) == 1, f"these can't be stacked: {alike}"
        self.steps = runs[0].steps
        self.shape = shape or SHAPES[runs[0].size]
        self._rows = torch.cat([self._first(run) for run in runs])
        self._sizes = [parameter.numel() for parameter in self._model.parameters()]
        ends = torch.tensor([run.replicas for run in runs]).cumsum(0).tolist()
        rows = [self._rows[end - run.replicas : end] for run, end in zip(runs, ends, strict=True)]
        self.lanes = [Lane(run, self._model, part) for run, part in zip(runs, rows, strict=True)]
        self._differentiate = vmap(grad_and_value(self._loss))
        self._beside: tuple[Tensor, ...] = ()  # what else the loss depends on, by row
        self._failure: BaseException | None = None
        # One call for each row is still the fastest way to attention here.
        warnings.filterwarnings("ignore", message="There is a performance drop because")
        self._ready = threading.Barrier(len(runs), action=self._descend)

    def _first(self, run: Run) -> Tensor:
        torch.manual_seed(run.seed)
        self._model = GPT(self.shape)
        return flat(self._model).repeat(run.replicas, 1)

    def _new_model(self) -> nn.Module:
        return GPT(self.shape)

    def _loss(self, row: Tensor, batch: Tensor, *beside: Tensor) -> Tensor:
        names, shapes = zip(*((name, p.shape) for name, p in self._model.named_parameters()), strict=True)
        values = (part.view(shape) for part, shape in zip(row.split(self._sizes), shapes, strict=True))
        return loss_of(functional_call(self._model, dict(zip(names, values, strict=True)), (batch[:, :-1],)), batch)

    def _descend(self) -> None:
        try:
            self._step()
        except BaseException as error:
            self._failure = error
            raise

    @torch.no_grad()
    def _step(self) -> None:
        batches = torch.cat([lane.batch() for lane in self.lanes])
        gradients, _ = self._differentiate(self._rows, batches, *self._beside)
        for lane, part in zip(self.lanes, gradients.split([lane.run.replicas for lane in self.lanes]), strict=True):
            lane.descend(part)

    def train(self) -> list[Lane]:
        """Do all runs."""
        with ThreadPoolExecutor(len(self.lanes)) as pool:
            ends = [pool.submit(self._follow, lane) for lane in self.lanes]
        if self._failure is not None:
            raise self._failure
        for end in ends:
            end.result()
        return self.lanes

    def _follow(self, lane: Lane) -> None:
        try:
            if lane.run.method in ("alone", "DDP", *ROUNDS):
                for _ in range(self.steps):
                    self._ready.wait()
            else:
                run_replicas(self._replica, lane.run.replicas, lane)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                self._failure = error
            self._ready.abort()
            raise

    def _replica(self, group: SimGroup, lane: Lane) -> None:
        """Follow one row, whose steps all threads of a lane make together, through the outer loop."""
        for _ in range(lane.run.split):
            self._advance(group, lane)
        model = self._new_model()
        lie_in(model, lane.weights[group.rank])
        inner = self._seen(model, lane, group.rank)
        for recipe, steps in phases(lane.run):
            with OuterLoop(model, recipe, group, inner=inner) as outer:
                for _ in range(steps):
                    self._advance(group, lane)
                    with self._read(group, lane, outer, model):
                        outer.count(done=lane.run.at_work(lane.step - 1)[group.rank])
                        outer.sync_if_due()
                if outer.has_anchor or not lane.run.readouts:
                    with self._read(group, lane, outer, model):
                        outer.flush()
                if not lane.run.readouts:
                    outer.detach()
            if group.rank == 0:
                lane.bytes_sent += outer.stats().bytes_sent
                lane.rounds += outer.stats().rounds

    @contextmanager
    def _read(self, group: SimGroup, lane: Lane, outer: OuterLoop, model: nn.Module) -> Iterator[None]:
        """Note the weights around a round, if there is one in the block."""
        if group.rank or not (lane.run.readouts and outer.has_anchor):
            yield
            return
        rounds, replicas = outer.stats().rounds, lane.weights.mean(0, keepdim=True)
        yield
        if outer.stats().rounds > rounds:
            with outer.synced():
                slow = flat(model)[None]
            lane.readouts.note(replicas=replicas, look_ahead=flat(model)[None], slow=slow)

    def _seen(self, model: nn.Module, lane: Lane, rank: int) -> torch.optim.Optimizer:
        """Return what recipes see of the inner optimizer: AdamW's moments, and nothing of Muon's state."""
        seen = torch.optim.AdamW(model.parameters())
        match lane.inner:
            case [(_, AdamW(state=moments))]:
                for name, rows in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                    for parameter, part in zip(model.parameters(), rows[rank].split(self._sizes), strict=True):
                        seen.state[parameter][name] = part.view(parameter.shape)
        return seen

    def _advance(self, group: SimGroup, lane: Lane) -> None:
        """Make the next step of all runs, once all replicas of this one are done with the last one."""
        before = lane.step
        group.barrier()
        if lane.step == before:  # the first of its replicas to go on; they take turns
            self._ready.wait()

    @torch.no_grad()
    def judge(self) -> list[dict[str, float]]:
        """Return the held-out loss of each run, by its end and its readouts; of replicas alone, their mean loss."""
        batches = spread(texts()[1], self.shape.context, HELD_OUT_SEQUENCES)

        def loss_by(rows: Tensor) -> float:
            return statistics.mean(self._loss(row, batch).item() for row in rows for batch in batches)

        return [
            {
                "held_out_loss": loss_by(lane.weights if lane.run.method == "alone" else lane.weights[:1]),
                **{name: loss_by(rows) for name, rows in lane.readouts.weights.items()},
                **(self._tuned(lane, loss_by) if lane.run.tuned_steps else {}),
            }
            for lane in self.lanes
        ]

    def _tuned(self, lane: Lane, loss_by: Callable[[Tensor], float]) -> dict[str, float]:
        context, weights = self.shape.context, lane.readouts.weights
        return tuned(lane.run, weights, self._differentiate, loss_by, self._loss, context)


def spread(text: Tensor, context: int, sequences: int) -> tuple[Tensor, ...]:
    """Return batches `[64, context + 1]` of sequences spread over a text."""
    starts = torch.linspace(0, len(text) - context - 1, sequences).long()
    return text[starts[:, None] + torch.arange(context + 1)].split(64)


def phases(run: Run) -> list[tuple[farflung.outer.Recipe, int]]:
    """Return the recipes of a run, each with the steps that it is used for."""
    settings, steps = run.options, run.steps - run.split
    last, averages = settings.pop("last", None), settings.pop("average_state", False)
    first, sooner = settings.pop("first", None), settings.pop("sooner", None)
    if "largest" in settings:
        settings["max_momentum"] = settings.pop("largest")
    make: Callable[..., farflung.outer.Recipe] = getattr(farflung.outer, run.method)
    recipe = make(**settings)
    if averages:
        recipe = dataclasses.replace(recipe, inner=AverageState())
    if sooner is not None:
        recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, sooner=sooner))
    end = run.steps // 10
    if first is not None:
        plain = {**settings, "every": first, "lr": 1.0, "momentum": 0.0}
        return [(make(**plain), end), (recipe, steps - end)]
    if last is None:
        return [(recipe, steps)]
    return [(recipe, steps - end), (make(**{**settings, "every": last}), end)]


def flat(model: nn.Module) -> Tensor:
    """Return `[parameters]`, a copy of all parameters in their order."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def lie_in(model: nn.Module, row: Tensor) -> None:
    """Let the parameters be views of a row."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)


def train(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Do runs together; return the figures of each."""
    began = time.process_time()
    stack = Stack(runs)
    stack.train()
    seconds = (time.process_time() - began) / len(runs)
    return [
        {
            **{name: round(loss, 5) if math.isfinite(loss) else None for name, loss in losses.items()},
            "bytes_sent": round(lane.bytes_sent),
            "rounds": lane.rounds,
            "cpu_s": round(seconds, 1),
        }
        for lane, losses in zip(stack.lanes, stack.judge(), strict=True)
    ]
