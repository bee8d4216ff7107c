# SPDX-License-Identifier: Apache-2.0
"""transformers' models shard in the parts that they name themselves, and peft's adapters travel between islands."""

from importlib import import_module

import pytest

import farflung
from farflung.testing.ranks import run_ranks

pytestmark = pytest.mark.package("peft")


def program(folder):
    farflung.install_as_accelerate()
    return import_module("tests.integrations.sharded").main(folder)  # transformers takes seconds to import: there alone


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    first, *others = run_ranks(program, 4, tmp_path_factory.mktemp("adapters"), timeout_s=120)
    assert all(other["llama"] == first["llama"] for other in others)
    return first


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", ["FSDPLlamaDecoderLayer"] * 2 + ["FSDPLlamaForCausalLM"]),
        ("bert", ["FSDPBertForMaskedLM"] + ["FSDPBertLayer"] * 2),  # its embeddings are tied to the head, in the root
    ],
)
def test_a_model_shards_in_the_parts_that_it_names_and_trains_as_under_ddp(found, name, groups):
    replicated, sharded = found[name]["ddp"], found[name]["sharded"]
    assert (replicated["groups"], sharded["groups"]) == ([], groups)
    assert sharded["losses"][-1] < 0.8 * sharded["losses"][0]
    # Under DDP some operations are in bf16, whose values have 8 bits; here all of them are, and the weights they read.
    assert sharded["losses"] == pytest.approx(replicated["losses"], rel=0.03)


def test_adapters_in_a_sharded_model_train_and_travel_and_are_saved_alone(found):
    adapters = found["adapters"]
    assert adapters["losses"][-1] < adapters["losses"][0]
    assert adapters["moved"]
    assert all("lora_" in name for name in adapters["moved"])
    assert len(adapters["moved"]) == 2 * 2 * 2  # A and B, of queries and values, in two layers
    assert adapters["sent"] == pytest.approx(adapters["sent_of_adapters"], rel=0.01)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(adapters["saved"])
    assert not any(name.startswith(("model", "pytorch_model")) for name in adapters["saved"])


def test_saved_adapters_load_into_the_plain_model(found):
    assert found["adapters"]["difference"] < 1e-5


def test_checkpoints_of_a_model_with_adapters_and_of_its_adapters_alone_load(found):
    adapters = found["adapters"]
    assert adapters["restored"] == [True, True]
    assert len(adapters["adapter_files"]) == len(adapters["moved"])
    assert all("lora_" in name for name in adapters["adapter_files"])


def test_a_trainer_whose_arguments_ask_for_fsdp_trains_resumes_and_saves_as_it_does_without(found):
    trainer = found["trainer"]
    assert trainer["wrapped"] == "FSDPLlamaForCausalLM"
    assert len(trainer["replicated"]) == 4
    assert trainer["sharded"] == pytest.approx(trainer["replicated"], rel=1e-4)
    assert trainer["resumed"] == trainer["sharded"]
    assert trainer["saved sharded"] == pytest.approx(trainer["saved replicated"], rel=1e-3, abs=1e-3)
    assert trainer["saved resumed"] == trainer["saved sharded"]
