# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md, run: what it says of Accelerate is so, and Farflung does the other thing.

Each test makes the same program once with each library. It keeps the left side of a row; the test that the row names
keeps the right side in full.
"""

import stat
from functools import partial

import accelerate
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.optimizer import AcceleratedOptimizer as TheirOptimizer
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
from tests.docs.test_numbers import LIBRARIES, fresh, on_ranks


def both(program, *args):
    """The values of `program` with Accelerate and with Farflung."""
    return tuple(program(library, *args) for library in LIBRARIES.values())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def dtype_inside(library):
    """The dtype in a layer in fp16 on a CPU, and what the accelerator calls the precision."""
    accelerator = library.Accelerator(cpu=True, mixed_precision="fp16")
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    accelerator.prepare(model)(torch.ones(1, 2))
    return seen[0], accelerator.mixed_precision


def scaled():
    """How each library prepares an optimizer in fp16, and scales its loss."""
    accelerate.Accelerator(cpu=True)
    scaler, precision = torch.amp.GradScaler("cpu"), ScaledFp16("cpu")
    ours = partial(OurOptimizer, state=LoopState(), precision=precision)
    return (partial(TheirOptimizer, scaler=scaler), scaler.scale), (ours, precision.scale)


def test_a_fused_optimizer_that_overflows():
    def skipped(fused, prepare, scale):
        model = nn.Linear(2, 1)
        optimizer = prepare(torch.optim.AdamW(model.parameters(), fused=fused))
        scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
        optimizer.step()
        return optimizer.step_was_skipped

    assert [skipped(False, *library) for library in scaled()] == [True, True]
    assert [skipped(True, *library) for library in scaled()] == [False, True]


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

    assert [second_weight(*library) for library in scaled()] == [-1.0, 0.0]


def test_launched_compiling_that_says_nothing_of_varying_shapes():
    words = ["--dynamo_backend", "eager", "train.py"]
    arguments = launch_command_parser().parse_args(words)
    arguments.num_processes = arguments.num_machines = arguments.num_cpu_threads_per_process = 1
    arguments.mixed_precision, arguments.use_cpu = "no", True
    _, theirs = prepare_simple_launcher_cmd_env(arguments)
    ours = rank_variables(LaunchSettings(dynamo_backend="eager"))
    assert (theirs["ACCELERATE_DYNAMO_USE_DYNAMIC"], ours.get("ACCELERATE_DYNAMO_USE_DYNAMIC")) == ("False", None)


def window_gradients(library):
    """Gradients at the end of windows of 3, over micro-batches whose gradients are 1, 2, 3 and 4."""
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
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


def who_steps(library):
    """Which of two models, accumulated in turn with windows of 2, is updated."""
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
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


def end_is_seen(library):
    """Whether the window completes at the end of the data, after an evaluation that was left by `break`."""
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(1, 1))
    train, evaluation = accelerator.prepare(DataLoader(range(4)), DataLoader(range(3)))
    for number, _ in enumerate(train):
        with accelerator.accumulate(model):
            complete = accelerator.sync_gradients
        if number == 1:
            for _ in evaluation:
                break
    return complete


def first_batches_are_alike(library):
    """Whether a seedable order is the same again after a `break`."""
    accelerator = fresh(library, use_seedable_sampler=True)
    loader = accelerator.prepare(DataLoader(range(64), batch_size=8, shuffle=True))
    first, second = (next(batch.tolist() for batch in loader) for _ in range(2))
    return first == second


@pytest.mark.parametrize(
    ("program", "theirs", "ours"),
    [
        (dtype_inside, (torch.float32, "fp16"), (torch.float16, "fp16")),
        (window_gradients, ([2.0, 1.3333], True), ([2.0, 4.0], False)),
        (who_steps, [False, True], [True, True]),
        (end_is_seen, False, True),
        (first_batches_are_alike, True, False),
    ],
)
def test_small_programs(program, theirs, ours):
    assert both(program) == (theirs, ours)


def masks_of_the_first_epoch(library, stateful):
    accelerator = fresh(library, use_stateful_dataloader=stateful)
    torch.manual_seed(0)
    train, _ = accelerator.prepare(DataLoader(torch.ones(8), 2), DataLoader(torch.ones(4), 2))
    return [torch.dropout(batch, 0.5, True).tolist() for batch in train]


@pytest.mark.filterwarnings("ignore")  # torchdata goes through all of torch's old names
def test_masks_of_the_first_epoch_with_stateful_loaders():
    plain, stateful = (both(masks_of_the_first_epoch, stateful) for stateful in (False, True))
    assert [one == other for one, other in zip(plain, stateful, strict=True)] == [False, True]


def settled(library, folder):
    one, two = (library.Accelerator(cpu=True, gradient_accumulation_steps=steps) for steps in (2, 3))
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    same = one.prepare(optimizer) is one.prepare(optimizer)
    file = folder / library.__name__
    one.save({"x": torch.ones(1)}, file, safe_serialization=True)
    shared = bool(file.stat().st_mode & stat.S_IRGRP)
    stream = type(one.prepare(DataLoader(Stream()))).__name__
    return one.gradient_accumulation_steps, two.gradient_accumulation_steps, same, shared, stream


def test_second_accelerators_second_prepares_files_and_streams(tmp_path):
    theirs = (3, 3, False, False, "DataLoaderDispatcher")
    assert both(settled, tmp_path) == (theirs, (2, 3, True, True, "DataLoaderShard"))


def on_two_ranks():
    environ.export({"ACCELERATE_USE_CPU": "true"})
    return both(talked)


def talked(library):
    accelerator = fresh(library, dispatch_batches=False)
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
        list(loader)
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
        "dictionary": attempt(lambda: library.utils.gather_object({"key": rank})),
    }


def one_more_batch(library):
    """Rank 0 gathers a batch in its loop that rank 1 does not have; rank 1 goes on to another call."""
    environ.export({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    accelerator, seen = fresh(LIBRARIES[library], even_batches=False), []
    try:
        for batch in accelerator.prepare(DataLoader(range(3), batch_size=1)):
            seen.append(accelerator.gather_for_metrics(batch).tolist())
        seen.append(accelerator.gather_for_metrics(torch.tensor([100])).tolist())
    except RuntimeError as error:
        seen.append(type(error).__name__)
    return seen


def test_a_batch_that_one_rank_does_not_have():
    theirs, ours = on_ranks(one_more_batch)
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
    accelerator = LIBRARIES[name].Accelerator(cpu=True)
    accelerator.wait_for_everyone()  # a rank that ended now would break connections that another still makes
    return str(accelerator.device), torch.zeros(1, device=accelerator.device).device == accelerator.device


def test_the_device_of_several_cpu_processes():
    assert on_ranks(devices_of_two) == ([("cpu:0", False)] * 2, [("cpu", True)] * 2)
