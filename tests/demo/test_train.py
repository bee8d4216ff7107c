# SPDX-License-Identifier: Apache-2.0
"""The ways see the same data from the same weights, and are judged when their processes agree; bytes and seconds."""

import os
import stat
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis.strategies import integers
from safetensors import safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.auto.choice import FOREVER, Choice
from farflung.config.outer import AUTO, OuterSettings
from farflung.cost.model import Method, Workload, cost_of
from farflung.demo import train
from farflung.demo.settings import ALONE, MODEL_FILE, DemoSettings
from farflung.testing.ranks import run_ranks

TEXT = bytes(range(256)) * 40


def items_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


@given(steps=integers(1, 3000), every=integers(1, 100))
def test_the_loss_is_taken_at_ends_of_rounds_before_the_last_step(steps, every):
    found = train.checkpoints(steps, every)
    assert all(step % every == 0 and 0 < step < steps for step in found)
    assert len(found) <= 12
    assert not found or every in found


@given(length=integers(9, 200), context=integers(1, 8))
def test_sequences_overlap_by_the_byte_that_is_foretold_only(length, context):
    text = bytes(range(length))
    pieces = [bytes(piece.tolist()) for piece in items_of(train.Sequences(text, context))]
    assert all(len(piece) == context + 1 for piece in pieces)
    assert b"".join(piece[:-1] for piece in pieces) == text[: len(pieces) * context]
    assert all(before[-1] == after[0] for before, after in pairwise(pieces))


def test_what_is_held_out_is_spread_over_the_whole_text():
    starts = [int(piece[0]) for piece in items_of(train.evenly(train.Sequences(bytes(range(101)), 10), 5))]
    assert starts == [0, 20, 40, 60, 80]


def settings_for(**changes):
    known = {"steps": 4, "processes": 2, "every": 2, "batch": 3, "seed": 7, "bandwidth_bps": 20e6, "output": "unused"}
    return DemoSettings(size="tiny", data=None, **known | changes)


def weights(trial):
    return torch.cat([parameter.detach().flatten() for parameter in trial.model.parameters()])


class Noting(train.Trial):
    """A trial that keeps what it learned from."""

    seen = ()

    def learn(self, batch):
        super().learn(batch)
        self.seen = (*self.seen, batch)


ROUNDS = Choice(OuterSettings("diloco", every=3, codec="e3m0"), "", "three steps")
DATA_PARALLEL = Choice(OuterSettings("post_local_sgd", warmup=FOREVER), "", "plain")


def one_contest(choice):
    accelerator = Accelerator(cpu=True)
    settings = settings_for(steps=7)
    loader, judges = accelerator.prepare(
        DataLoader(train.Sequences(TEXT, 64), batch_size=3, shuffle=True, drop_last=True),
        DataLoader(train.evenly(train.Sequences(TEXT, 64), 8), batch_size=2),
    )
    with ExitStack() as stack:
        trials = [stack.enter_context(Noting(way, accelerator, settings)) for way in train.ways(settings, choice)]
        before = [weights(trial) for trial in trials]
        train.compete(trials, train.endless(loader), judges, lambda trial: None)
    seen = [(weights(trial), torch.stack(trial.seen), trial.result()) for trial in trials]
    return [(start, *rest) for start, rest in zip(before, seen, strict=True)]


def test_all_ways_start_alike_see_the_same_batches_and_end_in_agreement_but_for_the_one_that_trains_alone():
    first, second = run_ranks(one_contest, 2, ROUNDS, connect=False)
    start, _, batches, _ = first[0]
    for (begun, ended, seen, result), there in zip(first, second, strict=True):
        assert torch.equal(start, begun)
        assert torch.equal(start, there[0])  # all ranks start alike
        assert torch.equal(ended, there[1]) == (result.way != ALONE)
        assert not torch.equal(start, ended)
        assert torch.equal(batches, seen)
        assert torch.equal(second[0][2], there[2])
        ends = [3, 6, 7] if result.way == AUTO else [2, 4, 6, 7]  # of its own rounds
        assert [point.step for point in result.curve] == ends
        assert result.note == (ROUNDS.why if result.way == AUTO else "")
        assert [point.loss for point in result.curve] == [point.loss for point in there[3].curve]
        assert (result.bytes_sent == 0) == (result.way == ALONE)
    assert not torch.equal(batches, second[0][2])  # each process has a share of its own


def test_data_parallel_training_that_auto_chose_has_the_losses_bytes_and_time_of_ddp():
    by_way = {result.way: result for *_, result in run_ranks(one_contest, 2, DATA_PARALLEL, connect=False)[0]}
    ddp, auto = by_way["DDP"], by_way[AUTO]
    assert auto.curve == ddp.curve
    assert auto.bytes_sent == ddp.bytes_sent > 0
    line_s = 8 * ddp.bytes_sent / settings_for().bandwidth_bps
    assert min(auto.line_seconds, ddp.line_seconds) > line_s / 2  # whatever the processor
    assert auto.note == "plain"


