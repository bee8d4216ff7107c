# SPDX-License-Identifier: Apache-2.0
"""What Lightning needs in addition to hooks, held by its own names; and messages in the words of each framework."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung.base.errors import ConfigError
from farflung.integrations import frameworks
from farflung.integrations.data_parallel import DDPTakeover
from farflung.outer.arguments import OuterConfig
from farflung.testing.ranks import run_ranks

DATA = TensorDataset(torch.zeros(8, 4))


def lightning(put=sys.modules.__setitem__):
    """The parts of Lightning that are followed, put among the loaded modules."""

    class Strategy:
        def on_train_end(self):
            pass

    def sized_len(loader):
        return len(loader)

    strategies, data = ModuleType("lightning.pytorch.strategies"), ModuleType("lightning.fabric.utilities.data")
    strategies.Strategy, data.sized_len = Strategy, sized_len
    for one in (strategies, data):
        put(one.__name__, one)
    return strategies, data


def fitted():
    """Whether the ranks have the same weights in memory before and after Lightning's end of a fit in mid-pass."""
    strategies, _ = lightning()
    takeover = DDPTakeover(OuterConfig("diloco", every=1000, report="off"))
    takeover.install()
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number, _ in enumerate(DataLoader(DATA, 1, sampler=DistributedSampler(DATA))):
        if dist.get_rank() == 0 or number == 0:  # the other one has fewer steps
            model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
            optimizer.step()
        if number == 2:
            break
    for end in (lambda: None, strategies.Strategy().on_train_end):
        end()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, net.weight.tolist())
        seen.append(everyone[0] == everyone[1] and torch.equal(net.state_dict()["weight"], net.weight))
    takeover.close()
    return seen


def test_the_end_of_a_lightning_fit_brings_all_steps_together():
    assert run_ranks(fitted, 2) == [[False, True]] * 2


WORDS = {"lightning": 'strategy="ddp"', "pytorch_lightning": "Trainer", "ignite": "idist", "keras": "fit does not"}


def test_lightning_is_told_no_length_that_is_only_planned(monkeypatch):
    _, data = lightning(lambda name, one: monkeypatch.setitem(sys.modules, name, one))
    planned, known = DistributedSampler(DATA, 1, 0), DistributedSampler(DATA, 1, 0, shuffle=False)
    loaders = [DataLoader(DATA, 2, sampler=sampler) for sampler in (planned, known)]
    for _ in range(2):  # as each DDP model calls it
        frameworks.follow_lightning(lambda: None, lambda sampler: sampler is planned)
    combined = [SimpleNamespace(flattened=[loader], __len__=None) for loader in loaders]
    assert [data.sized_len(loader) for loader in loaders] == [None, 4]
    assert data.sized_len(combined[0]) is None


@pytest.mark.parametrize("name", WORDS)
def test_messages_have_the_words_of_the_framework_that_a_script_has_loaded(monkeypatch, name):
    for other in WORDS:
        monkeypatch.delitem(sys.modules, other, raising=False)
    model = nn.Linear(2, 2)
    takeover = DDPTakeover(OuterConfig("diloco", every=2, report="off"))
    plain = frameworks.to_make_ddp()
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigError) as raised:
        takeover._about_to_step(torch.optim.SGD(model.parameters()))
    assert frameworks.to_make_a_group() in str(raised.value)
    assert WORDS[name] in frameworks.to_make_ddp() != plain
