# SPDX-License-Identifier: Apache-2.0
"""The laws that tie the recipes to each other and to what they are in other words, on replicas that are threads."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from farflung.comm.group import SoloGroup
from farflung.outer import Cast, OuterLoop, diloco, gossip, local_sgd
from farflung.testing.sim import run_replicas
from farflung.votes.ballot import BALLOT_BYTES
from tests.outer.replicas import Counting, linear, net, same, train, values

LR = 2.0**-3


def trained(group, recipe, steps, make=linear, lr=LR, **options):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with OuterLoop(model, recipe, group, **options) as outer:
        for step in range(steps):
            train(model, optimizer, step, group.rank)
            outer.step()
    return values(model)


def alone(rank, model, steps):
    """Train a copy of `model` without an outer loop."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in steps:
        train(model, optimizer, step, rank)
    return model


def mean(models):
    """The mean of the models' parameters, summed in rank order."""
    columns = zip(*(model.parameters() for model in models), strict=True)
    return [sum(column[1:], start=column[0].detach().clone()).detach() / len(models) for column in columns]


@torch.no_grad()
def put(model, tensors):
    for parameter, tensor in zip(model.parameters(), tensors, strict=True):
        parameter.copy_(tensor)


@pytest.mark.law("published-equations")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_local_sgd_is_the_bitwise_mean_of_the_weights(size):
    model = linear()
    for start in (0, 2, 4):
        put(model, mean([alone(rank, model, (start, start + 1)) for rank in range(size)]))
    assert same(values(model), *run_replicas(trained, size, local_sgd(2), 6))


@pytest.mark.law("exact-data")
@pytest.mark.parametrize("size", [2, 4])
def test_the_data_of_these_laws_is_exact(size):
    """A run in fp64 gives the same numbers as one in fp32, so bitwise equality is a fair claim."""
    for recipe in (local_sgd(1), diloco(1, lr=0.5, momentum=0.5)):
        narrow = run_replicas(trained, size, recipe, 2)[0]
        wide = run_replicas(trained, size, recipe, 2, lambda: linear().double())[0]
        assert same({name: x.double() for name, x in narrow.items()}, wide)


@pytest.mark.law("unit-sgd-is-averaging")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_outer_sgd_of_one_and_nothing_is_averaging(size):
    plain = run_replicas(trained, size, local_sgd(1), 2)
    assert same(*plain, *run_replicas(trained, size, diloco(1, lr=1.0, momentum=0.0), 2))


# SlowMo: u <- beta u + delta / gamma;  x0 <- x0 - alpha gamma u, gamma the inner learning rate; delta is x0 - mean x.
# DiLoCo: m <- mu m + delta;  x0 <- x0 - gamma (delta + mu m), which is ahead of x0 - gamma delta by gamma mu m.
@pytest.mark.law("published-equations")
@pytest.mark.parametrize(("nesterov", "size"), [(False, 2), (False, 4), (True, 1), (True, 2), (True, 4)])
def test_slowmo_is_an_outer_heavy_ball_and_diloco_its_published_equations(nesterov, size):
    lr, mu, gamma, rounds = (0.5, 0.5, 1.0, 2) if nesterov else (0.5, 0.5, LR, 3)
    model, slow = linear(), linear()
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for start in range(rounds):
        anchor = [p.detach().clone() for p in model.parameters()]
        averaged = mean([alone(rank, model, (start,)) for rank in range(size)])
        deltas = [x0 - x for x0, x in zip(anchor, averaged, strict=True)]
        momenta = [mu * m + delta / gamma for m, delta in zip(momenta, deltas, strict=True)]
        moves = [d + mu * m if nesterov else gamma * m for m, d in zip(momenta, deltas, strict=True)]
        put(model, [x - lr * move for x, move in zip(anchor, moves, strict=True)])
        put(slow, [x - lr * delta for x, delta in zip(anchor, deltas, strict=True)])
    expected = values(slow if nesterov else model)
    assert same(expected, *run_replicas(trained, size, diloco(1, lr=lr, momentum=mu, nesterov=nesterov), rounds))


