# SPDX-License-Identifier: Apache-2.0
"""A script with the habits of Accelerate's users; `test_habits.py` starts it with `farflung launch` and without.

python habits.py works            each habit that works, and what it gives
python habits.py resumes          continue from the checkpoint of another number of processes
python habits.py waits            and the others: the main process makes a call, and the other one trains
"""

import json
import os
import sys
from collections import namedtuple
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from farflung import Accelerator, LocalSGD
from farflung.base.errors import ConfigError, StateError
from farflung.big_modeling import cpu_offload
from farflung.state import AcceleratorState
from farflung.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

Pair = namedtuple("Pair", ["first", "second"])
SAMPLES = 12


@dataclass
class Output:
    logits: torch.Tensor
    words: list


def again(**settings):
    """An Accelerator in a process that may have had others."""
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **settings)


class Run:
    """A model and data, and one step after the other."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
        loader = DataLoader(torch.arange(float(SAMPLES)), batch_size=2)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), loader
        )

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch[:, None]).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def steps(self, number=2):
        for k, batch in enumerate(self.loader, 1):
            self.step(batch)
            if k == number:
                break

    @property
    def weights(self):
        return [p.tolist() for p in self.accelerator.unwrap_model(self.model).parameters()]


def error_of(call, kind=ConfigError):
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing"


def saves_and_loads_on_the_main_process():
    run = Run(again())
    accelerator = run.accelerator
    run.steps()
    at_save = run.weights
    if accelerator.is_main_process:
        accelerator.save_state("alone")
        accelerator.save_model(run.model, "weights")
    accelerator.wait_for_everyone()
    run.steps()
    if accelerator.is_main_process:
        accelerator.load_state("alone")
    is_loaded = run.weights == at_save
    run.steps(1)
    accelerator.load_state("alone")
    return os.listdir("weights"), is_loaded, run.weights == at_save


def saves_a_replica_and_shards_alone():
    """Where there is one process alone, it is all of them."""
    run = Run(again())
    if run.accelerator.num_processes == 1:
        with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=2):
            run.steps()
            run.accelerator.save_state("replica")
            run.accelerator.load_state("replica")
        run = Run(again(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)))
        run.steps()
        run.accelerator.save_state("shards")
        run.accelerator.save_model(run.model, "of_shards")
        run.accelerator.load_state("shards")
    return None


def trains_again():
    totals = []
    for _ in range(3):
        run = Run(again())
        run.steps()
        totals.append(run.accelerator.reduce(torch.ones(1)).item())
    return totals


def reads_its_own_share():
    def loader(accelerator):
        sampler = DistributedSampler(range(SAMPLES), accelerator.num_processes, accelerator.process_index)
        return accelerator.prepare(DataLoader(range(SAMPLES), batch_size=2, sampler=sampler))

    accelerator = again(dataloader_config=DataLoaderConfiguration(already_sharded=True))
    read = [x for batch in loader(accelerator) for x in accelerator.gather_for_metrics(batch).tolist()]
    forgotten = error_of(lambda: list(loader(again())))
    return sorted(read) == [*range(SAMPLES)], "already_sharded=True" in forgotten


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 2)

    def forward(self, x):
        return F.linear(x, self.proj.weight)


def uses_offloaded_weights():
    again()
    model, x = Parent().requires_grad_(False), torch.ones(1, 2)
    expected = model(x)
    cpu_offload(model)
    refused = error_of(lambda: model.proj.weight.add_(1), StateError)
    return torch.equal(model(x), expected), "would change proj.weight" in refused


def trains_a_static_graph():
    found = []
    for static in (True, False):
        handler = DistributedDataParallelKwargs(static_graph=static)
        run = Run(again(gradient_accumulation_steps=2, kwargs_handlers=[handler]))
        run.steps(4)
        accumulated = run.weights
        run = Run(again(kwargs_handlers=[handler]))
        with run.accelerator.no_sync(run.model):
            run.accelerator.backward(run.model(torch.ones(1, 1)).sum())
        run.steps()
        found.append(torch.cat([torch.tensor(one).flatten() for one in (*accumulated, *run.weights)]))
    return torch.allclose(*found)


def has_its_own_precision():
    accelerator = again(mixed_precision="fp16")
    model = nn.Linear(2, 1).half()
    refused = error_of(lambda: accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    accelerator = again(mixed_precision="bf16")
    model, x = accelerator.prepare(nn.Linear(2, 2)), torch.full((8, 2), 1 / 3)
    before = model(x)
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    is_kept = torch.equal(model(x), before) and not torch.equal(plain(x), before)
    return "trains fp32 weights and computes in fp16" in refused, is_kept


def gathers_what_models_return():
    accelerator = again()
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    seen, size = [], accelerator.num_processes
    for batch in loader:
        seen.append(accelerator.gather_for_metrics(Pair(batch, Output(-batch, [batch]))))
    assert {(type(one), type(one.second)) for one in seen} == {(Pair, Output)}
    whole = accelerator.gather(Pair(torch.ones(1), Output(torch.ones(1), [torch.ones(1)])))
    assert len(whole.first) == len(whole.second.logits) == len(whole.second.words[0]) == size
    return [torch.cat(part).tolist() for part in ([one.first for one in seen], [one.second.words[0] for one in seen])]


def saves_in_an_epoch():
    run = Run(again())
    for k, batch in enumerate(run.loader, 1):
        run.step(batch)
        if k == 2:
            run.accelerator.save_state("epoch")


WORKS = [
    saves_and_loads_on_the_main_process,
    saves_a_replica_and_shards_alone,
    trains_again,
    reads_its_own_share,
    uses_offloaded_weights,
    trains_a_static_graph,
    has_its_own_precision,
    gathers_what_models_return,
    saves_in_an_epoch,
]


def works():
    return {habit.__name__: habit() for habit in WORKS}


def resumes():
    run = Run(again())
    with redirect_stderr(StringIO()) as said:
        run.accelerator.load_state("epoch")
    sys.stderr.write(said.getvalue())
    rest = [x for batch in run.loader for x in run.accelerator.gather_for_metrics(batch).tolist()]
    return [line for line in said.getvalue().splitlines() if "again" in line], rest


def goes_elsewhere(run, call, after_step=lambda: None):
    """The main process makes a call, and the others train."""
    run.steps()
    if run.accelerator.is_main_process:
        call(run.accelerator)
    for _ in range(3):
        run.step(torch.ones(2))
        after_step()
    run.accelerator.wait_for_everyone()


def waits():
    goes_elsewhere(Run(Accelerator(cpu=True)), lambda accelerator: accelerator.wait_for_everyone())


def saves_a_replica():
    run = Run(Accelerator(cpu=True))
    with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=2) as loop:
        goes_elsewhere(run, lambda accelerator: accelerator.save_state("replica"), loop.step)


def saves_shards():
    run = Run(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)))
    goes_elsewhere(run, lambda accelerator: accelerator.save_state("shards"))


def saves_weights_of_shards():
    run = Run(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)))
    goes_elsewhere(run, lambda accelerator: accelerator.save_model(run.model, "weights"))


DEEDS = [works, resumes, waits, saves_a_replica, saves_shards, saves_weights_of_shards]


def main():
    found = {each.__name__: each for each in DEEDS}[sys.argv[1]]()
    with open(f"seen{AcceleratorState().process_index}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
