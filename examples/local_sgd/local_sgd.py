# SPDX-License-Identifier: Apache-2.0
"""Step three of three: the loop of `accelerated.py` with Local SGD; the processes talk at each eighth step only.

Run it with `farflung launch --cpu --num_processes 2 local_sgd.py` or `torchrun --nproc_per_node 2 local_sgd.py`; with
`python local_sgd.py`, on one process, there is no one to talk to and it trains like `accelerated.py`.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, LocalSGD

# The task, made on the spot: which of four random directions does a point lie nearest to?
torch.manual_seed(0)
points = torch.randn(1024, 16)
classes = (points @ torch.randn(16, 4)).argmax(dim=1)
training_dataloader = DataLoader(TensorDataset(points, classes), batch_size=16, shuffle=True)

num_epochs = 4
gradient_accumulation_steps = 2
accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
device = accelerator.device
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device)
loss_function = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
num_steps = num_epochs * len(training_dataloader) // gradient_accumulation_steps
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=num_steps)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(model, optimizer, training_dataloader, scheduler)

with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local_sgd:
    for _ in range(num_epochs):
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                local_sgd.step()

with torch.no_grad():
    accuracy = (model(points.to(device)).argmax(dim=1) == classes.to(device)).float().mean().item()
accelerator.print(f"{accuracy:.1%} of the points are classified correctly")
