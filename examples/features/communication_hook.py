# SPDX-License-Identifier: Apache-2.0
"""DDP communication hooks: what gradients go through on their way to the other processes.

Run it with `farflung launch --num_processes 2 communication_hook.py --hook bf16`; or no, fp16, power_sgd.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=6, batch_size=32, hook="bf16", lr=0.02)
    set_seed(0)
    is_low_rank = flags.hook == "power_sgd"
    options = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(flags.hook),
        # PowerSGD begins with ordinary averages, and then sends two thin matrices instead of each large one.
        comm_state_option={"matrix_approximation_rank": 2, "start_powerSGD_iter": 10} if is_low_rank else {},
    )
    accelerator = Accelerator(cpu=flags.cpu, kwargs_handlers=[options])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for _ in range(flags.epochs):
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            optimizer.step()
            optimizer.zero_grad()

    found = accuracy(accelerator, model, test)
    accelerator.print(f"{found:.1%} classified correctly, with gradients sent as {flags.hook}")
    accelerator.end_training()
    return {"accuracy": found}


if __name__ == "__main__":
    main()
