# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of a tensor: the tensor itself, or its shard of a DTensor, in the same memory."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples
from torch import nn

from farflung.comm.bucket import Buckets
from farflung.comm.shards import addresses, local, mesh_of, num_parts, with_local
from tests.accelerator.conftest import on_ranks


@on_ranks(2)
def test_of_a_sharded_tensor_the_local_part_is_packed_and_written_in_place():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = nn.Parameter(distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)]))
    buckets = Buckets([whole])
    with torch.no_grad():
        assert buckets.pack(0).tolist() == [6.0 * mesh.get_rank() + k for k in range(6)]
        buckets.flat(0).mul_(10)
        buckets.unpack(0)
    assert whole.full_tensor().flatten().tolist() == [10.0 * k for k in range(12)]
    assert local(whole).data_ptr() == addresses([whole])[0]
    assert mesh_of(whole) == ([0, 1], "[2] (Shard(dim=0),)")
    made = with_local(local(whole).double(), whole)
    assert (made.dtype, made.placements, local(made).tolist()) == (
        torch.float64,
        whole.placements,
        local(whole).tolist(),
    )


PLACED = (None, 0, 1)  # along a dimension of a mesh: copied, or cut along a dimension of the tensor
TENSORS = lists(tuples(integers(0, 5), integers(1, 4), sampled_from(PLACED), sampled_from(PLACED)), min_size=1)


@given(TENSORS, integers(1, 3), integers(1, 3), integers(1, 40))
@pytest.mark.law("islands-are-replicas")
def test_squares_of_parts_and_copies_add_up_to_those_of_whole_tensors(tensors, rows, columns, cap):
    from torch.distributed.tensor import Replicate, Shard

    torch.manual_seed(0)
    wholes = [torch.randn(height, width, dtype=torch.float64) for height, width, *_ in tensors]
    found = 0.0
    for row, column in product(range(rows), range(columns)):
        parts, shares = [], []
        for whole, (_, _, *dims) in zip(wholes, tensors, strict=True):
            part, mesh = whole, SimpleNamespace(shape=(rows, columns))
            for dim, place, count in zip(dims, (row, column), mesh.shape, strict=True):
                if dim is not None:
                    cut = part.tensor_split(count, dim)
                    part = cut[place]
            parts.append(part.contiguous())
            placed = [Replicate() if dim is None else Shard(dim) for dim in dims]
            spread = SimpleNamespace(device_mesh=mesh, placements=placed, to_local=None)
            shares.append(num_parts(spread) / (rows * columns))
        buckets = Buckets(parts, torch.float64, cap_bytes=8 * cap, shares=shares)
        found += sum(float(buckets.square(k, buckets.pack(k))) for k in range(len(buckets)))
    assert found == pytest.approx(sum(float(whole.square().sum()) for whole in wholes))
