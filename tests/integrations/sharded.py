# SPDX-License-Identifier: Apache-2.0
"""What ranks do with transformers' models that are sharded over them, with LoRA adapters in them, and with a Trainer.

transformers and peft find Farflung where they import Accelerate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from farflung import Accelerator
from farflung.checkpoint.sharded import ShardReader
from farflung.comm.shards import full
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.outer import diloco
from farflung.state import AcceleratorState
from farflung.utils import load_fsdp_model, save_fsdp_model

STEPS, EVERY, ROUNDS = 12, 2, 3
SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> PreTrainedModel:
    """A decoder whose last layer is its embedding."""
    set_seed(1)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, tie_word_embeddings=True, **SHAPE, **tokens))


def bert() -> PreTrainedModel:
    """An encoder, likewise; its dropout would differ from rank to rank."""
    set_seed(1)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(max_position_embeddings=32, **SHAPE, **quiet))


def sentences(rank: int) -> torch.Tensor:
    """`[4, 8]` tokens of a rank."""
    return torch.randint(2, 32, (4, 8), generator=torch.Generator().manual_seed(rank))


def sharding() -> FullyShardedDataParallelPlugin:
    """Blocks are gathered one by one; which modules these are is for the model to say."""
    return FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> float:
    """Take one step on this rank's sentences; the loss of all ranks before it."""
    tokens = sentences(accelerator.process_index)
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()


def train(model: PreTrainedModel, sharded: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=sharding() if sharded else None)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    losses = [step(accelerator, prepared, optimizer) for _ in range(STEPS)]
    groups = sorted(type(module).__name__ for module in prepared.modules() if isinstance(module, FSDPModule))
    AcceleratorState._reset_state()
    return {"losses": losses, "groups": groups}


def train_adapters(folder: Path) -> dict[str, Any]:
    """Train LoRA adapters of a model on two islands of two ranks, and load what was saved into the plain model."""
    grid = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=sharding(), parallelism_config=grid)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), adapters)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    with accelerator.outer(model, diloco(EVERY)) as outer:
        losses = [step(accelerator, model, optimizer) for _ in range(ROUNDS * EVERY)]
        sent = outer.stats().bytes_sent
    held = sum(full(parameter).numel() for parameter in model.parameters() if parameter.requires_grad) / 2
    after = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder, state_dict=after, is_main_process=accelerator.is_main_process
    )
    accelerator.wait_for_everyone()
    tokens = sentences(0)
    logits = model(input_ids=tokens).logits.detach()
    loaded = PeftModel.from_pretrained(llama(), folder)
    restored = restore(accelerator, model, optimizer, folder)
    found = {
        "losses": losses,
        "sent": sent,
        "sent_of_adapters": ROUNDS * 4 * held,  # an all-reduce of two sends the whole once
        "moved": sorted(name for name in after if not torch.equal(after[name], before[name])),
        "saved": sorted(path.name for path in folder.iterdir()),
        "adapter_files": sorted(ShardReader(folder / "adapter" / "pytorch_model_fsdp_0").sizes),
        "restored": [all(torch.equal(state[name], after[name]) for name in after) for state in restored],
        "difference": (loaded(input_ids=tokens).logits - logits).abs().max().item(),
    }
    AcceleratorState._reset_state()
    return found


def restore(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> list[dict[str, Any]]:
    """Save all and the adapters alone, and load each after a further step; the whole states that follow."""
    accelerator.save_state(folder / "state")
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder / "adapter", adapter_only=True)
    step(accelerator, model, optimizer)
    accelerator.load_state(folder / "state")
    found = [accelerator.get_state_dict(model)]
    step(accelerator, model, optimizer)
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder / "adapter", adapter_only=True)
    return [*found, accelerator.get_state_dict(model)]


def trainer(folder: Path, sharded: bool) -> Trainer:
    """A Trainer whose own arguments ask for FSDP, or do not."""
    rows = [{"input_ids": row, "labels": row} for row in torch.cat([sentences(number) for number in range(12)])]
    config = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    wanted: dict[str, Any] = {"fsdp": True, "fsdp_config": config} if sharded else {}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_steps": 2}
    arguments = TrainingArguments(str(folder), max_steps=4, per_device_train_batch_size=2, **quiet, **wanted)
    return Trainer(llama(), arguments, train_dataset=rows)


def train_by_trainer(folder: Path) -> dict[str, Any]:
    """What a Trainer logs when it replicates, when it shards, and when it resumes from a sharded checkpoint."""
    found: dict[str, Any] = {}
    for way in ("replicated", "sharded", "resumed"):
        checkpoint = str(folder / "sharded" / "checkpoint-2") if way == "resumed" else None
        one = trainer(folder / ("replicated" if way == "replicated" else "sharded"), way != "replicated")
        one.train(resume_from_checkpoint=checkpoint)
        one.save_model(str(folder / way / "final"))
        found[way] = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        found["wrapped"] = type(one.model_wrapped).__name__
        if one.is_world_process_zero():
            saved = LlamaForCausalLM.from_pretrained(folder / way / "final").state_dict()
            found[f"saved {way}"] = {name: value.double().sum().item() for name, value in saved.items()}
        AcceleratorState._reset_state()
    return found


def main(folder: Path) -> dict[str, Any]:
    """Train each model replicated and sharded over all ranks, adapters on islands, and a Trainer."""
    models = {"llama": llama, "bert": bert}
    ways = {"ddp": False, "sharded": True}
    found = {name: {way: train(make(), sharded) for way, sharded in ways.items()} for name, make in models.items()}
    found["adapters"] = train_adapters(folder / "adapters")
    return found | {"trainer": train_by_trainer(folder)}
