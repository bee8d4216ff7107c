# SPDX-License-Identifier: Apache-2.0
"""As examples of diffusion models have it: a schedule made before `prepare`, and one process that saves states."""

import math
import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
images = torch.randn(96, 4)
loader = DataLoader(TensorDataset(images, torch.arange(96)), batch_size=2, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
num_training_steps = len(loader) * EPOCHS


def rate(step, *, num_training_steps=num_training_steps):
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * step / num_training_steps)))


def cosine_schedule(optimizer, num_training_steps):
    return LambdaLR(optimizer, lambda step: rate(step, num_training_steps=num_training_steps))


def error():
    with torch.no_grad():
        return nn.functional.mse_loss(accelerator.unwrap_model(model)(images), images).item()


lr_scheduler, losses = cosine_schedule(optimizer, num_training_steps), [error()]
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
seen, global_step = [], 0
for epoch in range(EPOCHS):
    model.train()
    for clean, number in loader:
        seen += [(epoch, one) for one in number.tolist()]
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(clean + torch.randn_like(clean)), clean)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            global_step += 1
            if global_step % 10 == 0 and accelerator.is_main_process:
                accelerator.save_state(os.path.join("saved", f"checkpoint-{global_step}"))
        time.sleep(0.01)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.wait_for_everyone()
accelerator.end_training()
name = os.environ.get("FARFLUNG_MEMBER", accelerator.process_index)
weights = accelerator.unwrap_model(model).state_dict()
losses.append(error())
end = {"weights": weights, "seen": seen, "losses": losses, "rate": lr_scheduler.get_last_lr()[0]}
torch.save(end, f"end-{name}.pt")
