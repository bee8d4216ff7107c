# SPDX-License-Identifier: Apache-2.0
"""Mixed precision on the CPU: what is computed in half, what comes out, and what the loss scaler does."""

import copy
import pickle

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.config.handlers import AutocastKwargs, GradScalerKwargs
from farflung.precision.amp import Autocast, ScaledFp16, choose_precision, without_precision
from farflung.precision.base import Precision

CPU = torch.device("cpu")


class Probe(nn.Module):
    """Says in which dtype its layer computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x):
        y = self.layer(x)
        self.seen = y.dtype
        return {"out": y}


@pytest.mark.parametrize(
    ("name", "dtype", "options", "answer"),
    [
        ("bf16", torch.bfloat16, {}, torch.float32),
        ("fp16", torch.float16, {}, torch.float32),
        ("bf16", torch.bfloat16, {"outputs_to_fp32": False}, torch.bfloat16),
    ],
)
def test_a_wrapped_model_computes_in_half_and_answers_in_fp32(name, dtype, options, answer):
    model = choose_precision(name, CPU, AutocastKwargs(**options)).wrap(Probe())
    assert model(torch.ones(2, 4))["out"].dtype == answer
    assert model.seen == dtype
    assert model.layer.weight.dtype == torch.float32


def test_wrapping_twice_wraps_once_and_restoring_gives_the_plain_forward_back():
    model, precision = Probe(), Autocast("bf16", "cpu")
    precision.wrap(precision.wrap(model))
    plain = without_precision(model)
    plain(torch.ones(2, 4))
    assert plain.seen == torch.float32
    model(torch.ones(2, 4))
    assert model.seen == torch.bfloat16  # it is in use, and goes on in half
    assert all(a is b for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert without_precision(plain) is plain
    pickle.loads(pickle.dumps(plain))


def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights():
    model = Autocast("bf16", "cpu").wrap(Probe())
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.layer.weight.zero_()
        average.layer.bias.zero_()
    x = torch.ones(2, 4)
    assert not average(x)["out"].any()
    assert average.seen == torch.bfloat16
    assert model(x)["out"].any()


def test_restoring_gives_a_forward_of_its_own_back():
    model = Probe()
    model.forward = patched = lambda x: model.layer(x).dtype
    Autocast("bf16", "cpu").wrap(model)
    assert model(torch.ones(2, 4)) == torch.bfloat16
    assert without_precision(model).forward is patched
    assert model(torch.ones(2, 4)) == torch.bfloat16


@pytest.mark.parametrize("clips", [False, True])
def test_fp16_weights_are_refused_in_their_first_step_unless_the_script_makes_torch_take_them(clips):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    layer = nn.Linear(2, 2).half()
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    nn.init.ones_(layer.bias)

    def step():
        accelerator.backward(model(torch.ones(1, 2)).sum())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(ConfigError, match=r"trains fp32 weights .* 2 of the 2 parameters of this SGD are fp16"):
        step()
    optimizer.zero_grad()
    plain = accelerator.scaler._unscale_grads_
    accelerator.scaler._unscale_grads_ = lambda one, scale, found, _: plain(one, scale, found, True)  # as kohya does
    step()
    assert layer.bias.tolist() == [0.0, 0.0]


def test_autocast_can_be_switched_off_for_a_block():
    precision = Autocast("bf16", "cpu")
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with precision.autocast():
        assert layer(x).dtype == torch.bfloat16
    with precision.autocast(AutocastKwargs(enabled=False)):
        assert layer(x).dtype == torch.float32


def scaled():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return ScaledFp16("cpu", scaler=GradScalerKwargs(init_scale=1024.0)), model, optimizer


def test_gradients_are_scaled_by_the_known_scale_and_unscaled_once():
    precision, model, optimizer = scaled()
    precision.scale(model(torch.ones(1, 2)).sum()).backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 1024.0))
    precision.unscale_(optimizer)
    precision.unscale_(optimizer)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))
    before = model.weight.detach().clone()
    assert precision.step(optimizer)
    assert torch.equal(model.weight.detach(), before - 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_says_so(fused):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    precision = ScaledFp16("cpu")
    for x, is_done in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        precision.scale(model(torch.full((1, 2), x)).sum()).backward()
        before = model.weight.detach().clone()
        assert precision.step(optimizer) is is_done
        assert torch.equal(model.weight.detach(), before) is not is_done


@pytest.mark.parametrize("clipped", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("overflow", [False, True])
def test_two_optimizers_step_on_gradients_of_one_scale(clipped, overflow):
    """The first one's step changes nothing for the second: neither that it is unscaled nor the scale by an overflow."""
    precision = ScaledFp16("cpu", scaler=GradScalerKwargs(init_scale=1024.0))
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for number, model in enumerate(models):
        nn.init.ones_(model.weight)
        x = torch.full((1, 2), float("inf") if overflow and number == 0 else 1.0)
        precision.scale(model(x).sum()).backward()
    for number in clipped:
        precision.unscale_(optimizers[number])
    assert [precision.step(optimizer) for optimizer in optimizers] == [not overflow, True]
    assert models[1].weight.tolist() == [[0.0, 0.0]]
    precision.scale(torch.ones(1))
    assert precision.scaler.get_scale() == (512.0 if overflow else 1024.0)


def test_what_cannot_be_is_refused():
    precision, _, optimizer = scaled()
    with pytest.raises(Unsupported, match="closure"):
        precision.step(optimizer, lambda: None)
    assert type(choose_precision("no", CPU)) is Precision
