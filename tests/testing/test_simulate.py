# SPDX-License-Identifier: Apache-2.0
"""simulate: the same bits each time, real bytes, seconds of a virtual clock, and replicas that are slow or lost."""

import pytest
import torch
from torch import nn

from farflung import outer
from farflung.base.errors import ConfigError
from farflung.cost.model import Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.testing.simulate import simulate
from farflung.votes.ballot import BALLOT_BYTES
from tests.recipes import made

WIDTH = 8


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))


def batches(rank):
    """Endless draws of one task, other ones for each replica."""
    while True:
        inputs = torch.randn(16, WIDTH)
        yield inputs, inputs.sum(dim=1, keepdim=True).sin()


def loss(net, batch):
    inputs, targets = batch
    return (net(inputs) - targets).square().mean()


def evaluate(net):
    inputs = torch.linspace(-1, 1, 64).view(-1, 1).repeat(1, WIDTH)
    return loss(net, (inputs, inputs.sum(dim=1, keepdim=True).sin())).item()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def run(recipe, replicas=2, steps=8, **settings):
    settings = {"loss": loss, "make_optimizer": sgd, "evaluate": evaluate} | settings
    return simulate(model, batches, recipe, replicas=replicas, steps=steps, **settings)


def weights(simulation):
    return torch.cat([p.detach().flatten() for p in simulation.model.parameters()])


@pytest.mark.long
def test_sixty_four_replicas_learn_together():
    found = run(outer.diloco(4, lr=0.7, momentum=0.5), replicas=64, steps=24, evaluate_every=12)
    assert len(found.losses) == 64
    assert all(len(losses) == 24 for losses in found.losses)
    assert sum(found.curve[-4:]) < 0.8 * sum(found.curve[:4])
    assert [e.step for e in found.evaluations] == [12, 24]
    assert found.value == found.evaluations[-1].value
    assert len(found.rounds) == found.stats[0].rounds >= 6


NAMES = ("local_sgd", "streaming_diloco", "eager_diloco", "sparse_loco", "gossip", "noloco", "edit")
RECIPES = {name: made(name, every=4) for name in NAMES}
RECIPES |= {"radial": made("diloco radial", every=4)}
RECIPES |= {"gradients": None, "hierarchical": outer.hierarchical({2: 2, 4: None})}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_arguments_give_the_same_bits_whatever_else_is_asked_for(name):
    settings = {"replicas": 4, "steps": 6, "bandwidth_bps": 1e6}
    before = torch.get_rng_state()
    once, again = (run(RECIPES[name], **settings) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)  # the caller's draws are its own
    assert (once.losses, once.evaluations, once.seconds) == (again.losses, again.evaluations, again.seconds)
    assert torch.equal(weights(once), weights(again))
    watched = run(RECIPES[name], **settings, evaluate_every=3, step_seconds=(1, 2, 3, 1))
    assert watched.losses == once.losses
    assert run(RECIPES[name], **settings, seed=1).losses != once.losses
    assert len(set(once.losses)) == 4  # each has data and dropout of its own


def test_one_step_of_local_sgd_is_averaged_gradients():
    every_step, gradients = run(outer.local_sgd(1), replicas=4), run(None, replicas=4)
    assert torch.allclose(weights(every_step), weights(gradients), atol=1e-6)
    assert gradients.bytes_sent == gradients.bytes_received >= 8 * 2 * 3 / 4 * 4 * weights(gradients).numel()


def test_fast_replicas_wait_for_slow_ones():
    found = run(outer.local_sgd(4), replicas=3, step_seconds=(1, 3, 2))
    assert found.seconds == 24
    assert found.waited == (16, 0, 8)
    hiccup = run(outer.local_sgd(4), replicas=3, delays={(1, 3): 10, (1, 6): 0.5})
    assert hiccup.seconds == 18.5
    assert hiccup.waited == (10.5, 0, 10.5)


def test_by_the_clock_slow_replicas_do_fewer_steps_and_weigh_less():
    found = run(outer.Recipe(outer.ByTime(12.0)), replicas=2, steps=1000, seconds=48, step_seconds=(1, 3))
    assert [len(losses) for losses in found.losses] == [48, 16]
    assert found.seconds == 48
    assert found.waited == (0, 0)
    assert [each.weights for each in found.rounds[:4]] == [(0.75, 0.25)] * 4


def test_by_the_clock_the_wait_for_slower_replicas_does_not_grow():
    found = run(outer.Recipe(outer.ByTime(10.0)), replicas=2, steps=1000, seconds=240, step_seconds=(0.9, 3.0))
    assert {each.weights for each in found.rounds[:-1]} == {(0.75, 0.25)}  # 12 steps in 10.8 s, 4 steps in 12 s
    assert found.waited[0] <= 1.2 * len(found.rounds) + 0.9


RUN = Workload(parameters=10_000, layers=4, step_s=1.0, replicas=4, bandwidth_bps=1e5, latency_s=0.01)


