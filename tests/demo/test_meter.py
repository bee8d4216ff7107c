# SPDX-License-Identifier: Apache-2.0
"""The meter leaves DDP's gradients as they are, and counts a ring's bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.demo.train import GradientMeter
from farflung.testing.ranks import run_ranks


def _gradients(metered):
    torch.manual_seed(0)
    # 0.6 MB and more a layer, so that the gradients travel in several buckets.
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(400, 400) for _ in range(4))), bucket_cap_mb=1)
    meter = GradientMeter(model) if metered else None
    x = torch.randn(3, 400, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(x).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()], meter


def metered_and_plain():
    metered, meter = _gradients(True)
    plain, _ = _gradients(False)
    torch.testing.assert_close(metered, plain)
    return meter.bytes_sent, sum(gradient.nbytes for gradient in plain)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_ddp_and_bytes_those_of_a_ring(size):
    for sent, gradient_bytes in run_ranks(metered_and_plain, size):
        assert sent == pytest.approx(2 * 2 * (size - 1) / size * gradient_bytes, abs=20)
