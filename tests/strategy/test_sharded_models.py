# SPDX-License-Identifier: Apache-2.0
"""Whatever the order in which models and optimizers are made, sharded and prepared, they train as under DDP."""

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.comm.shards import full, is_sharded, local
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from farflung.utils import GradientAccumulationPlugin
from tests.accelerator.conftest import on_ranks


def fresh(**settings):
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **settings)


def sharding(**settings):
    return fresh(fsdp_plugin=FullyShardedDataParallelPlugin(), **settings)


def net(seed=0, out=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, out))


def adam(model):
    weights, biases = [[p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False)]
    return torch.optim.AdamW([{"params": weights, "lr": 0.05}, {"params": biases}], lr=0.01)


def steps(accelerator, model, optimizer, count=4, seed=0):
    for number in range(count):
        torch.manual_seed(100 * seed + 10 * number + accelerator.process_index)
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 5)).square().mean())
        optimizer.step()


def weights(model):
    return [full(p.detach()).clone() for p in model.parameters()]


def assert_alike(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def in_one_call(accelerator, model):
    return accelerator.prepare(model, adam(model))


def optimizer_first(accelerator, model):
    return accelerator.prepare(adam(model), model)[::-1]


def optimizer_in_an_earlier_call(accelerator, model):
    optimizer = accelerator.prepare(adam(model))
    return accelerator.prepare(model), optimizer


def optimizer_in_a_later_call(accelerator, model):
    made = adam(model)
    model = accelerator.prepare(model)
    return model, accelerator.prepare(made)


def optimizer_made_later(accelerator, model):
    model = accelerator.prepare(model)
    return model, accelerator.prepare(adam(model))


def optimizer_that_has_stepped(accelerator, model):
    model(torch.ones(1, 5)).sum().backward()
    made = adam(model)
    made.step()
    made.zero_grad()
    return accelerator.prepare(model, made)


WAYS = [in_one_call, optimizer_first, optimizer_in_an_earlier_call, optimizer_in_a_later_call, optimizer_made_later]
WAYS += [optimizer_that_has_stepped]


def trained(accelerator, way):
    model, optimizer = way(accelerator, net())
    steps(accelerator, model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    return weights(model)


def two_models_with_two_optimizers(accelerator):
    first, second = net(1), net(2, out=5)
    first, second, one, two = accelerator.prepare(first, second, adam(first), adam(second))
    for number in range(3):
        torch.manual_seed(10 * number + accelerator.process_index)
        noise = torch.randn(4, 5)
        one.zero_grad()
        accelerator.backward(first(second(noise).detach()).square().mean())
        one.step()
        two.zero_grad()
        accelerator.backward(first(second(noise)).mean())
        two.step()
    return weights(first) + weights(second)


@on_ranks(2)
def test_optimizers_are_bound_again_whenever_they_were_made_and_prepared():
    for way in WAYS:
        assert_alike(trained(fresh(), way), trained(sharding(), way))
    assert_alike(two_models_with_two_optimizers(fresh()), two_models_with_two_optimizers(sharding()))


@on_ranks(2)
def test_an_accelerator_may_be_collected_in_the_midst_of_an_optimizers_step():
    dropped = []

    def collect(*_):
        dropped.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    accelerator = sharding()
    strategy = weakref.ref(accelerator._strategy)
    accelerator.itself = accelerator  # so that the garbage collector alone finds it
    dropped.append(accelerator)
    del accelerator
    adam(net()).step()
    hook.remove()
    assert strategy() is None


@on_ranks(2)
def test_a_model_that_comes_sharded_is_taken_as_it_is():
    accelerator = fresh()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    model = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    prepared, optimizer = in_one_call(accelerator, model)
    assert prepared is model
    with accelerator.accumulate(model):
        steps(accelerator, model, optimizer)
    plain, optimizer = in_one_call(accelerator := fresh(), net())
    steps(accelerator, plain, optimizer)
    assert_alike(weights(model), weights(plain))


@on_ranks(2)
def test_a_model_that_a_trainer_shards_by_itself_meets_one_that_was_prepared():
    accelerator, other = sharding(), net(1)
    model = accelerator.prepare(net())
    fully_shard(other, mesh=init_device_mesh("cpu", (2,)))  # which it makes by default
    with torch.no_grad():
        sums = [full(one + two) for one, two in zip(model.parameters(), other.parameters(), strict=True)]
    assert all(map(torch.equal, sums, (one + two for one, two in zip(weights(net()), weights(net(1)), strict=True))))


@on_ranks(2)
def test_a_plugin_has_the_policies_by_which_a_trainer_shards_models():
    for offloads, policy in ((False, OffloadPolicy()), (True, CPUOffloadPolicy())):
        flags = offloads, offloads, not offloads
        plugin, same, other = (FullyShardedDataParallelPlugin(cpu_offload=flag) for flag in flags)
        state = fresh(fsdp_plugin=plugin, mixed_precision="bf16").state
        assert state.fsdp_plugin is plugin
        assert plugin.cpu_offload == policy
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for again in (plugin, same):
            assert Accelerator(cpu=True, fsdp_plugin=again, mixed_precision="bf16").state.fsdp_plugin is plugin
        refused_at(ConfigError, "^fsdp_plugin=", Accelerator, cpu=True, fsdp_plugin=other, mixed_precision="bf16")


def embedder():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    model[1].register_buffer("extra", torch.full((3,), 5.0), persistent=False)
    return model


@on_ranks(2)
def test_weights_that_rank_0_alone_has_loaded_reach_all_ranks():
    accelerator = sharding()
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = embedder()
    model = accelerator.prepare(model)
    assert model[2].weight is model[0].weight
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert model[2].weight is model[0].weight
    assert all(map(torch.equal, weights(model), weights(embedder())))
    assert model[1].extra.tolist() == [5.0] * 3
    assert model[1].running_var.shape == (4,)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_an_overflow_in_one_shard_makes_all_ranks_skip_the_step(fused):
    accelerator = sharding(mixed_precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    steps(accelerator, model, optimizer, 1)
    before = weights(model)
    accelerator.backward(model(torch.randn(4, 5)).square().mean())
    if accelerator.is_last_process:  # an overflow in one rank's shards alone
        local(next(model.parameters()).grad).fill_(float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(map(torch.equal, before, weights(model)))
    steps(accelerator, model, optimizer, 1)  # which lets the scale follow
    assert optimizer.completed_steps == 2
    assert accelerator.scaler.get_scale() < 2.0**16


@on_ranks(2)
def test_weights_in_a_half_precision_are_trained_in_fp32_and_reduced_in_it():
    accelerator = sharding(mixed_precision="bf16")
    model = accelerator.prepare(net().to(torch.bfloat16))
    assert next(model.parameters()).dtype == torch.float32
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    out = model(torch.full((1, 5), float(accelerator.process_index)))
    assert (seen[0], out.dtype) == ((torch.bfloat16, torch.bfloat16), torch.float32)
    accelerator.backward(out.sum())
    assert full(model[2].bias.grad).tolist() == [1.0] * 3
    model.zero_grad()
    accelerator.backward((model(torch.zeros(1, 5)) * (1 + accelerator.process_index / 128)).sum())
    assert full(model[2].bias.grad).tolist() == [1 + 1 / 256] * 3  # of 1 and 1 + 1/128, which bf16 would round


def refused_at(kind, words, call, *args, **settings):
    with pytest.raises(kind, match=words):
        call(*args, **settings)


@on_ranks(2)
def test_what_can_not_be_is_refused_with_what_to_do():
    plugin = FullyShardedDataParallelPlugin
    refused_at(ConfigError, "6", fresh, parallelism_config=ParallelismConfig(dp_replicate_size=3, dp_shard_size=2))
    refused_at(ConfigError, "dp_shard_size", fresh, fsdp_plugin=plugin(), island_size=2)
    refused_at(ConfigError, "dp_replicate_size=2", fresh, fsdp_plugin=plugin(), outer="diloco")
    refused_at(ConfigError, "does not divide the 2 processes", fresh, island_size=3)
    matrix = nn.Linear(4, 4, bias=False)
    refused_at(Unsupported, "Muon", sharding().prepare, matrix, torch.optim.Muon(matrix.parameters()))
    ignoring = plugin(ignored_modules="0")
    refused_at(Unsupported, "ignored_modules", fresh(fsdp_plugin=ignoring).prepare, net())
    naming = plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"])
    refused_at(ConfigError, "Layer", fresh(fsdp_plugin=naming).prepare, net())


@on_ranks(4)
def test_the_ranks_of_a_ddp_island_average_gradients_among_themselves_under_an_outer_loop():
    accelerator = fresh(island_size=2)
    rank = accelerator.process_index
    torch.manual_seed(rank)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert len(set(accelerator.gather(model.module.weight.detach()).flatten().tolist())) == 1

    def gradient(**kwargs):
        optimizer.zero_grad()
        accelerator.backward(model(torch.full((1, 1), 1.0 + rank)).sum(), **kwargs)
        return model.module.weight.grad.item()

    assert gradient() == 2.5
    with accelerator.outer(model, "diloco"):
        assert (gradient(), gradient(num_items=2)) == ((1.5, 0.75) if rank < 2 else (3.5, 1.75))


@on_ranks(4)
def test_an_axis_of_shards_alone_shards_by_default():
    accelerator = fresh(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    model = accelerator.prepare(net())
    assert all(map(is_sharded, model.parameters()))
    assert local(next(model.parameters())).shape in ((4, 5), (3, 5))


WINDOWS = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": {}},
    "fsdp by layer": {
        "fsdp_plugin": {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    },
    "fsdp, whole in between": {"fsdp_plugin": {"reshard_after_forward": False}},
}


def gradient_of_windows(settings, by_items, each):
    """Two windows, the second of them short; y = w * x makes the gradient a mean of what is fed."""
    settings = {name: FullyShardedDataParallelPlugin(**given) for name, given in settings.items()}
    steps = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = fresh(gradient_accumulation_plugin=steps, **settings)
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    data = DataLoader(TensorDataset(torch.arange(1.0, 7.0).view(6, 1)), batch_size=1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
    found = []
    for (x,) in data:
        with accelerator.accumulate(model):
            y = model(x)[:, 0]
            if by_items:
                accelerator.backward(y.sum() * x.item(), num_items=x.item())
            else:
                accelerator.backward(y.mean())
            if accelerator.sync_gradients:
                found.append(full(next(model.parameters()).grad)[0].item())
            optimizer.step()
            optimizer.zero_grad()
    return found


@on_ranks(2)
def test_short_windows_and_items_count_as_under_one_process():
    for name, by_items, each in product(WINDOWS, (False, True), (False, True)):
        # Rank 0 gets 1, 3, 5, and rank 1 gets 2, 4, 6: windows of 1 to 4, then of 5 and 6.
        expected = [30 / 10, 61 / 11] if by_items else [2.5, 5.5]
        assert gradient_of_windows(WINDOWS[name], by_items, each) == pytest.approx(expected), (name, by_items, each)


@on_ranks(2)
def test_norms_over_empty_shards_and_over_several_meshes_are_those_of_whole_gradients():
    clip = nn.utils.clip_grad_norm_
    one, other, plain = net(out=1), net(1), net(2)
    for model in (one, other, plain):
        model(torch.ones(1, 5)).sum().backward()
    for norm_type in (2.0, float("inf")):
        accelerator = sharding()
        model, _ = in_one_call(accelerator, net(out=1))
        second = net(1)
        fully_shard(second, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
        accelerator.backward(model(torch.ones(1, 5)).sum())
        second(torch.ones(1, 5)).sum().backward()
        pairs = ((model,), (one,)), ((model, second), (one, other)), ((plain, model), (plain, one))
        for sharded, whole in pairs:
            sharded, whole = ([p for each in models for p in each.parameters()] for models in (sharded, whole))
            norm = accelerator.clip_grad_norm_(sharded, 1e9, norm_type).item()
            assert norm == pytest.approx(clip(whole, 1e9, norm_type).item())


@on_ranks(2)
def test_what_would_not_be_trained_or_averaged_is_refused():
    accelerator, model = sharding(), net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    refused_at(Unsupported, r"the gradients of 2\.weight, 2\.bias", accelerator.prepare, model)
    one, other = net(1), net(2)
    other[0].weight = one[0].weight
    accelerator.prepare(one)
    refused_at(Unsupported, r"shares 0\.weight", accelerator.prepare, other)
    model = net()
    made = adam(model)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 5)).sum())
    for _ in range(2):  # each time, not the first time alone
        refused_at(StateError, "AdamW was made before its model was sharded", made.step)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    words = r"param_dtype=torch\.float32, but mixed_precision computes in torch\.bfloat16"
    refused_at(ConfigError, words, fresh, fsdp_plugin=plugin, mixed_precision="bf16")


@on_ranks(2)
def test_values_that_a_rank_lacks_are_those_of_rank_0():
    """Rank 1 lacks the values of a layer; a frozen part stays whole."""
    accelerator = fresh(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="1"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 3))
    before = weights(model)
    if accelerator.process_index == 1:
        model[1:].to("meta")
    model = accelerator.prepare(model)
    sharding().prepare(nn.MSELoss())  # which has no parameters that might be missing
    assert all(map(torch.equal, weights(model), before))
