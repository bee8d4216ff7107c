# SPDX-License-Identifier: Apache-2.0
"""Trains what the README shows, with the names taken away that the oldest torch we declare (2.6) has not got.

Started by `test_older_torch.py`, on two processes.
"""

import inspect
import sys

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

YOUNGER = [
    (torch.optim, "Muon"),
    (fsdp.FSDPModule, "set_all_reduce_hook"),
    (dist.Store, "clone"),
    (dist.Store, "list_keys"),
]


def without(function, *names):
    """The function, with a signature that lacks some arguments: for callers of ours, as torch itself passes them."""
    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in names]

    def older(*args, **options):
        if sys._getframe(1).f_globals["__name__"].startswith("farflung"):
            older.__signature__.bind(*args, **options)
        return function(*args, **options)

    older.__signature__ = signature.replace(parameters=kept)
    return older


def take_away():
    """Take from torch what 2.6 has not got."""
    for owner, name in YOUNGER:
        for each in (owner, *(owner.__subclasses__() if isinstance(owner, type) else ())):
            if name in vars(each):
                delattr(each, name)
    torch.accelerator.current_accelerator = without(torch.accelerator.current_accelerator, "check_available")
    fsdp.fully_shard = without(fsdp.fully_shard, "ignored_params", "dp_mesh_dims")
    torch.compile = without(torch.compile, "isolate_recompiles")


def main(layout):
    """The README's ten lines, an outer loop around them, and one around a plain loop."""
    from farflung import Accelerator, FullyShardedDataParallelPlugin, LocalSGD
    from farflung.outer import OuterLoop, diloco

    accelerator = Accelerator(
        gradient_accumulation_steps=2, fsdp_plugin=FullyShardedDataParallelPlugin() if layout == "fsdp" else None
    )
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2)), 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch(after_step=lambda: None):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(), scheduler.step(), optimizer.zero_grad()
                after_step()
        return accelerator.gather_for_metrics(targets)

    epoch()
    if layout == "loops":
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
            epoch(local_sgd.step)
        with accelerator.outer(model, diloco(every=2)):
            epoch()
        with OuterLoop(torch.nn.Linear(2, 2), diloco(every=1)) as outer:
            outer.step()
        assert outer.stats().rounds == 1
    accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    accelerator.print("trained")
    accelerator.end_training()


if __name__ == "__main__":
    take_away()
    main(*sys.argv[1:])
