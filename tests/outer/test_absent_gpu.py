# SPDX-License-Identifier: Apache-2.0
"""On a GPU that is not here, every recipe learns what it learns on the CPU, and only rounds wait for the device."""

from contextlib import nullcontext

import pytest
import torch

from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.absent_gpu import CUDA, absent_gpu
from tests.outer.replicas import RATE, net, train
from tests.recipes import RECIPES

STEPS = 16
A_ROUND_WAITS = 6  # at most: for norms, ballots, bytes; in the first rounds also for each parameter, to find twins


def learnt(group, name, device, steps=STEPS):
    """What was learnt, and how often the host waited for the device in each step."""
    with absent_gpu() if device == "cuda" else nullcontext() as gpu:
        model, noted = (gpu.move(net()), gpu.waits) if gpu else (net(), [])
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        outer = OuterLoop(model, RECIPES[name], group).attach(optimizer)
        waits = []
        for number in range(steps):
            before = len(noted)
            train(model, optimizer, number, group.rank)
            waits.append(len(noted) - before)
        outer.close()
        return {key: value.cpu() for key, value in model.state_dict().items()}, waits


def check_same(here, there):
    for (found, _), (expected, _) in zip(here, there, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_ends_with_the_cpus_bits_and_waits_for_the_device_in_rounds_alone(name):
    size = 4 if name in ("hierarchical", "gossip", "noloco") else 2  # what two replicas can't show
    there = run_replicas(learnt, size, name, "cuda")
    check_same(there, run_replicas(learnt, size, name, "cpu"))
    for _, waits in there:
        if name not in ("hierarchical", "streaming_diloco", "streaming_diloco without delay"):  # due in each step
            assert waits.count(0) >= STEPS / 3
        assert max(waits[STEPS // 2 :]) <= A_ROUND_WAITS


def learnt_over_gloo(names, device):
    return [learnt(TorchGroup(), name, device, steps=9) for name in names]


@pytest.mark.long
def test_processes_that_send_from_a_gpu_end_with_the_cpus_bits_also_in_the_background():
    names = ["local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco"]
    there, here = (run_ranks(learnt_over_gloo, 2, names, device) for device in ("cuda", "cpu"))
    for mine, others in zip(there, here, strict=True):
        check_same(mine, others)


def test_a_tensor_of_the_host_among_those_of_the_device_is_found_and_so_is_a_wait():
    with absent_gpu() as gpu:
        x = torch.ones(3, device="cuda")
        assert (2 * x).device == CUDA
        with pytest.raises(AssertionError, match=r"add: a tensor of the host, of shape \[3\]"):
            x + torch.ones(3)
        assert gpu.waits == []
        assert float(x.sum()) == 3
        torch.empty(3).copy_(x)
        assert gpu.waits == ["__float__", "copy_"]
