# SPDX-License-Identifier: Apache-2.0
"""Nets that train in turns: what any rank trains is in the next round, and what rests costs nothing."""

import cProfile
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch
from farflung.outer import (
    OuterLoop,
    Recipe,
    Streaming,
    by_bytes,
    diloco,
    eager_diloco,
    local_sgd,
    noloco,
    streaming_diloco,
)
from farflung.testing.sim import run_replicas
from tests.outer.replicas import on_replicas, same, values
from tests.recipes import RECIPES

LATE = streaming_diloco(4, 2, delay=3)  # the next fragment is sent before one has landed
NUMEL = {"first": 4 * 6 + 6, "second": 6 * 3 + 3}


class Pair(nn.Module):
    """Two nets that train each other, as a generator and a critic do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x))


class Turns:
    """Trains the nets of a pair in turns; those that rest are frozen by `kind`."""

    def __init__(self, rank, kind, momentum=0.5):
        self.model, self.rank, self.kind, self.step = Pair(), rank, kind, 0
        nets = self.nets = {"first": self.model.first, "second": self.model.second}
        self.optimizers = {k: torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum) for k, net in nets.items()}
        if kind == "flags":
            self.model.first.requires_grad_(False)

    def train(self, *names):
        """Make a step of each net named, the one after the other, on this rank's own data."""
        for name in names:
            self.step += 1
            for other, net in self.nets.items():
                if self.kind == "flags":
                    net.requires_grad_(other == name)
                net.zero_grad()
            generator = torch.Generator().manual_seed(100 * self.step + self.rank)
            self.model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            self.optimizers[name].step()


BOTH, FIRST, SECOND = ("first", "second"), ("first",), ("second",)
# The nets that a rank trains in a step.
PLANS = {
    "each_step": lambda step, rank: BOTH,
    "long_turns": lambda step, rank: FIRST if step // 7 % 2 else SECOND,
    "out_of_step": lambda step, rank: BOTH if (step + rank) % 3 else SECOND,
    "opposite": lambda step, rank: FIRST if (step // 4 + rank) % 2 else SECOND,
    "one_rank_alone": lambda step, rank: BOTH if rank == 1 and step > 4 else SECOND,
    "for_ever": lambda step, rank: SECOND if step < 6 else FIRST,
}


def in_turns(group, recipe, plan, kind, attaches=False):
    turns = Turns(group.rank, kind)
    with OuterLoop(turns.model, recipe, group, inner=turns.optimizers["second"]) as outer:
        if attaches:
            outer.attach(turns.optimizers["second"], turns.optimizers["first"])
        for step in range(20):
            turns.train(*plan(step, group.rank))
            if not attaches:
                outer.step()
    return values(turns.model), outer.stats().dropped_rounds


@pytest.mark.parametrize("plan", ["long_turns", "out_of_step", "opposite"])
@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"post_local_sgd"}))  # which begins with the same gradients
def test_replicas_end_alike_whoever_trains_which_net_when(name, plan):
    recipe, kind = RECIPES[name], "flags"
    if recipe.schedule.fragments > 1:
        recipe = replace(recipe, fragments=by_bytes, schedule=replace(recipe.schedule, every=4, fragments=2))
        kind = "optimizers"  # a single net at the start is too little for two fragments
    ends, dropped = zip(*run_replicas(in_turns, 4, recipe, PLANS[plan], kind), strict=True)
    assert set(dropped) == {0}
    assert same(*ends)


def by_round(group, plan, kind, recipe):
    """For each round: this rank's weights before and after it, its steps of each net, and the bytes it sent."""
    turns, rounds, sent = Turns(group.rank, kind, momentum=0.0), [], 0
    outer = OuterLoop(turns.model, recipe, group)
    for step in range(24):
        turns.train(*plan(step, group.rank))
        outer.count()
        if step % 3 == 2:
            before = values(turns.model)
            outer.sync_if_due()
            rounds.append((before, values(turns.model), outer.stats().bytes_sent - sent))
            sent = outer.stats().bytes_sent
    held = {name for fragment in outer._rounds.replica.fragments for name in fragment.comparison.names}
    outer.close()
    return rounds, held


