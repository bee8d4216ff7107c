# SPDX-License-Identifier: Apache-2.0
"""method_of: the cost model says of each recipe what a run of it counts; what a forecast compares is what it makes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from farflung import Accelerator, outer, utils
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import launched_outer, rank_variables
from farflung.config.resolve import resolve
from farflung.cost.methods import Rows
from farflung.cost.model import Method, Workload, cost_of
from farflung.cost.recipes import method_of
from farflung.launch.options import SettingsCommand, given, launch_options
from farflung.methods.arguments import recipe_of
from farflung.state import AcceleratorState
from farflung.testing.sim import run_replicas
from tests.recipes import RECIPES as PLAIN, made

ROUNDS, WIDTH = 3, 64
RECIPES = PLAIN | {
    "post_local_sgd": made("post_local_sgd", warmup=0),
    "quadratic": made("quadratic", every=2, alpha=1e-6),  # so that all of its rounds are short
    "bf16": outer.local_sgd(2, codec=outer.Cast("bf16")),
    "int8": outer.diloco(2, codec=outer.Int8()),
    "in two hops": replace(outer.diloco(2, codec=outer.Int8()), aggregator=outer.ReduceScatterMean()),
    "trimmed": replace(outer.diloco(2), aggregator=outer.TrimmedMean()),
    "gathered": replace(outer.diloco(2), aggregator=outer.GatherMean()),
    "noloco without pull": outer.noloco(2, pull=0),
    "Adam averaged": replace(outer.local_sgd(2), inner=outer.AverageState()),
    "DES-LOC": replace(outer.local_sgd(2), inner=outer.AverageState({"exp_avg": 1, "exp_avg_sq": 3})),
}


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def rounds(group, recipe, steps):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with outer.OuterLoop(net, recipe, group, inner=optimizer) as loop:
        for _ in range(steps):
            net(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            loop.step()
        return loop.stats()


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_that_a_run_counts(name):
    recipe = RECIPES[name]
    parameters = sum(parameter.numel() for parameter in model().parameters())
    method = method_of(recipe, parameters, name=name)
    found = run_replicas(rounds, 4, recipe, ROUNDS * method.every + method.delay)[0]
    cost = cost_of(Workload(parameters, 4, 1.0, replicas=4, bandwidth_bps=1e9), method)
    assert ROUNDS * cost.bytes_sent_per_round == pytest.approx(found.bytes_sent, rel=0.005)
    assert ROUNDS * cost.bytes_sent_per_round == pytest.approx(found.bytes_received, rel=0.005)


def test_what_is_kept_follows_from_the_recipe():
    def kept(recipe):
        row = method_of(recipe, 1000, name="any", every=8)
        return row.anchor, row.outer_state, row.feedback, row.voted

    assert kept(outer.local_sgd(8)) == (False, 0, False, False)
    assert kept(outer.diloco(8)) == (True, 1, False, False)
    assert kept(outer.sparse_loco(8)) == (True, 0, True, True)
    assert kept(outer.eager_diloco(8)) == (True, 1, True, True)
    assert kept(outer.diloco(8, radial=True)) == (True, 1, False, True)
    assert kept(outer.edit(8)) == (True, 1, False, True)
    assert kept(replace(outer.diloco(8), optimizer=lambda p: torch.optim.Adam(p, lr=0.1))) == (True, 2, False, False)


def test_large_models_are_cut_into_buckets_and_small_ones_pay_for_whole_blocks():
    def bits(parameters, **settings):
        return method_of(outer.diloco(8, codec=outer.Int8()), parameters, name="any", **settings).bits

    assert bits(256) == 8 + 32 / 256
    assert bits(1) == 8 + 32
    assert bits(512, bucket_bytes=4 * 100) == 8 + 32 * 6 / 512


def test_a_schedule_by_time_needs_to_be_told_its_steps():
    recipe = outer.Recipe(outer.ByTime(60.0))
    with pytest.raises(ConfigError, match="how many steps a round has"):
        method_of(recipe, 1000, name="by time")
    assert method_of(recipe, 1000, name="by time", every=50).every == 50
    plain = Method("plain", every=8, confirmed=True, bucket_bytes=4 * 2**20)
    assert method_of(outer.local_sgd(8), 1000, name="plain") == plain


@pytest.mark.parametrize("bucket_bytes", [None, 2**20])
@pytest.mark.parametrize(("parameters", "layers"), [(366_000, 4), (124_000_000, 12), (1_100_000_000, 1000)])
def test_the_rows_of_a_forecast_are_their_recipes_and_their_flags_ask_for_them(parameters, layers, bucket_bytes):
    """They are written in plain numbers so that a forecast needs no torch; here they are held to the recipes."""
    run = Workload(parameters, layers, step_s=0.1, replicas=4, bandwidth_bps=1e9)
    for row in Rows(run, 20_000, bucket_bytes).chosen:
        if row.outer is not None:
            recipe = recipe_of(row.outer, local_size=1)
            assert recipe.bucket_bytes == bucket_bytes
            assert row.method == method_of(recipe, parameters, name=row.method.name, bucket_bytes=bucket_bytes)
        command = SettingsCommand("launch", params=launch_options())
        settings = resolve(given(command.make_context("launch", row.flags.split()).params)).settings
        with environ.patched(rank_variables(settings)):
            assert launched_outer() == row.outer


def test_what_a_row_writes_into_the_script_is_an_accelerator():
    names = {"Accelerator": Accelerator, **vars(utils)}
    run = Workload(124_000_000, 12, step_s=0.1, replicas=4, bandwidth_bps=1e9)
    for row, bucket in [(row, size) for size in (None, 2**20) for row in Rows(run, 20_000, size).chosen]:
        if row.outer is None and row.script:
            handler = eval(row.script.replace("Accelerator(", "Accelerator(cpu=True, "), names).ddp_handler
            assert handler.bucket_cap_mb == (1 if bucket else 25)
            assert (handler.comm_hook == "bf16") is ("bf16" in row.method.name)
            AcceleratorState._reset_state(reset_partial_state=True)
        elif row.outer is None:
            assert row.method.name == "DDP"
