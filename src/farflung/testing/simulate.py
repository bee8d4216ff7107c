# SPDX-License-Identifier: Apache-2.0
"""Try a recipe for many replicas on one machine: curves, bytes and virtual seconds, before machines are rented."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from farflung.base.bars import Bar
from farflung.base.checks import check_callable, check_number, check_type, check_whole, shown, wrong_type
from farflung.base.errors import ConfigError, RankFailure
from farflung.base.words import counted
from farflung.comm.group import SoloGroup
from farflung.methods.arguments import OuterConfig, chosen_recipe
from farflung.methods.recipe import Recipe
from farflung.methods.recipes import post_local_sgd
from farflung.methods.schedule import ByTime
from farflung.outer.engine import OuterLoop
from farflung.outer.membership import FixedMembership
from farflung.outer.stats import Round, Stats
from farflung.testing.sim import Network, SimGroup, TimedGroup, VirtualClock, run_replicas
from farflung.votes.generation import Generation, Needs, open_generation

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation of the anchor, and when it was made."""

    step: int  # of the replica that evaluated
    seconds: float  # on the virtual clock
    bytes_sent: int  # by that replica so far, without votes
    value: float  # what `evaluate` returned


@dataclass(frozen=True)
class Simulation:
    """What came of a simulated run. "The first replica" is the lowest rank that was there at the end."""

    losses: tuple[tuple[float, ...], ...]  # by replica, the training loss of each of its steps
    evaluations: tuple[Evaluation, ...]  # by step; the last one is of the end, when all replicas are the same
    rounds: tuple[Round, ...]  # as the first replica saw them, with bytes of each and seconds of this machine
    stats: tuple[Stats, ...]  # by replica; their seconds are those of this machine too
    seconds: float  # on the virtual clock, of the slowest replica that was there at the end
    waited: tuple[float, ...]  # by replica, virtual seconds in which it waited for the network or for others
    failures: tuple[str, ...]  # messages, one for each loss of members that the first replica saw
    model: nn.Module  # of the first replica, as it was at the end
    first: int

    @property
    def curve(self) -> tuple[float, ...]:
        """After each step the mean training loss of the replicas that did it."""
        steps = max(map(len, self.losses))
        done = [[losses[step] for losses in self.losses if step < len(losses)] for step in range(steps)]
        return tuple(sum(losses) / len(losses) for losses in done)

    @property
    def value(self) -> float:
        return self.evaluations[-1].value

    @property
    def bytes_sent(self) -> int:
        """By the first replica: rounds, averaged gradients and the last flush, without votes and the first weights."""
        return self.stats[self.first].bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.stats[self.first].bytes_received


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call the model, and take what it returns for the loss, or that's `.loss`; a mapping's entries are arguments."""
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss: Tensor = getattr(out, "loss", out)
    return loss


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW with its usual settings."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def simulate(
    make_model: Callable[[], nn.Module],
    make_data: Callable[[int], Iterable[Any]],
    recipe: Recipe | OuterConfig | str | None,
    *,
    replicas: int = 64,
    steps: int,
    seconds: float = math.inf,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw,
    make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    loss: Loss = own_loss,
    items: Callable[[Any], float] | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    evaluate: Callable[[nn.Module], float] | None = None,
    evaluate_every: int | None = None,
    step_seconds: float | Sequence[float] = 1.0,
    delays: Mapping[tuple[int, int], float] | None = None,
    lost: Mapping[int, int] | None = None,
    bandwidth_bps: float = math.inf,
    latency_s: float = 0.0,
    progress: bool | None = None,
) -> Simulation:
    """Train `replicas` replicas of a model in this process, one after the other, as `recipe` has them talk.

    The outer loop is the real one, its collectives included: losses and counted bytes are those of a real run. Time is
    not: each replica has a clock that advances by `step_seconds` a step, stands still while this machine computes, and
    waits where the replica would wait, for the line and for slower replicas. What a collective takes follows from its
    bytes as in the cost model (`farflung.cost.model`); codecs take no time. Rounds among neighbours alone, those of
    `hierarchical`, only wait for each other, as they do not leave a machine.

    A replica that is lost leaves after its step without a word. The others hear of it in the next round and continue as
    a smaller group from there (`farflung.outer.membership`); no step of theirs is lost, and what was under way counts
    as not sent.

    The same arguments give the same result bit by bit, as replicas take turns and draw from generators of their own
    (torch's; `random` and numpy are shared). Each replica needs the memory of a training of its own.

    Args:
        make_model: builds the model; all replicas start from the same weights.
        make_data: from a rank to its batches, which are gone through again when they end.
        recipe: from `farflung.outer`, or a recipe's name. None averages gradients in each step, as plain data
            parallelism does.
        steps: optimizer steps of each replica.
        seconds: on the clock, after which a replica begins no further step; for schedules that go by time.
        make_optimizer: from parameters to the inner optimizer.
        make_scheduler: from the optimizer to what changes its learning rate after each step.
        loss: from model and batch to a loss; without it the model returns the loss, or an object that has `.loss`.
        items: samples or tokens of a batch, for recipes that weigh by them.
        max_norm: clips gradients.
        seed: of the first weights and of each replica's draws.
        evaluate: from a model, as the replicas agreed on it last, to a number; in evaluation mode, without gradients.
        evaluate_every: steps between two evaluations. One is made at the end in any case.
        step_seconds: of one step on the clock, for all replicas or one for each of them.
        delays: seconds that single steps take beyond that: `{(rank, step): seconds}`, with steps counted from 1.
        lost: the step after which a replica is lost, by its rank.
        bandwidth_bps: bits a second of each replica's line, each way at the same time.
        latency_s: seconds from one replica to another, one way.
        progress: whether a bar shows how far it is, once that takes longer than a moment. None: on a terminal.

    Raises:
        ConfigError: a number is out of its range, or the recipe does not fit the model.
    """
    given = dict(locals())
    check_whole("replicas", replicas, least=1)
    check_whole("steps", steps, least=1)
    if not isinstance(step_seconds, (list, tuple)):
        check_number("step_seconds", step_seconds, least=0)
    given |= {
        "recipe": post_local_sgd(steps, 1) if recipe is None else chosen_recipe(recipe),
        "step_seconds": tuple(step_seconds) if isinstance(step_seconds, (list, tuple)) else (step_seconds,) * replicas,
        "network": Network(given.pop("bandwidth_bps"), given.pop("latency_s")),
        "delays": {} if delays is None else delays,
        "lost": {} if lost is None else lost,
    }
    del given["progress"]
    task = SimulateArguments(**given)
    is_shown = sys.stderr is not None and sys.stderr.isatty() if progress is None else progress
    with closing(Bar("simulating", steps, is_shown, of_bytes=False)) as bar:

        def show(done: int) -> None:
            bar.advance(max(0, done - bar.num_done))

        return _summary(run_replicas(lambda group: _SimulatedReplica(group, task, show).play(), replicas, seed=seed))


@dataclass(frozen=True)
class SimulateArguments:
    """The arguments of `simulate`, checked."""

    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], Iterable[Any]]
    recipe: Recipe
    replicas: int
    steps: int
    seconds: float
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    loss: Loss
    items: Callable[[Any], float] | None
    max_norm: float | None
    seed: int
    evaluate: Callable[[nn.Module], float] | None
    evaluate_every: int | None
    step_seconds: tuple[float, ...]
    delays: Mapping[tuple[int, int], float]
    lost: Mapping[int, int]
    network: Network
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0)
        check_number("seconds", self.seconds, above=0, finite=False)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, least=0, finite=False)
        if self.evaluate_every is not None:
            check_whole("evaluate_every", self.evaluate_every, least=1)
        self._check_functions()
        self._check_times()
        meets = self.recipe.optimizer is None or not self.recipe.agrees
        if self.evaluate_every is not None and isinstance(self.recipe.schedule, ByTime) and meets:
            raise ConfigError(
                "Evaluating this recipe averages the weights of all replicas, but with a schedule by time they reach a "
                "step at different times. Leave out evaluate_every, and evaluate once at the end."
            )

    def _check_functions(self) -> None:
        if isinstance(self.make_model, nn.Module):
            raise wrong_type(
                "make_model", self.make_model, "a function that makes one, such as lambda: model_of(config)"
            )
        for name, example in (
            ("make_model", "lambda: nn.Linear(2, 1)"),
            ("make_data", "lambda rank: batches[rank]"),
            ("make_optimizer", "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
            ("loss", "lambda model, batch: model(batch).mean()"),
            ("make_scheduler", "lambda optimizer: LambdaLR(optimizer, schedule)"),
            ("items", "lambda batch: len(batch)"),
            ("evaluate", "lambda model: perplexity_of(model)"),
        ):
            if getattr(self, name) is not None or name not in ("make_scheduler", "items", "evaluate"):
                check_callable(name, getattr(self, name), example)

    def _check_times(self) -> None:
        for seconds in self.step_seconds:
            check_number("step_seconds", seconds, least=0)
        if len(self.step_seconds) != self.replicas:
            raise ConfigError(
                f"step_seconds has {counted(len(self.step_seconds), 'value')} for {counted(self.replicas, 'replica')}: "
                "give one number, or one for each of them."
            )
        check_type("lost", self.lost, Mapping, "a dictionary of ranks and steps, such as {3: 100}")
        check_type("delays", self.delays, Mapping, "a dictionary of seconds, such as {(rank, step): 2.0}")
        for key, seconds in self.delays.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise wrong_type("delays: a key", key, "a rank and a step, such as (0, 5)")
            check_number(f"delays: {key}", seconds, least=0)
        for rank, step in self.lost.items():
            check_whole(f"lost: {rank!r}", step, least=0)
        strangers = sorted({*self.lost, *(rank for rank, _ in self.delays)} - set(range(self.replicas)), key=str)
        if strangers:
            raise ConfigError(
                f"lost and delays name ranks {strangers} of {counted(self.replicas, 'replica')}, counted from 0."
            )

    def model(self) -> nn.Module:
        model = self.make_model()
        check_type("make_model: what it returned", model, nn.Module, "an nn.Module")
        return model

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch; raise ConfigError if it is no tensor of one number."""
        loss = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss: what it returned is {shown(loss)}; it must be a tensor of one number.")
        return loss


def _summary(replicas: Sequence[_SimulatedReplica]) -> Simulation:
    there = [rank for rank, replica in enumerate(replicas) if not replica.is_lost]
    # If all were lost the last one to go tells most.
    number = there[0] if there else max(range(len(replicas)), key=lambda rank: len(replicas[rank].losses))
    first = replicas[number]
    evaluations = sorted({e for one in replicas for e in one.evaluations}, key=lambda e: (e.step, e.seconds))
    return Simulation(
        losses=tuple(tuple(torch.stack(one.losses).tolist()) if one.losses else () for one in replicas),
        evaluations=tuple(evaluations),
        rounds=tuple(first.rounds),
        stats=tuple(one.outer.stats() for one in replicas),
        seconds=max(replicas[rank].clock.now for rank in there or [number]),
        waited=tuple(one.waited for one in replicas),
        failures=tuple(first.members.failures),
        model=first.model,
        first=number,
    )


class _SimulatedReplica:
    """One replica: an ordinary training loop, with a virtual clock."""

    def __init__(self, group: SimGroup, task: SimulateArguments, show: Callable[[int], None]) -> None:
        self._task = task
        self._show = show
        self._rank = group.rank
        torch.manual_seed(task.seed)
        self.model = task.model()
        torch.manual_seed((task.seed << 20) + group.rank + 1)  # from here on each replica draws for itself
        self._optimizer = task.make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self._scheduler = task.make_scheduler(self._optimizer) if task.make_scheduler else None
        self._batches = _endless(task.make_data(group.rank))
        self.clock = VirtualClock()
        self.waited = 0.0
        self.is_lost = False
        self._done = self._evaluated = 0
        self.losses: list[Tensor] = []
        self.evaluations: list[Evaluation] = []
        self.rounds: list[Round] = []
        self._aloft = 0.0  # when the line has sent what overlaps with training
        self._arrivals: dict[int, float] = {}  # of what was sent after a step
        self._landed = 0.0
        self.members = _Members(group, task, self.clock)
        with self.members.group.for_free():
            self.outer = OuterLoop(
                self.model,
                task.recipe,
                membership=self.members,
                inner=self._optimizer,
                clock=lambda: self.clock.now,
            )
        self.outer.listeners.append(self._note)

    def play(self) -> _SimulatedReplica:
        """Train to the end, or until this replica is lost; return itself."""
        task = self._task
        while self._done < task.steps and self.clock.now < task.seconds:
            if self._done >= task.lost.get(self._rank, math.inf):
                task.gone.add(self._rank)
                self.members.group.leave(f"lost after step {self._done}")
                self.is_lost = True
                return self
            self._evaluate_if_due()
            self._step()
            self._show(self._done)
        self._close()
        self._judge_if_first()
        return self

    def _step(self) -> None:
        task = self._task
        batch = next(self._batches)
        loss = task.loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.clock.now += task.step_seconds[self._rank] + task.delays.get((self._rank, self._done + 1), 0.0)
        before = self.clock.now
        self.outer.average_gradients()
        self.waited += self.clock.now - before
        self.losses.append(loss.detach().reshape(()))
        if task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), task.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        self._done += 1
        self.outer.count(items=task.items(batch) if task.items else 0)
        self._sync()

    def _sync(self) -> None:
        """Do what is due. An overlapped transfer takes the line's time, and the replica's where it is applied.

        A recipe with a delay never waits for what it launches; its group, which can't know that, moves the clock on.
        """
        began = self._landed = self.clock.now
        self.clock.now = taken_up = max(began, self._aloft)
        self.outer.sync_if_due()
        if self._task.recipe.schedule.delay:
            if self.clock.now > taken_up:
                self._arrivals[self._done] = self._aloft = self.clock.now
            self.clock.now = self._landed
        self.waited += self.clock.now - began

    def _close(self) -> None:
        began = self.clock.now
        self.clock.now = max(began, self._aloft)
        self.outer.close()
        self.waited += self.clock.now - began

    def _note(self, this: Round) -> None:
        self.rounds.append(this)
        self._landed = max(self._landed, self._arrivals.pop(this.step, 0.0))

    def _evaluate_if_due(self) -> None:
        every = self._task.evaluate_every
        if self._task.evaluate is None or every is None or self._done % every or self._evaluated == self._done:
            return
        now = self.clock.now
        with self.members.group.for_free(), self.outer.synced():
            self._judge_if_first()
        self.clock.now = now
        self._evaluated = self._done

    def _judge_if_first(self) -> None:
        if self._task.evaluate is None or self.members.group.rank > 0:
            return
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value = float(self._task.evaluate(self.model))
        self.model.train()
        self.evaluations.append(Evaluation(self._done, self.clock.now, self.outer.stats().bytes_sent, value))


