# SPDX-License-Identifier: Apache-2.0
"""The outer loop where a replica is an island of several ranks: shards of it, or copies that DDP keeps in step."""

import copy
import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from farflung.base.errors import ConfigError, RankFailure, Unsupported
from farflung.comm.shards import local
from farflung.comm.torch_group import TorchGroup
from farflung.exchanged.replica import Replica
from farflung.members.elastic import Elastic
from farflung.outer import GatherMean, OuterLoop, diloco, eager_diloco, edit, local_sgd, merge_states, streaming_diloco
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.errors import error_of
from tests.faults import fail_at
from tests.outer.elastic_run import transport_of_ranks
from tests.outer.islands import Grid, IslandRun, Uneven
from tests.outer.replicas import same
from tests.outer.traces import CASES, of_recipe, replica
from tests.recipes import RECIPES

ALL = RECIPES | {
    "streaming_diloco int8": streaming_diloco(4, 2, delay=2, codec="int8"),
    "streaming_diloco fp32": streaming_diloco(4, 2, delay=2, codec="none"),
    "diloco gathered": replace(diloco(2), aggregator=GatherMean()),
}
# What looks at each value alone gives the same bits, whichever rank has the value. Codecs look at blocks of a rank's
# values, `edit` and radial means at norms, which are summed in another order.
BY_VALUE = {
    name for name in ALL if not name.startswith(("streaming", "eager", "sparse", "edit", "diloco radial", "diloco in"))
}
BY_VALUE |= {"streaming_diloco fp32"}


def every_recipe():
    grid, outcomes = Grid(), {}
    for name, wrap in itertools.product(ALL, ("alone", "sharded", "in_step")):
        run = IslandRun(grid, ALL[name], wrap).steps(*range(1, 8))
        run.outer.flush()
        stats = run.outer.stats()
        outcomes[name, wrap] = run.values(), (stats.rounds, stats.drift_norm, stats.cosine)
        run.outer.close()
    return outcomes


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
def test_islands_of_shards_or_of_ddp_are_replicas_bit_by_bit_under_every_recipe():
    ranks = run_ranks(every_recipe, 4, timeout_s=120)
    for name, wrap in ranks[0]:
        values, said = zip(*(outcomes[name, wrap] for outcomes in ranks), strict=True)
        assert same(*values), (name, wrap)  # after a flush
        alone, said_alone = ranks[0][name, "alone"]
        assert wrap == "alone" or said[::2] == said[1::2], (name, wrap)
        if wrap == "in_step" or name in BY_VALUE:
            assert same(alone, values[0]), (name, wrap)
            assert said[0] == pytest.approx(said_alone, abs=1e-6), (name, wrap)
        elif name in ("edit", "diloco radial"):
            assert all(torch.allclose(value, alone[key], atol=1e-5) for key, value in values[0].items())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* a round was dropped")
@pytest.mark.law("islands-are-replicas")
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, size, kind in CASES if size == 2])
def test_islands_that_train_alike_leave_the_traces_of_replicas(name, kind):
    def as_islands(group):
        return replica(group.across(2), name, kind, island=group.split(2))

    digests, _, rounds = zip(*run_replicas(as_islands, 4), strict=True)
    trace = of_recipe(name, 2, kind)
    assert list(digests[::2]) == list(digests[1::2]) == trace["digests"]
    assert rounds[0] == rounds[1] == trace["rounds"]


def resumed(grid, recipe):
    """Train for six steps, and from the third one on once more."""
    run, again = IslandRun(grid, recipe).steps(1, 2, 3), IslandRun(grid, recipe)
    state, moments = run.outer.state_dict(), copy.deepcopy(run.optimizer.state_dict())
    run.steps(4, 5, 6)
    again.outer.load_state_dict(state)
    again.optimizer.load_state_dict(moments)
    again.steps(4, 5, 6)
    for each in (run, again):
        each.outer.close()
    return run.values(), again.values()