class Wide(nn.Module):
    """Four layers and 10,000 parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(50, 50, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


COSTED = {name: made(name, every=4) for name in NAMES if name != "streaming_diloco"}
COSTED |= {"sparse_loco": outer.sparse_loco(4)}  # with the codec that it has by default
COSTED |= {"hierarchical": RECIPES["hierarchical"], "diloco": outer.diloco(4, momentum=0.5)}
COSTED |= {"bf16": outer.local_sgd(4, codec=outer.Cast("bf16")), "streaming_diloco": outer.streaming_diloco(8, 2)}
COSTED |= {"streaming in fp32": outer.streaming_diloco(8, 2, codec=outer.Identity())}


@pytest.mark.long
@pytest.mark.parametrize("name", COSTED)
def test_seconds_are_those_of_the_cost_model(name):
    recipe, line = COSTED[name], {"bandwidth_bps": RUN.bandwidth_bps, "latency_s": RUN.latency_s}

    def steps(number):
        data = {rank: [torch.full((2, 50), rank + 1.0)] for rank in range(RUN.replicas)}
        found = simulate(Wide, data.get, recipe, replicas=RUN.replicas, steps=number, **line)
        assert found.waited == (pytest.approx(found.seconds - number),) * RUN.replicas
        return found

    short, long = steps(16), steps(32)  # what is sent at the end is the same in both
    forecast = 16 * cost_of(RUN, method_of(recipe, RUN.parameters, name="any")).seconds_per_step
    # What they weigh, at most.
    votes = (len(long.rounds) - len(short.rounds)) * 8 * 3 * (BALLOT_BYTES + 4) / RUN.bandwidth_bps
    assert forecast <= (long.seconds - short.seconds) * (1 + 1e-9)
    assert long.seconds - short.seconds <= (forecast + votes) * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"hierarchical"}))
def test_the_others_go_on_without_a_lost_replica(name):
    found = run(RECIPES[name], replicas=4, steps=24, lost={1: 6, 3: 15}, evaluate_every=8)
    assert [len(losses) for losses in found.losses] == [24, 6, 24, 15]
    assert "rank 1 left (lost after step 6)" in found.failures[0]
    assert "rank 3" in found.failures[1]
    assert [e.step for e in found.evaluations] == [8, 16, 24]
    assert {len(each.weights) for each in found.rounds} <= {0, 2, 3, 4}
    assert {len(each.weights) for each in found.rounds[-1:]} <= {2 if name != "gradients" else 0}
    assert found.value < 1.1 * found.evaluations[0].value
    assert torch.isfinite(weights(found)).all()


def test_groups_of_neighbours_can_not_lose_one():
    with pytest.raises(ConfigError, match="hierarchical averages blocks of neighbouring ranks"):
        run(RECIPES["hierarchical"], replicas=4, lost={1: 3})


def test_no_step_of_the_others_is_lost_with_a_replica():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.zeros(1))

        def forward(self, step):
            return -self.x.sum()

    def count(**lost):
        options = {"replicas": 3, "steps": 12, "make_optimizer": lambda p: torch.optim.SGD(p, 1.0), **lost}
        return simulate(Counter, lambda rank: [0], outer.local_sgd(4), **options).model.x.item()

    assert count() == count(lost={2: 5}) == count(lost={0: 4, 1: 4}) == 12


def test_without_the_first_replica_the_next_one_tells():
    found = run(outer.diloco(2, momentum=0.5), replicas=3, lost={0: 3}, evaluate_every=2)
    assert found.first == 1
    assert [e.step for e in found.evaluations] == [2, 4, 6, 8]
    everyone = run(outer.local_sgd(2), replicas=2, lost={0: 3, 1: 5})
    assert (everyone.first, everyone.evaluations) == (1, ())
    assert [len(losses) for losses in everyone.losses] == [3, 5]


def test_an_error_of_a_replica_is_raised_and_no_loss():
    def wrong(net, batch):
        if len(seen := torch.rand(1)) and seen.item() < 0.1:
            raise ValueError("wrong shapes")
        return loss(net, batch)

    with pytest.raises(ValueError, match="wrong shapes"):
        run(outer.local_sgd(2), replicas=4, steps=200, loss=wrong, lost={0: 100})


def test_data_that_end_are_gone_through_again_or_refused_and_a_model_may_return_its_loss():
    data = [{"x": torch.ones(1, 50)}, torch.ones(1, 50)]
    found = simulate(Wide, lambda rank: data, outer.post_local_sgd(2, 2), replicas=2, steps=5)
    assert len(found.curve) == 5
    found = simulate(lambda: nn.Linear(4, 1), lambda rank: [torch.ones(4)], outer.local_sgd(2), replicas=2, steps=5)
    assert len(found.curve) == 5
    with pytest.raises(ConfigError, match="returned no batches"):
        simulate(Wide, lambda rank: iter([torch.ones(1, 50)]), outer.local_sgd(2), replicas=2, steps=5)
