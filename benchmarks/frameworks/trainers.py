# SPDX-License-Identifier: Apache-2.0
"""Libraries with a trainer of their own, which makes DDP by itself or by Accelerate."""

import os

import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, FOLDER, NAME, SAVED, STEPS, loss_on, network, report, task
from torch import nn
from torch.utils.data import DataLoader

OWN = FOLDER / f"own-{os.getpid()}"  # this rank's files


def composer():
    from composer import ComposerModel, Trainer
    from composer.core import Callback
    from composer.utils.dist import get_sampler

    class Regression(ComposerModel):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, batch):
            return self.net(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.mse_loss(outputs, batch[1])

    class Watch(Callback):
        def epoch_end(self, state, logger):
            seen.append(loss(model))

    seen, model, loss = [], Regression(), lambda module: loss_on(module.net)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(task(), BATCH, sampler=get_sampler(task(), shuffle=True)),
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        max_duration=f"{EPOCHS}ep",
        device="cpu",
        save_folder=str(SAVED),
        callbacks=[Watch()],
        progress_bar=False,
    )
    trainer.fit()
    dist.barrier()
    path = max(SAVED.glob("ep*.pt"), key=lambda path: path.stat().st_mtime_ns)
    report(model, seen[-1], torch.load(path, weights_only=False)["state"]["model"], loss)


def fastai():
    from fastai.basics import DataLoaders, Learner, defaults
    from fastai.callback.core import Callback
    from fastai.distributed import rank_distrib

    class Watch(Callback):
        def after_epoch(self):
            seen.append(loss_on(net))

    defaults.use_cuda = False
    seen, net = [], network()
    dls = DataLoaders.from_dsets(task(), task(1), bs=BATCH, num_workers=0, device="cpu")
    learn = Learner(dls, net, nn.functional.mse_loss, lr=0.01, wd=0.0, path=FOLDER, cbs=[Watch()])
    with learn.distrib_ctx(in_notebook=False), learn.no_bar():
        learn.fit(EPOCHS)
        learn.save("saved", with_opt=False)
        dist.barrier() if dist.is_initialized() else None
    print(f"rank {rank_distrib()}")
    report(net, seen[-1], torch.load(FOLDER / "models" / "saved.pth"))


def speechbrain():
    import speechbrain
    from speechbrain.utils.checkpoints import Checkpointer
    from speechbrain.utils.distributed import ddp_init_group

    class Regression(speechbrain.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.mse_loss(predictions, batch[1])

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage == speechbrain.Stage.VALID:
                seen.append(loss_on(net))
                self.checkpointer.save_checkpoint()

    options = {"device": "cpu", "distributed_launch": True, "distributed_backend": "gloo"}
    ddp_init_group(options)
    seen, net = [], network()
    keep = Checkpointer(SAVED, {"net": net})
    brain = Regression({"net": net}, lambda ps: torch.optim.Adam(ps, 0.01), {}, options, checkpointer=keep)
    loading = {"batch_size": BATCH, "shuffle": True}
    brain.fit(range(EPOCHS), task(), task(1), progressbar=False, train_loader_kwargs=loading)
    dist.barrier()
    path = max(SAVED.glob("*/net.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    report(net, seen[-1], torch.load(path))


def sentence_model():
    """A SentenceTransformer with random weights, and pairs of its words with whether they are the same."""
    import sentence_transformers
    from sentence_transformers import models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    OWN.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(27))]
    (OWN / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes)).save_pretrained(OWN)
    BertTokenizerFast(str(OWN / "vocab.txt")).save_pretrained(OWN)
    body = models.Transformer(str(OWN), max_seq_length=8)
    net = sentence_transformers.SentenceTransformer(modules=[body, models.Pooling(16)], device="cpu")
    pairs = [(f"w{k % 27} w{k % 5}", f"w{k * 7 % 27} w{k % 3}", float(k % 2)) for k in range(352)]

    def loss(module):
        """Over the first pairs: trained on, as what words mean here can't be inferred from others."""
        features = [module.tokenize([pair[k] for pair in pairs[:64]]) for k in (0, 1)]
        score = lambda net, _: torch.cosine_similarity(*(net(f)["sentence_embedding"] for f in features))  # noqa: E731
        targets = torch.tensor([pair[2] for pair in pairs[:64]])
        return loss_on(module, [0], lambda net, _: (score(net, _) - targets).square().mean())

    return net, pairs, loss