@pytest.mark.parametrize("kind", ["flags", "optimizers"])
@pytest.mark.parametrize("plan", PLANS)
def test_each_round_averages_all_that_any_rank_has_trained(plan, kind):
    outcomes = [rounds for rounds, _ in run_replicas(by_round, 2, PLANS[plan], kind, local_sgd(3))]
    for (mine, after, _), (others, _, _) in zip(*outcomes, strict=True):
        for name in after:
            torch.testing.assert_close(after[name], (mine[name] + others[name]) / 2, rtol=1e-6, atol=1e-7)


def nets_of(plan, number):
    """The nets that two ranks train in a round."""
    steps = itertools.product(range(3 * number, 3 * number + 3), range(2))
    return {name for step, rank in steps for name in plan(step, rank)}


@pytest.mark.parametrize("recipe", [local_sgd(3), diloco(3)], ids=["local_sgd", "diloco"])
@pytest.mark.parametrize("kind", ["flags", "optimizers"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_rests_for_a_whole_round_costs_neither_bytes_nor_memory_after_it(plan, kind, recipe):
    outcomes = run_replicas(by_round, 2, PLANS[plan], kind, recipe)
    exchanged = {"second"} if kind == "flags" else {"first", "second"}  # trained alone at the start
    for number, (_, _, sent) in enumerate(outcomes[0][0]):
        trained = nets_of(PLANS[plan], number)
        values_sent = sum(NUMEL[name] for name in exchanged | trained)
        assert sent == 4 * values_sent, number  # of two ranks each sends what it has once
        exchanged = trained
    for _, held in outcomes:
        assert {name.split(".")[0] for name in held} == exchanged


def lent(group, recipe):
    """Return the weights of an evaluation in the middle of each round."""
    turns, seen = Turns(group.rank, "flags", momentum=0.0), []
    with OuterLoop(turns.model, recipe, group) as outer:
        for step in range(12):
            turns.train(*PLANS["for_ever"](step, group.rank))
            outer.step()
            before = values(turns.model)
            with outer.synced():
                seen.append(values(turns.model))
            assert same(before, values(turns.model))
    return seen


@pytest.mark.parametrize(
    "recipe", [diloco(4), local_sgd(4), noloco(4), LATE], ids=["anchor", "none", "one per replica", "late"]
)
def test_an_evaluation_has_equal_weights_also_of_a_net_that_has_just_begun_to_train(recipe):
    assert all(map(same, *run_replicas(lent, 2, recipe)))


def left(group):
    """Return a net's weights after the last round that it was trained for, and at the end."""
    turns, after = Turns(group.rank, "flags", momentum=0.0), {}
    with OuterLoop(turns.model, diloco(3, momentum=0.9), group) as outer:
        for step in range(12):
            turns.train(*PLANS["for_ever"](step, group.rank))
            outer.step()
            if step == 5:
                after = values(turns.model.second)
    return after, values(turns.model.second)


@pytest.mark.law("readout-is-slow-weights")
def test_a_net_that_rests_does_not_go_on_by_its_momentum():
    """One more round shows that nobody trains it: the slow weights of that round are the anchor before it."""
    for after, end in run_replicas(left, 2):
        torch.testing.assert_close(end, after)


@pytest.mark.parametrize("plan", ["each_step", "long_turns"])
def test_attached_optimizers_may_take_turns(plan):
    (first, _), (second, _) = run_replicas(in_turns, 2, diloco(3), PLANS[plan], "flags", True)
    assert same(first, second)


def resumed(group, recipe, stop):
    """Train; after `stop` steps another loop continues from the state."""
    turns = Turns(group.rank, "flags")
    outer = OuterLoop(turns.model, recipe, group)
    for step in range(20):
        if step == stop:
            state, kept = outer.state_dict(), [one.state_dict() for one in turns.optimizers.values()]
            outer.detach()
            turns = Turns(group.rank, "flags")
            turns.step = step
            for one, saved in zip(turns.optimizers.values(), kept, strict=True):
                one.load_state_dict(saved)
            outer = OuterLoop(turns.model, recipe, group)
            outer.load_state_dict(state)
        turns.train(*PLANS["long_turns"](step, group.rank))
        outer.step()
    outer.close()
    return values(turns.model)


@pytest.mark.parametrize("at", [5, 8, 9, 13])
@pytest.mark.parametrize(
    "recipe", [local_sgd(3), diloco(3), eager_diloco(3), LATE], ids=lambda one: type(one.schedule).__name__
)
def test_a_run_resumed_in_any_turn_is_like_one_that_was_not_stopped(recipe, at):
    whole, again = (run_replicas(resumed, 2, recipe, stop) for stop in (None, at))
    assert all(map(same, whole, again))


def begun_apart(group):
    """Rank 1 builds its loop in the other net's turn."""
    turns = Turns(group.rank, "flags")
    if group.rank == 1:
        turns.model.first.requires_grad_(True)
        turns.model.second.requires_grad_(False)
    with OuterLoop(turns.model, diloco(2), group) as outer:
        for step in range(4):
            turns.train(*PLANS["opposite"](step, group.rank))
            outer.step()
    return values(turns.model)


def test_ranks_may_begin_in_different_turns():
    assert same(*run_replicas(begun_apart, 2))


def spoiled(group, recipe, kind, plan, at):
    """After a step, a value of the first net is no number on one rank, and is then put right."""
    turns = Turns(group.rank, kind, momentum=0.0)
    outer = OuterLoop(turns.model, recipe, group)
    for step, names in enumerate(plan):
        turns.train(*names)
        if step == at:
            before = values(turns.model)
            turns.model.first.bias.data[0] += float("nan") if group.rank else 0.0
        outer.step()
        assert outer.stats().dropped_rounds == (step >= at)
        if step == at:
            assert group.rank or same(before, values(turns.model))
            turns.model.load_state_dict(before)
    outer.detach()
    return before["first.bias"], turns.model.first.bias.detach()


@pytest.mark.law("whole-round-or-none")
@pytest.mark.filterwarnings("ignore:.*a round was dropped")
@pytest.mark.parametrize(
    ("recipe", "kind", "plan", "at"),
    [
        (local_sgd(1), "flags", [FIRST, SECOND], 0),
        (diloco(1, lr=1.0, momentum=0.0), "flags", [FIRST, SECOND], 0),
        (Recipe(Streaming(2, 2), fragments=by_bytes), "optimizers", [BOTH, SECOND, SECOND, SECOND], 1),
    ],
    ids=["averaged", "anchored", "in its fragment"],
)
def test_what_has_trained_before_a_round_that_is_dropped_is_in_the_next_one_though_it_rests(recipe, kind, plan, at):
    (mine, after), (others, same_after) = run_replicas(spoiled, 2, recipe, kind, plan, at)
    assert torch.equal(after, same_after)
    torch.testing.assert_close(after, (mine + others) / 2)


@on_replicas(2)
def test_what_only_some_ranks_have_is_named_when_they_train_it(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    if group.rank == 1:
        model[1].weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    outer = OuterLoop(model, local_sgd(1), group)
    model[1].requires_grad_(True)
    why = (
        r"train different models: not all of them have 1\.weight float32 \[2, 2\], which is trained on others\. Change"
    )
    with pytest.raises(CollectiveMismatch, match=why):
        outer.step()
    outer.detach()


class Still(torch.optim.SGD):
    def step(self, closure=None):
        pass


def calls_of_a_step(num_layers):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    model(torch.ones(1, 2)).sum().backward()
    optimizer, calls = Still(model.parameters(), lr=0.1), []
    outer = OuterLoop(model, local_sgd(100)).attach(optimizer)
    for _ in range(4):
        profile = cProfile.Profile()
        profile.runcall(optimizer.step)
        calls.append(sum(row.callcount for row in profile.getstats()))
    outer.detach()
    return min(calls)  # the first steps import and notice


def test_a_step_between_rounds_costs_as_many_calls_for_any_number_of_parameters():
    assert calls_of_a_step(2) == calls_of_a_step(50)
