# SPDX-License-Identifier: Apache-2.0
"""Several models and optimizers in one loop, on ranks: the same weights as one process that takes whole batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.state import AcceleratorState
from tests.accelerator.conftest import on_ranks

NUM, GLOBAL_BATCH = 24, 8
DATA = torch.randn(NUM, 3, generator=torch.Generator().manual_seed(1))


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def weights(*models):
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def alternating(generator_every):
    """A GAN, by hand: the discriminator steps after each two batches, the generator after each two of its own."""
    generator, judge = net(1), net(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, judge)]
    pending = [0, 0]
    for number, batch in enumerate(DATA.split(GLOBAL_BATCH) * 2):
        turns = [(1, lambda b: judge(generator(b).detach()).square().mean() - judge(b).mean())]
        if number % generator_every == 0:
            turns.append((0, lambda b: -judge(generator(b)).mean()))
        for which, loss in turns:
            kept = [parameter.grad for parameter in judge.parameters()] if which == 0 else []
            kept = [None if grad is None else grad.clone() for grad in kept]
            (loss(batch) / 2).backward()
            for parameter, grad in zip(judge.parameters(), kept, strict=False):
                parameter.grad = grad  # what the generator's loss left there belongs to nobody
            pending[which] += 1
            last = number % 3 == 2  # of an epoch
            if pending[which] == 2 or last:
                scale = 2 / pending[which]
                for group in optimizers[which].param_groups:
                    for parameter in group["params"]:
                        parameter.grad *= scale
                optimizers[which].step()
                optimizers[which].zero_grad()
                pending[which] = 0
    return weights(generator, judge)


def alternating_on_ranks(generator_every):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = net(1), net(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in bare]
    (generator, judge), (one, other) = [accelerator.prepare(*things) for things in (bare, optimizers)]
    loader = accelerator.prepare(DataLoader(DATA, batch_size=GLOBAL_BATCH // accelerator.num_processes))
    for epoch in range(2):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(judge):
                accelerator.backward(judge(generator(batch).detach()).square().mean() - judge(batch).mean())
                other.step()
                other.zero_grad()
            if (3 * epoch + number) % generator_every == 0:
                judge.requires_grad_(False)
                with accelerator.accumulate(generator):
                    accelerator.backward(-judge(generator(batch)).mean())
                    one.step()
                    one.zero_grad()
                judge.requires_grad_(True)
    AcceleratorState._reset_state()
    return weights(*bare)


def distilling(accelerator=None):
    """A frozen teacher, and two students that learn in one window, each with an optimizer, the second partly frozen."""
    teacher, first, second = net(1).requires_grad_(False), net(2), net(3)
    second[0].requires_grad_(False)
    bare = first, second
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) for model in bare]
    clip, loader, prepared = nn.utils.clip_grad_norm_, DATA.split(GLOBAL_BATCH), (teacher, first, second)
    if accelerator is not None:
        data = DataLoader(DATA, batch_size=GLOBAL_BATCH // accelerator.num_processes)
        *prepared, loader = accelerator.prepare(teacher, first, second, data)
        optimizers = [accelerator.prepare(one) for one in optimizers]
        clip = accelerator.clip_grad_norm_
    norms = []
    for number, batch in enumerate([*loader][:2] * 2 if accelerator is None else (b for _ in range(2) for b in loader)):
        if accelerator is not None and number % 3 == 2:
            continue  # the third batch of each epoch is nobody's
        target = prepared[0](batch)
        loss = sum((student(batch) - target).square().mean() for student in prepared[1:])
        if accelerator is None:
            (loss / 2).backward()
            if number % 2 == 0:
                continue
        else:
            with accelerator.accumulate([prepared[1], None], *prepared[2:]):
                accelerator.backward(loss)
        norms.append(float(clip([p for model in bare for p in model.parameters()], 0.05)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(*bare), [norm for norm in norms if norm == norm], weights(teacher)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_each_optimizer_steps_when_its_own_models_window_is_complete_as_in_one_process(num_ranks):
    pairs = [(alternating_on_ranks(every), alternating(every)) for every in (1, 2)]
    wanted, norms, teacher = distilling()
    distilled, seen, kept = distilling(Accelerator(cpu=True, gradient_accumulation_steps=2))
    for ours, reference in [*pairs, (distilled, wanted)]:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, reference, strict=True))
    assert seen == pytest.approx(norms, rel=1e-4)
    assert all(map(torch.equal, kept, teacher))
