# SPDX-License-Identifier: Apache-2.0
"""FSDP on GPUs: NCCL's streams and host memory do not change what is computed on CPUs."""

import pytest
import torch

from farflung import Accelerator
from farflung.comm.shards import local
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.strategy.test_fsdp import STEPS, WINDOW, batches, made

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
RECOMPUTING = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
PLUGINS = (None, {}, RECOMPUTING, {"cpu_offload": True})


def losses(plugins):
    found = []
    for plugin in plugins:
        AcceleratorState._reset_state()
        fsdp = None if plugin is None else FullyShardedDataParallelPlugin(**plugin)
        accelerator = Accelerator(fsdp_plugin=fsdp, gradient_accumulation_steps=WINDOW)
        model, optimizer = accelerator.prepare(*made())
        where = "cpu" if plugin and plugin.get("cpu_offload") else accelerator.device.type
        assert {local(p).device.type for p in model.parameters()} == {where}
        means = []
        for tokens in batches(accelerator.process_index, accelerator.num_processes):
            tokens = tokens.to(accelerator.device)
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            means.append(accelerator.reduce(loss.detach(), "mean").item())
        found.append(means)
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=two_gpus)])
def test_sharded_training_on_gpus_is_that_of_ddp(size):
    plugins = PLUGINS if size > 1 else PLUGINS[:-1]  # whose weights wait in the host's memory for several ranks only
    for ddp, *sharded in run_ranks(losses, size, plugins, connect=False):
        assert len(ddp) == STEPS * WINDOW
        for one in sharded:
            assert one == pytest.approx(ddp, abs=1e-4)
