# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with callbacks, with manual optimization, resumed; Fabric; and libraries that train by them."""

import lightning
import torch
from common import BATCH, EPOCHS, NAME, SAVED, STEPS, WORLD, loss_on, network, newest, report, squared_error, task
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
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


def fit(module, data=None, held_out=None, ckpt_path=None, strategy="ddp", max_epochs=EPOCHS, callbacks=(), **options):
    folder = SAVED / str(max_epochs)
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
    trainer.fit(module, data, held_out or DataLoader(task(1), 2 * BATCH), ckpt_path=ckpt_path)
    return newest(folder)


def end(module, path):
    state = torch.load(path, weights_only=False)["state_dict"]
    report(module, module.seen[-1], state, lambda module: loss_on(module.net))


def fitted():
    end(module := Regression(), fit(module, callbacks=[EarlyStopping("val", patience=9)], gradient_clip_val=1.0))


def gan():
    end(module := Gan(), fit(module, strategy="ddp_find_unused_parameters_true"))


def resumed():
    """A second Trainer continues from the file of the first one's end."""
    path = fit(Regression(), max_epochs=EPOCHS // 2)
    end(module := Regression(), fit(module, ckpt_path=path))


def loaders():
    """Two loaders, one of which is shorter and begins again in each epoch."""
    sizes = {"a": (0, 2 * STEPS * BATCH), "b": (2, STEPS * BATCH)}
    data = {name: DataLoader(task(*size), BATCH, shuffle=True) for name, size in sizes.items()}
    end(module := Regression(), fit(module, data))


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
    fabric.save(path := SAVED / "model.pt", {"model": model})
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


def series(seed):
    """A noisy wave: `[408]`."""
    noise = torch.randn(408, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(408) / 3).sin() + 0.3 * noise


class Watch(Callback):
    """Notes the loss at each validation that comes after a step."""

    def __init__(self, loss):
        self.loss, self.seen = loss, []

    def on_validation_epoch_end(self, trainer, module):
        self.seen.append(self.loss(module))


def darts():
    """Its NBEATSModel, which trains by a Trainer of its own making."""
    from darts import TimeSeries
    from darts.models import NBEATSModel
    from darts.utils.data.torch_datasets.utils import PLModuleInput

    train, test = (TimeSeries.from_values(series(seed).numpy()) for seed in (0, 1))
    windows = series(1).unfold(0, 9, 1)[:, :, None]

    def error(module, batch):
        return nn.functional.mse_loss(module(PLModuleInput(batch[:, :8])).prediction[:, -1:, :, 0], batch[:, 8:])

    watch = Watch(lambda module: loss_on(module, windows, error))
    options = {"accelerator": "cpu", "strategy": "ddp", "devices": WORLD, "enable_progress_bar": False, "logger": False}
    options |= {"callbacks": [watch, ModelCheckpoint(SAVED, save_top_k=-1, every_n_epochs=1)]}
    model = NBEATSModel(8, 1, num_stacks=2, num_layers=1, layer_widths=16, batch_size=BATCH, n_epochs=EPOCHS,
                        optimizer_kwargs={"lr": 0.01}, pl_trainer_kwargs=options, random_state=0)  # fmt: skip
    model.fit(train, val_series=test)
    state = torch.load(newest(SAVED), weights_only=False)["state_dict"]
    report(model.model, watch.seen[-1], state, watch.loss)


def forecasting():
    """pytorch-forecasting's NHiTS on its TimeSeriesDataSet."""
    import pandas
    from pytorch_forecasting import NHiTS, TimeSeriesDataSet
    from pytorch_forecasting.metrics import MAE

    frames = [
        pandas.DataFrame({"time": range(408), "group": "one", "value": series(seed).double().numpy()})
        for seed in (0, 1)
    ]
    data = TimeSeriesDataSet(
        frames[0], time_idx="time", target="value", group_ids=["group"], max_encoder_length=16, max_prediction_length=2,
        time_varying_unknown_reals=["value"],
    )  # fmt: skip
    held_out = TimeSeriesDataSet.from_dataset(data, frames[1])
    module = NHiTS.from_dataset(data, learning_rate=0.01, hidden_size=8, loss=MAE())
    x, (y, _) = next(iter(held_out.to_dataloader(train=False, batch_size=352)))
    error = lambda module, _: (module(x)["prediction"].squeeze(-1) - y).abs().mean()  # noqa: E731
    watch = Watch(lambda module: loss_on(module, [0], error))
    loaders = (
        data.to_dataloader(train=True, batch_size=BATCH),
        held_out.to_dataloader(train=False, batch_size=2 * BATCH),
    )
    path = fit(module, loaders[0], held_out=loaders[1], callbacks=[watch])
    report(module, watch.seen[-1], torch.load(path, weights_only=False)["state_dict"], watch.loss)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    {
        "lightning": fitted,
        "lightning-gan": gan,
        "lightning-resumed": resumed,
        "lightning-loaders": loaders,
        "fabric": fabric,
        "litgpt": litgpt,
        "darts": darts,
        "pytorch-forecasting": forecasting,
    }[NAME]()
