# SPDX-License-Identifier: Apache-2.0
"""A program: trains with transformers' Trainer, trl's SFTTrainer and a LoRA model of peft's, as users write them.

`trainers.py FOLDER [--resume]` writes `FOLDER/losses.json`: what each run logged, and what it logged when it was
resumed. It knows nothing of Farflung.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{k}" for k in range(29))]
LOGGED = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "num_tokens", "mean_token_accuracy")


def sentences(count: int) -> datasets.Dataset:
    """Sentences of different lengths."""
    numbers = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 12, (count,), generator=numbers).tolist()
    chosen = [torch.randint(3, len(WORDS), (length,), generator=numbers).tolist() for length in lengths]
    return datasets.Dataset.from_list([{"text": " ".join(WORDS[word] for word in sentence)} for sentence in chosen])


def rows(count: int) -> datasets.Dataset:
    """Rows of one length, which need no collator."""
    tokens = torch.randint(0, len(WORDS), (count, 8), generator=torch.Generator().manual_seed(count)).tolist()
    return datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])


def model() -> LlamaForCausalLM:
    """A model of two layers with random weights, always the same ones."""
    set_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, **shape, **tokens))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    by_word = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def plain(folder: Path, **settings: object) -> Trainer:
    arguments = TrainingArguments(str(folder), gradient_accumulation_steps=3, **common(), **settings)
    return Trainer(model(), arguments, train_dataset=rows(26), eval_dataset=rows(7))


def sft(folder: Path, **settings: object) -> SFTTrainer:
    arguments = SFTConfig(str(folder), gradient_accumulation_steps=2, max_length=16, **common())
    data = {"train_dataset": sentences(26), "eval_dataset": sentences(7), "processing_class": tokenizer()}
    return SFTTrainer(model(), arguments, **data, **settings)


def lora(folder: Path) -> SFTTrainer:
    targets = ["q_proj", "v_proj"]
    return sft(folder, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))


def common() -> dict[str, object]:
    steps = {"logging_steps": 1, "save_steps": 2, "eval_strategy": "epoch", "num_train_epochs": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "log_level": "error"}
    return {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, **steps, **quiet}


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [{name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history]


def main(folder: Path) -> None:
    """Train each of them, and perhaps once more from its checkpoint."""
    datasets.disable_progress_bars()
    found = {}
    for name, make in {"trainer": plain, "bf16": lambda at: plain(at, bf16=True), "sft": sft, "lora": lora}.items():
        trainer = make(folder / name)
        trainer.train()
        found[name] = {"whole": logged(trainer)}
        if "--resume" in sys.argv:
            resumed = make(folder / name)
            resumed.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
            found[name]["resumed"] = logged(resumed)
    if trainer.is_world_process_zero():
        who = type(trainer.accelerator).__module__.split(".")[0]
        (folder / "losses.json").write_text(json.dumps({"by": who, "runs": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
