# SPDX-License-Identifier: Apache-2.0
"""Whatever the order in which models and optimizers are made, sharded and prepared, they train as under DDP."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.base.errors import ConfigError, FarflungError, StateError, Unsupported
from farflung.comm.shards import full, is_sharded, local
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import GradientAccumulationPlugin


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


WAYS = (in_one_call, optimizer_first, optimizer_in_an_earlier_call, optimizer_in_a_later_call, optimizer_made_later)


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


def every_way():
    found = {}
    for name, make in (("ddp", fresh), ("fsdp", sharding)):
        found[name] = [trained(make(), way) for way in WAYS]
        found[name].append(trained(make(), optimizer_that_has_stepped))
        found[name].append(two_models_with_two_optimizers(make()))
    return found


def test_optimizers_are_bound_again_whenever_they_were_made_and_prepared():
    for found in run_ranks(every_way, 2):
        for number, (ddp, fsdp) in enumerate(zip(found["ddp"], found["fsdp"], strict=True)):
            for mine, other in zip(ddp, fsdp, strict=True):
                torch.testing.assert_close(mine, other, atol=1e-6, rtol=0, msg=f"way {number}")


def stepped_while_another_accelerator_is_collected():
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
    made = adam(net())
    made.step()
    hook.remove()
    return strategy() is None


def test_an_accelerator_may_be_collected_in_the_midst_of_an_optimizers_step():
    assert run_ranks(stepped_while_another_accelerator_is_collected, 2) == [True, True]


def sharded_by_its_user():
    accelerator = fresh()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    model = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    prepared, optimizer = accelerator.prepare(model, adam(model))
    assert prepared is model
    with accelerator.accumulate(model):
        steps(accelerator, model, optimizer)
    by_hand = weights(model)
    plain, optimizer = (accelerator := fresh()).prepare(*(lambda m: (m, adam(m)))(net()))
    steps(accelerator, plain, optimizer)
    return by_hand, weights(plain)


def test_a_model_that_comes_sharded_is_taken_as_it_is():
    for by_hand, plain in run_ranks(sharded_by_its_user, 2):
        for mine, other in zip(by_hand, plain, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def loaded_on_rank_0_alone():
    accelerator = sharding()
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
        model[2].weight = model[0].weight
        model[1].register_buffer("extra", torch.full((3,), 5.0), persistent=False)
    whole = [p.detach().clone() for p in model.parameters()] if accelerator.is_main_process else []
    model = accelerator.prepare(model)
    assert model[2].weight is model[0].weight
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    assert model[2].weight is model[0].weight
    return whole, weights(model), model[1].extra.clone(), model[1].running_var.clone()


def test_weights_that_rank_0_alone_has_loaded_reach_all_ranks():
    found = run_ranks(loaded_on_rank_0_alone, 2)
    whole = found[0][0]
    for _, there, extra, variance in found:
        assert all(map(torch.equal, whole, there))
        assert extra.tolist() == [5.0] * 3
        assert variance.shape == (4,)


def scaled(fused):
    accelerator = sharding(mixed_precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    steps(accelerator, model, optimizer, 1)
    before = weights(model)
    accelerator.backward(model(torch.randn(4, 5)).square().mean())
    if accelerator.is_last_process:  # an overflow in one rank's shards alone
        local(next(model.parameters()).grad).fill_(float("inf"))
    optimizer.step()
    same = all(map(torch.equal, before, weights(model)))
    was_skipped = optimizer.step_was_skipped
    steps(accelerator, model, optimizer, 1)  # which lets the scale follow
    return was_skipped, same, optimizer.completed_steps, accelerator.scaler.get_scale() < 2.0**16


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_shard_makes_all_ranks_skip_the_step(fused):
    assert run_ranks(scaled, 2, fused) == [(True, True, 2, True)] * 2


def half_loaded():
    accelerator = sharding(mixed_precision="bf16")
    model = accelerator.prepare(net().to(torch.bfloat16))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    out = model(torch.full((1, 5), float(accelerator.process_index)))
    accelerator.backward(out.sum())
    bias = full(model[2].bias.grad)
    torch.manual_seed(1)
    model.zero_grad()
    accelerator.backward((model(torch.zeros(1, 5)) * (1 + accelerator.process_index / 128)).sum())
    odd = full(model[2].bias.grad)  # the mean of 1 and 1 + 1/128, which bf16 would round
    return next(model.parameters()).dtype, seen[0], out.dtype, bias.tolist(), odd.tolist()


def test_weights_in_a_half_precision_are_trained_in_fp32_and_reduced_in_it():
    half = torch.bfloat16
    expected = (torch.float32, (half, half), torch.float32, [1.0] * 3, [1 + 1 / 256] * 3)
    assert run_ranks(half_loaded, 2) == [expected] * 2


def told(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except FarflungError as error:
        return type(error), str(error)
    return None


def refused():
    found = []
    found.append(told(fresh, parallelism_config=ParallelismConfig(dp_replicate_size=3, dp_shard_size=2)))
    found.append(told(fresh, fsdp_plugin=FullyShardedDataParallelPlugin(), island_size=2))
    found.append(told(fresh, fsdp_plugin=FullyShardedDataParallelPlugin(), outer="diloco"))
    found.append(told(fresh, island_size=3))
    accelerator = sharding()
    matrix = nn.Linear(4, 4, bias=False)
    found.append(told(accelerator.prepare, matrix, torch.optim.Muon(matrix.parameters())))
    ignoring = FullyShardedDataParallelPlugin(ignored_modules="0")
    found.append(told(fresh(fsdp_plugin=ignoring).prepare, net()))
    naming = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"]
    )
    found.append(told(fresh(fsdp_plugin=naming).prepare, net()))
    return found


def test_what_can_not_be_is_refused_with_what_to_do():
    wanted = [
        (ConfigError, "6"),
        (ConfigError, "dp_shard_size"),
        (ConfigError, "dp_replicate_size=2"),
        (ConfigError, "does not divide the 2 processes"),
        (Unsupported, "Muon"),
        (Unsupported, "ignored_modules"),
        (ConfigError, "Layer"),
    ]
    for found in run_ranks(refused, 2):
        for said, (kind, words) in zip(found, wanted, strict=True):
            assert said is not None, words
            assert said[0] is kind
            assert words in said[1]


def islands():
    """Gradients of DDP islands: over all ranks, and over the island once an outer loop has the model."""
    accelerator = fresh(island_size=2)
    torch.manual_seed(accelerator.process_index)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    start = model.module.weight.item()

    def gradient(**kwargs):
        optimizer.zero_grad()
        accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum(), **kwargs)
        return model.module.weight.grad.item()

    together = gradient()
    with accelerator.outer(model, "diloco"):
        apart, by_items = gradient(), gradient(num_items=2)
    return start, together, apart, by_items


def test_the_ranks_of_a_ddp_island_average_gradients_among_themselves_under_an_outer_loop():
    found = run_ranks(islands, 4)
    assert len({start for start, *_ in found}) == 1
    assert [rest for _, *rest in found] == [[2.5, 1.5, 0.75]] * 2 + [[2.5, 3.5, 1.75]] * 2


def shards_of(layout):
    accelerator = fresh(parallelism_config=ParallelismConfig(**layout))
    model = accelerator.prepare(net())
    return [tuple(local(p).shape) for p in model.parameters()], all(map(is_sharded, model.parameters()))


def test_an_axis_of_shards_alone_shards_by_default():
    for shapes, sharded in run_ranks(shards_of, 4, {"dp_replicate_size": 2, "dp_shard_size": 2}):
        assert sharded
        assert shapes[0] in ((4, 5), (3, 5))


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


def every_window():
    plans = [(by_items, each) for by_items in (False, True) for each in (False, True)]
    return {(name, *plan): gradient_of_windows(WINDOWS[name], *plan) for name in WINDOWS for plan in plans}


def test_short_windows_and_items_count_as_under_one_process():
    for found in run_ranks(every_window, 2):
        for (name, by_items, each), gradients in found.items():
            # Rank 0 gets 1, 3, 5, and rank 1 gets 2, 4, 6: windows of 1 to 4, then of 5 and 6.
            expected = [30 / 10, 61 / 11] if by_items else [2.5, 5.5]
            assert gradients == pytest.approx(expected), (name, by_items, each)


def clipped(norm_type):
    """The norm over a model of uneven shards, and over two models on two meshes."""
    accelerator = sharding()
    model, optimizer = in_one_call(accelerator, net(out=1))
    other = net(1)
    fully_shard(other, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
    accelerator.backward(model(torch.ones(1, 5)).sum())
    other(torch.ones(1, 5)).sum().backward()
    alone = accelerator.clip_grad_norm_(model.parameters(), 1e9, norm_type).item()
    both = accelerator.clip_grad_norm_([*model.parameters(), *other.parameters()], 1e9, norm_type).item()
    return alone, both


def every_norm():
    return {norm_type: clipped(norm_type) for norm_type in (2.0, float("inf"))}


def test_norms_over_empty_shards_and_over_several_meshes_are_those_of_whole_gradients():
    one, other = net(out=1), net(1)
    for model in (one, other):
        model(torch.ones(1, 5)).sum().backward()
    for found in run_ranks(every_norm, 2):
        for norm_type, (alone, both) in found.items():
            expected = nn.utils.clip_grad_norm_(one.parameters(), 1e9, norm_type).item()
            assert alone == pytest.approx(expected)
            everything = [*one.parameters(), *other.parameters()]
            assert both == pytest.approx(nn.utils.clip_grad_norm_(everything, 1e9, norm_type).item())


def refusals_of_what_would_not_train():
    said = []
    accelerator = sharding()
    model, made = net(), adam(net())
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(Unsupported) as refused:
        accelerator.prepare(model)
    said.append(str(refused.value))
    one, other = net(1), net(2)
    other[0].weight = one[0].weight
    one = accelerator.prepare(one)
    with pytest.raises(Unsupported) as refused:
        accelerator.prepare(other)
    said.append(str(refused.value))
    model = net()
    made = adam(model)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 5)).sum())
    for _ in range(2):  # each time, not the first time alone
        with pytest.raises(StateError) as refused:
            made.step()
    said.append(str(refused.value))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    with pytest.raises(ConfigError) as refused:
        fresh(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy), mixed_precision="bf16")
    said.append(str(refused.value))
    return said


def test_what_would_not_be_trained_or_averaged_is_refused():
    for partly, tied, strange, policy in run_ranks(refusals_of_what_would_not_train, 2):
        assert "the gradients of 2.weight, 2.bias" in partly
        assert "shares 0.weight" in tied
        assert "AdamW was made before its model was sharded" in strange
        assert "param_dtype=torch.float32, but mixed_precision computes in torch.bfloat16" in policy


def partly_loaded():
    """Rank 1 lacks the values of a layer; a frozen part stays whole."""
    accelerator = fresh(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="1"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 3))
    if accelerator.process_index == 1:
        model[1:].to("meta")
    before = [p.detach().clone() for p in model.parameters()]
    model = accelerator.prepare(model)
    sharding().prepare(nn.MSELoss())  # which has no parameters that might be missing
    return before, [full(p.detach()) for p in model.parameters()]


def test_values_that_a_rank_lacks_are_those_of_rank_0():
    ranks = run_ranks(partly_loaded, 2)
    for _, after in ranks:
        assert all(torch.equal(mine, value) for mine, value in zip(after, ranks[0][0], strict=True))
