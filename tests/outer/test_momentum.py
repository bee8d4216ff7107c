# SPDX-License-Identifier: Apache-2.0
"""The outer momentum that nobody has chosen grows with the rounds; what is said of runs that are short for a recipe."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError
from farflung.comm.group import SoloGroup
from farflung.exchanged.structure import settings_of
from farflung.loop.scheduler import planned_updates
from farflung.methods.arguments import OuterConfig, recipe_of
from farflung.methods.momentum import GrowingMomentumSGD, momentum_of
from farflung.outer import OuterLoop, diloco, eager_diloco, edit, local_sgd, post_local_sgd, streaming_diloco
from tests.outer.replicas import shift


def test_the_momentum_of_a_round_is_what_the_page_says():
    assert [momentum_of(number, delay=10) for number in (1, 10, 90, 9000)] == [1 / 11, 0.5, 0.9, 0.9]


@pytest.mark.parametrize("make", [diloco, streaming_diloco])
@pytest.mark.parametrize(("every", "lr"), [(4, 0.35), (8, 0.7), (16, 0.7), (24, 0.7877), (32, 0.85), (500, 0.85)])
def test_the_outer_learning_rate_grows_with_the_interval_as_the_page_says(make, every, lr):
    def rate(**settings):
        return make(every, **settings).optimizer([torch.zeros(1)]).param_groups[0]["lr"]

    assert rate() == pytest.approx(lr, abs=1e-4)
    assert rate(momentum=0.9) == 0.7
    assert rate(lr=0.4) == rate(lr=0.4, momentum=0.9) == 0.4


@pytest.mark.parametrize(("make", "delay"), [(diloco, 10), (streaming_diloco, 5)])
def test_it_grows_where_nobody_chooses_one(make, delay):
    optimizer = make(8).optimizer([nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, GrowingMomentumSGD)
    assert optimizer.defaults["momentum"] == 1 / (1 + delay)
    assert (optimizer.defaults["lr"], optimizer.defaults["nesterov"]) == (0.7, True)
    delays = [1 / make(every).optimizer([torch.zeros(1)]).defaults["momentum"] - 1 for every in (32, 64, 128, 500)]
    assert delays == pytest.approx([delay, delay / 2, 0.3 * delay, 0.3 * delay])
    assert make(8, momentum=0.9).optimizer([nn.Parameter(torch.zeros(1))]).defaults["momentum"] == 0.9


def test_it_grows_to_the_largest_one_that_is_chosen_and_all_must_choose_the_same():
    def optimizer(**settings):
        return diloco(8, **settings).optimizer([nn.Parameter(torch.zeros(1))])

    growing, usual = optimizer(max_momentum=0.8), optimizer()
    for parameter, one in [(each.param_groups[0]["params"][0], each) for each in (growing, usual)]:
        for _ in range(95):
            parameter.grad = torch.ones(1)
            one.step()
    assert [each.param_groups[0]["momentum"] for each in (growing, usual)] == [0.8, 0.9]
    assert (
        settings_of(diloco(8, max_momentum=0.8)) != settings_of(diloco(8)) == settings_of(diloco(8, max_momentum=0.9))
    )
    with pytest.raises(ConfigError, match=r"momentum is 0\.5 in all rounds"):
        diloco(8, momentum=0.5, max_momentum=0.8)
    with pytest.raises(ConfigError, match="max_momentum is 1"):
        diloco(8, max_momentum=1)
    assert optimizer(max_momentum=0).param_groups[0]["nesterov"] is False  # plain averages, as momentum=0


@pytest.mark.parametrize("every", [None, 0, -8])
def test_it_needs_an_interval_also_where_rounds_are_by_time(every):
    with pytest.raises(ConfigError, match=f"every is {every}"):
        diloco(every, seconds=60.0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_its_rounds_follow_the_equation_and_go_on_after_a_resume(nesterov):
    way = torch.tensor([1.0, -2.0, 3.0])

    def moved(resume_after):
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        recipe = diloco(1, lr=0.7, nesterov=nesterov)
        outer = OuterLoop(model, recipe, SoloGroup(), bucket_bytes=8)  # two buckets, each of which counts the rounds
        for number in range(6):
            if number == resume_after:
                state, outer = outer.state_dict(), OuterLoop(model, recipe, SoloGroup(), bucket_bytes=8)
                outer.load_state_dict(state)
            shift(model.parameters(), -way * (number + 1))
            outer.step()
        return model.weight.detach().double().flatten()

    anchor, buffer = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for number in range(6):
        mu, delta = momentum_of(number + 1, delay=10), way.double() * (number + 1)
        buffer = mu * buffer + delta
        anchor -= 0.7 * (delta + mu * buffer if nesterov else buffer)
    torch.testing.assert_close(moved(None), anchor, rtol=1e-5, atol=0)
    assert torch.equal(moved(None), moved(3))


def made(name, **options):
    return recipe_of(OuterConfig(name, **options), local_size=1)


def test_a_run_of_few_rounds_is_warned_of_and_a_longer_one_is_not():
    short = OuterConfig("diloco", steps=319)
    with pytest.warns(UserWarning, match="319 steps make 9 rounds of 32.* rounds of 15 make 21"):
        recipe_of(short, local_size=1)
    with pytest.warns(UserWarning, match="32 steps make 1 round of 32"):
        made("diloco", steps=32)
    with pytest.warns(UserWarning, match="needs hundreds of rounds"):
        made("diloco", steps=32 * 30, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made("diloco", steps=320)
        made("local_sgd", steps=80)
        made("diloco", steps=32 * 30, rounds=300, momentum=0.9)
        made("edit", seconds=10.0, steps=1)  # how many rounds that is, depends on a clock


def test_a_recipe_says_of_itself_whether_a_run_is_short():
    assert local_sgd(8).few_rounds(80) == ""
    assert edit(seconds=1.0).few_rounds(1) == ""
    assert diloco(seconds=1.0).few_rounds(1) == ""
    assert "79 steps make 9 rounds of 8" in local_sgd(8).few_rounds(79)
    warmed = post_local_sgd(100, 8)
    assert "99 steps make 0 rounds of 8" in warmed.few_rounds(99)
    assert re.match("109 steps make 1 round of 8.*: rounds of 1 make 9", warmed.few_rounds(109))


def test_a_recipe_advises_against_a_large_momentum_for_adapters_in_short_rounds_alone():
    assert "rounds of 8 steps" in diloco(8).advice_for_adapters
    assert "--outer-max-momentum 0.5" in diloco(8, codec="e3m0").advice_for_adapters
    others = diloco(32), diloco(8, max_momentum=0.5), diloco(8, momentum=0.0), local_sgd(8), streaming_diloco(8)
    for recipe in (*others, diloco(seconds=1.0), edit(8)):
        assert recipe.advice_for_adapters == ""


def a_schedule(kind, steps_taken, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = kind(optimizer, **options)
    for _ in range(steps_taken):
        optimizer.step()
        schedule.step()
    return schedule


def test_a_schedule_tells_the_length_of_a_run_after_its_first_step():
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    of_steps, of_epochs = a_schedule(cosine, 1, T_max=200), a_schedule(cosine, 0, T_max=90)
    resumed, endless = a_schedule(cosine, 50, T_max=200), a_schedule(torch.optim.lr_scheduler.ConstantLR, 1)
    assert planned_updates([of_steps]) == planned_updates([of_epochs, of_steps, resumed]) == 200
    assert planned_updates([of_epochs, resumed, endless]) is None
    assert planned_updates([]) is None


def test_an_accelerator_says_once_that_a_run_is_short_for_its_recipe(caplog):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=79)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with accelerator.outer(model, local_sgd(8)):
        for _ in range(4):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert caplog.text.count("As the learning rate schedule has it, 79 steps make 9 rounds of 8.") == 1


def test_a_momentum_that_short_runs_do_not_pay_back_is_warned_of():
    for make in (partial(diloco, 32), partial(streaming_diloco, 4, 2), partial(eager_diloco, 4)):
        with pytest.warns(UserWarning, match=r"of 0\.9 needs hundreds of rounds to pay off, but 30 are planned"):
            make(rounds=30, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diloco(32, rounds=100, momentum=0.9)
        diloco(32, rounds=30, momentum=0.6)
        diloco(32, momentum=0.0)
