# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: written in parts, whole or in other parts again, the run goes on as it was."""

import io
import json
import shutil
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.base.errors import CheckpointError, CollectiveMismatch, ConfigError
from farflung.checkpoint.sharded import merge_shards
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.outer import diloco
from farflung.state import AcceleratorState, PartialState
from farflung.testing.ranks import run_ranks
from farflung.utils import ParallelismConfig, load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from tests.accelerator.conftest import on_ranks

STEPS = 6


class Net(nn.Module):
    """Tied and frozen weights, sizes that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 1, bias=False)
        self.tied = nn.Linear(3, 1, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        h = self.frozen(self.inner(x))
        return self.last(h) + self.tied(h)


class Run:
    """The objects of one rank, with the model sharded over rows of `columns` ranks; 1: not at all."""

    def __init__(self, columns, accumulation=1, load=None, **asked):
        AcceleratorState._reset_state(reset_partial_state=False)
        size = PartialState(cpu=True).num_processes
        settings = {"scheduler_ticks": "per_update", "gradient_accumulation_steps": accumulation}
        if columns > 1:
            wraps = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30}
            settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **wraps, **asked)
            settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=size // columns, dp_shard_size=columns)
        self.accelerator = Accelerator(cpu=True, **settings)
        torch.manual_seed(0)
        net = Net()
        trained = [{"params": net.inner.parameters(), "lr": 0.02}, {"params": [net.last.weight]}]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        data = DataLoader(torch.randn(64, 5, generator=torch.Generator().manual_seed(1)), 2)
        self.model, self.optimizer, self.scheduler, self.data = self.accelerator.prepare(
            net, optimizer, scheduler, data
        )
        if load is not None:
            self.accelerator.load_state(load)

    def backward(self, seed):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        loss = self.model(x).square().mean()
        self.accelerator.backward(loss)
        return loss.item()

    def train(self, seeds):
        """Train on the same batch on all ranks, so that the layout does not matter; return the losses."""
        losses = []
        for seed in seeds:
            losses.append(self.backward(seed))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def micro_step(self, step):
        """Accumulate the gradients of one batch, another one on each rank, and step where the window ends."""
        with self.accelerator.accumulate(self.model):
            self.backward(10 * step + self.accelerator.process_index)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.weights()

    def weights(self):
        """Return copies of the whole weights."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def windows(folder):
    """Save in the middle of an accumulation window, and complete it in each layout; return weights after its step."""
    run = Run(2, accumulation=3)
    run.accelerator.save_state(folder / "new")
    run.accelerator.load_state(folder / "new")
    assert not run.optimizer.state
    run.micro_step(0)
    run.accelerator.save_state(folder / "unreduced")
    run.micro_step(1)
    found = [run.micro_step(2)]
    for columns in (2, 4, 1):
        run = Run(columns, accumulation=3, load=folder / "unreduced")
        run.micro_step(1)
        found.append(run.micro_step(2))
    each = Run(2)
    each.accelerator.backward(each.model(torch.ones(1, 5)).sum())  # reduced at once, but there is no step yet
    each.accelerator.save_state(folder / "reduced")
    for run in (each, Run(2, load=folder / "reduced")):
        run.optimizer.step()
        found.append(run.weights())
    with redirect_stderr(io.StringIO()) as notes:
        Run(4, load=folder / "reduced")
    return found, notes.getvalue()


def check_windows(folder):
    """Check that windows that were not complete are completed, in other layouts too."""
    (*states, reduced, again), notes = run_ranks(windows, 4, folder)[0]
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=0, atol=1e-6)
    assert all(torch.equal(reduced[name], again[name]) for name in reduced)
    assert "had reduced gradients of other shards: it starts over" in notes


def test_a_window_that_was_not_complete_is_completed(tmp_path):
    check_windows(tmp_path)


@on_ranks(4)
def test_islands_go_on_in_mid_round_and_refuse_other_shards(tmp_path):
    """Two islands of two ranks under an outer loop."""

    def trained(run, numbers):
        return run.train(10 * number + run.accelerator.process_index // 2 for number in numbers)

    run = Run(2)
    with run.accelerator.outer(run.model, diloco(every=3)):
        trained(run, range(4))
        run.accelerator.save_state(tmp_path / "outer", block=False)
        whole = trained(run, range(4, 8))
    run.accelerator.end_training()  # which waits for the save
    run = Run(2)
    with run.accelerator.outer(run.model, diloco(every=3)):
        run.accelerator.load_state(tmp_path / "outer")
        assert trained(run, range(4, 8)) == whole
    with pytest.raises(CheckpointError, match=r"sharded over 2 ranks, but here they are sharded over 4 .*size=2"):
        Run(4, load=tmp_path / "outer")
    accelerator = run.accelerator
    with pytest.raises(CollectiveMismatch, match=r"^get_state_dict: every process must .* is in `wait_for_everyone`"):
        accelerator.get_state_dict(run.model) if accelerator.is_main_process else accelerator.wait_for_everyone()


def write_as_accelerate(run, folder):
    """Write the model and the optimizer with the calls that Accelerate's FSDP2 makes; the rest is the same as ours."""
    if run.accelerator.is_main_process:
        shutil.copytree(folder.parent / "at_once", folder)
        for name in ("farflung.json", "pytorch_model_fsdp_0", "optimizer_0", "loop_state"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.accelerator.wait_for_everyone()
    model = {"model": get_model_state_dict(run.model)}
    optimizer = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer.optimizer)}
    dcp.save(model, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"))
    dcp.save(optimizer, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))


