# SPDX-License-Identifier: Apache-2.0
"""Warm-ups, learning rates, the inner optimizer's state, evaluation, records: what goes on around the rounds."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch, ConfigError, StateError, Unsupported
from farflung.comm.group import SoloGroup
from farflung.exchanged import comparison
from farflung.exchanged.structure import settings_of
from farflung.methods.agreement import Replace
from farflung.methods.recipes import local_sgd, noloco, post_local_sgd, quadratic, sparse_loco, streaming_diloco
from farflung.methods.schedule import Every, Warmup
from farflung.outer import AverageState, OuterLoop, TopK, diloco, eager_diloco, edit, gossip, hierarchical
from farflung.outer.background import BackgroundJob
from farflung.outer.stats import Meter, Stats
from farflung.testing.sim import run_replicas
from tests.errors import error_of
from tests.outer.replicas import (
    Run,
    batch,
    kept_of,
    linear,
    net,
    no_statistics,
    on_replicas,
    same,
    shift,
    train,
    values,
)
from tests.recipes import RECIPES


def test_a_function_as_a_part_is_the_same_wherever_it_is_in_memory():
    def made():
        def merge(local, anchor):
            Replace()(local, anchor)

        return merge

    first, other = made(), made()
    assert settings_of(replace(local_sgd(2), merge=first)) == settings_of(replace(local_sgd(2), merge=other))


# post_local_sgd
def warmed(group, steps):
    run = Run(group, post_local_sgd(4, 2), no_statistics)
    return run.seen(*range(steps)), run.end(), run.outer.stats()


def test_in_a_warm_up_gradients_are_averaged_and_weights_stay_alike():
    (first, one, stats), (second, other, _) = run_replicas(warmed, 2, 8)
    assert list(map(same, first, second)) == [True] * 4 + [False, True, False, True]
    assert same(one, other)
    assert stats.rounds == 2
    # Four times gradients, twice weights.
    assert stats.bytes_sent == 6 * sum(p.numel() for p in no_statistics().parameters()) * 4


def warmed_in_turns(group, attaches, counts):
    """Two nets in turns, each with a backward pass of its own; rank 1 may run out of data in the warm-up."""
    model = no_statistics()
    nets = model[0], model[2]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    outer, seen = OuterLoop(model, post_local_sgd(4, 2), group), []
    if attaches:
        outer.attach(*optimizers)
    for step in range(counts[group.rank]):
        for optimizer in optimizers:
            model.zero_grad()
            model(batch(step, group.rank)[0]).square().sum().backward()
            if not attaches:
                outer.average_gradients()
            optimizer.step()
        if not attaches:
            outer.step()
        seen.append(values(model))
    outer.close()
    return seen, values(model), outer.stats().bytes_sent


@pytest.mark.parametrize("counts", [(5, 5), (5, 4), (6, 1), (3, 2), (5, 0)])
@pytest.mark.parametrize("attaches", [True, False])
def test_in_a_warm_up_each_optimizer_steps_with_the_gradients_of_all(attaches, counts):
    (first, one, sent), (second, other, _) = run_replicas(warmed_in_turns, 2, attaches, counts)
    alike = [same(a, b) for a, b in zip(first, second, strict=False)]
    assert alike == ([True] * 4 + [False])[: len(alike)]
    assert same(one, other)
    if attaches and counts == (5, 5):  # four times gradients, each once, and once weights
        assert sent == 5 * sum(p.numel() for p in no_statistics().parameters()) * 4


def one_model(ranks, steps):
    """One process that has the data of all."""
    model, *copies = (no_statistics() for _ in range(1 + ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for step in range(steps):
        for rank, copy in enumerate(copies):
            copy.load_state_dict(model.state_dict())
            train(copy, torch.optim.SGD(copy.parameters(), lr=0.0), step, rank)
        for name, parameter in model.named_parameters():
            parameter.grad = sum(copy.get_parameter(name).grad for copy in copies) / ranks
        optimizer.step()
    return values(model)


def flushed_in_epochs(group, warmup):
    """Three epochs, of which rank 1 has one batch more."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OuterLoop(model, post_local_sgd(warmup, 4), group).attach(optimizer) as outer:
        for step in [step for epoch in range(3) for step in (*range(5 + group.rank), None)]:
            if step is None:
                outer.flush()
                continue
            model(torch.full((2, model.in_features), float(step + group.rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("warmup", [4, 6, 7, 12])
def test_a_flush_may_end_a_warm_up_that_another_rank_has_ended(warmup):
    assert same(*run_replicas(flushed_in_epochs, 2, warmup))


@pytest.mark.law("warm-up-is-ddp")
def test_a_warm_up_is_plain_data_parallelism():
    got = run_replicas(warmed, 2, 3)[0][0][-1]
    assert all(torch.allclose(value, got[name], atol=1e-6) for name, value in one_model(2, 3).items())


@on_replicas(2)
def test_shared_steps_of_a_warm_up_count_no_weight(group):
    """Two shared steps of the warm-up's four, then rank 0 makes four alone: each adds 1."""
    model = linear()
    model.weight.data.zero_()
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    with OuterLoop(model, post_local_sgd(4, 2), group).attach(optimizer):
        for _ in range((6, 2)[group.rank]):
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
    assert model.weight.unique().tolist() == [6.0]


@pytest.mark.parametrize(
    "recipe",
    [post_local_sgd(3, 4), *(replace(one, schedule=Warmup(3, one.schedule)) for one in (diloco(2), eager_diloco(2)))],
)
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_flush_in_or_after_a_warm_up_averages_buffers_too(recipe, steps):
    def flushed(group):
        run = Run(group, recipe)
        before = run.steps(*range(steps))
        run.outer.flush()
        return before, values(run.model)

    (before, one), (other_before, other) = run_replicas(flushed, 2)
    assert not same(before, other_before)  # of a BatchNorm
    assert same(one, other)


@on_replicas(2)
def test_a_step_whose_gradients_were_not_averaged_is_an_error(group):
    outer = OuterLoop(linear(), post_local_sgd(2, 2), group)
    with pytest.raises(
        StateError, match=r"in the first 2 steps, and this is step 1\. Call outer\.average_gradients\(\)"
    ):
        outer.step()
    OuterLoop(linear(), post_local_sgd(2, 2), SoloGroup()).step()  # alone there is nothing to average
    model = linear()
    outer = OuterLoop(model, post_local_sgd(2, 2), group)
    for step in range(4):
        assert outer.is_warming == (step < 2)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(group.rank)) if step or group.rank else None
        outer.average_gradients()
        assert model.weight.grad.unique().tolist() == [0.5 if step < 2 else group.rank]
        outer.step()


@on_replicas(2)
def test_in_a_warm_up_what_no_rank_has_used_stays_as_it_is(group):
    heads = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1, weight_decay=0.5)
    outer = OuterLoop(heads, post_local_sgd(2, 2), group).attach(optimizer)
    before = heads[2].weight.detach().clone()
    for step in range(2):
        used = heads[: 1 + group.rank] if step == 0 else [heads[2 * group.rank]]
        sum(head(torch.ones(2)) for head in used).backward()
        optimizer.step()
        assert [head.weight.grad is None for head in heads] == [False, step == 1, step == 0]
        assert torch.equal(before, heads[2].weight) == (step == 0)
        optimizer.zero_grad()
    outer.close()


@on_replicas(2)
def test_a_closure_in_a_warm_up_is_refused(group):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = OuterLoop(model, post_local_sgd(1, 2), group).attach(optimizer)
    for give in (lambda f: optimizer.step(f), lambda f: optimizer.step(closure=f)):
        with pytest.raises(
            Unsupported, match=r"\(1 step\) an .* closure: it .* after they were averaged\. Use a recipe"
        ):
            give(lambda: 0.0)
    outer.average_gradients()
    optimizer.step()
    optimizer.step(lambda: 0.0)


def scaled(group, averages):
    """Rank 1 has a gradient that is not finite in its second step."""
    model = linear()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    outer = OuterLoop(model, post_local_sgd(3, 2), group).attach(optimizer)
    for step in range(4):
        factor = math.inf if (step, group.rank) == (1, 1) else 1.0 + group.rank
        scaler.scale(factor * model(torch.ones(1, model.in_features)).sum()).backward()
        if averages:
            outer.average_gradients()
        done = outer.stats().steps
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if outer.stats().steps == done:
            outer.count(done=False)
            outer.sync_if_due()
        if step == 2:
            warm = values(model)
    outer.close()
    return warm, values(model), outer.stats().steps


def test_with_gradients_averaged_before_it_a_scaler_skips_the_same_steps_on_all_ranks():
    (warm, one, steps), (other_warm, other, others) = run_replicas(scaled, 2, True)
    assert same(warm, other_warm)
    assert same(one, other)
    assert steps == others == 3


def test_a_step_that_a_scaler_skips_on_one_rank_alone_in_a_warm_up_is_an_error():
    with pytest.raises(StateError, match=r"before scaler\.step"):
        run_replicas(scaled, 2, False)


def evaluated_and_flushed_while_warm(group, recipe):
    run, plain = (Run(group, recipe) for _ in range(2))
    weights = [name for name, _ in run.model.named_parameters()]
    first, sent = run.steps(0, 1, 2), run.outer.stats().bytes_sent
    with run.outer.synced():
        assert same(first, values(run.model))
    assert run.outer.stats().bytes_sent == sent
    run.outer.flush()
    flushed = values(run.model)
    assert all(torch.equal(first[name], flushed[name]) for name in weights)
    ends = run.steps(3), plain.steps(0, 1, 2, 3)
    assert same(*({name: end[name] for name in weights} for end in ends))
    return flushed


@pytest.mark.parametrize("recipe", [replace(diloco(2), schedule=Warmup(8, Every(2))), post_local_sgd(8, 2)])
def test_a_warm_up_can_be_evaluated_and_flushed_without_a_step_back(recipe):
    assert same(*run_replicas(evaluated_and_flushed_while_warm, 2, recipe))


def warmed_by_adam(group, is_resumed):
    """Epochs in a warm-up, of which the first one is uneven: the moments differ from then on."""
    recipe = replace(diloco(2), schedule=Warmup(4, Every(2)))
    model = no_statistics()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    outer = OuterLoop(model, recipe, group).attach(optimizer)
    for number, epoch in enumerate([(2, 1), (1, 0), (3, 3)]):
        for step in range(epoch[group.rank]):
            train(model, optimizer, 10 * number + step, group.rank)
        outer.flush()
        if is_resumed and number == 0:
            state = outer.state_dict()
            outer.detach()
            outer = OuterLoop(model, recipe, group).attach(optimizer)
            for step in range(5):  # past the warm-up, from which it comes back
                train(model, optimizer, step, group.rank)
            outer.load_state_dict(state)
    outer.close()
    return values(model)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_optimizers_that_differ_in_a_warm_up_leave_no_replicas_that_differ(is_resumed):
    assert same(*run_replicas(warmed_by_adam, 2, is_resumed))


# quadratic
def rounds_by_rate(group, lr, steps, rate_at):
    """The steps after which rounds end, where `rate_at` says the learning rate in each step."""
    run = Run(group, quadratic(2, alpha=0.2), no_statistics, lr=lr)
    for number in range(steps):
        run.optimizer.param_groups[0]["lr"] = rate_at(number)
        run.steps(number)
    run.end()
    return [this.step for this in run.rounds]


@pytest.mark.parametrize(
    ("lr", "steps", "rate_at", "ended"),
    [
        # (0.2 / 0.1)**2 = 4 steps; from the round after step 8 on (0.2 / 0.05)**2 = 16; the last one is forced.
        (0.1, 34, lambda number: 0.1 if number < 5 else 0.05 if number < 15 else 1e-9, [4, 8, 24, 34]),
        # A warm-up: at 0.02, 0.04, 0.06, 0.08, 0.1 rounds have 100, 25, 11, 6 and 4 steps; five are done at the last.
        (1e-6, 12, lambda number: min(0.1, 0.02 * (number + 1)), [5, 9, 12]),
    ],
    ids=["decay", "warm-up"],
)
def test_quadratic_rounds_follow_the_rate_and_a_warm_up_makes_none_endless(lr, steps, rate_at, ended):
    assert run_replicas(rounds_by_rate, 2, lr, steps, rate_at) == [ended] * 2


def test_the_quadratic_rule_must_know_the_optimizer():
    outer = OuterLoop(linear(), quadratic(2, alpha=0.2), SoloGroup())
    with pytest.raises(ConfigError, match="inner=optimizer"):
        outer.step()
    model = linear()
    outer = OuterLoop(model, quadratic(2, 0.2), SoloGroup(), inner=torch.optim.SGD(model.parameters(), lr=0.2))
    outer.step()
    outer.step()
    assert outer.stats().rounds == 1


# by time
def by_the_clock(group, speeds):
    now = [0.0]
    model = nn.ParameterList([torch.zeros(1)])
    recipe = replace(edit(seconds=10.0, lr=1.0, momentum=0.0), policy=RECIPES["local_sgd"].policy)
    with OuterLoop(model, recipe, group, clock=lambda: now[0]) as outer:
        rounds = []
        outer.listeners.append(rounds.append)
        for _ in range(2 * 10 // speeds[group.rank]):
            now[0] += speeds[group.rank]
            shift(model, 1.0)
            outer.step()
    return [this.weights for this in rounds], model[0].item(), outer.stats().rounds


def test_by_time_fast_replicas_do_more_steps_and_weigh_more():
    outcomes = run_replicas(by_the_clock, 2, (1, 5))
    assert outcomes == [([(10 / 12, 2 / 12)] * 2, pytest.approx(2 * (100 + 4) / 12), 2)] * 2


# synced
def evaluated(group, recipe):
    run, plain = (Run(group, recipe, no_statistics) for _ in range(2))
    before = run.steps(0, 1, 2)
    with run.outer.synced():
        inside = values(run.model)
    assert same(before, values(run.model))
    with pytest.raises(KeyError), run.outer.synced():
        raise KeyError("an evaluation that fails")
    assert same(before, plain.steps(0, 1, 2), values(run.model))
    insides = [inside]
    for number in range(3, 9):  # also in mid-flight
        assert same(run.steps(number), plain.steps(number))
        with run.outer.synced():
            insides.append(values(run.model))
    return before, insides


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_sees_the_same_weights_on_all_ranks_and_changes_no_bit_of_the_training(name):
    outcomes = run_replicas(evaluated, 4, RECIPES[name])
    assert all(map(same, *(insides for _, insides in outcomes)))
    if RECIPES[name].optimizer is None:  # the mean of what all have
        for key, value in outcomes[0][1][0].items():
            expected = sum(before[key] for before, _ in outcomes) / 4
            assert torch.allclose(value, expected, atol=1e-6)


@on_replicas(2)
def test_with_an_anchor_an_evaluation_sees_what_was_agreed_on(group):
    run = Run(group, diloco(2), no_statistics)
    run.steps(0, 1)
    with run.outer.synced():
        agreed = values(run.model)
    run.steps(2)
    sent = run.outer.stats().bytes_sent
    with run.outer.synced():
        assert same(agreed, values(run.model))
    assert run.outer.stats().bytes_sent == sent
    run.model[0].weight.data = run.model[0].weight.data.clone()
    with run.outer.synced():
        assert same(agreed, values(run.model))


# digests
def tampered(group, recipe, tamper=None):
    run = Run(group, recipe, no_statistics)
    run.steps(0)
    if group.rank == 1 and tamper:
        state = run.outer.state_dict()
        tamper(state["rounds"]["fragments"][0])
        run.outer.load_state_dict(state)
    run.steps(*range(1, 9))


@pytest.mark.parametrize("recipe", [diloco(1), streaming_diloco(1, 1, delay=0, alpha=0.0)])
def test_an_anchor_that_differs_is_found_and_named(recipe, monkeypatch):
    monkeypatch.setattr(comparison, "_DIGEST_EVERY", 2)
    with pytest.raises(CollectiveMismatch, match=r"no longer agree on 2\.weight: its value on rank 1"):
        run_replicas(tampered, 3, recipe, lambda one: one["agreed"]["anchor"]["chunks"][0][22].add_(1e-6))
    why = r"no longer agreed at the end of .* \(digests \[(\d+), 5, \1\]\), .* now\. Something has written to it"
    with pytest.raises(CollectiveMismatch, match=why):
        run_replicas(tampered, 3, recipe, lambda one: one.update(digest=5))
    run_replicas(tampered, 3, recipe)


# What is written down.
def recorded(group, ways, recipe):
    model, said = nn.ParameterList([torch.zeros(4)]), []
    outer = OuterLoop(model, recipe, group)
    outer.listeners.append(said.append)
    for way in ways[group.rank]:
        shift(model, torch.tensor(way))
        outer.step()
    return said, outer.stats(), outer.advice()


def test_a_round_is_recorded_as_it_was():
    ways = [[[3.0, 0, 0, 4.0], [0, 0, 0, 1.0]], [[0, 0, 5.0, 0], [0, 0, 0, 1.0]]]
    (said, stats, _), (theirs, _, _) = run_replicas(recorded, 2, ways, diloco(1, lr=1.0, momentum=0.0))
    first, second = said
    assert [(this.step, this.fragment, this.dropped) for this in said] == [(1, 0, False), (2, 0, False)]
    assert first.number < second.number
    assert first.weights == (0.5, 0.5)
    assert first.norms == (5.0, 5.0)
    assert first.norm == pytest.approx(math.sqrt(50) / 2)
    assert first.cosine == pytest.approx(0.0, abs=1e-6)
    assert second.cosine == pytest.approx(1.0)
    assert (stats.drift_norm, stats.cosine, stats.weight) == (1.0, pytest.approx(1.0), 0.5)
    assert stats.bytes_sent == first.bytes_sent + second.bytes_sent == 2 * 4 * 4
    assert stats.bytes_received == first.bytes_received + second.bytes_received == 2 * 4 * 4
    assert [this.norms for this in theirs] == [this.norms for this in said]


def test_a_dropped_round_is_recorded_too():
    with pytest.warns(RuntimeWarning, match="not finite"):
        (said, stats, _), _ = run_replicas(recorded, 2, [[[1.0] * 4], [[math.nan] * 4]], diloco(1))
    assert [(this.dropped, this.weights) for this in said] == [(True, (0.5, 0.5))]
    assert (stats.rounds, stats.dropped_rounds, stats.drift_norm) == (0, 1, 0.0)


def test_advice_is_given_where_there_is_something_to_say():
    for last in (5.0, 4.0):
        growing = [[[size] * 4 for size in (1.0, 2.0, last)]] * 2
        (_, stats, advice), *_ = run_replicas(recorded, 2, growing, diloco(1, lr=1.0, momentum=0.0))
        assert ("times as far" in advice) == (last > 4)
        far = "moved 5.0 times as far from the anchor in the latest round as in the first one: synchronize more often"
        assert f"{far} (every=), or lower the learning rate." in advice or last == 4
        assert (stats.first_drift_norm, stats.drift_norm) == (2.0, 2 * last)
    calm = OuterLoop(linear(), diloco(2), SoloGroup())
    calm.step()
    assert calm.advice() == ""


def test_a_replica_that_trained_alone_though_others_may_come_is_told_what_0_bytes_mean():
    meter = Meter()
    assert meter.advice(by_flags=True, is_fixed=False) == "", "it has made no round yet"
    meter.add("rounds", 7)
    said = "warning: 0 B were sent in 7 rounds: no other replica took part in any, so this one has trained alone"
    assert meter.advice(by_flags=True, is_fixed=False).startswith(said)
    assert meter.advice(by_flags=True, is_fixed=True) == ""
    meter.add("bytes_sent", 1)
    assert meter.advice(by_flags=True, is_fixed=False) == ""


def test_advice_is_by_cause_and_names_what_can_be_set():
    meter = Meter()
    meter.add("bytes_sent")
    for name, amount in {"seconds_exposed": 90.0, "seconds_total": 100.0, "seconds_voting": 10.0, "rounds": 10}.items():
        assert meter.advice(by_flags=True, is_fixed=False) == ""
        meter.add(name, amount)
    for by_flags, every, codec in (False, "every=", "codec="), (True, "--outer-every", "--outer-codec"):
        assert f"({every}), send fewer bits ({codec}), or let rounds overlap" in meter.advice(by_flags, is_fixed=True)
    assert meter.advice(by_flags=True, is_fixed=False, is_auto=True) == ""
    for seconds, says in (
        (30.0, "44% of that for slower ranks: synchronize"),
        (10.0, "56% of that for slower ranks: start"),
    ):
        meter.add("seconds_voting", seconds)
        assert says in meter.advice(by_flags=False, is_fixed=False)
    meter.add("seconds_voting", 30.0)
    for by_flags, by_time in (False, "(diloco(seconds=10))"), (True, "(--outer diloco --outer-seconds 10)"):
        advice = meter.advice(by_flags, is_fixed=False)
        assert f"89% of that for slower ranks: start rounds by time {by_time}" in advice
        fixed = meter.advice(by_flags, is_fixed=True)  # all ranks have as many steps, whenever rounds begin
        assert fixed.endswith("89% of that for slower ranks: give slower ranks less work per step.")
        assert fixed == meter.advice(by_flags, is_fixed=False, is_auto=True)
        assert "bits" not in advice
    meter.add("seconds_voting", 90.0)  # in the background too
    assert "90% of the time waiting for rounds, 100% of that" in meter.advice(by_flags=False, is_fixed=True)
    meter.add("first_drift_norm", 1.0)
    meter.add("drift_norm", 9.0)
    assert "times as far" not in meter.advice(by_flags=False, is_fixed=True, is_auto=True)
    for exposed_s, is_much in (-75.0, True), (-8.0, False):  # 15 and 7 of 100
        meter.add("seconds_exposed", exposed_s)
        assert ("waiting for rounds" in meter.advice(by_flags=False, is_fixed=True)) == is_much


def test_seconds_continue_from_a_state(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("farflung.outer.stats.time", SimpleNamespace(perf_counter=lambda: now.s))
    meter = Meter()
    with meter.timed("voting"):
        now.s = 103.0
    for name in ("replicas_lost", "replicas_joined", "seconds_recovering", "steps_lost"):
        meter.add(name)  # what others did is not saved
    saved = meter.stats().saved() | {"seconds_total": 10.0}
    now.s = 150.0
    meter.load({name: value for name, value in saved.items() if name != "weight"})  # as an older version wrote it
    now.s = 153.0
    assert meter.stats() == Stats(seconds_voting=3.0, seconds_total=13.0)
    assert (BackgroundJob(None, seconds=3.0, waited=1.0).hidden_s, BackgroundJob(None, waited=1.0).hidden_s) == (2, 0)


# anchor_on_cpu
@pytest.mark.law("anchor-place-is-invisible")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "recipe",
    [diloco(2), streaming_diloco(4, 2, delay=1), eager_diloco(2), sparse_loco(2, codec=TopK(k=3, chunk=16)), noloco(2)],
)
def test_an_anchor_that_is_kept_in_the_hosts_memory_gives_the_same_bits(recipe, device):
    def trained(group, recipe):
        run = Run(group, recipe, lambda: net().to(device))
        chunks = [chunk for kept in kept_of(run.outer) for chunk in kept["anchor"]["chunks"]]
        assert all(chunk.is_cpu == (device == "cpu" or recipe.anchor_on_cpu) for chunk in chunks)
        run.steps(*range(7))
        return run.end()

    assert same(*run_replicas(trained, 2, recipe), *run_replicas(trained, 2, replace(recipe, anchor_on_cpu=True)))


# What is due late is done step by step, so that ranks stay in the same rounds.
@pytest.mark.parametrize(
    "recipe",
    [hierarchical({1: 2, 3: None}), streaming_diloco(3, 2, delay=0, alpha=0.0), local_sgd(2), gossip(3), diloco(1)],
)
def test_a_rank_that_asks_seldom_does_all_that_was_due(recipe):
    def counting_late(group):
        model = linear()
        with OuterLoop(model, recipe, group) as outer:
            for step in range(12):
                shift([model.weight], 2.0**group.rank)
                outer.count()
                if group.rank == 0 or step % 5 == 4:
                    outer.sync_if_due()
        return values(model)

    assert same(*run_replicas(counting_late, 4))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(diloco(2), inner=AverageState()), "AverageState("),
        (replace(diloco(2), weigh_by="items"), "by items"),
        (replace(diloco(2), optimizer=functools.partial(torch.optim.SGD, lr=0.5)), "lr=0.5"),
        (edit(2, momentum=0.9), "WithoutOutliers"),
        (eager_diloco(2), "eager"),
        (gossip(2), "Gossip"),
        (diloco(3), "Every(every=3)"),
    ],
)
def test_ranks_with_other_recipes_are_told_how_they_differ(other, told):
    def differing(group):
        return error_of(CollectiveMismatch, OuterLoop, linear(), (diloco(2), other)[group.rank], group)

    first, second = run_replicas(differing, 2)
    assert first == second
    assert told in first
