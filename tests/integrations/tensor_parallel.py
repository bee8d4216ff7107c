# SPDX-License-Identifier: Apache-2.0
"""What ranks do with models of transformers that their own plans cut over all ranks, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, set_seed
from transformers.distributed import DistributedConfig

from farflung import Accelerator
from farflung.comm.shards import num_parts
from farflung.config.parallelism import ParallelismConfig
from farflung.state import AcceleratorState

SHAPE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt": GPTNeoXConfig(hidden_dropout=0.0, attention_dropout=0.0, **SHAPE),
    "llama": LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **SHAPE),
}


class Training:
    """A model from a folder, its optimizer and a shuffled loader."""

    def __init__(self, folder: Path) -> None:
        AcceleratorState._reset_state()
        size = torch.distributed.get_world_size()
        grid = ParallelismConfig(tp_size=size) if size > 1 else None
        plan = DistributedConfig(tp_size=size, tp_plan="auto") if size > 1 else None
        self.accelerator = Accelerator(parallelism_config=grid)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=plan)
        self.num_cut = sum(num_parts(parameter) > 1 for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(3))
        loader = DataLoader(tokens, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def epoch(self, after: int = 0, folder: Path = Path()) -> Training:
        """Train for an epoch, and save `after` so many steps."""
        for tokens in self.loader:
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.accelerator.backward(loss)
            self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if len(self.losses) == after:
                self.accelerator.save_state(folder)
        return self

    def load(self, folder: Path) -> Training:
        self.accelerator.load_state(folder)
        return self

    def values(self) -> dict[str, Tensor]:
        """Copies of whole weights, on the first rank."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def export(self, folder: Path) -> dict[str, Tensor]:
        """Write the whole model for transformers; return the weights that it reads there on one process."""
        accelerator, model = self.accelerator, self.accelerator.unwrap_model(self.model)
        whole = accelerator.get_state_dict(self.model)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=whole)
        accelerator.wait_for_everyone()
        return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict())


def main(name: str, folder: Path, saved: str = "") -> dict[str, Any]:
    """Train each kind of model, resume it from the middle, and load what a run `saved` wrote."""
    found = {}
    for kind, config in CONFIGS.items():
        start, own = folder / kind, folder / name / kind
        if not start.exists():
            set_seed(1)
            AutoModelForCausalLM.from_config(config).save_pretrained(start)
        run = Training(start).epoch(3, own / "middle").epoch()
        run.accelerator.save_state(own / "end")
        again = Training(start).load(own / "middle").epoch().epoch()
        found[kind] = {"losses": run.losses, "norms": run.norms, "num_cut": run.num_cut, "resumed": again.losses}
        found[kind] |= {"saved": run.values(), "exported": run.export(own / "exported")}
        if saved:
            found[kind]["loaded"] = Training(start).load(folder / saved / kind / "end").values()
    return found