def evaluated(grid, recipe):
    """Train without and with forward passes in between, which leave whole parameters in the root module."""
    plain, run, outputs = IslandRun(grid, recipe), IslandRun(grid, recipe), []
    for step in range(1, 7):
        plain.steps(step)
        run.steps(step)
        run.model.eval()
        with torch.no_grad():
            run.model(torch.ones(1, 16))
            with run.outer.synced():
                outputs.append(run.model(torch.ones(1, 16)))
        run.model.train()
    for each in (plain, run):
        each.outer.close()
    return plain.values(), run.values(), outputs


def with_a_nan(grid, recipe, wrap):
    """Let one rank have a value that is not finite after the second step; return what becomes of it."""
    run = IslandRun(grid, recipe, wrap)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 5):
            run.backward(step)
            run.optimizer.step()
            kept = [local(parameter).clone() for parameter in run.bare.parameters()]
            with torch.no_grad():
                if step == 2 and dist.get_rank() == 1:
                    local(run.bare.body.weight)[0, 0] = math.nan
                run.outer.step()
                for parameter, value in zip(run.bare.parameters(), kept, strict=True):
                    if local(parameter).isnan().any():
                        local(parameter).copy_(value)
    run.outer.close()
    dropped = [one.number for one in run.rounds if one.dropped]
    return dropped, [one.weights for one in run.rounds], run.values(), [str(one.message) for one in caught]


def weighed_by_items(grid, items):
    """Return how much each island counts whose ranks have done so many items."""
    run = IslandRun(grid, replace(local_sgd(1), weigh_by="items"))
    run.outer.step(items=items[dist.get_rank()])
    run.outer.detach()
    return run.rounds[0].weights


def by_time(grid, speeds, steps):
    """Train by clocks that differ within an island; return the rounds of whoever comes to the end."""
    now = [0.0]
    run = IslandRun(grid, edit(seconds=10), clock=lambda: now[0])
    for step in range(steps[grid.column.rank]):
        now[0] += speeds[dist.get_rank()]
        run.steps(step)
    run.outer.close()
    return [(one.step, one.weights) for one in run.rounds]


def of_odd_grids(grid):
    """Return what is said of models and groups that don't fit together."""
    model = grid.sharded(Uneven())
    half = Uneven()
    fully_shard(half.body, mesh=grid.mesh["dp_shard"])
    state = OuterLoop(model, local_sgd(2), grid.column, island=grid.island).state_dict()
    return [
        error_of(ConfigError, OuterLoop, model, local_sgd(2)),
        error_of(ConfigError, OuterLoop, model, local_sgd(2), grid.island, island=grid.column),
        error_of(Unsupported, OuterLoop, half, local_sgd(2), grid.column, island=grid.island),
        error_of(ConfigError, merge_states, [state, state | {"shard": state["shard"] + 1}]),
    ]


IN_FLIGHT = [ALL["streaming_diloco int8"], eager_diloco(3), diloco(4), edit(4), RECIPES["sparse_loco"]]


def many_cases():
    grid = Grid()
    return {
        "resumed": [resumed(grid, recipe) for recipe in IN_FLIGHT],
        "evaluated": [evaluated(grid, recipe) for recipe in (diloco(2), ALL["streaming_diloco int8"], local_sgd(2))],
        "nan": [with_a_nan(grid, recipe, wrap) for recipe in (diloco(2), edit(2)) for wrap in ("sharded", "in_step")],
        "nan, eager": with_a_nan(grid, eager_diloco(2), "sharded"),
        "items": [weighed_by_items(grid, items) for items in ((1, 3, 2, 2), (1, 1, 2, 4))],
        "by time": by_time(grid, (1, 3, 2, 2), (8, 10)),
        "refused": of_odd_grids(grid),
    }


@pytest.fixture(scope="module")
def cases():
    return run_ranks(many_cases, 4, timeout_s=120)


def test_a_run_over_shards_goes_on_from_the_middle_of_a_round_with_the_same_bits(cases):
    for case in cases:
        assert all(same(*values) for values in case["resumed"])


@pytest.mark.law("readout-is-slow-weights")
def test_evaluations_in_between_change_no_bit_and_see_what_is_agreed_on(cases):
    for case in cases:
        assert all(same(first, second) for first, second, _ in case["evaluated"])
        for mine, theirs in zip(case["evaluated"], cases[0]["evaluated"], strict=True):
            assert all(map(torch.equal, mine[2], theirs[2]))


