# SPDX-License-Identifier: Apache-2.0
"""ignite: idist's `auto_model` and `auto_dataloader`, an evaluator, a ModelCheckpoint; and MONAI's engine."""

import ignite.distributed as idist
import torch
from common import BATCH, EPOCHS, NAME, SAVED, loss_on, network, newest, report, task
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Loss
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def training(local_rank):
    net, loss, seen = network(), nn.functional.mse_loss, []
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = idist.auto_dataloader(task(), batch_size=BATCH * idist.get_world_size(), shuffle=True)
    held_out = idist.auto_dataloader(task(1), batch_size=2 * BATCH)
    trainer = create_supervised_trainer(model, optimizer, loss)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(loss)})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        evaluator.run(held_out)
        seen.append(loss_on(net))

    keep = ModelCheckpoint(SAVED, "net", n_saved=None, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keep, {"model": net})
    trainer.run(loader, max_epochs=EPOCHS)
    idist.barrier()
    report(net, seen[-1], torch.load(newest(SAVED)))


def monai(local_rank):
    """MONAI's SupervisedTrainer around its fully connected net in DDP, with its handlers."""
    from monai.engines import SupervisedTrainer
    from monai.handlers import CheckpointSaver
    from monai.networks.nets import FullyConnectedNet

    class Named(Dataset):
        def __init__(self, data):
            self.data = data

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            return dict(zip(("image", "label"), self.data[index], strict=True))

    torch.manual_seed(0)
    net, seen, data = FullyConnectedNet(8, 1, [32], act="TANH"), [], Named(task())
    model = nn.parallel.DistributedDataParallel(net)
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=EPOCHS,
        train_data_loader=DataLoader(data, BATCH, sampler=DistributedSampler(data)),
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss_function=nn.MSELoss(),
        train_handlers=[CheckpointSaver(str(SAVED), {"net": net}, save_interval=1)],
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(loss_on(net)))
    trainer.run()
    idist.barrier()
    report(net, seen[-1], torch.load(newest(SAVED)))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run({"ignite": training, "monai": monai}[NAME])
