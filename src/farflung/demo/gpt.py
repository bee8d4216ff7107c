# SPDX-License-Identifier: Apache-2.0
"""A small GPT over bytes: it reads a piece of text and says how likely each next byte is."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from farflung.base.errors import ConfigError
from farflung.base.files import utf8_name
from farflung.demo.settings import MODEL_FILE, SIZES, Shape

VOCABULARY = 256  # a byte is a token
_WAVELENGTH = 1000.0  # the slowest rotation, in bytes; contexts here are some hundred bytes long
_INIT_STD = 0.02  # GPT-2
TEMPERATURE = 0.7  # below 1, unlikely bytes are drawn less often than the model would have them


def rotations(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[length, head_width / 2]` of the angles by which each position turns each pair.

    Source: RoFormer (arXiv:2104.09864).
    """
    speeds = _WAVELENGTH ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of `x` `[..., length, head_width]`, so that products depend on distances alone."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention to what came before, then two layers on each position; both add to what they read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `x` `[batch, length, width]` to the same shape."""
        batch, length, width = x.shape
        packed = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(F.gelu(self.up(self.before_layers(x))))
        return x + added


class GPT(nn.Module):
    """A decoder-only transformer over bytes with rotary positions; it holds no buffers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.before_head = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.shape.depth)  # GPT-2: the sum of all blocks keeps its size
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if ends_branch else _INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `tokens` `[batch, length]` of integers to logits `[batch, length, 256]` of each following byte."""
        x = self.embed(tokens.long())
        cos, sin = rotations(tokens.shape[1], self.shape.width // self.shape.heads, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.before_head(x))
        return logits


def loss_per_sequence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `[batch]`, the mean cross-entropy in nats a byte, of `logits` `[batch, length, 256]`."""
    return F.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none").mean(dim=1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, *, temperature: float, seed: int) -> bytes:
    """Return `length` bytes that follow `prompt`, drawn one by one; low temperatures prefer likely bytes."""
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(length):
        tokens = torch.tensor([written[-model.shape.context :]])
        odds = (model(tokens)[0, -1] / temperature).softmax(dim=-1)
        written.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(written[len(prompt) :])


def saved_model(folder: Path) -> GPT:
    """Load the model from the output folder of a demo run."""
    file = folder / MODEL_FILE
    if not file.is_file():
        raise ConfigError(f"There is no {file}. Run `farflung demo` first, or name its folder with --output.")
    with utf8_name(file) as named, safe_open(named, framework="pt") as content:
        model = GPT(SIZES[content.metadata()["size"]])
        model.load_state_dict({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118 - no mapping
    return model.eval()


def continued(folder: Path, prompt: str, length: int, seed: int) -> str:
    """Return `prompt` and `length` more bytes by the saved model, as text."""
    start = prompt.encode() or b"\n"  # a model needs one byte to begin with
    written = generate(saved_model(folder), start, length, temperature=TEMPERATURE, seed=seed)
    return (start + written).decode(errors="replace")
