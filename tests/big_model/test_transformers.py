# SPDX-License-Identifier: Apache-2.0
"""transformers loads models with a device map, as it does with Accelerate, when the functions are these."""

from importlib import import_module

import pytest
import torch

import farflung
from farflung.hooks import AlignDevicesHook
from farflung.utils.modeling import clean_device_map, get_max_layer_size, get_max_memory

# What it has is loaded when it is used: two seconds for all who collect these tests.
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.package
IDS = torch.tensor([[1, 2, 3, 4]])
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with a tiny model, and what it answers."""
    inside = import_module("transformers.integrations.accelerate")
    monkeypatch.setattr(inside, "dispatch_model", farflung.dispatch_model)
    monkeypatch.setattr(inside, "accelerate_max_memory", get_max_memory)
    monkeypatch.setattr(inside, "clean_device_map", clean_device_map)
    monkeypatch.setattr(inside, "get_max_layer_size", get_max_layer_size)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    return tmp_path / "model", answer(model)


def answer(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "cpu"},
        {"device_map": "auto", "max_memory": {"cpu": "15KB"}},
        {"device_map": {"model.embed_tokens": "disk", "lm_head": "disk", "model": "cpu"}},
        {"device_map": {"model": "disk", "lm_head": "disk"}},
    ],
    ids=str,
)
def test_a_model_is_loaded_with_a_device_map_answers_and_is_saved_again(options, saved, tmp_path):
    folder, expected = saved
    model = transformers.LlamaForCausalLM.from_pretrained(folder, offload_folder=tmp_path / "away", **options)
    assert torch.equal(answer(model), expected)
    assert torch.equal(answer(model), expected)
    is_spread = options["device_map"] != "cpu"
    assert (
        any(isinstance(getattr(module, "_hf_hook", None), AlignDevicesHook) for module in model.modules()) is is_spread
    )
    assert any(parameter.is_meta for parameter in model.parameters()) is is_spread
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(answer(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")), expected)