# Lookahead: slow <- slow + alpha (fast - slow); fast <- slow.
@pytest.mark.law("alone-is-lookahead")
def test_one_replica_without_momentum_is_lookahead():
    alpha, model = 0.5, linear()
    for start in (0, 2):
        slow = [p.detach().clone() for p in model.parameters()]
        fast = mean([alone(0, model, (start, start + 1))])
        put(model, [s + alpha * (f - s) for s, f in zip(slow, fast, strict=True)])
    assert same(values(model), trained(SoloGroup(), diloco(2, lr=alpha, momentum=0.0), 4))


@pytest.mark.law("alone-is-lookahead")
def test_one_replica_and_a_neutral_outer_optimizer_are_the_inner_one_alone():
    expected = values(alone(0, linear(), range(3)))
    assert same(expected, trained(SoloGroup(), diloco(1, lr=1.0, momentum=0.0), 3))
    assert same(expected, trained(SoloGroup(), local_sgd(1), 3))


def counted(group, recipe, make=linear):
    counting, model = Counting(group), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with OuterLoop(model, recipe, counting) as outer:
        for step in range(6):
            train(model, optimizer, step, group.rank)
            outer.step()
    return counting.reduced(), counting.calls, outer.stats()


# What the group is handed is what the codec says, no more.
@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize("codec", [None, Cast("bf16"), Cast("fp16")])
@pytest.mark.parametrize("make_recipe", [local_sgd, diloco])
def test_the_wire_carries_the_bytes_that_the_codec_states(codec, make_recipe):
    recipe = make_recipe(2, codec=codec)
    for reduced, calls, stats in run_replicas(counted, 4, recipe):
        assert stats.rounds == 3
        assert reduced == 3 * recipe.codec.wire_bytes(8)
        assert stats.bytes_sent == stats.bytes_received == 2 * 3 * reduced // 4
        # One vote at the start, one beside each round, after which all say that they have received it; at the end one
        # that shows that nobody has any more data, and one on what to do then; at both ends a fingerprint of the rest.
        votes = [size for kind, _, size in calls if kind == "all_gather_small"]
        assert votes == [BALLOT_BYTES, 8, *[BALLOT_BYTES, 4] * 3, BALLOT_BYTES, BALLOT_BYTES, 8]
        assert stats.bytes_voting == 3 * sum(votes)


@pytest.mark.law("stated-bytes")
def test_what_is_sent_outside_of_rounds_counts_too():
    for reduced, calls, stats in run_replicas(counted, 4, gossip(2), net):
        swapped, votes = (sum(size for kind, _, size in calls if kind == one) for one in ("swap", "all_gather_small"))
        assert (stats.bytes_sent, stats.bytes_voting) == (swapped + 2 * 3 * reduced // 4, 3 * votes)


@pytest.mark.law("buckets-are-invisible")
@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1, lr=0.5, momentum=0.5)])
@pytest.mark.parametrize("bucket_bytes", [4, 12, 20])
def test_the_cut_into_buckets_changes_no_bit(recipe, bucket_bytes):
    def small(group):
        return trained(group, recipe, 2, bucket_bytes=bucket_bytes)

    assert same(*run_replicas(trained, 2, recipe, 2), *run_replicas(small, 2))


def test_any_torch_optimizer_moves_the_anchor():
    recipe = replace(diloco(1), optimizer=partial(torch.optim.Adam, lr=0.25))
    model, anchor = linear(), linear()
    optimizer = torch.optim.Adam(anchor.parameters(), lr=0.25)
    for start in range(3):
        averaged = mean([alone(rank, model, (start,)) for rank in range(2)])
        for parameter, x in zip(anchor.parameters(), averaged, strict=True):
            parameter.grad = parameter.detach() - x
        optimizer.step()
        put(model, [p.detach() for p in anchor.parameters()])
    first, second = run_replicas(trained, 2, recipe, 3)
    assert same(first, second)
    assert all(torch.allclose(first[name], x, atol=1e-6) for name, x in values(model).items())
