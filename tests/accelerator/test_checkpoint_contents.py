# SPDX-License-Identifier: Apache-2.0
"""What of models and optimizers is in a checkpoint, and under which names."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from farflung import Accelerator
from farflung.base.errors import ConfigError, Unsupported
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from tests.accelerator.conftest import on_ranks


def chain(**layers):
    return nn.Sequential(OrderedDict(layers))


# Models with a child that has the name of what DDP wraps.
NAMED = {
    "named": lambda: chain(module=nn.Linear(4, 4), head=nn.Linear(4, 1)),
    "only": lambda: chain(module=nn.Linear(4, 1)),
    "clash": lambda: chain(module=chain(head=nn.Linear(4, 4)), head=nn.Linear(4, 1)),
}


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


def start(kind, sharded, optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.1), load=None, **asked):
    """Return an Accelerator, with a model and its optimizer: sharded over all ranks, or whole on each."""
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **asked) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = kind()
    run = accelerator, *accelerator.prepare(model, optimizer(model.parameters()))
    if load is not None:
        accelerator.load_state(load)
    return run


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()


def lists(state):
    return {name: value.tolist() for name, value in state.items()}


def whole(accelerator, model, *_):
    return lists(accelerator.get_state_dict(model))


def named_module(folder):
    """Return the weights after a step in one process and on all, and after loading each form, with one more step."""
    found = []
    for name, kind in NAMED.items():
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
            path = folder / f"{name} {before}"
            run[0].save_state(path)
            found.append((wanted[0], whole(*run)))
            for after in (True, False):
                run = start(kind, after, load=path)
                step(*run)
                found.append((wanted[1], whole(*run)))
    return found


def test_a_child_called_module_keeps_its_name(tmp_path):
    for wanted, found in run_ranks(named_module, 2, tmp_path)[0]:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value))


@on_ranks(2)
def test_buffers_that_are_not_persistent_are_left_out_on_all_ranks(tmp_path):
    for sharded in (False, True):
        run = start(Passing, sharded)
        step(*run)
        run[0].save_state(tmp_path / str(sharded))
        _, model, _ = start(Passing, sharded, load=tmp_path / str(sharded))
        found = {name.removeprefix("module."): value.tolist() for name, value in model.named_buffers()}
        assert found == {"cache": [], "count": [0.0], "seen": [1.0]}, sharded


@on_ranks(2)
def test_models_keep_their_numbers_where_a_hook_takes_one(tmp_path):
    """Save and load a plain model that hooks take, a sharded one and another plain one."""

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
        return [whole(accelerator, model) for model in models[1:]]

    accelerator, models = make(0)
    wanted = weights(accelerator, models)
    accelerator.save_state(tmp_path / "it")
    accelerator, models = make(1)
    assert weights(accelerator, models) != wanted or accelerator.process_index
    accelerator.load_state(tmp_path / "it")
    assert weights(accelerator, models) == wanted


@on_ranks(2)
def test_hooks_are_given_what_prepare_returned(tmp_path):
    """Leave the second of two models to hooks, which find it by its identity."""
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(4, 2), nn.Linear(4, 3))
    bare = first.module
    wanted = bare.weight.detach().clone()

    def write(models, weights, folder):
        del weights[next(k for k, model in enumerate(models) if model is second)]
        models.clear()

    def read(models, folder):
        assert (models[0].module, accelerator.unwrap_model(models[0])) == (bare, bare)
        models.remove(second)

    accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(read)
    accelerator.save_state(tmp_path / "it")
    for parameter in (*first.parameters(), *second.parameters()):
        nn.init.zeros_(parameter)
    accelerator.load_state(tmp_path / "it")
    assert torch.equal(bare.weight, wanted)
    assert not second.module.weight.any()


def beside_weights(folder):
    """Save checkpoints into folders of `save_model`, and load them; return the weights of then and those after."""
    found = []
    for sharded, size in ((True, "10GB"), (True, 16), (False, 16)):
        run = start(NAMED["only"], sharded)
        where = folder / f"{sharded} {size}"
        if sharded:
            run[0].save_model(run[1], where, max_shard_size=size)
        run[0].wait_for_everyone()
        files = {path: path.read_bytes() for path in where.glob("*")}
        for _ in range(2):
            step(*run)
            run[0].save_state(where)
        if not sharded:
            run[0].save_model(run[1], where, max_shard_size=size)
        run[0].wait_for_everyone()
        assert all(path.read_bytes() == content for path, content in files.items())
        found.append((whole(*run), whole(*start(NAMED["only"], sharded, load=where))))
    return found


@on_ranks(2)
def test_what_fails_on_rank_0_is_raised_on_all(tmp_path):
    accelerator, model, _ = start(NAMED["only"], True)
    (tmp_path / "file").touch()
    for words, call in {
        "no shards": lambda: merge_fsdp_weights(tmp_path / "nothing", tmp_path / "out"),
        "is a file": lambda: accelerator.save_model(model, tmp_path / "file"),
        "max_shard_size is 'much'": lambda: accelerator.save_model(model, tmp_path / "good", max_shard_size="much"),
    }.items():
        with pytest.raises(ConfigError, match=rf"(?s)(?=.*rank 0).*{words}"):
            call()
    assert accelerator.gather(torch.tensor([1.0])).tolist() == [1.0, 1.0]


class Average:
    """An average of sharded weights, kept as they are."""

    def __init__(self, model):
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self):
        return self.weights

    def load_state_dict(self, state):
        self.weights = state


class Keeps(torch.optim.SGD):
    """Keeps what `keep` makes of each gradient."""

    def __init__(self, parameters, keep):
        super().__init__(parameters, 0.1)
        self.keep = keep

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self.keep(parameter.grad)
        return super().step(closure)


KeepsHistory = partial(Keeps, keep=lambda gradient: [gradient + 1, gradient + 2])
KeepsPart = partial(Keeps, keep=lambda gradient: gradient.to_local() + 1)
KeepsBoth = partial(Keeps, keep=lambda gradient: [gradient + 1, torch.ones(3)])
KeepsByNumber = partial(
    Keeps, keep=lambda gradient: {0: gradient + 1, 1: {7: gradient + 2, "n": [{3: 4}]}, (2, True): 5}
)


def square():
    return nn.Linear(4, 4, bias=False)


def odd_states(folder):
    """Save and load states in parts, which are saved whole or refused on all ranks; return those of then and after."""
    found = []
    run = start(square, True)
    run[0].register_for_checkpointing(Average(run[1]))
    for block in (True, False):
        with pytest.raises(ConfigError, match="registered Average holds sharded tensors"):
            run[0].save_state(folder / "average", block=block)
    for way in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        for kind, words in ((KeepsPart, "a plain tensor"), (KeepsBoth, "partly sharded")):
            run = start(square, True, kind, state_dict_type=way)
            step(*run)
            with pytest.raises(ConfigError, match=f"'kept'.*weight, is {words}"):
                run[0].save_state(folder / "kept")
        run = start(square, True, KeepsHistory, state_dict_type=way)
        step(*run)
        run[0].save_state(folder / way)
        runs = run, start(square, True, KeepsHistory, folder / way, state_dict_type=way)
        kept = [optimizer.state[next(model.parameters())]["kept"] for _, model, optimizer in runs]
        found.append([[tensor.to_local().tolist() for tensor in tensors] for tensors in kept])
    return found


def keys_of(node):
    if isinstance(node, dict):
        return {key: keys_of(value) for key, value in node.items()}
    return [keys_of(one) for one in node] if isinstance(node, list) else getattr(node, "shape", node)


def numbered_states(folder):
    """Save and load states with keys that are no text; return their keys and those after."""
    run = start(square, True, KeepsByNumber)
    run[2].param_groups[0]["table"] = {0: 0.1, 30: {"x": {1: 2}}}
    step(*run)
    run[0].save_state(folder / "it")
    save_fsdp_optimizer(None, run[0], run[2], run[1], folder / "alone")
    again, alone = start(square, True, KeepsByNumber, folder / "it"), start(square, True, KeepsByNumber)
    load_fsdp_optimizer(None, alone[0], alone[2], alone[1], folder / "alone")
    wanted, *found = (keys_of(optimizer.optimizer.state_dict()) for _, _, optimizer in (run, again, alone))
    return [(wanted, one) for one in found]


@pytest.mark.parametrize("act", [beside_weights, odd_states, numbered_states])
def test_states_come_back_as_they_were(act, tmp_path):
    for found in run_ranks(act, 2, tmp_path):
        assert all(wanted == loaded for wanted, loaded in found)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        self.state = state


def test_extra_state_that_is_no_tensor_needs_a_file_of_torch(tmp_path):
    accelerator, model, _ = start(lambda: Extra(4, 1), False)
    for save in (accelerator.save_state, lambda *args, **asked: accelerator.save_model(model, *args, **asked)):
        with pytest.raises(ConfigError, match=r"_extra_state is a dict.*safe_serialization=False"):
            save(tmp_path / "it")
        save(tmp_path / "it", safe_serialization=False)


@pytest.mark.package
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["prompt", "lora", "p-tuning"])
def test_the_adapter_alone_is_loaded(tmp_path, kind):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def make():
        shape = transformers.GPT2Config(
            vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16, tie_word_embeddings=False
        )
        config = {
            "p-tuning": lambda: peft.PromptEncoderConfig(
                num_virtual_tokens=3, encoder_hidden_size=4, task_type="CAUSAL_LM"
            ),
            "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
            "lora": lambda: peft.LoraConfig(
                r=2, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True
            ),
        }[kind]()
        return peft.get_peft_model(transformers.GPT2LMHeadModel(shape), config)

    def trained(model):
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    accelerator, model, _ = start(make, False)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(1)
    save_fsdp_model(None, accelerator, model, tmp_path, adapter_only=True)
    accelerator, other, _ = start(make, False)
    if kind == "p-tuning":  # peft saves what its encoder computes
        with pytest.raises(Unsupported, match=r"mlp_head\.0\.weight.* adapter_only=False"):
            load_fsdp_model(None, accelerator, other, tmp_path, adapter_only=True)
        return
    load_fsdp_model(None, accelerator, other, tmp_path, adapter_only=True)
    assert lists(trained(other)) == lists(trained(model))
