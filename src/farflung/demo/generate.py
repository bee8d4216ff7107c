# SPDX-License-Identifier: Apache-2.0
"""Let the model that a demo run saved go on from a piece of text."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from farflung.base.errors import ConfigError
from farflung.demo.gpt import GPT, generate
from farflung.demo.settings import MODEL_FILE, SIZES

TEMPERATURE = 0.7  # below 1, unlikely bytes are drawn less often than the model would have them


def saved_model(folder: Path) -> GPT:
    """Load the model from the output folder of a demo run."""
    file = folder / MODEL_FILE
    if not file.is_file():
        raise ConfigError(f"There is no {file}. Run `farflung demo` first, or name its folder with --output.")
    with safe_open(file, framework="pt") as content:
        model = GPT(SIZES[content.metadata()["size"]])
        model.load_state_dict({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118 - no mapping
    return model.eval()


def continued(folder: Path, prompt: str, length: int, seed: int) -> str:
    """Return `prompt` and `length` more bytes by the saved model, as text."""
    start = prompt.encode() or b"\n"  # a model needs one byte to begin with
    written = generate(saved_model(folder), start, length, temperature=TEMPERATURE, seed=seed)
    return (start + written).decode(errors="replace")
