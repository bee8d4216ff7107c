# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning between friends: trl's SFTTrainer on an adapter of peft's. Adapters alone travel, by way of a bucket.

Each friend starts this line, whenever there is time for it:

    farflung launch --elastic 1:8 --meet hf://NAMESPACE/BUCKET/run7 --as-accelerate --outer diloco --outer-every 8 \
        --outer-max-momentum 0.5 sft_over_a_bucket.py

The script itself is as for one machine.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def load(name):
    """Return a model and its tokenizer; without a name a small Llama with random weights, which knows some words."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    words = ["<pad>", "<eos>", *["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]]
    known = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<pad>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)  # friends fine-tune the same weights
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
    return network, PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="<eos>")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name on the hub, or a folder; otherwise a small one is made")
    parser.add_argument("--text", help="a file, each line a text; otherwise some are made")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", default="adapters", help="a folder for the adapters, as peft loads them")
    flags = parser.parse_args()

    network, tokenizer = load(flags.model)
    counted = ["one two three four five six", "three four five six seven", "six seven eight nine ten"]
    lines = Path(flags.text).read_text(encoding="utf-8").splitlines() if flags.text else counted * 64
    given = SFTConfig(
        flags.save,
        num_train_epochs=flags.epochs,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=64,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    data = Dataset.from_dict({"text": lines})
    trainer = SFTTrainer(network, given, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    is_main = trainer.is_world_process_zero()
    trainer.accelerator.end_training()  # from now on the model has the weights that all agreed on last
    if is_main:
        trainer.model.save_pretrained(flags.save)


if __name__ == "__main__":
    main()
