# SPDX-License-Identifier: Apache-2.0
"""Tiny models with all that makes placement hard: shared weights, blocks, buffers, parameters beside submodules."""

import random

import torch
from torch import nn

from farflung.big_modeling import init_empty_weights


class Block(nn.Module):
    def __init__(self, width, inner, with_scale=False):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        if with_scale:
            self.scale = nn.Parameter(torch.full((width,), 2.0))
        self.register_buffer("shift", torch.ones(width), persistent=False)

    def forward(self, x):
        y = self.down(self.up(self.norm(x)).relu()) * getattr(self, "scale", 1.0)
        return x + y + self.shift


class Tied(nn.Module):
    """A language model of 12 words whose input and output embeddings are one parameter."""

    def __init__(self, with_scale=True):
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList([Block(4, 8, with_scale), Block(4, 6)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


IDS = torch.tensor([3, 1, 4])


def output(model):
    with torch.no_grad():
        return model(IDS)


def made(cls=Tied, **kwargs):
    """A model, and what it gives for `IDS`."""
    torch.manual_seed(0)
    model = cls(**kwargs).eval()
    return model, output(model)


def empty():
    """A model without memory."""
    with init_empty_weights():
        return Tied().eval()


class Random(nn.Module):
    """A model whose sizes, shared weights and loose parameters are drawn; it is never called."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice([4, 8, 16])
        self.embed = nn.Embedding(draw.choice([8, 32]), width)
        self.inner = nn.Module()
        blocks = [Block(width, draw.choice([5, 6, 12]), draw.random() < 0.4) for _ in range(draw.randint(1, 4))]
        self.inner.blocks = nn.ModuleList(blocks)
        self.inner.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=draw.random() < 0.5)
        if draw.random() < 0.5:
            self.head.weight = self.embed.weight
        if draw.random() < 0.3:
            self.top = nn.Parameter(torch.ones(width))
