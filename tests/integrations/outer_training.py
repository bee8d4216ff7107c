# SPDX-License-Identifier: Apache-2.0
"""A program of two processes: a Trainer with an outer loop, by the callback or (`--launched`) by the launcher's flags.

`outer_training.py FOLDER [--launched]` writes `FOLDER/seen.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from farflung.base.errors import FarflungError
from farflung.integrations.transformers import OuterCallback
from farflung.outer import diloco


class Rows(Dataset):
    """Random tokens."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[k], "labels": self.tokens[k]}


class Differences(TrainerCallback):
    """How far the two replicas are apart, after each step and while each evaluation has the model."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.after_steps: list[float] = []
        self.evaluated: list[float] = []

    def on_step_end(self, *_, **__) -> None:
        self.after_steps.append(self.measure())

    def on_evaluate(self, *_, **__) -> None:
        self.evaluated.append(self.measure())

    def measure(self) -> float:
        one, other = self.trainer.accelerator.gather(weights(self.trainer)).view(2, -1)
        return (one - other).abs().max().item()


class Late(TrainerCallback):
    """Asks for a checkpoint after step 5: after the outer loop's callback."""

    def on_step_end(self, args, state, control, **_) -> None:
        control.should_save |= state.global_step == 5


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def made(folder: Path, **settings: object) -> tuple[Trainer, Differences, OuterCallback | None]:
    """A Trainer over 7 batches for each rank, which is evaluated and saved after step 4: in the middle of a round."""
    set_seed(1)
    shape = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    steps = {"num_train_epochs": 2, "logging_steps": 1, "save_steps": 4, "eval_steps": 4, "eval_strategy": "steps"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "ddp_find_unused_parameters": False}
    common = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, **steps, **quiet, **settings}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, **shape))
    trainer = Trainer(model, TrainingArguments(str(folder), **common), train_dataset=Rows(28), eval_dataset=Rows(6))
    differences = Differences(trainer)
    trainer.callback_handler.callbacks.insert(0, differences)  # it sees each step before the outer loop's callback
    if "--launched" in sys.argv:
        return trainer, differences, None
    callback = OuterCallback(trainer, "diloco", every=3)
    trainer.add_callback(callback)
    trainer.add_callback(Late())
    return trainer, differences, callback


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if k in ("step", "loss", "eval_loss", "outer/round")}
        for entry in trainer.state.log_history
    ]


def refusals(trainer: Trainer, folder: Path) -> list[str]:
    """What the callback says to wrong uses."""
    elsewhere, _, callback = made(folder / "elsewhere")
    wrong = [
        lambda: OuterCallback(SimpleNamespace(accelerator=object()), "diloco"),
        lambda: OuterCallback(trainer, diloco(every=3), every=3),
        lambda: OuterCallback(trainer, "dilocco"),
        lambda: elsewhere.train(resume_from_checkpoint=str(folder / "checkpoint-4")),
    ]
    said = []
    for use in wrong:
        try:
            use()
        except FarflungError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def main(folder: Path) -> None:
    trainer, differences, callback = made(folder)
    trainer.train()
    seen = {"after_steps": differences.after_steps, "evaluated": differences.evaluated, "end": differences.measure()}
    seen["logged"] = logged(trainer)
    if callback is not None:
        saved, late = (load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (4, 5))
        resumed, *_ = made(folder)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        best, at_end, _ = made(folder / "best", load_best_model_at_end=True)
        best.train()
        chosen = load_file(Path(best.state.best_model_checkpoint) / "model.safetensors")
        seen |= {
            "rounds": callback.loop.stats().rounds,
            "late_alike": all(torch.equal(value, late[name]) for name, value in saved.items()),
            "resumed": logged(resumed),
            "resumed_alike": torch.equal(weights(trainer), weights(resumed)),
            "best_alike": all(
                torch.equal(value, chosen[name]) for name, value in best.model.state_dict().items() if name in chosen
            ),
            "best_apart": at_end.measure(),
            "refusals": refusals(trainer, folder),
        }
    if trainer.is_world_process_zero():
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
