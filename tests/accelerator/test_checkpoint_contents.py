# SPDX-License-Identifier: Apache-2.0
"""What of models and optimizers is in a checkpoint, and under which names."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from farflung import Accelerator
from farflung.base.errors import ConfigError
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import merge_fsdp_weights


class Named(nn.Module):
    """With a child that has the name of what DDP wraps."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.module(x))


class Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 1)

    def forward(self, x):
        return self.module(x)


class Clash(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Module()
        self.module.head = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.module.head(x))


class Passing(nn.Module):
    """With buffers that are no part of its state: one grows, one counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.cache = torch.arange(8.0)
        self.count += 1
        self.seen += 1
        return self.linear(x)


def start(kind, sharded, optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.1), **asked):
    """Return an Accelerator, with a model and its optimizer: sharded over all ranks, or whole on each."""
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **asked) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = kind()
    return accelerator, *accelerator.prepare(model, optimizer(model.parameters()))


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()


def lists(state):
    return {name: value.tolist() for name, value in state.items()}


def named_module(folder):
    """Return the weights after a step in one process and on all, and after loading each form, with one more step."""
    found = []
    for kind in (Named, Only, Clash):
        torch.manual_seed(0)
        plain = kind()
        wanted = []
        optimizer = torch.optim.AdamW(plain.parameters(), 0.1)
        for _ in range(2):
            plain(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(lists(plain.state_dict()))
        for before in (True, False):
            run = start(kind, before)
            step(*run)
            path = folder / f"{kind.__name__} {before}"
            run[0].save_state(path)
            found.append((wanted[0], lists(run[0].get_state_dict(run[1]))))
            for after in (True, False):
                run = start(kind, after)
                run[0].load_state(path)
                step(*run)
                found.append((wanted[1], lists(run[0].get_state_dict(run[1]))))
    return found


def test_a_child_called_module_keeps_its_name(tmp_path):
    for wanted, found in run_ranks(named_module, 2, tmp_path)[0]:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value))


def passing_buffers(folder):
    found = []
    for sharded in (False, True):
        run = start(Passing, sharded)
        step(*run)
        run[0].save_state(folder / str(sharded))
        run = start(Passing, sharded)
        run[0].load_state(folder / str(sharded))
        found.append({name.removeprefix("module."): value.tolist() for name, value in run[1].named_buffers()})
    return found


def test_buffers_that_are_not_persistent_are_left_out_on_all_ranks(tmp_path):
    for found in run_ranks(passing_buffers, 2, tmp_path):
        assert found == [{"cache": [], "count": [0.0], "seen": [1.0]}] * 2


def hooked(folder):
    """Save and load a plain model that hooks take, a sharded one and another plain one; return the last two's weights."""

    def make(seed):
        AcceleratorState._reset_state(reset_partial_state=False)
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        taken, sharded, plain = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 5)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        models = accelerator.prepare(taken, sharded, plain)
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights and weights.pop(0))
        accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
        return accelerator, models

    def weights(accelerator, models):
        return [lists(accelerator.get_state_dict(model)) for model in models[1:]]

    accelerator, models = make(0)
    wanted = weights(accelerator, models)
    accelerator.save_state(folder / "it")
    accelerator, models = make(1)
    assert weights(accelerator, models) != wanted or accelerator.process_index
    accelerator.load_state(folder / "it")
    return wanted, weights(accelerator, models)


def test_models_keep_their_numbers_where_a_hook_takes_one(tmp_path):
    for wanted, found in run_ranks(hooked, 2, tmp_path):
        assert found == wanted


def only_rank_0_fails(folder):
    accelerator, model, _ = start(Only, True)
    (folder / "file").write_text("x")
    found = []
    for call in (
        lambda: merge_fsdp_weights(folder / "nothing", folder / "out"),
        lambda: accelerator.save_model(model, folder / "file"),
        lambda: accelerator.save_model(model, folder / "good", max_shard_size="much"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        found.append(str(error.value))
    return found, accelerator.gather(torch.tensor([1.0])).tolist()


def test_what_fails_on_rank_0_is_raised_on_all(tmp_path):
    for found, gathered in run_ranks(only_rank_0_fails, 2, tmp_path):
        assert gathered == [1.0, 1.0]
        for message, words in zip(found, ("no shards", "is a file", "max_shard_size is 'much'"), strict=True):
            assert "rank 0" in message and words in message
