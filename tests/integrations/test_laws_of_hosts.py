# SPDX-License-Identifier: Apache-2.0
"""Two laws under each host of a loop and each recipe: what is validated is what is saved, and nets may take turns."""

from contextlib import ExitStack
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung import Accelerator
from farflung.methods.arguments import OuterConfig
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.integrations.takeover import installed, is_the_same
from tests.recipes import OPTIONS, made

BATCHES, RATE = 5, 0.05  # of a pass, on each rank
CONFIGS = {
    **{name: OuterConfig(name, report="off", **OPTIONS[name]) for name in ("local_sgd", "slowmo", "diloco", "edit")},
    "diloco of a long round": OuterConfig("diloco", every=1000, report="off"),
    "gossip": OuterConfig("gossip", report="off", **OPTIONS["gossip"]),
    "eager_diloco": OuterConfig("eager_diloco", report="off", **OPTIONS["eager_diloco"]),
}


# The nets that are trained on each batch of an epoch, the one after the other; and whether flags freeze the other.
WAYS = {
    "in turns, by flags": (lambda epoch: ("second", "first"), True),
    "in turns, by optimizers": (lambda epoch: ("second", "first"), False),
    "for a while": (lambda epoch: ("first", "second")[epoch:] or ("first", "second"), True),
    "for ever": (lambda epoch: ("second",), True),
}


class Pair(nn.Module):
    """Two nets, of which one may be frozen while the other trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(self.first(x))

    def train_alone(self, name, freezes):
        for other in ("first", "second"):
            getattr(self, other).requires_grad_(other == name or not freezes)


def accelerated(model, optimizers, loader, config, stack):
    accelerator = Accelerator(cpu=True, outer=config)
    wrapped, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
    loop = accelerator.outer_loops[0]
    stack.callback(AcceleratorState._reset_state)
    states = partial(accelerator.get_state_dict, wrapped)
    return wrapped, optimizers, loader, accelerator.backward, loop.synced, states, loop.close


the_takeover = cache(lambda: installed(CONFIGS["local_sgd"]))  # of this process, whose wrappers stay


def taken_over(model, optimizers, loader, config, stack):
    takeover = the_takeover()
    takeover._config = config
    takeover.read_ranks()
    takeover.forget()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    validated = partial(in_eval_mode, wrapped)
    return wrapped, optimizers, loader, torch.Tensor.backward, validated, model.state_dict, takeover.close


def weights(state):
    return {name.removeprefix("module."): value.tolist() for name, value in state.items()}


def in_eval_mode(model):
    model.eval()
    lent = ExitStack()
    lent.callback(model.train)
    return lent


def look(model, state):
    """Whether all ranks have the same weights in memory, and whether their state dict is that."""
    live = weights(model.state_dict() if state is None else dict(model.named_parameters()))
    return is_the_same(live), state is None or weights(state) == live


def trained(host, config, way, stops):
    """What `look` returns in the middle of a pass as it is validated, after each pass, and at the end."""
    nets, freezes = WAYS[way]
    with ExitStack() as stack:
        model = Pair()
        model.train_alone(nets(0)[0], freezes)
        optimizers = [torch.optim.SGD(net.parameters(), lr=RATE) for net in (model.first, model.second)]
        data = TensorDataset(torch.randn(2 * BATCHES, 4, generator=torch.Generator().manual_seed(1)))
        sampler = DistributedSampler(data, shuffle=False) if host is taken_over else None
        loader = DataLoader(data, 1, sampler=sampler)
        wrapped, optimizers, loader, backward, validated, state, end = host(model, optimizers, loader, config, stack)
        seen = []
        for epoch in range(2):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for number, (batch,) in enumerate(loader):
                for name in nets(epoch):
                    optimizer = dict(zip(("first", "second"), optimizers, strict=True))[name]
                    model.train_alone(name, freezes)
                    optimizer.zero_grad()
                    backward(wrapped(batch).square().mean())
                    optimizer.step()
                if number == 2:
                    with validated():
                        seen.append(look(model, state()))
                if stops and epoch and number == 3:
                    break
            if not stops or not epoch:
                with in_eval_mode(wrapped):
                    seen.append(look(model, state()))
        end()
        seen.append(look(model, None))
        return seen


def over_recipes(host, way, stops):
    return {name: trained(host, config, way, stops) for name, config in CONFIGS.items()}


# `make test` has each pair of a host, a way and whether passes stop early; that makes half of the triples.
@pytest.mark.parametrize(
    ("host", "way", "stops"),
    [
        pytest.param(host, way, stops, marks=[pytest.mark.long] * ((row + number + stops) % 2))
        for row, host in enumerate((accelerated, taken_over))
        for number, way in enumerate(WAYS)
        for stops in (False, True)
    ],
)
def test_what_is_validated_is_what_is_saved_and_nets_may_take_turns(host, way, stops):
    outcomes = run_ranks(over_recipes, 2, host, way, stops)
    for name, seen in outcomes[0].items():
        assert all(is_saved for _, is_saved in seen), name
        recipe = made(name.partition(" of")[0])
        is_common = host is accelerated or recipe.has_anchor  # in the middle of a pass too
        is_common &= not recipe.eager  # each rank is ahead by its own steps
        assert all(are_equal for are_equal, _ in (seen if is_common else [*seen[1::2], seen[-1]])), name
    assert outcomes[0] == outcomes[1]
