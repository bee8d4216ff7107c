# SPDX-License-Identifier: Apache-2.0
"""Which public calls have a collective here and none in Accelerate, where a script may make them on one process alone.

Collectives are counted over all process groups of two ranks, with each library. What differs is in `ONLY_HERE`, with
the reason; a call that is added to it needs a name in errors (`within=`), which the second test checks.
"""

import importlib
import logging
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from farflung import Accelerator
from farflung.base.errors import CollectiveMismatch
from farflung.data_loader import prepare_data_loader
from farflung.logging import get_logger
from farflung.testing.ranks import run_ranks
from farflung.utils import FullyShardedDataParallelPlugin, ProfileKwargs, merge_fsdp_weights, save_fsdp_model

ONLY_HERE = {
    # All ranks agree on errors before they go on. One rank may make either call alone; see test_alone.py.
    "save_state": "an error on one rank is raised on all, and the folder is put in place when all have written",
    "load_state": "an error on one rank is raised on all, with all as it was",
    # A script makes these on all ranks: what it does next, or then, has collectives there as well.
    "iter(seedable loader)": "ranks share one seed, also where theirs differ",
    "in_order": "a barrier also where the level is switched off, as levels may differ between ranks",
    "LocalSGD.__enter__": "groups are made, and models compared",
    "join_uneven_inputs": "Accelerate joins nothing on CPUs, and makes as many on GPUs",
}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def inside(context):
    with context:
        pass


def num_collectives():
    return sum(group._get_sequence_number_for_group() for group in list(dist.distributed_c10d._world.pg_map))