def test_a_value_of_one_rank_that_is_not_finite_counts_for_its_whole_island(cases):
    for case in cases:
        for dropped, _, _, warned in (*case["nan"][:2], case["nan, eager"]):
            assert dropped == [1]
            assert "the weights of island 0 are not finite" in warned[0]
        for dropped, weights, _, _ in case["nan"][2:]:  # by `edit`
            assert not dropped
            assert weights[0] == (0, 1)
        assert all(same(one[2], other[2]) for one, other in zip(case["nan"], cases[0]["nan"], strict=True))


def test_an_island_counts_by_the_items_of_all_its_ranks(cases):
    assert [case["items"] for case in cases] == [[(0.5, 0.5), (0.25, 0.75)]] * 4


def test_a_round_by_time_begins_when_the_furthest_clock_of_an_island_says_so(cases):
    first, again, second, also = (case["by time"] for case in cases)
    assert (again, also) == (first, second)
    assert [step for step, _ in first] == [4, 8]  # at 3 seconds a step, as rank 1 counts
    assert [step for step, _ in second] == [5, 10]
    assert [weights for _, weights in first] == [weights for _, weights in second]


def test_models_that_are_not_sharded_over_the_island_are_refused(cases):
    alone, swapped, half, merged = cases[0]["refused"]
    assert "sharded over ranks 0 and 1" in alone
    assert "OuterLoop(island=), which has 1 rank now" in alone
    assert "OuterLoop(island=), which has 2 ranks now" in swapped
    assert half.startswith("five.weight is not sharded")
    assert "saved by rank 1 of an island" in merged


def lose_rank_3(way, folder):
    """Train in two islands until rank 3 is gone; the others write down what they are told, and whether they moved."""
    fault = fail_at("encoding" if way == "in a round" else "local step", is_armed=False)
    run, before = IslandRun(Grid(), fault.recipe(diloco(2))), []
    try:
        with run.outer:
            run.steps(1, 2, 3)
            if dist.get_rank() == 3:
                next(iter(())) if way == "raises" else fault.arm()
            fault.reach("local step")
            run.backward(4)
            run.optimizer.step()
            before += [local(parameter).clone() for parameter in run.bare.parameters()]
            run.outer.step()
    except RankFailure as error:
        stayed = all(torch.equal(local(p), value) for p, value in zip(run.bare.parameters(), before, strict=False))
        torch.save((str(error), stayed), folder / str(dist.get_rank()))


@pytest.mark.parametrize("way", ["raises", "killed", "in a round"])
def test_a_rank_that_is_lost_in_one_island_is_named_on_all_others_within_seconds(tmp_path, way):
    with pytest.raises(RankFailure, match="rank 3"):
        run_ranks(lose_rank_3, 4, way, tmp_path, grace_s=10.0)
    for rank in range(3):
        message, stayed = torch.load(tmp_path / str(rank))
        assert "rank 3 left (StopIteration" in message if way == "raises" else "rank 3 sent no heartbeat" in message
        assert stayed  # what not all islands have got is not applied


def meet_where_one_rank_alone_hears_of_a_loss():
    model, losses = torch.nn.Linear(4, 1), [1] * dist.get_rank()
    synchronize = Replica.synchronize

    def losing(self, giver, takes):
        synchronize(self, giver, takes)
        if losses:
            losses.pop()
            raise RankFailure("its column has lost a rank")

    Replica.synchronize = losing
    with OuterLoop(model, diloco(2), membership=Elastic(transport_of_ranks(), 1, island=TorchGroup())) as outer:
        for _ in range(4):
            outer.step()
        return outer.position, outer.stats().rounds, outer._quorum.generation.number


def test_a_loss_that_one_rank_of_an_island_hears_of_while_it_meets_others_is_one_to_all_of_them():
    assert run_ranks(meet_where_one_rank_alone_hears_of_a_loss, 2) == [(4, 2, 2)] * 2
