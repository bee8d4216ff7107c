# SPDX-License-Identifier: Apache-2.0
"""Robust rules: whatever one replica brings, the others train as without it; it is left out, and may come back."""

import itertools
import json
import logging
import math
from copy import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from farflung.address.member_store import Record
from farflung.base.errors import ConfigError
from farflung.base.events import EVENTS, Event, Kind
from farflung.comm.group import SoloGroup
from farflung.comm.shards import full
from farflung.comm.torch_group import TorchGroup
from farflung.hosts.rounds import record_rounds
from farflung.methods.robustness import RULES
from farflung.methods.weighting import Decision, Policy, in_proportion
from farflung.outer import ByWork, ClippedToMedian, OuterLoop, Screened, diloco, robust, streaming_diloco
from farflung.outer.membership import fixed_membership
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.elastic_run import ElasticRun, wrong
from tests.outer.islands import Uneven
from tests.outer.replicas import RATE, linear, net, on_replicas, same, shift, through_a_file, train, values
from tests.outer.test_elastic_laws import Members
from tests.outer.test_membership import ChangingMembership
from tests.recipes import RECIPES

PAIRS = {  # of the table of recipes, each that takes a rule; test_wrong_uses.py has what the others are refused with
    "trimmed": ("local_sgd", "quadratic", "slowmo", "diloco", "streaming_diloco", "streaming_diloco without delay"),
    "clip": ("slowmo", "diloco", "diloco radial", "streaming_diloco", "streaming_diloco without delay", "sparse_loco"),
}
ACCEPTED = [(name, rule) for rule, names in PAIRS.items() for name in names]
FAULTS = {
    "NaN": lambda moved: torch.full_like(moved, math.nan),
    "huge": lambda moved: 1e30 * torch.ones_like(moved),
    "x-100": lambda moved: -100 * moved,
    "garbage": lambda moved: torch.randn(moved.shape, generator=torch.Generator().manual_seed(1)),
}
PLAIN = {"lr": 1.0, "momentum": 0.0}
KINDS = None, "FSDP", "TP"  # of islands


@pytest.mark.parametrize("rule", RULES)
def test_every_recipe_takes_a_rule_or_refuses_it_by_name(rule):
    for name, recipe in RECIPES.items():
        if name in PAIRS[rule] or recipe.average or (rule == "clip" and name.endswith("two hops")):
            assert isinstance(robust(recipe, rule).policy, Screened)
        else:
            with pytest.raises(ConfigError, match=f"^robust is '{rule}', but .*(Use|Leave|Keep)"):
                robust(recipe, rule)


def trained(group, recipe, steps, as_ranks=None, faulty=None, fault="x-100", until=math.inf):
    """Train on the data of rank `as_ranks[rank]`; the steps of rank `faulty` have a fault until one."""
    model, rounds = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    outer = OuterLoop(model, recipe, group, inner=optimizer, bucket_bytes=32)
    outer.listeners.append(rounds.append)
    for step in range(steps):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, step, group.rank if as_ranks is None else as_ranks[group.rank])
        if group.rank == faulty and step < until:
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.data = old + FAULTS[fault](parameter.data - old)
        outer.step()
    outer.close()
    return values(model), rounds


