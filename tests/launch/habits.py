# SPDX-License-Identifier: Apache-2.0
"""A script with the habits of Accelerate's users; `test_habits.py` starts it with `farflung launch` and without.

python habits.py epoch            save in the middle of an epoch
python habits.py resumes          continue from the checkpoint of another number of processes
python habits.py waits            and the others: the main process makes a call, and the other one trains
python habits.py alone            all of these calls, which are right where there is one process
"""

import json
import sys
from contextlib import redirect_stderr
from io import StringIO

import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, LocalSGD
from farflung.state import AcceleratorState
from farflung.utils import FullyShardedDataParallelPlugin

SAMPLES = 12


class Run:
    """A model and data, and one step after the other, in a process that may have had other runs."""

    def __init__(self, **settings):
        AcceleratorState._reset_state(True)
        self.accelerator = Accelerator(cpu=True, **settings)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(torch.arange(float(SAMPLES)), batch_size=2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch[:, None]).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()


def epoch():
    run = Run()
    for k, batch in enumerate(run.loader, 1):
        run.step(batch)
        if k == 2:
            run.accelerator.save_state("epoch")


def resumes():
    run = Run()
    with redirect_stderr(StringIO()) as said:
        run.accelerator.load_state("epoch")
    rest = [x for batch in run.loader for x in run.accelerator.gather_for_metrics(batch).tolist()]
    return [line for line in said.getvalue().splitlines() if "again" in line], rest


def goes_elsewhere(run, call, after_step=lambda: None):
    """The main process makes a call, and the others train."""
    for _, batch in zip(range(2), run.loader, strict=False):
        run.step(batch)
    if run.accelerator.is_main_process:
        call(run.accelerator)
    for _ in range(3):
        run.step(torch.ones(2))
        after_step()
    run.accelerator.wait_for_everyone()


def saves_and_loads(accelerator):
    accelerator.save_state("state")
    accelerator.load_state("state")


def sharded():
    return Run(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def waits():
    goes_elsewhere(Run(), lambda accelerator: accelerator.wait_for_everyone())


def loads_a_replica():
    run = Run()
    with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=2) as loop:
        goes_elsewhere(run, saves_and_loads, loop.step)


def saves_shards():
    goes_elsewhere(sharded(), saves_and_loads)


def saves_weights_of_shards():
    run = sharded()
    goes_elsewhere(run, lambda accelerator: accelerator.save_model(run.model, "weights"))


def alone():
    for deed in (waits, loads_a_replica, saves_shards, saves_weights_of_shards):
        deed()


def main():
    deeds = (epoch, resumes, waits, loads_a_replica, saves_shards, saves_weights_of_shards, alone)
    found = {each.__name__: each for each in deeds}[sys.argv[1]]()
    with open(f"seen{AcceleratorState().process_index}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
