# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md, run: what it says of Accelerate is so, and Farflung does the other thing.

Each test makes the same program once with each library. It keeps the left side of a row; the test that the row names
keeps the right side in full.
"""

import stat

import accelerate
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.optimizer import AcceleratedOptimizer as TheirOptimizer
from accelerate.utils import DataLoaderConfiguration as TheirLoading, gather_object as their_gather_object
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import farflung
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import LaunchSettings, rank_variables
from farflung.loop.optimizer import AcceleratedOptimizer as OurOptimizer
from farflung.loop.state import LoopState
from farflung.precision.amp import ScaledFp16
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration as OurLoading, gather_object as our_gather_object


def both(program, *args):
    """The values of `program` with Accelerate and with Farflung."""
    return program(accelerate.Accelerator, *args), program(farflung.Accelerator, *args)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def dtype_inside(make):
    accelerator = make(cpu=True, mixed_precision="fp16")
    seen = []

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            seen.append(self.layer(x).dtype)
            return x

    accelerator.prepare(Probe())(torch.ones(1, 2))
    return seen[0], accelerator.mixed_precision


def test_fp16_on_a_cpu():
    assert both(dtype_inside) == ((torch.float32, "fp16"), (torch.float16, "fp16"))


def test_a_fused_optimizer_that_overflows():
    def skipped(fused, prepare):
        model = nn.Linear(2, 1)
        optimizer, scale = prepare(torch.optim.AdamW(model.parameters(), fused=fused))
        scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
        optimizer.step()
        return optimizer.step_was_skipped

    def theirs(optimizer):
        scaler = torch.amp.GradScaler("cpu")
        return TheirOptimizer(optimizer, scaler=scaler), scaler.scale

    def ours(optimizer):
        precision = ScaledFp16("cpu")
        return OurOptimizer(optimizer, state=LoopState(), precision=precision), precision.scale

    accelerate.Accelerator(cpu=True)
    assert [skipped(fused, theirs) for fused in (False, True)] == [True, False]
    assert [skipped(fused, ours) for fused in (False, True)] == [True, True]


def test_two_optimizers_of_which_the_first_overflows():
    def second_weight(prepare, scale):
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        optimizers = [prepare(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
        for model, x in zip(models, (float("inf"), 1.0), strict=True):
            nn.init.ones_(model.weight)
            scale(model(torch.full((1, 1), x)).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        return models[1].weight.item()

    accelerate.Accelerator(cpu=True)
    scaler, precision = torch.amp.GradScaler("cpu"), ScaledFp16("cpu")
    assert second_weight(lambda inner: TheirOptimizer(inner, scaler=scaler), scaler.scale) == -1.0
    state = LoopState()
    assert second_weight(lambda inner: OurOptimizer(inner, state=state, precision=precision), precision.scale) == 0.0


def test_launched_compiling_that_says_nothing_of_varying_shapes():
    words = ["--dynamo_backend", "eager", "train.py"]
    arguments = launch_command_parser().parse_args(words)
    arguments.num_processes = arguments.num_machines = arguments.num_cpu_threads_per_process = 1
    arguments.mixed_precision, arguments.use_cpu = "no", True
    _, theirs = prepare_simple_launcher_cmd_env(arguments)
    ours = rank_variables(LaunchSettings(dynamo_backend="eager"))
    assert (theirs["ACCELERATE_DYNAMO_USE_DYNAMIC"], ours.get("ACCELERATE_DYNAMO_USE_DYNAMIC")) == ("False", None)


def window_gradients(make):
    """Gradients at the end of windows of 3, over micro-batches whose gradients are 1, 2, 3 and 4."""
    accelerator = make(cpu=True, gradient_accumulation_steps=3)
    layer = nn.Linear(1, 1, bias=False)
    loader = DataLoader(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    model, optimizer, loader = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0), loader)
    gradients, norms = [], []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)))
            if accelerator.sync_gradients:
                gradients.append(round(layer.weight.grad.item(), 4))
            optimizer.step()
            optimizer.zero_grad()
    return gradients, norms[0] == norms[0]  # NaN is not itself


def test_a_short_last_window_and_clipping_inside_one():
    assert both(window_gradients) == (([2.0, 1.3333], True), ([2.0, 4.0], False))


def who_steps(make):
    """Which of two models, accumulated in turn with windows of 2, is updated."""
    accelerator = make(cpu=True, gradient_accumulation_steps=2)
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    before = [layer.weight.item() for layer in layers]
    pairs = [accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0)) for layer in layers]
    for _ in range(4):
        for model, optimizer in pairs:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
    return [layer.weight.item() != old for layer, old in zip(layers, before, strict=True)]


def test_two_models_in_turn():
    assert both(who_steps) == ([False, True], [True, True])


def end_is_seen(make):
    """Whether the window completes at the end of the data, after an evaluation that was left by `break`."""
    accelerator = make(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(1, 1))
    train, evaluation = accelerator.prepare(DataLoader(range(4)), DataLoader(range(3)))
    for number, _ in enumerate(train):
        with accelerator.accumulate(model):
            complete = accelerator.sync_gradients
        if number == 1:
            for _ in evaluation:
                break
    return complete


def test_an_evaluation_left_by_break():
    assert both(end_is_seen) == (False, True)


def first_batches(make, loading):
    accelerator = make(cpu=True, dataloader_config=loading(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(range(64), batch_size=8, shuffle=True))
    return [next(batch.tolist() for batch in loader) for _ in range(2)]


def test_a_seedable_order_after_a_break():
    first, second = first_batches(accelerate.Accelerator, TheirLoading)
    assert first == second
    first, second = first_batches(farflung.Accelerator, OurLoading)
    assert first != second


def masks_of_the_first_epoch(make, loading, stateful):
    accelerator = make(cpu=True, dataloader_config=loading(use_stateful_dataloader=stateful))
    torch.manual_seed(0)
    train, _ = accelerator.prepare(DataLoader(torch.ones(8), 2), DataLoader(torch.ones(4), 2))
    return [torch.dropout(batch, 0.5, True).tolist() for batch in train]


@pytest.mark.filterwarnings("ignore")  # torchdata goes through all of torch's old names
def test_masks_of_the_first_epoch_with_stateful_loaders():
    for make, loading, same in (
        (accelerate.Accelerator, TheirLoading, False),
        (farflung.Accelerator, OurLoading, True),
    ):
        seen = []
        for stateful in (False, True):
            farflung.state.AcceleratorState._reset_state(True)
            accelerate.state.AcceleratorState._reset_state(True)
            seen.append(masks_of_the_first_epoch(make, loading, stateful))
        assert (seen[0] == seen[1]) is same


def settled(make, folder):
    one, two = make(cpu=True, gradient_accumulation_steps=2), make(cpu=True, gradient_accumulation_steps=3)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    same = one.prepare(optimizer) is one.prepare(optimizer)
    file = folder / make.__module__
    one.save({"x": torch.ones(1)}, file, safe_serialization=True)
    shared = bool(file.stat().st_mode & stat.S_IRGRP)
    stream = type(one.prepare(DataLoader(Stream()))).__name__
    return one.gradient_accumulation_steps, two.gradient_accumulation_steps, same, shared, stream


def test_second_accelerators_second_prepares_files_and_streams(tmp_path):
    theirs, ours = both(settled, tmp_path)
    assert theirs == (3, 3, False, False, "DataLoaderDispatcher")
    assert ours == (2, 3, True, True, "DataLoaderShard")


def on_two_ranks():
    environ.export({"ACCELERATE_USE_CPU": "true"})
    theirs = talked(accelerate.Accelerator, TheirLoading, their_gather_object)
    return theirs, talked(farflung.Accelerator, OurLoading, our_gather_object)


def talked(make, loading, gather_object):
    accelerator = make(cpu=True, dataloader_config=loading(dispatch_batches=False))
    rank = accelerator.process_index
    seen = []
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2)):
        seen += accelerator.gather_for_metrics(batch).tolist()
    mixed = accelerator.gather_for_metrics({"words": [f"w{rank}"]})
    for _ in accelerator.prepare(DataLoader(range(5), batch_size=2)):
        if accelerator.gradient_state.end_of_dataloader:
            break
    later = len(accelerator.gather_for_metrics(torch.arange(4)))
    nested = []
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    for batch in loader:
        for _ in loader:
            pass
        nested.append(len(accelerator.gather_for_metrics(batch)))
    layer = nn.Linear(1, 1)
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=1, factor=0.5)
    optimizer, scheduler = accelerator.prepare(inner, scheduler)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=False)
    return {
        "stream": seen,
        "gathered after a break": later,
        "gathered behind an inner loop": nested,
        "lr": optimizer.param_groups[0]["lr"],
        "sampled": attempt(lambda: [int(x) for x in accelerator.prepare(DataLoader(range(8), sampler=sampler))]),
        "avg": attempt(lambda: accelerator.reduce(torch.tensor([1.0]), "avg").item()),
        "fp16 mean": accelerator.reduce(torch.tensor([60000.0], dtype=torch.float16), "mean").item(),
        "mixed": mixed,
        "dictionary": attempt(lambda: gather_object({"key": rank})),
    }


def one_more_batch(make, loading):
    """Rank 0 gathers a batch in its loop that rank 1 does not have; rank 1 goes on to another call."""
    accelerator = make(cpu=True, dataloader_config=loading(even_batches=False))
    seen = []
    try:
        for batch in accelerator.prepare(DataLoader(range(3), batch_size=1)):
            seen.append(accelerator.gather_for_metrics(batch).tolist())
        seen.append(accelerator.gather_for_metrics(torch.tensor([100])).tolist())
    except RuntimeError as error:
        seen.append(type(error).__name__)
    return seen


def one_more_batch_on_two_ranks(library):
    environ.export({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    if library == "theirs":
        return one_more_batch(accelerate.Accelerator, TheirLoading)
    return one_more_batch(farflung.Accelerator, OurLoading)


def test_a_batch_that_one_rank_does_not_have():
    theirs, ours = (run_ranks(one_more_batch_on_two_ranks, 2, library, connect=False) for library in ("theirs", "ours"))
    assert (theirs[0][:2], theirs[1]) == ([[0, 1], [2]], [[0], [2, 100]])
    assert ours == [[[0, 1], "CollectiveMismatch"]] * 2


def attempt(action):
    try:
        return action()
    except (ConfigError, TypeError) as error:
        return type(error).__name__


def test_two_ranks():
    (theirs, ours), _ = run_ranks(on_two_ranks, 2)
    assert theirs == {
        "stream": [*range(7), 0],
        "gathered after a break": 1,
        "gathered behind an inner loop": [1, 1],
        "lr": 0.5,
        "sampled": [0, 4],
        "avg": 2.0,
        "fp16 mean": float("inf"),
        "mixed": ["words", "words"],
        "dictionary": ["key", "key"],
    }
    assert ours == {
        "stream": [*range(7)],
        "gathered after a break": 8,
        "gathered behind an inner loop": [4, 1],
        "lr": 1.0,
        "sampled": "ConfigError",
        "avg": "ConfigError",
        "fp16 mean": 60000.0,
        "mixed": {"words": ["w0", "w1"]},
        "dictionary": "WrongType",
    }


def test_plugins_of_fsdp():
    ours, theirs = farflung.FullyShardedDataParallelPlugin, accelerate.FullyShardedDataParallelPlugin
    assert (theirs().fsdp_version, theirs().state_dict_type.name) == (1, "FULL_STATE_DICT")
    assert (ours().fsdp_version, ours().state_dict_type) == (2, "SHARDED_STATE_DICT")
    assert theirs(fsdp_version=2, backward_prefetch="BACKWARD_POST").backward_prefetch is None
    assert theirs(fsdp_version=2, limit_all_gathers=False, param_init_fn=print).fsdp_version == 2
    with pytest.raises(ValueError, match="forward_prefetch"):
        theirs(fsdp_version=2, forward_prefetch=False)
    assert ours(forward_prefetch=False).forward_prefetch is None
    assert theirs(fsdp_version=2, transformer_cls_names_to_wrap=["Block"]).auto_wrap_policy is None
    by_size = theirs(fsdp_version=2, auto_wrap_policy="size_based_wrap")
    by_size.set_auto_wrap_policy(nn.Linear(1, 1))
    assert by_size.auto_wrap_policy is None
    model = nn.Sequential(nn.Linear(1, 1))
    model._no_split_modules = ["Linear", "Vision"]
    with pytest.raises(ValueError, match="Vision"):
        theirs(fsdp_version=2, auto_wrap_policy="transformer_based_wrap").set_auto_wrap_policy(model)
    assert accelerate.ParallelismConfig(dp_shard_size=2).to_json() is None
    with pytest.raises(ValueError, match="at a time"):
        _validate_launch_command(launch_command_parser().parse_args(["--cpu", "--use_fsdp", "train.py"]))


def devices_of_two(name):
    accelerator = {"accelerate": accelerate, "farflung": farflung}[name].Accelerator(cpu=True)
    accelerator.wait_for_everyone()  # a rank that ended now would break connections that another still makes
    return str(accelerator.device), torch.zeros(1, device=accelerator.device).device == accelerator.device


def test_the_device_of_several_cpu_processes():
    assert run_ranks(devices_of_two, 2, "accelerate", connect=False) == [("cpu:0", False)] * 2
    assert run_ranks(devices_of_two, 2, "farflung", connect=False) == [("cpu", True)] * 2