LINES = [(1e5, 480, 24), (1e5, 5, 1), (1e15, 480, None), (1e15, 5, None)]


def choose_for_lines():
    settings, accelerator = settings_for(every=16), Accelerator(cpu=True)
    lines = [replace(settings, bandwidth_bps=rate, steps=steps) for rate, steps, _ in LINES]
    return [train.choice_for_line(accelerator, line) for line in lines]


def test_all_ranks_choose_the_same_for_the_line_of_the_demo():
    first, second = run_ranks(choose_for_lines, 2, connect=False)
    assert first == second
    for (bandwidth_bps, steps, longest), choice in zip(LINES, first, strict=True):
        assert choice.is_data_parallel == (longest is None), (bandwidth_bps, steps, choice.reason)
        assert longest is None or choice.settings.every <= longest
        assert "2 replicas" in choice.facts
        assert f"{steps} steps" in choice.facts


def schedule_at_the_end():
    trial = train.Trial(train.Way("DDP"), Accelerator(cpu=True), settings_for(steps=20))
    rates = []
    for _ in range(20):
        rates.append(trial.optimizer.param_groups[0]["lr"])
        trial.learn(torch.zeros(3, 65, dtype=torch.uint8))
    return rates, trial.optimizer.param_groups[0]["lr"]


def test_the_learning_rate_rises_shortly_and_ends_at_zero():
    rates, last = run_ranks(schedule_at_the_end, 2, connect=False)[0]
    assert 0 < rates[0] < max(rates[:4])
    assert last == pytest.approx(0)


def test_its_weights_have_the_mode_of_any_other_file_and_can_be_loaded(tmp_path):
    settings = settings_for(output=str(tmp_path))
    before = os.umask(0o027)
    try:
        train.save_model(torch.nn.Linear(2, 1), settings, "DDP")
    finally:
        os.umask(before)
    assert stat.S_IMODE(settings.path(MODEL_FILE).stat().st_mode) == 0o640
    with safe_open(settings.path(MODEL_FILE), framework="pt") as content:
        assert content.metadata() == {"size": "tiny", "way": "DDP"}
        assert set(content.keys()) == {"weight", "bias"}


LINE = Workload(parameters=1000, layers=2, step_s=0.05, replicas=2, bandwidth_bps=8000.0)


def test_what_nothing_hides_is_computing_and_bytes_over_the_line():
    # 4000 bytes a second pass in each direction: 8000 bits a second are 1000 bytes.
    method = Method("m", every=10, bits=1.0)  # whose bits are not those that were measured
    assert train.seconds_on_line(method, LINE, 100, 40_000) == pytest.approx(5.0 + 40.0)


def test_what_travels_while_training_goes_on_takes_no_time_of_its_own():
    method = Method("m", every=10, delay=5, exchange="gathered")
    assert train.seconds_on_line(method, LINE, 100, 2_000) == pytest.approx(5.0)
    assert train.seconds_on_line(method, LINE, 100, 40_000) == pytest.approx(45.0 - 10 * 0.25)  # five steps a round


@pytest.mark.parametrize("exchange", ["reduced", "gathered", "either"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_with_the_bytes_of_the_model_it_is_the_forecast(exchange, replicas):
    method = Method("m", every=10, fragments=2, delay=1, exchange=exchange)
    run = replace(LINE, replicas=replicas)
    cost = cost_of(run, method)
    found = train.seconds_on_line(method, run, 100, 100 * cost.bytes_sent_per_step)
    assert found == pytest.approx(100 * cost.seconds_per_step)


def _gradients(metered):
    torch.manual_seed(0)
    # 0.6 MB and more a layer, so that the gradients travel in several buckets.
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(400, 400) for _ in range(4))), bucket_cap_mb=1)
    meter = train.GradientMeter(model) if metered else None
    x = torch.randn(3, 400, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(x).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()], meter


def metered_and_plain():
    metered, meter = _gradients(True)
    plain, _ = _gradients(False)
    torch.testing.assert_close(metered, plain)
    return meter.bytes_sent, sum(gradient.nbytes for gradient in plain)


def test_gradients_are_those_of_ddp_and_bytes_those_of_a_ring():
    for sent, gradient_bytes in run_ranks(metered_and_plain, 3):
        assert sent == pytest.approx(2 * 2 * 2 / 3 * gradient_bytes, abs=20)


def test_a_pipe_gets_a_line_a_minute(monkeypatch, capsys):
    now, trial = [0.0], SimpleNamespace(way=SimpleNamespace(name="DDP"))
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for is_main in (True, False):
        with train.progress(SimpleNamespace(is_main_process=is_main), 1200) as show:
            for _ in range(13):
                now[0] += 10.0
                show(trial)
    lines = [f"{steps} of 1,200 steps after {minutes} min, the latest by DDP" for steps, minutes in ((6, 1), (12, 2))]
    assert capsys.readouterr().out.splitlines() == lines
