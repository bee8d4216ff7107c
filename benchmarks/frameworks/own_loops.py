# SPDX-License-Identifier: Apache-2.0
"""Libraries of models, losses and optimizers, which people train in a loop around torch's DDP."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import torch
import torch.distributed as dist
from common import BATCH, NAME, STEPS, WORLD, loss_on, network, report, task, train_in_ddp
from torch import nn
from torch.utils.data import TensorDataset


def images(seed, count=352):
    """Noise, brighter in the left half or in the right one: `[count, 3, 32, 32]`, and which: `[count]`."""
    torch.manual_seed(seed)
    x, y = torch.randn(count, 3, 32, 32), torch.randint(0, 2, (count,))
    x += 2.0 * torch.where(torch.arange(32) < 16, 1 - y[:, None, None, None], y[:, None, None, None])
    return TensorDataset(x, y)


def sentences(seed):
    """Tokens that count up, but for one in four, so that no model gets near a loss of 0: `[352, 17]`."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 32, (352, 17), generator=generator)
    counting = (torch.randint(0, 32, (352, 1), generator=generator) + torch.arange(17)) % 32
    return TensorDataset(torch.where(torch.rand(352, 17, generator=generator) < 0.25, noise, counting))


def keras():
    """A Keras model and its loss in DDP, as Keras' guide to distributed training with torch has it."""
    import keras

    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1)])
    error = keras.losses.MeanSquaredError()
    train_in_ddp(net, lambda net, batch: error(batch[1], net(batch[0])))


def keras_fit():
    """`fit`, whose optimizers are Keras' own."""
    import keras

    dist.init_process_group("gloo")
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1)])
    net.compile(optimizer="adam", loss="mse")
    x, y = task().tensors
    net.fit(x[dist.get_rank() :: WORLD], y[dist.get_rank() :: WORLD], epochs=2, verbose=0)
    report(net, loss_on(net), net.state_dict())
    dist.destroy_process_group()


def metric_learning():
    from pytorch_metric_learning import losses, miners

    miner, margin = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss_of(net, batch):
        made, labels = net(batch[0]), (batch[1] > 0).long().squeeze(1)
        return nn.functional.mse_loss(made, batch[1]) + 0.01 * margin(made, labels, miner(made, labels))

    train_in_ddp(network(), loss_of)


def timm():
    """A ViT, timm's AdamW with its groups of parameters, and its loss with smoothed labels."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    net = timm.create_model("test_vit", num_classes=2, img_size=32)
    loss = LabelSmoothingCrossEntropy(0.1)
    optimizer = create_optimizer_v2(net, "adamw", lr=1e-3, weight_decay=0.05)
    train_in_ddp(net, lambda net, batch: loss(net(batch[0]), batch[1]), images(1), images(2), optimizer)


def open_clip():
    """CLIP with its contrastive loss, which gathers the features of all ranks in each step."""
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    torch.manual_seed(0)
    vision = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
    net = CLIP(16, vision, {"context_length": 4, "vocab_size": 8, "width": 32, "heads": 2, "layers": 1})
    rank = int(os.environ.get("RANK", "0"))
    gathering, alone = ClipLoss(True, True, rank=rank, world_size=WORLD), ClipLoss()

    def loss_of(net, batch):
        texts = torch.stack([torch.full_like(batch[1], 1), 2 + batch[1], 4 + batch[1], torch.full_like(batch[1], 7)], 1)
        return (gathering if net.training else alone)(*net(batch[0], texts))

    train_in_ddp(net, loss_of, images(1), images(2), torch.optim.AdamW(net.parameters(), 1e-3))


def x_transformers():
    """Its AutoregressiveWrapper around a decoder."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    decoder = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    net = AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=17, attn_layers=decoder))
    train_in_ddp(net, lambda net, batch: net(batch[0]), sentences(0), sentences(1))


def torchtune(shards=False):
    """A llama of torchtune and its chunked loss; with `shard_model`, as its distributed recipes call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torchtune.models.llama3_2 import llama3_2
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.training import shard_model

    def llama():
        torch.manual_seed(0)
        net = llama3_2(32, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=16, intermediate_dim=32)
        net.set_num_output_chunks(2)
        return net

    net = llama()
    loss = CEWithChunkedOutputLoss(num_output_chunks=2)
    loss_of = lambda net, batch: loss(net(batch[0][:, :-1]), batch[0][:, 1:].contiguous())  # noqa: E731
    if not shards:
        train_in_ddp(net, loss_of, sentences(0), sentences(1))
        return
    dist.init_process_group("gloo")
    shard_model(net, [lambda name, module: "layers" in name and name.split(".")[-1].isdigit()], cpu_offload=False,
                dp_mesh=init_device_mesh("cpu", (WORLD,)))  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for start in range(0, STEPS * BATCH, BATCH):
        loss_of(net, sentences(0)[start : start + BATCH]).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = llama()
    whole.load_state_dict(get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)))
    judge = lambda module: loss_on(module, sentences(1), loss_of)  # noqa: E731
    report(whole, judge(whole), whole.state_dict(), judge)


if __name__ == "__main__":
    {
        "keras": keras,
        "keras-fit": keras_fit,
        "pytorch-metric-learning": metric_learning,
        "timm": timm,
        "open-clip": open_clip,
        "x-transformers": x_transformers,
        "torchtune": torchtune,
        "torchtune-recipe": lambda: torchtune(shards=True),
    }[NAME]()
