# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of a tensor: the tensor itself, or its shard of a DTensor, in the same memory."""

import torch
from torch import nn

from farflung.comm.bucket import Buckets
from farflung.comm.shards import addresses, local
from farflung.testing.ranks import run_ranks


def test_a_plain_tensor_is_its_own_local_part():
    parameter = nn.Parameter(torch.zeros(3))
    part = local(parameter)
    assert part.data_ptr() == parameter.data_ptr() == addresses([parameter])[0]
    assert not part.requires_grad


def averaged_by_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = nn.Parameter(distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)]))
    buckets = Buckets([whole])
    with torch.no_grad():
        packed = buckets.pack(0).tolist()
        buckets.flat(0).mul_(10)
        buckets.unpack(0)
    return packed, whole.full_tensor().flatten().tolist(), local(whole).data_ptr() == addresses([whole])[0]


def test_of_a_sharded_tensor_the_local_part_is_packed_and_written_in_place():
    for rank, (packed, full, is_same_memory) in enumerate(run_ranks(averaged_by_shards, 2)):
        assert packed == [6.0 * rank + k for k in range(6)]
        assert full == [10.0 * k for k in range(12)]
        assert is_same_memory