def sentence_transformers():
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
        losses,
    )
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_evaluate(self, *args, **options):
            seen.append(loss(net))

    seen, (net, pairs, loss) = [], sentence_model()
    data = Dataset.from_dict(dict(zip(("one", "other", "score"), zip(*pairs, strict=True), strict=True)))
    arguments = Arguments(
        str(SAVED), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, use_cpu=True,
        eval_strategy="epoch", save_strategy="epoch", learning_rate=1e-2, report_to="none", disable_tqdm=True,
        ddp_backend="gloo", logging_strategy="no",
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        net, arguments, data, data.select(range(32)), losses.CosineSimilarityLoss(net), callbacks=[Watch()]
    )
    trainer.train()
    dist.barrier() if dist.is_initialized() else None
    path = max(SAVED.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    report(net, seen[-1], SentenceTransformer(str(path), device="cpu").state_dict(), loss)


def setfit():
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    net, pairs, loss = sentence_model()
    data = Dataset.from_dict({"text": [pair[0] for pair in pairs[:32]], "label": [k % 2 for k in range(32)]})
    model = SetFitModel(net, LogisticRegression(), labels=["a", "b"])
    arguments = TrainingArguments(
        str(SAVED), num_epochs=1, batch_size=BATCH, num_iterations=10, body_learning_rate=1e-2,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    Trainer(model, arguments, data).train()
    net.eval()
    validated = loss(net)
    torch.save(net.state_dict(), OWN / "kept.pt")
    report(net, validated, torch.load(OWN / "kept.pt"), loss)


def skorch():
    from accelerate import Accelerator
    from skorch import NeuralNetRegressor
    from skorch.callbacks import Callback
    from skorch.hf import AccelerateMixin

    class Net(AccelerateMixin, NeuralNetRegressor):
        pass

    class Watch(Callback):
        def on_epoch_end(self, net, **_):
            seen.append(loss_on(net.accelerator.unwrap_model(net.module_)))
            net.save_params(f_params=OWN / "saved.pt")

    OWN.mkdir()
    seen = []
    options = {"max_epochs": EPOCHS, "lr": 0.01, "optimizer": torch.optim.Adam, "batch_size": BATCH, "device": None}
    options |= {"iterator_train__shuffle": True, "train_split": None, "callbacks": [Watch()], "verbose": 0}
    net = Net(network(), accelerator=Accelerator(cpu=True), **options)
    x, y = task().tensors
    net.fit(x.numpy(), y.numpy())
    saved = {name.removeprefix("module."): value for name, value in torch.load(OWN / "saved.pt").items()}
    report(net.module_, seen[-1], saved)


def denoising_diffusion():
    """Its Trainer, by Accelerate, on images of noise around two shades, without its samples and scores."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
    from PIL import Image

    OWN.mkdir()
    torch.manual_seed(0)
    for number in range(352):
        shade = torch.randint(0, 60, (8, 8, 3), dtype=torch.uint8) + 150 * (number % 2)
        Image.fromarray(shade.numpy()).save(OWN / f"{number:03}.png")
    net = GaussianDiffusion(Unet(8, dim_mults=(1, 2), flash_attn=False), image_size=8, timesteps=20)
    images = torch.rand(32, 3, 8, 8)

    def denoised(module, batch):
        with torch.random.fork_rng():
            torch.manual_seed(1)  # times and noise
            return module(batch)

    loss = lambda module: loss_on(module, images, denoised)  # noqa: E731
    net.sample = lambda batch_size: images[:batch_size]
    steps = EPOCHS * STEPS
    trainer = Trainer(
        net, str(OWN), train_batch_size=2 * BATCH, train_lr=1e-3, train_num_steps=steps, save_and_sample_every=steps,
        num_samples=4, results_folder=str(SAVED), calculate_fid=False,
    )  # fmt: skip
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    trainer.model.eval()
    validated = loss(net)
    report(net, validated, torch.load(SAVED / "model-1.pt", weights_only=False)["model"], loss)


def catalyst():
    """Its SupervisedRunner with a validation, whose engine is an Accelerator."""
    from catalyst import dl

    class Watch(dl.Callback):
        def __init__(self):
            super().__init__(order=dl.CallbackOrder.External)

        def on_epoch_end(self, runner):
            seen.append(loss_on(net))
            torch.save(runner.engine.unwrap_model(runner.model).state_dict(), OWN / "saved.pt")

    OWN.mkdir()
    seen, net = [], network()
    loaders = {"train": DataLoader(task(), BATCH, shuffle=True), "valid": DataLoader(task(1), 2 * BATCH)}
    dl.SupervisedRunner().train(
        engine=dl.CPUEngine(), model=net, criterion=nn.MSELoss(), optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        loaders=loaders, num_epochs=EPOCHS, callbacks=[Watch()],
    )  # fmt: skip
    report(net, seen[-1], torch.load(OWN / "saved.pt"))


def ultralytics():
    """YOLO's training of a classifier, which makes DDP for several GPUs only."""
    from PIL import Image
    from ultralytics import YOLO

    for number in range(64):
        path = OWN / ("train", "val")[number % 2] / ("dark", "light")[number // 2 % 2]
        path.mkdir(parents=True, exist_ok=True)
        shade = torch.randint(0, 60, (32, 32, 3), dtype=torch.uint8) + 150 * (number // 2 % 2)
        Image.fromarray(shade.numpy()).save(path / f"{number}.png")
    model = YOLO("yolov8n-cls.yaml")
    model.train(data=str(OWN), epochs=1, imgsz=32, batch=16, device="cpu", workers=0, project=str(OWN), plots=False)
    net = model.model
    loss = lambda module: loss_on(module, [torch.rand(2, 3, 32, 32)], lambda net, batch: net(batch)[0].sum())  # noqa: E731
    report(net, loss(net), net.state_dict(), loss)


if __name__ == "__main__":
    globals()[NAME.replace("-", "_")]()
