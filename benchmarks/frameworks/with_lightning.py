# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with callbacks, with manual optimization, resumed; Fabric; and libraries that train by them."""

import os

import lightning
import torch
from common import BATCH, EPOCHS, FOLDER, NAME, WORLD, loss_on, network, newest, report, squared_error, task
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = network(), []

    def training_step(self, batch, index):
        if isinstance(batch, dict):  # of two loaders
            return squared_error(self.net, batch["a"]) + squared_error(self.net, batch["b"])
        return squared_error(self.net, batch)

    def validation_step(self, batch, index):
        self.log("val", squared_error(self.net, batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.seen.append(loss_on(self.net))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Gan(Regression):
    """Its nets are frozen in turns, by `toggle_optimizer`."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 1))

    def judged(self, x, y, is_real):
        verdict = self.critic(torch.cat([x, y], 1))
        return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, is_real))

    def training_step(self, batch, index):
        (x, y), (maker, critic) = batch, self.optimizers()
        for optimizer in (critic, maker):
            self.toggle_optimizer(optimizer)
            made = self.net(x)
            if optimizer is critic:
                loss = self.judged(x, y, 1.0) + self.judged(x, made.detach(), 0.0)
            else:
                loss = nn.functional.mse_loss(made, y) + 0.01 * self.judged(x, made, 1.0)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.net, self.critic)]


def fit(module, data=None, ckpt_path=None, strategy="ddp", max_epochs=EPOCHS, callbacks=(), **options):
    folder = FOLDER / f"saved{max_epochs}"
    trainer = lightning.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = data or DataLoader(task(), BATCH, shuffle=True)
    trainer.fit(module, data, DataLoader(task(1), 2 * BATCH), ckpt_path=ckpt_path)
    return newest(folder)


def end(module, path):
    state = torch.load(path, weights_only=False)["state_dict"]
    report(module, module.seen[-1], state, lambda module: loss_on(module.net))


def fitted():
    end(module := Regression(), fit(module, callbacks=[EarlyStopping("val", patience=9)], gradient_clip_val=1.0))


def gan():
    end(module := Gan(), fit(module, strategy="ddp_find_unused_parameters_true"))


def resumed():
    """Two loaders; a second Trainer continues from the file of the first one's end."""
    loaders = {name: DataLoader(task(seed), BATCH, shuffle=True) for name, seed in (("a", 0), ("b", 2))}
    path = fit(Regression(), loaders, max_epochs=EPOCHS // 2)
    end(module := Regression(), fit(module, loaders, ckpt_path=path))


def fabric(net=None, loss_of=squared_error, data=None, held_out=None):
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=WORLD)
    fabric.launch()
    net = net or network()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data or task(), BATCH, shuffle=True))
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.barrier()
    model.eval()
    validated = loss_on(net, held_out, loss_of)
    fabric.save(path := FOLDER / f"saved{os.environ.get('FARFLUNG_MEMBER', '')}.pt", {"model": model})
    fabric.barrier()
    state = torch.load(path, weights_only=False)["model"]
    report(net, validated, state, lambda module: loss_on(module, held_out, loss_of))


def litgpt():
    """litgpt's GPT and loss, on sequences that count up."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    def counting(seed):
        start = torch.randint(0, 32, (352, 1), generator=torch.Generator().manual_seed(seed))
        return TensorDataset((start + torch.arange(17)) % 32)

    torch.manual_seed(0)
    config = Config(block_size=16, vocab_size=32, padded_vocab_size=32, n_layer=2, n_head=2, n_embd=16)
    loss = lambda net, batch: chunked_cross_entropy(net(batch[0][:, :-1]), batch[0][:, 1:].contiguous())  # noqa: E731
    fabric(GPT(config), loss, counting(0), counting(1))


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    {
        "lightning": fitted,
        "lightning-gan": gan,
        "lightning-resumed": resumed,
        "fabric": fabric,
        "litgpt": litgpt,
    }[NAME]()
