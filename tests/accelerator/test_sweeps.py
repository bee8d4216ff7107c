# SPDX-License-Identifier: Apache-2.0
"""Trial after trial in one process, as in a sweep or a notebook: each trains as the first did, and none lives on."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, LocalSGD
from farflung.state import AcceleratorState
from farflung.utils import DataLoaderConfiguration, TorchDynamoPlugin
from tests.accelerator.conftest import on_ranks

PLANS = [
    {"dispatch": True, "precision": "fp16", "backend": "no"},
    {"dispatch": False, "precision": "bf16", "backend": "eager"},
]


def trial(accelerator, alive):
    """Use all that could keep a parameter; return everything that was prepared, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    made = [*accelerator.prepare(model, frozen, optimizer, loader, scheduler)]
    model, frozen, optimizer, loader, scheduler = made

    def epoch(after=lambda: None):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(frozen(x)).square().sum()
                accelerator.backward(loss, num_items=len(x))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.gather_for_metrics(loss)
            after()

    epoch()
    with LocalSGD(accelerator, model, 2) as averaging:
        epoch(averaging.step)
    if accelerator.num_processes > 1:
        with accelerator.join_uneven_inputs([model]):
            epoch()
    for _ in loader:
        break
    accelerator.unwrap_model(model, keep_torch_compile=False)
    alive += [weakref.ref(parameter) for one in (model, frozen) for parameter in one.parameters()]
    return made, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("num_ranks", "plans"), [(1, PLANS), (2, PLANS), (4, PLANS[:1])])  # loading dynamo takes long
@on_ranks(timeout_s=90)
def test_a_trial_is_gone_with_all_its_parameters_and_the_next_one_trains_as_it_did(num_ranks, plans):
    for plan in plans:
        weights, alive = [], []
        for named in (True, False):
            accelerator = Accelerator(
                cpu=True,
                mixed_precision=plan["precision"],
                gradient_accumulation_steps=2,
                dynamo_plugin=TorchDynamoPlugin(backend=plan["backend"]),
                dataloader_config=DataLoaderConfiguration(dispatch_batches=plan["dispatch"]),
            )
            made, trained = trial(accelerator, alive)
            weights.append(trained)
            made = accelerator.free_memory(*made) if named else accelerator.free_memory() and None
            if not named:
                del accelerator  # its successor keeps nothing of it either
        Accelerator(cpu=True)
        gc.collect()
        if plan["backend"] != "no":
            torch._dynamo.reset()
        assert all(map(torch.equal, *weights)), plan
        assert [ref() for ref in alive] == [None] * 2 * 8, plan
        AcceleratorState._reset_state()