def far(one, other):
    """The largest difference between two models."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize(("name", "rule"), ACCEPTED)
def test_of_equal_members_a_rule_is_the_mean_and_their_order_does_not_matter(name, rule):
    plain = replace(RECIPES[name], same_data=True)
    means, rules = (run_replicas(trained, 4, one, 8, (0,) * 4) for one in (plain, robust(plain, rule)))
    assert far(means[0][0], rules[0][0]) < 1e-5
    ahead, back = (run_replicas(trained, 4, robust(plain, rule), 8, order) for order in ((0, 1, 2, 3), (3, 1, 0, 2)))
    assert same(*(model for model, _ in ahead))
    assert far(ahead[0][0], back[0][0]) < 1e-5


# One fault for each recipe, and all of them where values go different ways: whole, in flight, with error feedback.
EVERY_FAULT = ("diloco", "streaming_diloco", "sparse_loco")
FAULTY = [(*pair, fault) for pair in ACCEPTED for fault in FAULTS if fault == "x-100" or pair[0] in EVERY_FAULT]


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize(("name", "rule", "fault"), FAULTY)
def test_with_one_faulty_member_all_agree_and_are_where_the_others_would_be(name, rule, fault):
    recipe = robust(RECIPES[name], rule)
    alone = run_replicas(trained, 4, recipe, 12)[0][0]
    found = run_replicas(trained, 5, recipe, 12, (0, 1, 9, 2, 3), 2, fault)
    assert same(*(model for model, _ in found))
    assert far(found[0][0], alone) < 0.2
    assert not any(this.dropped for _, rounds in found for this in rounds)
    assert all({*this.left_out} <= {2} for _, rounds in found for this in rounds)


def test_without_a_rule_one_member_spoils_all():
    assert far(*(run_replicas(trained, n, diloco(2), 12, (0, 1, 2, 3, 9), 4)[0][0] for n in (4, 5))) > 1


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize(
    "recipe", [diloco(2), streaming_diloco(4, 2, delay=1, codec="none")], ids=["whole", "streaming"]
)
def test_a_member_is_left_out_in_its_third_round_by_name_and_comes_back(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    logger = logging.getLogger("farflung.rounds")
    for owner, name in (logger, "handlers"), (logger, "level"), (logger, "propagate"), (EVENTS, "handlers"):
        monkeypatch.setattr(owner, name, copy(getattr(owner, name)))
    record_rounds()
    everyone = run_replicas(trained, 4, robust(recipe, "clip"), 48, None, 2, "x-100", 16)
    why = "its values were over 5 times as large as the median of all replicas"
    lines = ["rank 2 does not count in rounds: " + why, "rank 2 counts in rounds again"]
    assert [one for one in capsys.readouterr().err.splitlines() if "rounds" in one] == [f"farflung: {x}" for x in lines]
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [str(Event.of_row(row)) for row in rows] == lines
    first, *others = [[this.left_out for this in rounds if this.fragment == 0] for _, rounds in everyone]
    assert others == [first] * 3
    assert first[:3] == [{}, {}, {2: why}]
    assert first[-1] == {}
    assert json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["left_out"] == {}


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize("rule", RULES)
@on_replicas(4)
def test_statistics_and_counters_of_one_member_spoil_no_model(group, rule):
    model = net()
    outer = OuterLoop(model, robust(diloco(1), rule), group)
    shift(model.parameters(), 0.25 * (group.rank + 1))
    model[1].running_mean.fill_(1e9 if group.rank == 2 else group.rank)
    model[1].num_batches_tracked.fill_(2**40 if group.rank == 2 else group.rank)
    outer.step()
    assert (model[1].running_mean[0], model[1].num_batches_tracked) == (2.0, 3)


@pytest.mark.parametrize("rule", RULES)
@on_replicas(4)
def test_statistics_that_are_finite_on_no_member_are_left_as_they_are(group, rule):
    model = net()
    outer = OuterLoop(model, robust(diloco(1), rule), group)
    shift(model.parameters(), 0.25)
    model[1].running_mean[1] = math.inf
    model[1].running_var.fill_(3.0)
    outer.step()
    assert model[1].running_mean[1] == math.inf
    assert model[1].running_var.unique().tolist() == [3.0]


def judged(rule, memory, *norms, weights=None):
    return rule(weights or (1.0,) * len(norms), norms, memory)


@pytest.mark.law("outliers-are-left-out")
def test_strikes_are_counted_and_taken_back():
    rule, memory = Screened(ClippedToMedian()), {}
    outs = [bool(judged(rule, memory, 1.0, norm, 1.0).left_out) for norm in (9, 9, 1, 9, 9, 1, 1, 1, 9)]
    assert outs == [False, False, False, False, True, True, True, False, False]
    assert judged(rule, memory, 1.0, 1.0, math.nan) == Decision(
        (1.0, 1.0, 0.0), 2.0, (), {2: "its values are not finite"}
    )
    assert judged(rule, memory, 0.0, 0.0, 0.0).factors == (1.0,) * 3


@pytest.mark.law("outliers-are-left-out")
@given(norms=st.lists(st.one_of(st.floats(0, 1e9), st.just(math.inf)), min_size=1, max_size=6))
def test_of_two_members_or_without_a_majority_none_is_left_out(norms):
    rule, memory = Screened(ClippedToMedian(), patience=1), {}
    decision = judged(rule, memory, *norms)
    odd = [rank for rank, norm in enumerate(norms) if math.isinf(norm)]
    if len(norms) < 3 or 2 * len(odd) >= len(norms):
        assert not decision.left_out
        assert decision.unfit == tuple(odd)
        assert not memory
    else:
        assert set(odd) <= set(decision.left_out)
        assert 2 * len(decision.left_out) < len(norms)
        assert decision.total
        assert not decision.unfit


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize("weight", [1e30, math.inf, math.nan, -1.0])
def test_work_that_a_member_reports_counts_within_bounds(weight):
    decision = judged(Screened(ByWork()), {}, 1.0, 1.0, 1.0, weights=(1.0, 1.0, weight))
    shares = [factor / decision.total for factor in decision.factors]
    assert shares == ([1 / 7, 1 / 7, 5 / 7] if weight == 1e30 else [0.5, 0.5, 0.0])


@pytest.mark.law("outliers-are-left-out")
def test_values_too_large_for_the_codec_drop_no_round_of_the_others():
    found = run_replicas(trained, 5, robust(diloco(2, codec="fp16"), "clip"), 8, (0, 1, 9, 2, 3), 2, "huge")
    assert same(*(model for model, _ in found))
    assert [dict(this.left_out) for this in found[0][1]] == [{2: "its values are not finite"}] * 4


class CountsRounds(Policy):
    """A policy that remembers how often it was asked."""

    norm, max_norm = "local", math.inf

    def __call__(self, weights, norms, history):
        history.setdefault(0, [0])[0] += 1
        return in_proportion(weights)

    def __repr__(self):
        return "CountsRounds()"


@pytest.mark.law("survivors-agree")
def test_what_a_policy_learns_in_a_round_counts_once_that_is_applied():
    """Of survivors, some may have heard all votes of a round that no one applies."""
    recipe = replace(streaming_diloco(4, 1, delay=2), policy=CountsRounds())
    loops = [OuterLoop(linear(), recipe, SoloGroup()) for _ in range(2)]
    fragments = [loop._rounds.replica.fragments[0] for loop in loops]
    for _ in range(5):
        loops[0].step()
    assert fragments[0].history == {}
    loops[1].load_state_dict(through_a_file(loops[0].state_dict()))
    for loop, fragment in zip(loops, fragments, strict=True):
        loop.step()
        loop.step()
        assert fragment.history == {0: [1]}
    loops[0].step()
    loops[0].step()
    (under_way,) = loops[0]._rounds._open.values()
    assert not under_way.abort(0)
    assert fragments[0].history == {0: [1]}
    assert under_way.abort(under_way.num_complete)
    assert fragments[0].history == {0: [2]}


@pytest.mark.law("survivors-agree")
def test_the_steps_of_a_dropped_round_that_a_loss_ends_count_in_the_next_one():
    loop = OuterLoop(linear(), streaming_diloco(4, 1, delay=2), SoloGroup())
    for value in (0.0, 0.0, 0.0, math.nan):
        loop._model.weight.data.fill_(value)
        loop.step()
    (under_way,) = loop._rounds._open.values()
    assert under_way.abort(under_way.num_complete)
    assert loop._rounds.replica.fragments[0].pending_weight == [4.0]


@pytest.mark.parametrize("rule", RULES)
@on_replicas(4)
def test_strikes_are_in_checkpoints_and_in_what_a_newcomer_gets(group, rule):
    recipe = replace(robust(diloco(1), rule), same_data=True)
    loops, rounds = [OuterLoop(linear(), recipe, group) for _ in range(2)], []

    def round_of(loop):
        shift(loop._model.parameters(), 100.0 if group.rank == 1 else 1.0)
        loop.step()

    round_of(loops[0])
    round_of(loops[0])
    fragments = [loop._rounds.replica.fragments[0] for loop in loops]
    given = fragments[0].replicated()
    assert given["history"] == {0: [0, 0], 1: [2, 0], 2: [0, 0], 3: [0, 0]}
    fragments[1].join(given, keeps=False)
    assert (fragments[1].history, fragments[1].num_rounds) == (given["history"], 2)
    fragments[1].enter((0, 1, 2, 3), (1, 3, 7))
    assert fragments[1].history == {0: [2, 0], 1: [0, 0]}
    loops[1].load_state_dict(through_a_file(loops[0].state_dict()))
    loops[0]._model.more = nn.Parameter(torch.zeros(1))  # they outlive a change of the model
    for loop in loops:
        loop.listeners.append(rounds.append)
        round_of(loop)
    assert [{*this.left_out} for this in rounds] == [{1}] * 2
    assert loops[0]._rounds.replica.fragments[0].num_rounds == 3


def among_few(group, rule):
    """Three replicas, then a fourth one, until one is lost; return what the loop reports, and who changed when."""
    model, membership, noted, rounds = linear(), ChangingMembership(group, (0, 1, 2)), [], []
    membership.note = lambda kind, member, **facts: noted.append(str(Event.now(kind, **facts)))
    outer = OuterLoop(model, robust(diloco(2), rule), membership=membership)
    outer.listeners.append(rounds.append)
    while outer.position < 20:
        if group.rank == 2 and outer.position == 12:
            return None, None, None  # it is lost
        outer.step()
    outer.close()
    changes = [(dict(this.lost), this.joined, this.seconds_recovering > 0) for this in rounds]
    stats = outer.stats()
    assert stats.seconds_recovering == sum(this.seconds_recovering for this in rounds)
    return noted, [one for one in changes if any(one)], (stats.replicas_lost, stats.replicas_joined)


@pytest.mark.law("outliers-are-left-out")
def test_an_event_says_when_replicas_have_become_too_few_for_a_rule_or_enough_again():
    found, changes, counts = zip(*run_replicas(among_few, 4, "trimmed"), strict=True)
    few = "with 3 replicas at work one of them can spoil the weights: the robust rule outvotes one of 4 or more"
    assert found == ([few, "with 4 replicas at work the robust rule outvotes any one of them again", few], [], None, [])
    joined, lost = ({}, (3,), False), ({2: "it is away"}, (), True)
    assert changes == ([joined, lost], [joined, lost], None, [lost])  # a newcomer doesn't count itself
    assert counts == ((1, 1), (1, 1), None, (1, 0))
    assert run_replicas(among_few, 4, "clip")[0][0] == []


def in_islands():
    """Four islands of two ranks with parts of a model, of which the second has a fault; and single ranks instead."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicas", "shards"))
    column, island = (TorchGroup(mesh.get_group(name)) for name in mesh.mesh_dim_names)
    outcomes = {}
    for rule in RULES:
        for kind in KINDS:
            model, seen = Uneven(), []
            if kind == "FSDP":
                fully_shard(model, mesh=mesh["shards"])
            if kind == "TP":  # both ranks have a copy of what is not cut, which counts once
                for name, part in (("body", 0), ("five", 1)):
                    module = getattr(model, name)
                    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh["shards"], [Shard(part)]))
            outer = OuterLoop(model, robust(diloco(1), rule), column, island=island if kind else None, bucket_bytes=256)
            outer.listeners.append(lambda this, seen=seen: seen.append((this.norms, {*this.left_out})))
            for step in range(4):
                move = -50.0 if column.rank == 1 else 0.5 ** (step + column.rank)
                shift([one for one in model.parameters() if one.requires_grad], move)
                outer.step()
            outcomes[rule, kind] = {name: full(one).clone() for name, one in model.state_dict().items()}, seen
            outer.detach()
    return outcomes


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
def test_norms_of_islands_are_those_of_the_whole_model():
    ranks = run_ranks(in_islands, 8, timeout_s=120)
    for rule in RULES:
        alone, seen = ranks[0][rule, None]
        for each, kind in itertools.product(ranks, KINDS[1:]):
            model, in_shards = each[rule, kind]
            assert far(model, alone) < 1e-5
            assert same(model, ranks[0][rule, kind][0])
            assert [out for _, out in in_shards] == [out for _, out in seen] == [set(), set(), {1}, {1}]
            for (one, _), (other, _) in zip(in_shards, seen, strict=True):
                assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.long