def read_as_accelerate(run, folder):
    """Read the model and the optimizer with the calls that Accelerate's FSDP2 makes."""
    model = {"model": get_model_state_dict(run.model)}
    optimizer = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer.optimizer)}
    for value in model["model"].values():
        value.mul_(0)
    dcp.load(model, storage_reader=dcp.FileSystemReader(folder / "pytorch_model_fsdp_0"))
    dcp.load(optimizer, storage_reader=dcp.FileSystemReader(folder / "optimizer_0"))
    set_model_state_dict(run.model, model["model"])
    set_optimizer_state_dict(run.model, run.optimizer.optimizer, optimizer["optimizer"])


def write(folder):
    """Train on a grid of 2x2, and write what there is in every form."""
    run = Run(2)
    accelerator, calls = run.accelerator, []
    accelerator.register_save_state_pre_hook(lambda models, weights, where: calls.append((models, weights)))
    before = run.train(range(3))
    accelerator.save_state(folder / "at_once")
    accelerator.save_state(folder / "behind", block=False)
    plugin = accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(folder / "full")
    save_fsdp_model(plugin, accelerator, run.model, folder / "full" / "fsdp")
    save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, folder / "full" / "fsdp")
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, run.model, folder / "parts")
    save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, folder / "parts")
    write_as_accelerate(run, folder / "theirs")
    state = accelerator.get_state_dict(run.model)
    accelerator.save_model(run.model, folder / "whole")
    accelerator.save_model(run.model, folder / "cut", max_shard_size=64)
    if accelerator.is_main_process:
        shards = folder / "at_once" / "pytorch_model_fsdp_0"
        with pytest.raises(ConfigError, match=r"/whole lies in .*, which is to be removed\. Name another folder"):
            merge_shards(shards, shards / "whole", remove=True)
        merge_shards(shards, folder / "merged")
    assert all(models == [run.model] and weights == [] for models, weights in calls)
    assert state.get("tied.weight") is state.get("last.weight")  # gathered once
    state = {name: value.clone() for name, value in state.items()}
    return before, run.train(range(3, STEPS)), state


def go_on(folder, columns, names):
    """Load each checkpoint into freshly made objects, and return the losses that follow."""
    losses = {}
    for name in names:
        run = Run(columns)
        run.accelerator.register_load_state_pre_hook(lambda models, where: None)
        run.accelerator.load_state(folder / name)
        losses[name] = run.train(range(3, STEPS))
    run = Run(columns, load=folder / "at_once")
    for name in ("parts", "full/fsdp"):
        run.train(range(10, 12))
        plugin = run.accelerator.state.fsdp_plugin
        load_fsdp_optimizer(plugin, run.accelerator, run.optimizer, run.model, folder / name)
        load_fsdp_model(plugin, run.accelerator, run.model, folder / name)
        run.scheduler.scheduler.last_epoch = 3
        losses[name] = run.train(range(3, 4))
    return losses


def all_layouts(folder):
    """Write on a grid of 2x2, and go on in all layouts that 4 ranks can have."""
    written = write(folder)
    names = ["at_once", "behind", "full", "theirs"]
    found = [go_on(folder, columns, names) for columns in (4, 1, 2)]
    run = Run(2)
    read_as_accelerate(run, folder / "at_once")
    theirs = run.weights()
    whole = Run(1)
    whole.train(range(3))
    whole.accelerator.save_state(folder / "plain")
    found.append(go_on(folder, 4, ["plain"]))
    return *written, found, theirs


def whole_run(folder):
    """Train in one process, and go on from what 4 wrote."""
    run = Run(1)
    losses = run.train(range(3))
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    plain = Net()
    plain.load_state_dict(load_file(folder / "whole" / "model.safetensors"), strict=False)
    return (
        losses + run.train(range(3, STEPS)),
        state,
        go_on(folder, 1, ["at_once", "full", "theirs"]),
        plain.state_dict(),
    )


@pytest.mark.long
def test_a_run_on_2x2_goes_on_in_any_other_layout(tmp_path):
    ranks = run_ranks(all_layouts, 4, tmp_path, timeout_s=120)
    before, after, state, found, theirs = ranks[0]
    assert [(rank[2], rank[4]) for rank in ranks[1:]] == [({}, {})] * 3
    ((losses, one, alone, plain),) = run_ranks(whole_run, 1, tmp_path)
    assert losses == pytest.approx(before + after, abs=1e-6)
    for layout in [*(one for rank in ranks for one in rank[3]), alone]:
        for name, seen in layout.items():
            assert seen == pytest.approx(after[: len(seen)], abs=1e-6), name

    # The whole model, key by key, however it was gathered: as the model of one process has it.
    assert list(state) == list(one)
    cut = {}
    for path in (tmp_path / "cut").glob("*.safetensors"):
        cut.update(load_file(path))
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())["weight_map"]
    assert cut.keys() == index.keys() == one.keys() - {"tied.weight"}
    forms = [state, theirs, cut, load_file(tmp_path / "whole" / "model.safetensors"), plain]
    for form in [*forms, load_file(tmp_path / "merged" / "model.safetensors")]:
        for name, value in form.items():
            torch.testing.assert_close(value, one[name], rtol=0, atol=1e-6)
