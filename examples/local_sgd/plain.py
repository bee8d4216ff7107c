# SPDX-License-Identifier: Apache-2.0
"""Step one of three: a plain PyTorch loop with gradient accumulation, on one process.

Run it with `python plain.py`; then compare it with `accelerated.py`.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

# The task, made on the spot: which of four random directions does a point lie nearest to?
torch.manual_seed(0)
points = torch.randn(1024, 16)
classes = (points @ torch.randn(16, 4)).argmax(dim=1)
training_dataloader = DataLoader(TensorDataset(points, classes), batch_size=16, shuffle=True)

num_epochs = 4
gradient_accumulation_steps = 2
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device)
loss_function = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
num_steps = num_epochs * len(training_dataloader) // gradient_accumulation_steps
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=num_steps)

for _ in range(num_epochs):
    for index, batch in enumerate(training_dataloader):
        inputs, targets = batch
        inputs = inputs.to(device)
        targets = targets.to(device)
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        loss = loss / gradient_accumulation_steps
        loss.backward()
        if (index + 1) % gradient_accumulation_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

with torch.no_grad():
    accuracy = (model(points.to(device)).argmax(dim=1) == classes.to(device)).float().mean().item()
print(f"{accuracy:.1%} of the points are classified correctly")
