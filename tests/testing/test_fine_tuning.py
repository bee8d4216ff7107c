# SPDX-License-Identifier: Apache-2.0
"""The fine-tunings of benchmarks/evidence train LoRA's factors as they should; exchanges keep what they say they do."""

from types import SimpleNamespace

import pytest
import torch

from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape

SHAPE, RANK, REPLICAS, EVERY = Shape(depth=1, width=8, heads=2, context=8), 3, 4, 4
CLOSE = {"atol": 1e-6, "rtol": 0}


@pytest.fixture
def lora(benchmark):
    return benchmark("evidence.lora")


@pytest.fixture
def tuning(benchmark, monkeypatch):
    module = benchmark("evidence.fine_tuning")
    first = module.flat(GPT(SHAPE))
    monkeypatch.setattr(module, "trained", lambda size, seed: first)
    monkeypatch.setitem(benchmark("evidence.runner").SHAPES, "34k", SHAPE)
    return module


@pytest.fixture
def lane(lora):
    """Adapters of four replicas, a round's steps after they were equal."""
    torch.manual_seed(0)
    gpt = GPT(SHAPE)
    model = lora.Adapters(gpt, RANK)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    frozen = torch.randn(sum(parameter.numel() for parameter in gpt.parameters())).repeat(REPLICAS, 1)
    weights = torch.randn(parameters) / 3 + torch.randn(REPLICAS, parameters) / 10
    run = SimpleNamespace(steps=EVERY)
    return SimpleNamespace(model=model, weights=weights, frozen=frozen, run=run, step=0, rounds=0, bytes_sent=0.0)


def products(lane):
    """The mean over replicas of what each adds to each frozen weight, by hand."""
    found = {}
    for pair in lane.model.pairs:
        (outer, inner), sums = pair.shape, 0
        for row in lane.weights.double():
            a, b = row[pair.a].view(pair.rank, inner), row[pair.b].view(outer, pair.rank)
            sums = sums + b @ a
        found[pair.name] = sums / len(lane.weights)
    return found


def joined(lane, exchange):
    """What a round makes of the frozen weights and the products, with the mean of the products before it."""
    rounds, before = exchange(lane, [], EVERY), products(lane)
    frozen = lane.frozen.double()
    lane.step = EVERY
    rounds.after_step()
    assert lane.rounds == 1
    assert (lane.weights == lane.weights[0]).all()
    added = (lane.frozen.double() - frozen)[0]
    return before, {pair.name: added[pair.weight].view(pair.shape) for pair in lane.model.pairs}, products(lane)


def test_averaging_the_factors_apart_is_not_the_mean_of_the_products(lane):
    before = products(lane)
    lane.weights = lane.weights.mean(0, keepdim=True)
    assert all((after - before[name]).abs().max() > 1e-3 for name, after in products(lane).items())


def test_with_the_residual_the_weights_are_the_mean_of_the_products(lane, lora):
    before, added, after = joined(lane, lora.Residual)
    for name, mean in before.items():
        torch.testing.assert_close(added[name] / lora.SCALE + after[name], mean, **CLOSE)
        assert added[name].abs().max() > 1e-3


def test_the_best_factors_have_the_product_that_is_nearest_to_the_mean_of_the_products(lane, lora):
    before, added, after = joined(lane, lora.BestRank)
    for name, mean in before.items():
        u, lengths, v = torch.linalg.svd(mean)
        nearest = u[:, :RANK] * lengths[:RANK] @ v[:RANK]
        torch.testing.assert_close(after[name], nearest, **CLOSE)
        assert not added[name].any()


def test_the_best_factors_of_equal_ones_have_their_product_and_stay_near_to_them(lora):
    a, b = torch.linalg.qr(torch.randn(8, RANK)).Q.T / 2, torch.randn(12, RANK)
    for found, factor in zip(lora.best_factors(torch.stack([a] * 2), torch.stack([b] * 2)), (a, b), strict=True):
        torch.testing.assert_close(found, factor, atol=1e-5, rtol=1e-5)
    a = torch.randn(RANK, 8)
    found_a, found_b = lora.best_factors(torch.stack([a] * 2), torch.stack([b] * 2))
    torch.testing.assert_close(found_b @ found_a, b @ a, atol=1e-5, rtol=1e-5)
    assert (found_a - a).norm() < a.norm()


@pytest.mark.parametrize("rounds", [0, 1])
def test_in_turns_the_product_is_the_mean_of_the_products(lane, lora, rounds):
    """Replicas are equal after a round, so they differ in the factor that the next one trains."""
    drifted, lane.weights = lane.weights, lane.weights[:1].repeat(REPLICAS, 1)
    lane.rounds = rounds
    exchange, was = lora.Alternating(lane, [], EVERY), lane.weights.clone()
    lane.weights[:] = drifted
    lane.step = EVERY - 1
    exchange.after_step()
    before = products(lane)
    lane.step = EVERY
    exchange.after_step()
    assert (lane.weights == lane.weights[0]).all()
    for pair in lane.model.pairs:
        torch.testing.assert_close(products(lane)[pair.name], before[pair.name], **CLOSE)
        idle, trained = (pair.a, pair.b) if rounds == 0 else (pair.b, pair.a)
        assert torch.equal(lane.weights[:, idle], was[:, idle])
        assert not torch.equal(lane.weights[:, trained], was[:, trained])
    assert lane.bytes_sent < 1.5 * lane.weights[0].nbytes


def test_a_layer_computes_with_its_weight_and_the_product_of_its_factors(tuning, benchmark):
    """As peft does: W x + scale B (A x)."""
    run = tuning.Tuning("34k", "alone", 1e-3, 0, 1, replicas=1, rank=RANK)
    stack = tuning.Tunings([run])
    row = torch.randn_like(stack.lanes[0].weights[0]) / 10
    gpt = GPT(SHAPE)
    benchmark("evidence.runner").lie_in(gpt, stack.lanes[0].frozen[0])
    for pair in stack._model.pairs:
        a, b = pair.factors(row)
        layer = gpt.get_submodule(pair.name.removesuffix(".weight"))
        layer.register_forward_hook(lambda _, args, out, a=a, b=b: out + 2.0 * (args[0] @ a.T) @ b.T)
    batch = torch.randint(256, (2, 9), dtype=torch.uint8)
    expected = tuning.loss_of(gpt(batch[:, :-1]), batch)
    torch.testing.assert_close(stack._loss(row, batch, stack.lanes[0].frozen[0]), expected)


def test_replicas_of_every_exchange_end_with_one_set_of_factors(tuning, lora):
    """And all but those that add to it leave the frozen weights as they were."""
    ways = [("local_sgd", {"every": 4}), ("diloco", {"every": 4, "codec": "e3m0"})]
    ways += [(name, {"every": 4}) for name in lora.EXACT]
    usual = tuning.Tuning("34k", "alone", 1e-2, 0, 8, common=0.0, readouts=True, rank=RANK)
    runs = [tuning.replace(usual, method=name, settings=tuning.spelled(**said)) for name, said in ways]
    stack = tuning.Tunings([usual, *runs])
    alone, *lanes = stack.train()
    assert not torch.equal(alone.weights[0], alone.weights[1])
    for lane in lanes:
        assert (lane.weights == lane.weights[0]).all()
        assert (lane.frozen == lane.frozen[0]).all()
        assert lane.rounds == 2
        assert torch.equal(lane.frozen, alone.frozen) == (lane.run.method != "residual")
    assert all(figures["held_out_loss"] > 0 for figures in stack.judge())
