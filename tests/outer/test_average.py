# SPDX-License-Identifier: Apache-2.0
"""A running mean of the weights over rounds: `average=`."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from farflung.base.errors import ConfigError
from farflung.comm.group import SoloGroup
from farflung.outer import (
    OuterLoop,
    diloco,
    eager_diloco,
    edit,
    local_sgd,
    noloco,
    slowmo,
    sparse_loco,
    streaming_diloco,
)
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, net, no_statistics, same, shift, through_a_file, values
from tests.outer.test_membership import ChangingMembership
from tests.outer.test_readout import evaluated, slow_of

WINDOW, STEPS = 4, 66
RECIPES = {
    "slowmo": slowmo(1),
    "diloco": diloco(1),
    "diloco of long windows": diloco(1, momentum=0.5),
    "streaming_diloco": streaming_diloco(3, 2, delay=1),
    "sparse_loco": sparse_loco(1, lr=1.0),
    "edit": edit(1),
}


def with_mean(recipe, window=WINDOW):
    return replace(recipe, average=window)


def window_of(rounds):
    return min(WINDOW, max(1, rounds // 10))


def recorded(group, recipe, make):
    """What is evaluated after each step, and the fragments whose round has ended in it."""
    run, found = Run(group, recipe, make), []
    for number in range(STEPS):
        run.rounds.clear()
        run.steps(number)
        found.append((evaluated(run.outer, run.model), [one.fragment for one in run.rounds]))
    names = [set(fragment["local"]) for fragment in run.outer.state_dict()["rounds"]["fragments"]]
    return names, found, run.end()


@pytest.mark.law("average-is-of-recorded-rounds")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_evaluated_is_the_mean_of_the_recorded_rounds(name, size):
    make = net if RECIPES[name].leaves_alike else no_statistics
    names, plain, _ = run_replicas(recorded, size, RECIPES[name], make)[0]
    ours = run_replicas(recorded, size, with_mean(RECIPES[name]), make)
    mean, rounds = dict(plain[0][0]), [0] * len(names)
    for step, (slow, landed) in enumerate(plain):
        for fragment in landed:
            rounds[fragment] += 1
            for key in names[fragment]:
                if slow[key].is_floating_point():
                    mean[key] = mean[key] + (slow[key] - mean[key]) / window_of(rounds[fragment])
                else:  # the number of batches
                    mean[key] = slow[key]
        if all(rounds):
            for _, seen, _ in ours:
                torch.testing.assert_close(seen[step][0], mean, rtol=1e-5, atol=1e-6)
                assert same(seen[step][0], ours[0][1][step][0])
    assert window_of(min(rounds)) >= 2
    assert all(same(end, ours[0][2]) for *_, end in ours)
    if RECIPES[name].leaves_alike:
        torch.testing.assert_close(ours[0][2], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.law("average-is-of-recorded-rounds")
@pytest.mark.parametrize("name", RECIPES)
def test_a_mean_changes_no_bit_of_the_training(name):
    def run(group, recipe):
        this = Run(group, recipe)
        return this.seen(*range(STEPS))[-1]

    assert all(map(same, run_replicas(run, 2, RECIPES[name]), run_replicas(run, 2, with_mean(RECIPES[name]))))


@pytest.mark.law("resume-is-exact")
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_resumed_in_mid_round_continues_its_mean_bit_by_bit(every):
    def run(group, resumes):
        this = Run(group, diloco(every, average=WINDOW))
        this.steps(*range(64))
        this = this.resumed() if resumes else this
        before = evaluated(this.outer, this.model)
        this.steps(*range(64, 68))
        return before, evaluated(this.outer, this.model), this.end()

    for plain, again in zip(run_replicas(run, 2, False), run_replicas(run, 2, True), strict=True):
        assert all(map(same, plain, again))


def joins(group, first):
    """Train among replicas that come; return what is evaluated at the end of each round that this one has seen."""
    model = no_statistics()
    outer = OuterLoop(model, diloco(2, average=WINDOW), membership=ChangingMembership(group, first))
    found = {}
    while outer.position < 60:
        shift(model.parameters(), -(group.rank + outer.position % 3))
        outer.step()
        found[outer.position] = evaluated(outer, model)
    outer.close()
    return found, values(model)


@pytest.mark.law("average-is-of-recorded-rounds")
def test_a_newcomer_has_the_mean():
    (first, end), *others = run_replicas(joins, 3, [0, 1])
    for found, other_end in others:
        assert all(same(first[step], found[step]) for step in found)
        assert same(end, other_end)


def test_a_mean_begins_again_where_weights_are_set():
    run = Run(SoloGroup(), diloco(1, average=WINDOW), make=no_statistics)
    run.steps(*range(50))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0)
    run.outer.reset_anchor()
    assert same(values(run.model), evaluated(run.outer, run.model))
    run.steps(50)  # the first round of the new mean
    assert same(slow_of(run.outer), evaluated(run.outer, run.model))
    run.steps(51)
    assert not same(slow_of(run.outer), evaluated(run.outer, run.model))


def test_a_state_without_a_mean_begins_it_at_its_slow_weights():
    run = Run(SoloGroup(), diloco(2), make=net)
    run.steps(*range(5))
    slow, state = evaluated(run.outer, run.model), through_a_file(run.outer.state_dict())
    for fragment in state["rounds"]["fragments"]:
        del fragment["kept"], fragment["num_averaged"]
    another = net()
    outer = OuterLoop(another, diloco(2, average=WINDOW))
    outer.load_state_dict(state)
    found = evaluated(outer, another)
    trained = [name for name, _ in another.named_parameters()]
    assert all(torch.equal(found[name], slow[name]) for name in trained)


def test_a_state_with_a_mean_goes_on_without_one():
    run = Run(SoloGroup(), diloco(2, average=WINDOW), make=net)
    run.steps(*range(50))
    another = net()
    outer = OuterLoop(another, diloco(2))
    outer.load_state_dict(through_a_file(run.outer.state_dict()))
    assert same(values(run.model), values(another))
    slow = {name: value for name, value in evaluated(outer, another).items() if name in slow_of(outer)}
    assert same(slow_of(run.outer), slow)


def test_a_model_that_grows_keeps_the_mean_of_what_it_had():
    def run(group):
        this = Run(group, diloco(1, average=WINDOW), make=no_statistics)
        this.steps(*range(40))
        before = evaluated(this.outer, this.model)
        this.model.append(nn.Linear(2, 2))
        this.optimizer.add_param_group({"params": list(this.model[3].parameters())})
        this.optimizer.param_groups[0]["lr"] = this.optimizer.param_groups[1]["lr"] = 0.0
        this.steps(40)  # only the momentum of before moves what it had
        return before, evaluated(this.outer, this.model), values(this.model)

    for before, after, live in run_replicas(run, 2):
        assert not same(before, {name: after[name] for name in before})
        for name in before:  # a mean of four moves by less than what is trained
            assert (after[name] - before[name]).norm() < (live[name] - before[name]).norm()
        assert torch.equal(after["3.weight"], live["3.weight"])


@pytest.mark.parametrize("recipe", [local_sgd(2), eager_diloco(2), noloco(2)])
def test_without_an_anchor_that_all_share_there_is_no_mean(recipe):
    with pytest.raises(ConfigError, match="average is 3, but only an anchor shared by all replicas has a mean"):
        replace(recipe, average=3)
    with pytest.raises(ConfigError, match="average"):
        diloco(2, average=0)