def counted(library, folder):
    """How many collectives each public call makes on this rank, none of them alone on it."""
    warnings.simplefilter("ignore")
    logging.disable()
    rooms = ("utils", "local_sgd", "data_loader", "logging")
    utils, local_sgd, data_loader, log = (importlib.import_module(f"{library}.{name}") for name in rooms)
    kind = importlib.import_module(library).Accelerator
    accelerator = kind(cpu=True)
    data, model = torch.arange(24.0).reshape(12, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    counts, registered = {}, SimpleNamespace(state_dict=dict, load_state_dict=print)

    def count(name, call):
        before = num_collectives()
        found = call()
        counts[name] = num_collectives() - before
        return found

    count("Accelerator", kind)
    model, optimizer = count("prepare", lambda: accelerator.prepare(model, optimizer))
    scheduler = count("prepare_scheduler", lambda: accelerator.prepare(scheduler))
    count("prepare_model", lambda: accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True))
    prepare, shuffled = data_loader.prepare_data_loader, DataLoader(data, batch_size=2, shuffle=True)
    loaders = {
        "loader": lambda: accelerator.prepare(DataLoader(data, batch_size=2)),
        "shuffled loader": lambda: accelerator.prepare(shuffled),
        "seedable loader": lambda: prepare(shuffled, use_seedable_sampler=True),
        "stream": lambda: prepare(DataLoader(Stream(), batch_size=2), dispatch_batches=False),
        "uneven loader": lambda: prepare(DataLoader(data, batch_size=5), even_batches=False),
    }
    made = {name: count(f"prepare({name})", make) for name, make in loaders.items()}
    for name, loader in made.items():
        count(f"iter({name})", lambda loader=loader: list(loader))
    skipped = count("skip_first_batches", lambda: accelerator.skip_first_batches(made["loader"], 1))
    count("iter(skipped)", lambda: list(skipped))
    for _ in range(3):  # DDP settles its buckets
        accelerator.backward(model(data[:2]).sum())
    count("backward", lambda: accelerator.backward(model(data[:2]).sum()))
    count("clip_grad_norm_", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    count("clip_grad_value_", lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    count("step", lambda: (optimizer.step(), scheduler.step(), optimizer.zero_grad()))
    count("save_state", lambda: accelerator.save_state(f"{folder}/state"))
    accelerator.wait_for_everyone()  # Accelerate's rank 1 may be quicker than the files of rank 0
    count("load_state", lambda: accelerator.load_state(f"{folder}/state"))
    count("save_model", lambda: accelerator.save_model(model, f"{folder}/model"))
    count("save", lambda: accelerator.save({"a": 1}, f"{folder}/object"))
    count("get_state_dict", lambda: accelerator.get_state_dict(model))
    count("unwrap_model", lambda: accelerator.unwrap_model(model))
    count("register_for_checkpointing", lambda: accelerator.register_for_checkpointing(registered))
    for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
        count(name, lambda name=name: getattr(accelerator, name)(data))
    count("set_trigger", accelerator.set_trigger)
    count("check_trigger", accelerator.check_trigger)
    count("wait_for_everyone", accelerator.wait_for_everyone)
    count("main_process_first", lambda: inside(accelerator.main_process_first()))
    count("split_between_processes", lambda: inside(accelerator.split_between_processes([1, 2], apply_padding=True)))
    count("print", lambda: accelerator.print(end=""))
    count("in_order", lambda: log.get_logger("a").info("a", in_order=True))
    count("main_process_only", lambda: log.get_logger("a").info("a", main_process_only=False))
    count("trackers", lambda: (accelerator.init_trackers("a"), accelerator.log({"a": 1})))
    count("profile", lambda: inside(accelerator.profile(utils.ProfileKwargs(output_trace_dir=f"{folder}/profile"))))
    averaging = local_sgd.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8)
    count("LocalSGD.__enter__", averaging.__enter__)
    count("LocalSGD.step", averaging.step)
    count("LocalSGD.__exit__", lambda: averaging.__exit__(None, None, None))
    count("join_uneven_inputs", lambda: inside(accelerator.join_uneven_inputs([model])))
    count("set_seed", lambda: utils.set_seed(1, device_specific=True))
    count("synchronize_rng_states", lambda: utils.synchronize_rng_states(["torch"]))
    count("free_memory", accelerator.free_memory)
    return counts


def test_what_has_a_collective_here_alone_is_listed_with_the_reason(tmp_path):
    libraries = ("accelerate", "farflung")
    theirs, ours = (run_ranks(counted, 2, each, tmp_path / each, connect=False)[0] for each in libraries)
    assert {name for name in ours if ours[name] and not theirs[name]} == ONLY_HERE.keys()


def calls_of(accelerator, model, folder):
    """Every call that has a collective and can be made in place of another one, by the name that its error has."""
    loader = prepare_data_loader(DataLoader(range(8), shuffle=True), use_seedable_sampler=True)
    whole = prepare_data_loader(DataLoader(torch.arange(3), sampler=[[0, 1], [1, 2], [2]], batch_size=None))

    return {
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(torch.ones(2)),
        "gather_for_metrics of objects": lambda: accelerator.gather_for_metrics(["a"]),
        "check_trigger": accelerator.check_trigger,
        "main_process_first": lambda: inside(accelerator.main_process_first()),
        "local_main_process_first": lambda: inside(accelerator.local_main_process_first()),
        "profile": lambda: inside(accelerator.profile(ProfileKwargs(output_trace_dir=f"{folder}/profile"))),
        "a logger, in_order=True": lambda: get_logger("a").info("a", in_order=True),
        "iter(loader)": lambda: list(loader),
        "the end of iter(loader)": lambda: list(whole),
        "save_fsdp_model": lambda: save_fsdp_model(None, accelerator, model, f"{folder}/shards"),
        "merge_fsdp_weights": lambda: merge_fsdp_weights(f"{folder}/shards", f"{folder}/merged"),
    }


def parts_ways(folder):
    """Rank 1 makes each call in its turn, while rank 0 reduces."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(nn.Linear(4, 4))
    said = {}
    for name, call in calls_of(accelerator, model, folder).items():
        try:
            call() if accelerator.process_index else accelerator.reduce(torch.ones(1))
        except CollectiveMismatch as error:
            said[name] = str(error)
    return said


def test_a_mismatch_has_the_name_that_the_script_wrote(tmp_path):
    one, other = run_ranks(parts_ways, 2, tmp_path)
    assert one == other
    for name, said in one.items():
        begin = "rank 0 called reduce(reduction='sum', scale=1.0), rank 1 "
        assert said.startswith(begin), name
        called, _, _ = said.removeprefix(begin).partition(". ")
        assert any(one == name or one.startswith(f"{name}(") for one in called.split(" or ")), said
    assert len(one) == 11  # get_state_dict and save_model are matched before anything is sent, as save_state is
