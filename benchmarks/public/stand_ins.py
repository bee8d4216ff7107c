# SPDX-License-Identifier: Apache-2.0
"""Small data and models with random weights, in place of what scripts of the shelf would download."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def sentences(number: int) -> list[str]:
    """Words that follow each other in an order, but for one in four."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list(LETTERS[:26]), 4)) for _ in range(16)]
    found: dict[str, None] = {}
    while len(found) < number:
        first = int(draw.integers(16))
        order = (int(draw.integers(16)) if draw.random() < 0.25 else (first + k) % 16 for k in range(8))
        found[" ".join(words[k] for k in order) + "."] = None
    return list(found)


def images(folder: Path, number: int, size: int, draw: Callable[[int], np.ndarray] | None = None) -> None:
    """Noise around a shade of its own in each half of a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for k in range(number):
        picture = random.integers(0, 60, (size, size, 3)) + np.where(np.arange(size) < size // 2, 20, 150)[:, None]
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"{k:03}.png")


def text(cwd: Path) -> None:
    """Tokens of characters, as nanoGPT's `prepare.py` files have them."""
    folder = cwd / "data" / "shelf"
    folder.mkdir()
    tokens = np.array([LETTERS.index(one) for one in "".join(sentences(800))], dtype=np.uint16)
    tokens[:-2000].tofile(folder / "train.bin")
    tokens[-2000:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(LETTERS)}))


def causal_lm(cwd: Path) -> None:
    """A small Llama with a tokenizer of words, and sentences as JSON lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    lines = sentences(288)
    words = sorted({word for line in lines for word in line.replace(".", " .").split()})
    made = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(["<s>", "</s>", "<unk>", *words])}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(cwd / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words) + 3, **sizes)).save_pretrained(cwd / "model")
    (cwd / "data").mkdir()
    for part, some in {"train": lines[:256], "test": lines[256:]}.items():
        (cwd / "data" / f"{part}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in some))


def unconditional(cwd: Path) -> None:
    """Pictures, and the sizes of a small U-Net."""
    from diffusers import UNet2DModel

    images(cwd / "data", 96, 8)
    blocks = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2,
    }
    UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=4, **blocks).save_config(cwd / "model")


def segmented(cwd: Path) -> None:
    """Pictures, and masks of their bright halves."""
    images(cwd / "data" / "imgs", 80, 32)
    images(cwd / "data" / "masks", 80, 32)
    for file in (cwd / "data" / "masks").glob("*.png"):
        bright = np.asarray(Image.open(file)).mean(2) > 110
        Image.fromarray(bright.astype(np.uint8)).save(file)


def speech(cwd: Path) -> None:
    """Tones with noise as WAV files, and the sizes of small nets."""
    from scipy.io import wavfile

    (cwd / "wavs").mkdir()
    random, times = np.random.default_rng(0), np.arange(8192) / 22050
    for k in range(36):
        tone = 8000 * np.sin(2 * np.pi * (200 + 50 * k) * times) + random.normal(0, 400, len(times))
        wavfile.write(cwd / "wavs" / f"{k}.wav", 22050, tone.astype(np.int16))
    (cwd / "training.txt").write_text("".join(f"{k}|a\n" for k in range(32)))
    (cwd / "validation.txt").write_text("".join(f"{k}|a\n" for k in range(32, 36)))
    sizes = json.loads((cwd / "config_v3.json").read_text())
    sizes |= {"batch_size": 2, "segment_size": 8192, "upsample_initial_channel": 32, "num_workers": 0}
    (cwd / "small.json").write_text(json.dumps(sizes))


def captioned(cwd: Path) -> None:
    """Pictures with captions, and a small Stable Diffusion."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    images(cwd / "data", 96, 16)
    names = sorted(file.name for file in (cwd / "data").iterdir())
    rows = zip(names, sentences(len(names)), strict=True)
    (cwd / "data" / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": a, "text": b}) + "\n" for a, b in rows)
    )
    model = cwd / "model"
    (model / "tokenizer").mkdir(parents=True)
    tokens = [*LETTERS, *(f"{one}</w>" for one in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    (model / "tokenizer" / "vocab.json").write_text(json.dumps({one: k for k, one in enumerate(tokens)}))
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    (model / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 16}))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPTextConfig(vocab_size=len(tokens), max_position_embeddings=16, eos_token_id=len(tokens) - 1, **sizes)
    CLIPTextModel(config).save_pretrained(model / "text_encoder")
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16).save_pretrained(model / "vae")
    blocks = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    heads = {"attention_head_dim": 4, "cross_attention_dim": 32, "norm_num_groups": 4, "layers_per_block": 1}
    UNet2DConditionModel(sample_size=16, **blocks, **heads).save_pretrained(model / "unet")
    DDPMScheduler().save_pretrained(model / "scheduler")


STAND_INS = {one.__name__: one for one in (text, causal_lm, unconditional, segmented, speech, captioned)}
