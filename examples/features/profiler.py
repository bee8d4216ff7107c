# SPDX-License-Identifier: Apache-2.0
"""The profiler: which operations take the time, and a trace for each process to look at in a browser.

Run it with `python profiler.py --folder traces`, and open `traces/profile_0.json` at ui.perfetto.dev.
"""

import torch
from tiny import circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, ProfileKwargs
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, folder="traces", batch_size=32, lr=0.02)
    set_seed(0)
    tables = []

    def keep(profiler):  # is called when the active steps are over
        tables.append(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))

    whole = ProfileKwargs(record_shapes=True, output_trace_dir=flags.folder)
    some_steps = ProfileKwargs(schedule_option={"wait": 2, "warmup": 1, "active": 3, "repeat": 1}, on_trace_ready=keep)
    accelerator = Accelerator(cpu=flags.cpu, kwargs_handlers=[some_steps])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(500), batch_size=flags.batch_size, shuffle=True)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    def step(x, inside):
        accelerator.backward(nn.functional.cross_entropy(model(x), inside))
        optimizer.step()
        optimizer.zero_grad()

    with accelerator.profile() as profiler:  # as the Accelerator was told
        for x, inside in train:
            step(x, inside)
            profiler.step()  # goes on in the schedule
    with accelerator.profile(whole) as profiler:  # or otherwise, for one block
        for x, inside in train:
            step(x, inside)

    names = {event.key for event in profiler.key_averages()}
    accelerator.print(tables[-1])
    accelerator.end_training()
    return {"tables": len(tables), "names": sorted(name for name in names if name.startswith("aten::"))}


if __name__ == "__main__":
    main()
