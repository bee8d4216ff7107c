# SPDX-License-Identifier: Apache-2.0
"""As examples of adapters have it: transformers' Trainer, which runs on Accelerate, with dropout."""

import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
inputs = torch.randn(64, 4)


class Samples(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        return {"x": inputs[index], "number": torch.tensor(index)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.seen = []

    def forward(self, x, number):
        if self.training:
            self.seen += number.tolist()
        return {"loss": nn.functional.mse_loss(self.layers(x), x)}


def error():
    with torch.no_grad():
        return nn.functional.mse_loss(model.layers(inputs), inputs).item()


model = Model()
losses = [error()]
arguments = TrainingArguments(
    "trained",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    report_to=[],
    save_strategy="no",
    remove_unused_columns=False,
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Samples())
trainer.train()
rank = trainer.accelerator.process_index
name = os.environ.get("FARFLUNG_MEMBER", rank)
model.eval()
losses.append(error())
torch.save({"weights": model.state_dict(), "seen": model.seen, "losses": losses}, f"end-{name}.pt")
