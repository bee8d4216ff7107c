# SPDX-License-Identifier: Apache-2.0
"""Nested collectives on GPUs: headers over gloo, payloads over NCCL where the group has it; the same results."""

import pytest
import torch
import torch.distributed as dist

from farflung.base.errors import CollectiveMismatch
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.scatter import Scatter
from farflung.config import environ
from tests.accelerator.conftest import on_ranks
from tests.comm.counting import CountingGroup

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("cpu:gloo,cuda:nccl", marks=two_gpus), pytest.param("nccl", marks=two_gpus)]
)
@on_ranks(2, connect=False, timeout_s=120)
def test_results_are_those_of_the_cpu_on_the_leaves_own_device(backend):
    device = torch.device("cuda", environ.integer("RANK") % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if "nccl" in backend else None)
    group = CountingGroup()
    exchange = Exchange(group)
    rank, size = exchange.rank, exchange.size
    for n in (1, 5, 3000, 400_000):
        full = torch.full((n, 2), float(rank), device=device)
        tree = {"f": full, "h": full.half(), "i": torch.tensor(rank, device=device), "b": full > 0, "host": full.cpu()}
        gathered = collectives.gather(exchange, tree)
        assert {key: x.device for key, x in gathered.items()} == {key: x.device for key, x in tree.items()}
        assert gathered["f"][::n, 1].tolist() == gathered["host"][::n, 1].tolist() == list(range(size))
        assert gathered["i"].tolist() == list(range(size))
        ragged = collectives.gather(exchange, full[: n * rank], ragged=True)
        assert ragged.shape == (n * (size - 1), 2)
        summed = collectives.reduce(exchange, {"f": full, "h": torch.full_like(full, 40000).half()}, "mean")
        assert summed["f"].eq((size - 1) / 2).all()
        assert summed["h"].eq(40000).all()
        assert summed["h"].device == device
        assert collectives.reduce(exchange, {"b": tree["b"]}, "max")["b"].all()
        sent = collectives.broadcast(exchange, {"f": full.clone(), "t": full.t().clone().t()}, 1)
        assert sent["f"].eq(1).all()
        assert sent["t"].eq(1).all()
        padded = collectives.pad_across_processes(exchange, full.repeat(rank + 1, 1), pad_index=7)
        assert padded.shape[0] == n * size
    assert collectives.gather_object(exchange, [rank, "text"]) == [x for r in range(size) for x in (r, "text")]
    with pytest.raises(CollectiveMismatch, match="the same type of device"):
        collectives.gather(exchange, full if rank else full.cpu())
    with pytest.raises(CollectiveMismatch, match="pad_across_processes"):
        collectives.gather(exchange, full[rank:])
    scatter = Scatter(group)
    value = scatter.send([full + r for r in range(size)]) if rank == 0 else scatter.receive()
    assert value.eq(rank).all()
    dist.destroy_process_group()
