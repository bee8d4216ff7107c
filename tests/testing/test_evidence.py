# SPDX-License-Identifier: Apache-2.0
"""The runner of benchmarks/evidence, which trains all replicas as rows of one tensor, does what ordinary loops do."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.methods.schedule import Warmup
from farflung.testing.simulate import simulate
from tests.recipes import made

SHAPE = Shape(depth=2, width=8, heads=2, context=16)
STEPS = 40
SETTINGS = {
    "diloco": {"every": 6, "codec": "int8"},
    "local_sgd": {"every": 6},
    "noloco": {"every": 6},
    "streaming_diloco": {"every": 6, "fragments": 2, "delay": 2, "codec": "none"},
}
RECIPES = {"DDP": None} | {name: made(name, **options) for name, options in SETTINGS.items()}


@pytest.fixture
def runner(benchmark):
    return benchmark("evidence.runner")


@pytest.fixture
def inner(benchmark):
    return benchmark("evidence.inner")


@pytest.fixture
def trained(runner):
    """Trains runs of a method and its settings, all at once; returns their lanes."""

    def train(*runs, steps=STEPS, **options):
        made = [runner.Run("34k", name, 1e-2, 3, steps, json.dumps(said), replicas=2, **options) for name, said in runs]
        return runner.Stack(made, SHAPE).train()

    return train


@pytest.mark.long
def test_rows_of_one_tensor_end_with_the_weights_of_ordinary_replicas(runner, inner, trained, monkeypatch):
    monkeypatch.setattr(inner, "EPS", 1e-4)  # Adam makes large steps of gradients that are hardly more than rounding
    for lane in trained(*((name, SETTINGS.get(name, {})) for name in RECIPES), readouts=True):
        ended = simulated(runner, inner, lane.run, RECIPES[lane.run.method], adamw)
        most = 2e-3 if "int8" in lane.run.settings else 1e-5  # a value in between may be rounded up or down
        torch.testing.assert_close(lane.weights[0], runner.flat(ended.model), atol=most, rtol=0)
        torch.testing.assert_close(lane.weights[0], lane.weights[1], atol=0, rtol=0)
        if lane.run.method != "DDP":
            assert lane.rounds == ended.stats[0].rounds
            gradients = 4 * lane.weights.shape[1] * lane.run.split  # of the first steps; the runner leaves them out
            assert lane.bytes_sent == ended.bytes_sent - gradients


def test_replicas_that_make_fewer_steps_weigh_less(trained):
    alone, averaged = trained(("alone", {}), ("local_sgd", {"every": 4}), steps=4, common=0, strides="[1, 2]")
    alone, averaged = alone.weights, averaged.weights
    for row in averaged:
        torch.testing.assert_close(row, (4 * alone[0] + 2 * alone[1]) / 6, atol=1e-6, rtol=0)


def test_diloco_with_a_mean_of_full_rank_is_diloco(runner, trained):
    low_rank = [(runner.LOW_RANK, {"every": 5, "rank": rank}) for rank in (100, 1)]
    diloco, full, low = trained(("diloco", {"every": 5}), *low_rank)
    torch.testing.assert_close(full.weights, diloco.weights, atol=1e-5, rtol=0)
    assert (full.rounds, full.bytes_sent) == (diloco.rounds, diloco.bytes_sent)
    assert (low.weights - diloco.weights).abs().max() > 1e-3
    assert low.bytes_sent < 0.7 * diloco.bytes_sent


def test_a_run_is_judged_by_its_readouts(runner, trained):
    """Their last round is the one of the flush."""
    ddp, diloco, capped = trained(
        ("DDP", {}), ("diloco", {"every": 6}), ("diloco", {"every": 6, "largest": 0.1}), readouts=True
    )
    found = {name: rows[0] for name, rows in diloco.readouts.weights.items()}
    torch.testing.assert_close(diloco.weights[0], found["slow"], atol=0, rtol=0)
    assert (found["slow"] - found["look_ahead"]).norm() > (found["slow"] - found["replicas"]).norm() > 0
    torch.testing.assert_close(found["slow, mean of 5"], found["slow"])  # of the few rounds here a tenth is one
    assert ddp.readouts.weights.keys() == {"last", *(f"last, mean of {window}" for window in (5, 10, 20))}
    ahead = [(lane.readouts.weights["look_ahead"] - lane.readouts.weights["slow"]).norm() for lane in (capped, diloco)]
    assert ahead[0] < ahead[1]


def test_replicas_with_a_part_of_the_text_each_draw_from_no_other(runner):
    run = runner.Run("34k", "alone", 1e-2, 3, 100, batch=8, parts=True)
    starts, length = runner.draws(run, SHAPE.context), len(runner.texts()[0]) // 4
    for rank, mine in enumerate(starts):
        assert rank * length <= mine.min() < mine.max() < (rank + 1) * length - SHAPE.context
        assert mine.max() - mine.min() > 0.9 * length


@pytest.mark.parametrize("shape", [(12, 4), (4, 4), (4, 16)])
def test_muon_on_rows_is_torchs_muon_on_each(inner, shape):
    weights = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(row.clone()) for row in weights]
    theirs = torch.optim.Muon(parameters, weight_decay=inner.WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    ours = inner.Muon(weights)
    for step in range(6):
        theirs.param_groups[0]["lr"] = lr = 0.02 / (1 + step)
        gradients = torch.randn(1 if step < 3 else 2, *shape, generator=torch.Generator().manual_seed(step))
        for parameter, gradient in zip(parameters, gradients.expand(2, *shape), strict=True):
            parameter.grad = gradient.clone()
        theirs.step()
        ours.step(gradients.flatten(1), lr)
        torch.testing.assert_close(weights, torch.stack([one.detach() for one in parameters]), atol=2e-4, rtol=0)


def adamw(inner, run, parameters):
    return torch.optim.AdamW(parameters, lr=run.lr, betas=inner.BETAS, eps=inner.EPS, weight_decay=inner.WEIGHT_DECAY)


def simulated(runner, inner, run, recipe, make_optimizer):
    if recipe is not None:
        recipe = replace(recipe, schedule=Warmup(run.split, recipe.schedule))
    starts, span = runner.draws(run, SHAPE.context), torch.arange(SHAPE.context + 1)
    return simulate(
        lambda: GPT(SHAPE),
        lambda rank: [runner.texts()[0][start[:, None] + span] for start in starts[rank]],
        recipe,
        replicas=2,
        steps=STEPS,
        make_optimizer=partial(make_optimizer, inner, run),
        make_scheduler=lambda optimizer: LambdaLR(optimizer, run.factor),
        loss=lambda model, batch: runner.loss_of(model(batch[:, :-1]), batch),
        max_norm=runner.MAX_NORM,
        seed=run.seed,
    )
