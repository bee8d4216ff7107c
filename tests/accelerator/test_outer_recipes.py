# SPDX-License-Identifier: Apache-2.0
"""`Accelerator(outer=...)` with every recipe, and from a checkpoint that was written in the middle of a round."""

import io
from contextlib import redirect_stderr
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator, OuterConfig
from farflung.config.outer import RECIPES
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.accelerator.test_outer_attached import (
    DILOCO,
    alike,
    one_after_another,
    one_epoch,
    one_step,
    prepared,
    weights,
)
from tests.recipes import OPTIONS


def all_recipes():
    states = {}
    for recipe in RECIPES:
        options = {name: value for name, value in OPTIONS[recipe].items() if name != "codec"}
        run = prepared(OuterConfig(recipe, **({"seconds": 0.01} if recipe == "edit" else options)))
        one_epoch(*run)
        states[recipe] = weights(*run[:2])
        run[0].free_memory()
        AcceleratorState._reset_state()
    return states


def test_every_recipe_ends_a_pass_with_equal_replicas():
    first, second = run_ranks(all_recipes, 2)
    for recipe in RECIPES:
        assert alike([first[recipe], second[recipe]]), recipe


def to_the_end(config, folder, part):
    """Train two passes: `whole`; or up to a `save` in the first one; or from its checkpoint on."""
    accelerator, model, optimizer, loader = prepared(config)
    if part == "load":
        accelerator.load_state(folder)
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            one_step(accelerator, model, optimizer, batch)
            if part == "save" and number == 6:
                accelerator.save_state(folder)
                return None
    return weights(accelerator, model), accelerator.outer_loops[0].stats().rounds


def test_a_run_goes_on_from_a_checkpoint_in_mid_round_and_ends_with_the_same_bits(tmp_path):
    configs = [
        DILOCO,
        OuterConfig("streaming_diloco", every=4, fragments=2, rounds=200),
        OuterConfig("post_local_sgd", warmup=4, every=3),
        OuterConfig("post_local_sgd", warmup=8, every=3),  # saved in its warm-up
    ]
    parts = []
    for part in ("whole", "save", "load"):
        cases = [(config, tmp_path / str(number), part) for number, config in enumerate(configs)]
        parts.append(run_ranks(one_after_another, 2, to_the_end, cases))
    whole, _, resumed = parts
    for number, config in enumerate(configs):
        states = [found[number][0] for found in (*whole, *resumed)]
        assert alike(states), config
        assert len({found[number][1] for found in (*whole, *resumed)}) == 1, config


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(12_000, 3))


def chosen_by_auto():
    """Train for as long as a trial lasts, and return what is said then: for data of known length, and for a stream."""
    lines = []
    for data in (torch.zeros(12_000, 3), Stream()):
        accelerator = Accelerator(cpu=True, outer="auto", gradient_accumulation_steps=2)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data))
        with redirect_stderr(io.StringIO()) as screen:
            for batch in islice(loader, 44):
                one_step(accelerator, model, optimizer, batch)
        lines.append(screen.getvalue())
        accelerator.free_memory()
        AcceleratorState._reset_state()
    return lines


def test_auto_plans_for_at_least_one_pass_over_the_data():
    whole, stream = run_ranks(chosen_by_auto, 2)[0]
    assert ", 3,000 steps of one pass over the data, as nobody says how many" in whole
    assert ", 2,000 steps, as nobody says how many" in stream
