# SPDX-License-Identifier: Apache-2.0
"""trl's SFTTrainer and DPOTrainer on an adapter of peft's, with the options that people give them."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import EPOCHS, NAME, SAVED, loss_on, report
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

sys.modules["torchao"] = None  # that of torchtune is too old for peft
WORDS = ["<pad>", "<eos>", "<unk>", "ask", "say", *(f"w{k}" for k in range(27))]
TEMPLATE = (  # what the assistant says is marked, for assistant_only_loss
    "{% for message in messages %}{% if message['role'] == 'assistant' %}say {% generation %}{{ message['content'] }}"
    " <eos> {% endgeneration %}{% else %}ask {{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}say {% endif %}"
)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
IN_MID_ROUND = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 5}
IN_MID_ROUND |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
EACH_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}  # replicas that come and go have no best in common
SETTINGS = {  # of both trainers
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-1,
    "max_length": 24,
    "gradient_checkpointing": True,
    **(EACH_EPOCH if "FARFLUNG_MEMBER" in os.environ else IN_MID_ROUND),
    **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"},
}


def model():
    """A Llama with random weights, always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **sizes, **tokens))


def tokenizer():
    by_word = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=by_word, chat_template=TEMPLATE, **names)


def talks(seed, count, answers):
    """Questions of random words, with as many answers to each."""
    numbers = torch.Generator().manual_seed(seed)

    def said(role):
        length = int(torch.randint(2, 6, (), generator=numbers))
        words = torch.randint(5, len(WORDS), (length,), generator=numbers).tolist()
        return [{"role": role, "content": " ".join(WORDS[word] for word in words)}]

    names = ["prompt", *answers]
    return Dataset.from_list(
        [dict(zip(names, map(said, ["user", *["assistant"] * len(answers)]), strict=True)) for _ in range(count)]
    )


class Watch(TrainerCallback):
    """Notes the loss of the weights in memory at each evaluation, by step."""

    def __init__(self):
        self.losses, self.state, self.model = {}, None, None

    def on_evaluate(self, arguments, state, control, model, **_):
        self.losses[state.global_step] = loss(model)
        self.state, self.model = state, model

    def report(self, folder):
        """Report the best evaluation or the last, what peft loads from the folder, and what is in memory."""
        loaded = PeftModel.from_pretrained(model(), folder)
        best = self.state.best_model_checkpoint
        best = max(self.losses) if best is None else int(Path(best).name.split("-")[1])
        print(f"losses at evaluations: {self.losses}, the best: {best}")
        report(self.model, self.losses[best], loaded.state_dict(), loss)


def loss(net):
    tokens = torch.randint(5, len(WORDS), (8, 12), generator=torch.Generator().manual_seed(2))
    return loss_on(net, tokens, lambda module, batch: module(input_ids=batch, labels=batch).loss)


def train(trainer):
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    trainer.save_model(str(SAVED / "end"))
    dist.barrier() if dist.is_initialized() else None
    watch.report(SAVED / "end")


def trl_sft():
    arguments = SFTConfig(str(SAVED), packing=True, packing_strategy="wrapped", assistant_only_loss=True, **SETTINGS)
    data = [talks(seed, count, ["completion"]) for seed, count in ((0, 96), (1, 16))]
    data = [one.map(lambda row: {"messages": row["prompt"] + row["completion"]}) for one in data]
    data = [one.remove_columns(["prompt", "completion"]) for one in data]
    trainer = SFTTrainer(model(), arguments, None, *data, processing_class=tokenizer(), peft_config=LORA)
    train(trainer)


def trl_dpo():
    data = [talks(seed, count, ["chosen", "rejected"]) for seed, count in ((0, 96), (1, 16))]
    arguments = DPOConfig(str(SAVED), **SETTINGS)
    trainer = DPOTrainer(
        model(), None, arguments, train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer(),
        peft_config=LORA,
    )  # fmt: skip
    train(trainer)


if __name__ == "__main__":
    globals()[NAME.replace("-", "_")]()