class _Members(FixedMembership):
    """The replicas that are still there: a membership that gets smaller."""

    def __init__(self, group: SimGroup, task: SimulateArguments, clock: VirtualClock) -> None:
        super().__init__(group, SoloGroup())
        self.failures: list[str] = []
        self._task, self._clock = task, clock
        self._number, self.is_fixed = 0, not task.lost
        self._meet(group)

    def _meet(self, group: SimGroup) -> None:
        self._plain, self.group = group, TimedGroup(group, self._task.network, self._clock)

    def enter(self, needs: Needs) -> Generation:
        if self._generation is None:
            with self.group.for_free():
                self._generation = open_generation(self._number, self.group.members, self.group, self.island, needs)
        return self._generation

    def lost(self, failure: RankFailure) -> None:
        """Wait for those that are left; raise the failure if more is wrong than that a replica was lost on purpose."""
        before = set(self._plain.members)
        self._meet(self._plain.regroup())
        missing = before - set(self._plain.members)
        if not missing or not missing <= self._task.gone:
            raise failure
        self.failures.append(str(failure))
        self._number, self._generation = self._number + 1, None


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Go through `batches` again and again; raise ConfigError if there are none, as in an iterator's second turn."""
    while True:
        if not isinstance(batches, Iterable):
            raise wrong_type("make_data: what it returned", batches, "batches, such as a list or a DataLoader")
        turn = iter(batches)
        try:
            first = next(turn)
        except StopIteration:
            raise ConfigError(
                "make_data returned no batches, or an iterator that ended before the training: return something that "
                "can be iterated over again, such as a list or a DataLoader, or an infinite iterator."
            ) from None
        yield from chain([first], turn)
