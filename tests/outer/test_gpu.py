# SPDX-License-Identifier: Apache-2.0
"""On a GPU: replicas learn what they learn on CPUs, their steps don't wait for the device, and nothing grows there."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.comm.group import SoloGroup
from farflung.comm.shards import full
from farflung.comm.torch_group import TorchGroup
from farflung.config import environ
from farflung.outer import OuterLoop, diloco, eager_diloco, streaming_diloco
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from farflung.utils import DataLoaderConfiguration, GradScalerKwargs, InitProcessGroupKwargs
from tests.outer.replicas import Run, net
from tests.recipes import RECIPES

pytestmark = pytest.mark.gpu
OVERLAPPING = ["streaming_diloco", "eager_diloco"]


def learnt(group, name, device, steps=12):
    run = Run(group, RECIPES[name], lambda: net().to(device))
    run.steps(*range(steps))
    return {key: value.cpu() for key, value in run.end().items()}


def check_close(found, expected):
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_replicas_on_a_gpu_learn_what_they_learn_on_cpus(name, size):
    check_close(run_replicas(learnt, size, name, "cuda"), run_replicas(learnt, size, name, "cpu"))


def learnt_over_gloo(names):
    return [learnt(TorchGroup(), name, "cuda") for name in names]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_on_one_gpu_learn_it_too_also_in_the_background(size):
    names = ["local_sgd", "diloco", *OVERLAPPING]
    found = run_ranks(learnt_over_gloo, size, names, timeout_s=120)
    for number, name in enumerate(names):
        check_close([rank[number] for rank in found], run_replicas(learnt, size, name, "cpu"))


def learnt_over_nccl(names):
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device)
    found = [learnt(TorchGroup(), name, device) for name in names]
    mesh = init_device_mesh("cuda", (1,))
    run = Run(SoloGroup(), RECIPES["diloco"], lambda: fully_shard(net().to(device), mesh=mesh))
    run.steps(*range(12))
    sharded = {key: full(value).cpu() for key, value in run.end().items()}
    dist.destroy_process_group()
    return [*found, sharded]


def test_one_rank_over_nccl_learns_what_it_learns_without_a_group_also_sharded():
    names = ["diloco", *OVERLAPPING]
    (found,) = run_ranks(learnt_over_nccl, 1, names, connect=False, timeout_s=120)
    check_close(found, [learnt(SoloGroup(), name, "cpu") for name in (*names, "diloco")])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # is a prototype, torch says
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_does_not_wait_for_the_gpu(accumulation):
    loading = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=accumulation, dataloader_config=loading
    )
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4, pin_memory=True)
    model, optimizer, data, scheduler = accelerator.prepare(net, optimizer, data, LambdaLR(optimizer, lambda n: 1.0))

    def epoch():
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    with accelerator.outer(model, diloco(1000)):
        epoch()
        try:
            torch.cuda.set_sync_debug_mode("error")
            epoch()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where inductor is loaded
def test_a_round_recompiles_nothing_that_inductor_has_compiled():
    torch._dynamo.reset()
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor")
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
    x = torch.randn(4, 8, device=accelerator.device)
    with accelerator.outer(model, diloco(2)) as outer:
        for number in range(9):
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert outer.stats().rounds == 4


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("recipe", [diloco(1), streaming_diloco(2, 2, delay=1), eager_diloco(1)])
def test_two_hundred_rounds_leave_nothing_on_the_gpu(recipe, away):
    def ended(group, steps):
        run = Run(group, replace(recipe, anchor_on_cpu=away), lambda: net().cuda())
        run.steps(*range(steps))
        run.end()
        return run

    def held(steps):
        runs = run_replicas(ended, 2, steps)
        gc.collect()
        torch.cuda.synchronize()
        return len(runs), torch.cuda.memory_allocated()

    held(2)  # with what libraries keep
    assert held(220) == held(20)


def test_an_anchor_in_the_hosts_memory_takes_none_of_the_gpus():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    before, bucket = torch.cuda.memory_allocated(), 2**20
    with OuterLoop(model, replace(diloco(1), anchor_on_cpu=True), SoloGroup(), bucket_bytes=bucket) as outer:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            outer.step()
            assert torch.cuda.memory_allocated() - before <= 2.1 * bucket
        assert torch.cuda.max_memory_allocated() - before <= 8 * bucket  # of 32: one of the anchor, with its momentum


def skipping(sick, every, steps):
    """Train in fp16 on one GPU with the others; in step `sick` of the last rank its gradients overflow."""
    environ.export({"ACCELERATE_TORCH_DEVICE": "cuda:0"})
    scaler, init = GradScalerKwargs(init_scale=16.0), InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaler, init])
    is_sick = accelerator.process_index == accelerator.num_processes - 1
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    rounds = []
    with accelerator.outer(model, diloco(every)) as outer:
        outer.listeners.append(lambda one: rounds.append(one.weights))
        for number in range(steps):
            x = torch.full((2, 2), float("inf") if is_sick and number == sick else 1.0, device="cuda")
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        stats = outer.stats()
    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in net.parameters()])
    accelerator.free_memory()
    return rounds, (stats.steps, stats.attempts, stats.dropped_rounds), weights


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_the_scaler_skips_counts_nothing_in_a_round(size):
    found = run_ranks(skipping, size, 1, 4, 8, connect=False, timeout_s=120)
    for rank, (rounds, counts, weights) in enumerate(found):
        assert counts == (8 - (rank == size - 1), 8, 0)
        expected = [(1.0,)] * 2 if size == 1 else [(4 / 7, 3 / 7), (1 / 2, 1 / 2)]
        assert rounds[:2] == [pytest.approx(row) for row in expected]
        assert torch.equal(weights, found[0][2])
        assert weights.isfinite().all()
