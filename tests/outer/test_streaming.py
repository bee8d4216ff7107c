# SPDX-License-Identifier: Apache-2.0
"""The laws of what lands late: streaming fragments and eager updates, on replicas that are threads."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.comm.group import SoloGroup
from farflung.outer import Identity, Int8, OuterLoop, by_bytes, diloco, eager_diloco, streaming_diloco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, dyadic, linear, on_replicas, same, shift, values
from tests.outer.test_laws import alone, mean, put

LR = 2.0**-3
PLAIN = {"lr": 0.5, "momentum": 0.5}


def near(expected, got, atol):
    return all(torch.allclose(value, got[name], rtol=0, atol=atol) for name, value in expected.items())


def streaming(every, fragments, **options):
    return streaming_diloco(every, fragments, codec=Identity(), cut=by_bytes, **{**PLAIN, **options})


def trajectory(group, recipe, steps, make=linear):
    run = Run(group, recipe, make, lr=LR, momentum=0.0)
    return [*run.seen(*range(steps)), run.end()]


def logged(group, recipe, steps):
    model = nn.ParameterList([torch.zeros(n) for n in (3, 5, 4, 2, 1, 2)])
    outer = OuterLoop(model, recipe, group)
    said = []
    outer.listeners.append(lambda this: said.append((this.fragment, this.step, outer.position)))
    for _ in range(steps):
        shift(model, 2.0**group.rank)
        outer.step()
    landed = len(said)
    outer.close()
    return said, landed, values(model)


@pytest.mark.law("once-in-every-steps")
@settings(max_examples=20)
@given(st.integers(1, 6).flatmap(lambda h: st.tuples(st.just(h), st.integers(1, h), st.integers(0, h))))
def test_the_engine_syncs_each_fragment_once_in_every_steps(shape):
    every, fragments, delay = shape
    recipe = streaming(every, fragments, delay=delay, alpha=0.5 if delay else 0.0)
    steps = 4 * every
    (said, landed, weights), (_, _, others) = run_replicas(logged, 2, recipe, steps)
    assert same(weights, others)
    for fragment in range(fragments):
        mine = [(sent, came) for which, sent, came in said[:landed] if which == fragment]
        sent = [step for step, _ in mine]
        assert sent == list(range(sent[0], sent[0] + len(sent) * every, every))
        assert all(came == step + delay for step, came in mine)
        assert len(sent) >= 4 - (delay > 0)


@pytest.mark.law("blend-limits")
def test_with_alpha_1_replicas_train_as_if_alone():
    for rank, seen in enumerate(run_replicas(trajectory, 2, streaming(4, 2, delay=1, alpha=1.0), 9)):
        for step, weights in enumerate(seen[:-1]):
            assert same(values(alone(rank, linear(), range(step + 1))), weights)


@pytest.mark.law("blend-limits")
@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_with_alpha_0_exactly_the_steps_of_the_flight_are_dropped(size, delay):
    """Late by `delay` steps all are where `diloco` put them, and what they did meanwhile is gone."""
    seen = run_replicas(trajectory, size, streaming(4, 1, delay=delay, alpha=0.0, momentum=0.0), 4 + 4 + delay)
    model, steps = linear(), range(4)
    for landing in (4 + delay, 8 + delay):
        anchor = [p.detach().clone() for p in model.parameters()]
        averaged = mean([alone(rank, model, steps) for rank in range(size)])
        put(model, [x0 - 0.5 * (x0 - x) for x0, x in zip(anchor, averaged, strict=True)])
        assert all(near(values(model), row[landing - 1], 1e-6) for row in seen)
        steps = range(landing, 8)  # what is sent next: the steps since the landing


@pytest.mark.parametrize("alpha", [0.25, 0.5])
def test_a_blend_keeps_a_part_of_what_was_done_meanwhile(alpha):
    late = run_replicas(trajectory, 2, streaming(4, 1, delay=2, alpha=alpha), 6)
    anchor = run_replicas(trajectory, 2, diloco(4, **PLAIN), 4)[0][3]
    for rank, seen in enumerate(late):
        on = values(alone(rank, linear(), range(6)))
        assert near({name: alpha * on[name] + (1 - alpha) * anchor[name] for name in on}, seen[5], 1e-6)


def disturbed(group, act, at):
    """Do something to the weights while they are under way."""
    run = Run(group, streaming(4, 1, delay=2, alpha=0.0), linear, lr=LR, momentum=0.0)
    run.steps(*range(at))
    act(run.model.weight)
    return run.steps(*range(at, 6))


@pytest.mark.parametrize(
    ("act", "at"),
    [(lambda x: shift([x], 1.0), 4), (lambda x: setattr(x, "data", x.data.clone()), 5)],
    ids=["moved", "replaced"],
)
def test_weights_that_are_moved_or_replaced_during_a_flight_are_where_it_lands(act, at):
    assert same(*run_replicas(disturbed, 2, id, at), *run_replicas(disturbed, 2, act, at))


@pytest.mark.law("alone-eager-is-diloco")
@pytest.mark.parametrize("codec", [Identity(), Int8(4)])
@pytest.mark.parametrize("steps", [4, 7, 8, 9])
def test_eager_alone_is_diloco(codec, steps):
    """Also at the end, where the last round is not followed by another one."""
    eager = trajectory(SoloGroup(), eager_diloco(4, codec=codec, **PLAIN), steps)
    assert all(same(*pair) for pair in zip(eager, trajectory(SoloGroup(), diloco(4, **PLAIN), steps), strict=True))


# By round and rank: the steps done of two, and NaN where values are no numbers at its end.
WORK = [(2, 2, 2), (2, 2, 2), (2, 1, 0), (1, 0, 2), (1, 2, 2), (2, 1, math.nan), (0, 1, 2), (0, 0, 1), (2, 2, 2)]


def eager_and_uneven(group, resumes):
    """Replica r moves by 2**r in each step that it does; return where it is after each round."""
    model, seen = nn.ParameterList([torch.zeros(6)]), []
    recipe = eager_diloco(2, codec=Identity(), lr=1.0, momentum=0.0)
    outer = OuterLoop(model, recipe, group, bucket_bytes=8)
    for work in (row[group.rank] for row in WORK):
        if resumes:
            state = outer.state_dict()
            for _ in range(4):  # which a state does not follow
                shift(model, 3.0)
                outer.step()
            outer.detach()
            outer = OuterLoop(model, recipe, group, bucket_bytes=8)
            outer.load_state_dict(state)
        for step in range(2):
            done = math.isnan(work) or step < work
            shift(model, done * 2.0**group.rank)
            model[0].data[2] += 0 * work if step else 0  # spoils one of three buckets
            outer.count(done=done)
            outer.sync_if_due()
        model[0].data.nan_to_num_(model[0][0].item())
        seen.append(model[0].unique().tolist())
    outer.detach()
    return seen


def eager_by_hand():
    """g_i(t) = mean(t-1) + f_i(t) D_i(t) - f_i(t-1) D_i(t-1), where nothing of a round that was dropped comes back."""
    size = len(WORK[0])
    local, anchor, sent, shares = [0.0] * size, [0.0] * size, [0.0] * size, [1 / size] * size
    before, seen = [0.0] * size, []
    for row in WORK:
        came = sum(before) > 0  # not if it is no number
        mean = sum(w * x for w, x in zip(before, sent, strict=True)) / sum(before) if came else 0.0
        for i, work in enumerate(row):
            local[i] += (2 if math.isnan(work) else work) * 2.0**i
            old = came * shares[i] * sent[i]
            if math.isnan(work):
                shares[i] = 0.0
            elif not came and not work:
                sent[i] = 0.0
            else:
                shares[i] = before[i] / sum(before) if came else shares[i] or 1 / size
                sent[i] = anchor[i] - local[i]
                anchor[i] = local[i] = anchor[i] - (mean - old + shares[i] * sent[i])
        before = row
        seen.append([*local])
    return zip(*seen, strict=True)


@pytest.mark.law("published-equations")
@pytest.mark.filterwarnings("ignore:.*a round was dropped")
@pytest.mark.parametrize("resumes", [False, True])
def test_eager_updates_are_their_equation_with_shares_by_work_and_nothing_of_a_dropped_round_stays(resumes):
    for expected, seen in zip(eager_by_hand(), run_replicas(eager_and_uneven, 3, resumes), strict=True):
        assert seen == [pytest.approx([one]) for one in expected]


def nothing_is_lost(group, counts):
    """Replica r moves by 2**r in each of its steps; with outer SGD(1, 0) the mean must move by the weighted mean."""
    model = nn.ParameterList([torch.zeros(3)])
    with OuterLoop(model, eager_diloco(2, codec=Identity(), lr=1.0, momentum=0.0), group) as outer:
        for _ in range(counts[group.rank]):
            shift(model, 2.0**group.rank)
            outer.step()
    return model[0].tolist()


@pytest.mark.parametrize(("counts", "expected"), [((8, 8), 12.0), ((4, 4), 6.0), ((4, 8), 6.0 + 8.0), ((8, 0), 8.0)])
def test_of_an_eager_term_as_much_is_taken_out_as_was_put_in(counts, expected):
    """Also where the shares change, as a replica has no more data: rounds of one replica alone move by all it did."""
    one, other = run_replicas(nothing_is_lost, 2, counts)
    assert one == other == pytest.approx([expected] * 3)


@on_replicas(2)
def test_a_step_exchanges_its_own_fragment_and_no_other(group):
    """Other fragments keep what each replica did, and are not moved by an outer optimizer that is not theirs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    put(model, [dyadic(*parameter.shape, seed=number) for number, parameter in enumerate(model.parameters())])
    before = values(model)
    outer = OuterLoop(model, streaming_diloco(3, 3, delay=0, alpha=0.0, lr=1.0, momentum=0.0, codec=Identity()), group)
    shift(model.parameters(), float(group.rank))
    outer.step()
    moves = {name: (value - before[name]).unique().tolist() for name, value in values(model).items()}
    assert moves["0.weight"] == moves["0.bias"] == [0.5]
    assert moves["1.weight"] == moves["2.bias"] == [float(group.rank)]
