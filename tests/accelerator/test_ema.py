# SPDX-License-Identifier: Apache-2.0
"""`Accelerator(ema=)`: a running mean of the weights, which is evaluated, saved, resumed and left at the end."""

import gc
import weakref

import pytest
import torch
from torch import nn

from farflung import Accelerator, FullyShardedDataParallelPlugin
from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.shards import full
from farflung.state import AcceleratorState
from tests.accelerator.conftest import on_ranks

LAYOUTS = {"one": 1, "ddp": 2, "fsdp": 2}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
LAWS = {"decay": (0.75, 1), "snapshots": (3, 2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.module = "net"  # is no module inside this one

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x)))).square().mean()


def prepared(layout, optimizer="adamw", **options):
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if layout == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    torch.manual_seed(0)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05)
    return accelerator, *accelerator.prepare(model, made)


def trained(run, steps, found=None):
    """Train in these steps; note the weights after each."""
    accelerator, model, optimizer = run
    for step in steps:
        torch.manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(2, 4)))
        optimizer.step()
        optimizer.zero_grad()
        if found is not None:
            found.append(weights(run))


def weights(run):
    return {name: full(x.detach()).clone() for name, x in run[0].unwrap_model(run[1]).named_parameters()}


def alike(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def evaluated(run):
    run[1].eval()
    found = weights(run)
    run[1].train()
    return found


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS.items())
@on_ranks()
def test_the_mean_is_that_of_recorded_weights_and_changes_no_training(layout, num_ranks, optimizer, law):
    size, every = LAWS[law]
    run, recorded = prepared(layout, optimizer, ema=size, ema_every=every), []
    trained(run, range(9), recorded)
    mean, least = None, 1 - size if size < 1 else 1 / size
    for number, snapshot in enumerate(recorded[every - 1 :: every], 1):
        share = max(least, 1 / number)
        mean = snapshot if mean is None else {name: x + share * (snapshot[name] - x) for name, x in mean.items()}
    seen = evaluated(run)
    torch.testing.assert_close(seen, mean, rtol=1e-6, atol=1e-6)
    assert alike(weights(run), recorded[-1])  # trained again
    saved = run[0].get_state_dict(run[1])
    assert not saved or alike(seen, saved)  # of shards the first rank alone has whole ones
    plain, others = prepared(layout, optimizer), []
    trained(plain, range(9), others)
    assert all(map(alike, recorded, others))


@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS.items())
@on_ranks()
def test_a_run_resumes_with_its_mean_bit_by_bit_and_leaves_it(tmp_path, layout, num_ranks, state_dict_type):
    def begun():
        run = prepared(layout, ema=0.75)
        if layout == "fsdp":
            run[0].state.fsdp_plugin.set_state_dict_type(state_dict_type)
        return run

    run = begun()
    trained(run, range(4))
    run[1].eval()  # as scripts save after an evaluation
    run[0].save_state(tmp_path)
    run[1].train()
    trained(run, range(4, 8))
    mean, own = evaluated(run), weights(run)
    again = begun()
    again[1].eval()
    again[0].load_state(tmp_path)
    again[1].train()
    trained(again, range(4, 8))
    assert alike(own, weights(again))
    assert alike(mean, evaluated(again))
    again[0].end_training()
    assert alike(mean, weights(again))


@on_ranks(1, connect=False, each=None)
def test_what_can_not_work_is_refused():
    with pytest.raises(ConfigError, match=r"ema is 0.9, but an outer loop trains the replicas\. Use its average="):
        Accelerator(cpu=True, ema=0.9, outer="diloco")
    accelerator, model, _ = prepared("one", ema=0.9)
    with pytest.raises(ConfigError, match=r"ema is 0.9, but an outer loop trains the replicas\. Use its average="):
        accelerator.outer(model, "diloco")
    AcceleratorState._reset_state()
    for wrong in (0, -1, 2.5, "0.9"):
        with pytest.raises(ConfigError, match="ema"):
            Accelerator(cpu=True, ema=wrong)
    with pytest.raises(ConfigError, match="ema_every"):
        Accelerator(cpu=True, ema=0.9, ema_every=0)
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(Unsupported, match="would hardly move"):
        Accelerator(cpu=True, ema=0.9).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_moves_while_it_is_evaluated_goes_on_from_its_own_weights():
    run = prepared("one", ema=0.75)
    trained(run, range(3))
    own = weights(run)
    run[1].eval().double()
    run[1].float().train()
    assert alike(own, weights(run))


def test_training_goes_on_from_what_a_script_writes_while_the_mean_is_evaluated():
    run = prepared("one", ema=0.75)
    trained(run, range(3))
    own = weights(run)
    torch._foreach_mul_([one.data for one in run[1].parameters()], 2.0)
    run[1].eval()
    for name, one in run[0].unwrap_model(run[1]).named_parameters():
        one.data.copy_(own[name])
    run[1].train()
    assert alike(own, weights(run))


def test_a_mean_is_taken_once_a_step_after_memory_was_freed():
    accelerator, model, optimizer = prepared("one", ema=0.75)
    steps = []
    for _ in range(2):
        model, optimizer = accelerator.prepare(model, getattr(optimizer, "optimizer", optimizer))
        trained((accelerator, model, optimizer), range(2))
        steps.append(optimizer.param_groups[0]["ema_steps"])
        accelerator.free_memory()
    trained((accelerator, model, optimizer.optimizer), range(2))  # without the Accelerator's means
    assert [*steps, optimizer.param_groups[0]["ema_steps"]] == [2, 4, 4]


@pytest.mark.parametrize("options", [{"skip_nonfinite": 3}, {"ema": 0.75}])
def test_models_are_let_go_of_when_memory_is_freed_and_the_next_ones_have_means(options):
    run = prepared("one", **options)
    trained(run, range(2))
    run[1](torch.ones(2, 4))  # of a step that ran out of memory
    accelerator, left = run[0], weakref.ref(run[1])
    del run
    accelerator.free_memory()
    gc.collect()
    assert left() is None
    model = Net()
    run = accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    trained(run, range(3))
    assert alike(evaluated(run), weights(run)) == ("ema" not in options)
