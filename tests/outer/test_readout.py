# SPDX-License-Identifier: Apache-2.0
"""Which weights are evaluated, saved and taken home: those that an outer momentum looks ahead from."""

from functools import partial

import pytest
import torch

from farflung.base.errors import StateError
from farflung.comm.group import SoloGroup
from farflung.outer import OuterLoop, diloco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, linear, net, no_statistics, same, through_a_file, values
from tests.recipes import RECIPES, made

ANCHORED = [name for name, recipe in RECIPES.items() if recipe.optimizer is not None and recipe.average is None]
STEPS = 13


def evaluated(outer, model):
    with outer.synced():
        return values(model)


def slow_of(outer):
    """The slow weights by this rank's anchor and momentum, as its state has them."""
    found = {}
    for fragment in outer.state_dict()["rounds"]["fragments"]:
        chunks, optimizer = (fragment["agreed"]["anchor"][name] for name in ("chunks", "optimizer"))
        (group,), states = optimizer["param_groups"], optimizer["state"]
        ahead = group["lr"] * group["momentum"] if group["nesterov"] else 0.0
        moved = [states.get(k, {}).get("momentum_buffer") for k in range(len(chunks))]
        pairs = zip(chunks, moved, strict=True)
        flat = torch.cat([chunk if m is None else torch.add(chunk, m, alpha=ahead) for chunk, m in pairs])
        held = {name: value for name, value in fragment["local"].items() if name.endswith(("weight", "bias"))}
        parts = flat.split([value.numel() for value in held.values()])
        found |= {name: part.view_as(held[name]) for name, part in zip(held, parts, strict=True)}
    return found


def read(group, name, **options):
    """What is evaluated after each step, and in the end, with the slow weights of this rank."""
    run, found = Run(group, made(name, **options), make=no_statistics, bucket_bytes=40), []
    for number in range(STEPS):
        run.steps(number)
        if number == 8:
            run.outer.flush()
        found.append((evaluated(run.outer, run.model), slow_of(run.outer)))
    run.outer.flush()
    slow = slow_of(run.outer)
    return [*found, (run.end(), slow)]


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ANCHORED)
def test_what_is_evaluated_and_left_are_the_slow_weights(name, size):
    by_rank = run_replicas(read, size, name)
    for rows in zip(*by_rank, strict=True):
        seen, slow = zip(*rows, strict=True)
        assert same(*seen)
        if RECIPES[name].has_anchor or size == 1:
            assert same(seen[0], slow[0])
        else:  # an anchor on each rank
            for key, value in seen[0].items():
                torch.testing.assert_close(value, torch.stack([one[key] for one in slow]).mean(0))


@pytest.mark.law("readout-is-slow-weights")
def test_with_an_outer_rate_of_one_it_is_the_mean_of_the_replicas():
    def run(group):
        this = Run(group, diloco(3, lr=1.0), make=no_statistics)
        this.steps(0, 1, 2, 3, 4)
        before = this.steps  # the third step of a round averages right after it
        own = {}
        hook = this.optimizer.register_step_post_hook(lambda *_: own.update(values(this.model)))
        hooks = this.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(hook.id, last=False)  # before the loop's
        before(5)
        return own, evaluated(this.outer, this.model), values(this.model)

    found = run_replicas(run, 2)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, sum(own[name] for own, *_ in found) / 2)
    assert not same(found[0][1], found[0][2])


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("make", [partial(torch.optim.SGD, nesterov=True), torch.optim.SGD])
def test_any_sgd_that_looks_ahead_is_looked_back_from(on_cpu, make):
    recipe = diloco(2)
    object.__setattr__(recipe, "optimizer", partial(make, lr=0.5, momentum=0.5, weight_decay=0.25))
    object.__setattr__(recipe, "anchor_on_cpu", on_cpu)
    model = linear()
    outer = OuterLoop(model, recipe)
    before = values(model)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1.0)
        outer.step()
    looks_ahead = "nesterov" in make.keywords if isinstance(make, partial) else False
    # The first step, whose gradient is 2 and the decay.
    expected = {name: x - 0.5 * (2.0 + 0.25 * x) for name, x in before.items()} if looks_ahead else values(model)
    for name, value in evaluated(outer, model).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.law("readout-is-slow-weights")
def test_weights_that_a_script_has_set_are_evaluated_as_they_are():
    model = linear()
    outer = OuterLoop(model, diloco(2, lr=1.0, momentum=0.5))
    for _ in range(2):
        with torch.no_grad():
            model.weight.sub_(1.0)
        outer.step()
    outer.flush()
    with torch.no_grad():
        model.weight.fill_(3.0)
    given = values(model)
    assert same(given, evaluated(outer, model))
    outer.reset_anchor()
    assert same(given, evaluated(outer, model))
    outer.change_schedule(4)
    outer.close()
    assert same(given, values(model))


def test_a_state_of_the_weights_to_evaluate_is_refused():
    model = linear()
    with OuterLoop(model, diloco(4), SoloGroup()) as outer:
        with outer.synced(), pytest.raises(StateError, match=r"state_dict\(\) within synced\(\)"):
            outer.state_dict()
        assert outer.state_dict()


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_shortens_rows_in_an_evaluation_has_its_own_weights_afterwards(dtype):
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 4, max_norm=0.5, dtype=dtype)
    with OuterLoop(model, diloco(4), SoloGroup()) as outer:
        with torch.no_grad():
            model.weight.mul_(0.1)
        outer.step()
        own, agreed = values(model), evaluated(outer, model)
        with outer.synced():
            model(torch.arange(4))
            assert not same(agreed, values(model))
        assert same(own, values(model))
        assert same(agreed, evaluated(outer, model))
        with outer.synced(), torch.no_grad():
            model.weight[0].add_(torch.arange(4))
        assert not same(own, values(model))  # a script has written these


def seen_on(group, sizes):
    """Train a model with statistics, and evaluate it between rounds."""
    run = Run(group, diloco(3, lr=1.0, momentum=0.5), make=net)
    run.steps(0, 1, 2)
    after_round = evaluated(run.outer, run.model)
    run.steps(3, 4)
    between = evaluated(run.outer, run.model)
    another = run.resumed()
    resumed, own = evaluated(another.outer, another.model), values(another.model)
    return after_round, between, resumed, own


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_evaluated_with_the_statistics_of_their_round(size):
    by_rank = run_replicas(seen_on, size, None)
    for after_round, between, resumed, own in by_rank:
        assert same(after_round, between, resumed, by_rank[0][0])
        assert not torch.equal(own["1.running_mean"], between["1.running_mean"])
        assert (own["1.num_batches_tracked"], between["1.num_batches_tracked"]) == (5, 3)


@pytest.mark.law("readout-is-slow-weights")
def test_a_state_of_an_earlier_version_has_slow_weights_too():
    """Such a state has neither the statistics of its round nor how far its momentum looked ahead."""
    run = Run(SoloGroup(), diloco(2, lr=1.0, momentum=0.5), make=linear)
    run.steps(0, 1, 2)
    expected, state = evaluated(run.outer, run.model), through_a_file(run.outer.state_dict())
    for fragment in state["rounds"]["fragments"]:
        del fragment["kept"]
        del fragment["agreed"]["anchor"]["optimizer"]["param_groups"][0]["look_ahead"]
    another = linear()
    outer = OuterLoop(another, diloco(2, lr=1.0, momentum=0.5))
    outer.load_state_dict(state)
    assert same(values(another), values(run.model))
    assert same(expected, evaluated(outer, another))
