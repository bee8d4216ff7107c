# SPDX-License-Identifier: Apache-2.0
"""The runner of benchmarks/evidence, which trains all replicas as rows of one tensor, does what ordinary loops do."""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.outer import Recipe, diloco, local_sgd, noloco, streaming_diloco
from farflung.outer.schedule import Warmup
from farflung.testing.simulate import simulate

SHAPE = Shape(depth=2, width=8, heads=2, context=16)
STEPS = 40
RECIPES: dict[str, Recipe | None] = {
    "DDP": None,
    "local_sgd": local_sgd(every=6),
    "diloco": diloco(every=6, codec="int8"),
    "streaming_diloco": streaming_diloco(every=6, fragments=2, delay=2, codec="none"),
    "noloco": noloco(every=6),
}
SETTINGS = {
    "diloco": {"every": 6, "codec": "int8"},
    "local_sgd": {"every": 6},
    "noloco": {"every": 6},
    "streaming_diloco": {"every": 6, "fragments": 2, "delay": 2, "codec": "none"},
}


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("evidence.runner")


def test_rows_of_one_tensor_end_with_the_weights_of_ordinary_replicas(runner, monkeypatch):
    monkeypatch.setattr(runner, "EPS", 1e-4)  # Adam makes large steps of gradients that are hardly more than rounding
    runs = [
        runner.Run("34k", name, 1e-2, seed=3, steps=STEPS, settings=json.dumps(SETTINGS.get(name, {})), replicas=2)
        for name in RECIPES
    ]
    for lane in runner.Stack(runs, SHAPE).train():
        ended = simulated(runner, lane.run, RECIPES[lane.run.method])
        most = 2e-3 if "int8" in lane.run.settings else 1e-5  # a value in between may be rounded up or down
        torch.testing.assert_close(lane.weights[0], runner.flat(ended.model), atol=most, rtol=0)
        torch.testing.assert_close(lane.weights[0], lane.weights[1], atol=0, rtol=0)
        if lane.run.method != "DDP":
            assert lane.rounds == ended.stats[0].rounds
            gradients = 4 * lane.weights.shape[1] * lane.run.split  # of the first steps; the runner leaves them out
            assert lane.bytes_sent == ended.bytes_sent - gradients


def simulated(runner, run, recipe):
    if recipe is not None:
        recipe = replace(recipe, schedule=Warmup(run.split, recipe.schedule))
    starts, span = runner.draws(run, SHAPE.context), torch.arange(SHAPE.context + 1)
    return simulate(
        lambda: GPT(SHAPE),
        lambda rank: [runner.texts()[0][start[:, None] + span] for start in starts[rank]],
        recipe,
        replicas=2,
        steps=STEPS,
        make_optimizer=partial(
            torch.optim.AdamW, lr=run.lr, betas=runner.BETAS, eps=runner.EPS, weight_decay=runner.WEIGHT_DECAY
        ),
        make_scheduler=lambda optimizer: LambdaLR(optimizer, run.factor),
        loss=lambda model, batch: runner.loss_of(model(batch[:, :-1]), batch),
        max_norm=runner.MAX_NORM,
        seed=run.seed,
    )
