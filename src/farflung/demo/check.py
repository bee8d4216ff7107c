# SPDX-License-Identifier: Apache-2.0
"""`farflung test`: what the processes of a run must be able to do together, each with what it shows if it fails.

It takes the precision, the layout and the outer loop from the launcher, as a user's script would.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.utils import broadcast_object_list, set_seed

_SAMPLES, _BATCH, _PASSES = 96, 4, 3


def main() -> None:
    """Check this process together with the others; AssertionError if something is not as it must be."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es), {accelerator.distributed_type}, {accelerator.device}")
    _check_collectives(accelerator)
    _check_data(accelerator)
    _check_training(accelerator)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _check_collectives(accelerator: Accelerator) -> None:
    size, mine = accelerator.num_processes, accelerator.process_index
    ranks = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
    assert ranks == list(range(size)), f"gather brought the ranks {ranks}, for {size} processes"
    total = accelerator.reduce(torch.tensor(float(mine), device=accelerator.device)).item()
    assert total == size * (size - 1) / 2, f"the sum of all ranks is {total}, for {size} processes"
    (word,) = broadcast_object_list([f"from {mine}"])
    assert word == "from 0", f"the broadcast of process 0's object brought {word!r}"
    accelerator.print("collectives: passed")


def _check_data(accelerator: Accelerator) -> None:
    samples = TensorDataset(torch.arange(_SAMPLES - 1))
    loader = accelerator.prepare(DataLoader(samples, batch_size=_BATCH))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader]).tolist()
    assert sorted(seen) == list(range(_SAMPLES - 1)), f"of {_SAMPLES - 1} samples the processes saw {sorted(seen)}"
    accelerator.print("data: passed")


def _check_training(accelerator: Accelerator) -> None:
    set_seed(0)
    x = torch.randn(_SAMPLES, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=_BATCH, shuffle=True))
    means = []
    for _ in range(_PASSES):
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().float())
        means.append(accelerator.reduce(torch.stack(losses).mean(), "mean").item())
    assert means[-1] < means[0], f"the loss does not fall: {means} over {_PASSES} passes"
    accelerator.wait_for_everyone()  # outer loops come to the end of their rounds
    print_sum = sum(value.double().abs().sum() for value in accelerator.get_state_dict(model).values())
    everywhere = accelerator.gather(torch.as_tensor(print_sum).float().reshape(1).to(accelerator.device)).tolist()
    assert max(everywhere) - min(everywhere) < 1e-5 * max(everywhere), f"processes end with other weights: {everywhere}"
    accelerator.print(f"training: passed (loss {means[0]:.3f} -> {means[-1]:.3f})")


if __name__ == "__main__":
    main()