@pytest.mark.law("outliers-are-left-out")
def test_in_an_elastic_run_replicas_die_and_come_while_one_is_left_out(tmp_path):
    recipe = robust(diloco(4, **PLAIN), "trimmed")
    with ElasticRun(recipe=recipe, expected=5, grace_s=20.0, folder=tmp_path) as run:
        honest = [run.start(name) for name in range(3)]
        lost, faulty = run.start(3, dies=("exchange", 12)), run.start(4, moves=100)
        run.until(lambda: run.has_ended(lost))
        back = run.joins(3)
        run.until(lambda: any("replica 4 does not count in rounds: its values" in event for event in run.events))
        said = run.finish()
        assert not wrong([one for one in said if one["member"] != faulty])
        assert {one["member"] for one in said if "end" in one} == {*honest, back, faulty}


def test_an_event_of_a_member_goes_to_the_first_launcher():
    members = Members(Record(2, 1, (1, 2, 3)), ready=(1, 2, 3))
    members.member(1).note(Kind.EXCLUDED, 3, why="its values are not finite")
    members.told("member 3 does not count in rounds: its values are not finite")


TRIMMED = replace(robust(diloco(2, **PLAIN), "trimmed"), same_data=True)


def beside_rounds(group, recipe, how):
    """What replicas end with where the last of eight brings 2**40 in something that no round of all carries."""
    model, says = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), []
    membership = fixed_membership(group, None, True)
    membership.note = lambda kind, member, **facts: says.append(str(Event.now(kind, **facts)))
    outer = OuterLoop(model, recipe, membership=membership)
    outer.step()
    outer.step()
    wrong = 2.0**40 if group.rank == 7 else 1.0
    with torch.no_grad():
        if how == "buffers":
            model[1].running_mean.fill_(wrong)
        elif how == "counters":
            model[1].num_batches_tracked.fill_(int(wrong))
        elif how == "set weights":
            model[0].weight.fill_(wrong)
        elif how == "new parameters":
            model.append(nn.Linear(2, 2, bias=False))
            model[2].weight.fill_(wrong)
        elif how == "one at work" and group.rank in (0, 7):
            model[0].weight.fill_(wrong)
            outer.count()
    outer.flush()
    return max(float(value.abs().max()) for value in model.state_dict().values()), says


@pytest.mark.law("outliers-are-left-out")
@pytest.mark.parametrize("how", ["buffers", "counters", "set weights", "new parameters"])
def test_one_faulty_replica_spoils_nothing_that_is_averaged_outside_of_rounds(how):
    assert all(largest < 10 for largest, _ in run_replicas(beside_rounds, 8, TRIMMED, how))


def test_an_event_says_when_too_few_replicas_are_at_work_for_a_rule():
    _, says = run_replicas(beside_rounds, 8, TRIMMED, "one at work")[0]
    few = "with 2 replicas at work one of them can spoil the weights: the robust rule outvotes one of 4 or more"
    assert says == [few]
