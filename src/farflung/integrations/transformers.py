# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with an outer loop: a callback that opens it, checkpoints it and closes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from farflung.base.errors import CheckpointError, ConfigError, StateError
from farflung.checkpoint import paths
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.reader import read_torch
from farflung.comm.checksum import crc32
from farflung.comm.tensor_memory import host_bytes
from farflung.config.outer import AUTO
from farflung.exchanged.states import merge_states
from farflung.hosts.evaluation import evaluates
from farflung.hosts.patching import around
from farflung.methods.arguments import OuterConfig, chosen_recipe
from farflung.methods.recipe import Recipe
from farflung.outer.engine import OuterLoop
from farflung.process.log import get_logger


class OuterCallback(TrainerCallback):
    """Trains replicas of a Trainer's model independently, synchronized by an outer loop.

    `trainer.add_callback(OuterCallback(trainer, "diloco", every=32))`. The Trainer's own `Accelerator` must be
    Farflung's: see `farflung.install_as_accelerate`. Replicas are synchronized after each epoch and at the end of
    training too. What is evaluated and saved in between are the weights that all ranks agreed on last. Checkpoints
    have the outer loop's state for each rank, and a resumed run continues as if it had not been interrupted. The
    Trainer's log has the figures of the rounds.

    Args:
        trainer: a Trainer, such as trl's SFTTrainer.
        recipe: from `farflung.outer`, such as `diloco(every=32)`; an `OuterConfig`; or a recipe's name.
        options: the options of a recipe that is given by name; see `OuterConfig`.

    Attributes:
        loop: the outer loop of the latest training; None before. `loop.stats()` says what it did.

    Raises:
        ConfigError: the Trainer's Accelerator is not Farflung's, the Trainer saves at SIGTERM, or the recipe can't be.
    """

    def __init__(self, trainer: Any, recipe: Recipe | OuterConfig | str, **options: Any) -> None:
        if options and not isinstance(recipe, str):
            raise ConfigError(f"OuterCallback: the options {sorted(options)} only go with a recipe's name.")
        if not hasattr(trainer.accelerator, "outer"):
            raise ConfigError(
                "OuterCallback: this Trainer's Accelerator is not Farflung's. Call farflung.install_as_accelerate() "
                "before transformers is imported, or start the script with `farflung launch --as-accelerate`."
            )
        if getattr(trainer.args, "enable_jit_checkpoint", False):  # which older releases do not have
            raise ConfigError(
                "OuterCallback: with enable_jit_checkpoint each rank saves at the step where it receives SIGTERM, and "
                "replicas that train independently are at different steps. Leave it out, and save regularly: "
                "TrainingArguments(save_steps=...)."
            )
        self._trainer = trainer
        self._recipe = OuterConfig(recipe, **options) if isinstance(recipe, str) else recipe
        self._open: ExitStack | None = None
        self._agreed: ExitStack | None = None  # while the model has the agreed weights
        self.loop: OuterLoop | None = None
        # Whatever asks for them, such as a callback after this one.
        around(trainer, "evaluate", self._evaluate)
        around(trainer, "_save_checkpoint", self._save)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the outer loop (a collective), and continue it where a resumed training stands.

        Raises StateError if the training before ended with an error, CheckpointError if the checkpoint's outer loop is
        damaged, or not of this training.
        """
        if self._open is not None:
            raise StateError("OuterCallback: the training before did not end. Make a new Trainer and a new callback.")
        self._open = ExitStack()
        recipe = self._recipe
        if isinstance(recipe, OuterConfig) and recipe.recipe == AUTO and recipe.steps is None:
            recipe = OuterConfig(AUTO, **recipe.given(), steps=state.max_steps)
        outer = self._trainer.accelerator.outer(self._trainer.model_wrapped, recipe)
        self.loop = self._open.enter_context(outer)
        said = chosen_recipe(self._recipe).few_rounds(state.max_steps)
        if said:
            get_logger(__name__).warning(said)
        if state.global_step > 0:
            self._resume(args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Train this rank's own weights again, after an evaluation or a checkpoint."""
        self._take_own()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Synchronize the replicas if training stops: a collective."""
        if control.should_training_stop:
            self._flush()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Synchronize the replicas: a collective."""
        self._flush()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the figures of the rounds that have ended since the last log: `outer/round` and others."""
        if rounds := self._trainer.accelerator._controller.figures():
            self._trainer.log(rounds)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the outer loop: a collective. All ranks have the same weights afterwards."""
        model = self._trainer.model
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        best = {name: value.clone() for name, value in model.state_dict().items()} if is_best and self._agreed else {}
        self._take_own()
        if best:
            model.load_state_dict(best)
        if self._open is None or self.loop is None:
            return
        if is_best:
            self.loop.reset_anchor()  # the Trainer has loaded the best weights on all ranks
        self._open.close()
        self._open = None

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Evaluate the agreed weights; a schedule-free optimizer computes those to evaluate from the trained ones."""
        optimizer = self._trainer.optimizer
        if self._open is None or self.loop is None or evaluates(getattr(optimizer, "optimizer", optimizer)):
            return evaluate(*args, **options)
        is_lent = self._agreed is not None
        if not is_lent:
            self._enter()
        try:
            return evaluate(*args, **options)
        finally:
            if not (is_lent or self._trainer.control.should_save):  # else the checkpoint has the same weights
                self._take_own()

    def _save(self, save: Callable[..., None], *args: Any, **options: Any) -> None:
        """Save the agreed weights, and write this rank's outer loop and optimizer into the Trainer's checkpoint."""
        trainer = self._trainer
        if self._open is None or self.loop is None:
            return save(*args, **options)
        if self._agreed is None:
            self._enter()
        save(*args, **options)
        agreed = _checksum(trainer.model)
        self._take_own()
        if not trainer.args.save_only_model:
            content = {
                "loop": self.loop.state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
                "world_size": trainer.accelerator.num_processes,
                "agreed": agreed,
            }
            entry = Entry(paths.outer_state(trainer.accelerator.process_index), content, origin="the outer loop")
            entry.write(self._folder(trainer.state))
        if trainer.control.should_save:  # the Trainer calls `on_save` next, in which callbacks save the model too
            self._enter()
        return None

    def _enter(self) -> None:
        assert self.loop is not None
        self._agreed = ExitStack()
        self._agreed.enter_context(self.loop.synced())

    def _take_own(self) -> None:
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            agreed.close()

    def _flush(self) -> None:
        assert self.loop is not None
        self._take_own()
        if not self.loop.is_warming:  # while gradients are averaged the replicas are alike
            self.loop.flush()

    def _resume(self, args: Any, state: Any) -> None:
        assert self.loop is not None
        accelerator = self._trainer.accelerator
        given = args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, str) and Path(given).is_dir() else self._folder(state)
        if not folder.is_dir():
            raise CheckpointError(
                f"OuterCallback: training resumes at step {state.global_step}, but there is no {folder}. Say where the "
                "checkpoint is: TrainingArguments(resume_from_checkpoint=...)."
            )
        path = folder / paths.outer_state(accelerator.process_index)
        if not path.parent.is_dir():
            get_logger(__name__).warning(f"{folder} was written without an outer loop: it starts from its weights.")
            return
        first = folder / paths.outer_state(0)  # which new ranks have none of their own
        saved = read_torch(path if path.exists() else first)
        if saved["agreed"] != _checksum(self._trainer.model):
            raise CheckpointError(
                f"{path} does not belong to the weights that the Trainer resumes from. Say where the checkpoint is: "
                "TrainingArguments(resume_from_checkpoint=...)."
            )
        before, here = saved["world_size"], accelerator.num_processes
        if before == here:
            self._load(saved["optimizer"], saved["loop"])
            return
        everyone = [read_torch(folder / paths.outer_state(rank)) for rank in range(before)]
        merged = merge_states([one["loop"] for one in everyone])
        if merged.state is None:
            raise CheckpointError(
                f"{folder} was written by {before} processes, and here are {here}. A loop with eager updates continues "
                "on as many only, as each of its replicas has an anchor of its own."
            )
        get_logger(__name__).warning(
            f"{folder} was written by {before} processes, and here are {here}: all continue from the mean of their "
            "weights, with the anchor that they had agreed on."
        )
        self._load(everyone[accelerator.process_index % before]["optimizer"], merged.state)

    def _folder(self, state: Any) -> Path:
        """Return the Trainer's checkpoint of this step; each trial of a search has a folder of its own for them."""
        folder = self._trainer._get_output_dir(getattr(self._trainer, "_trial", None))
        return Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

    def _load(self, optimizer: dict[str, Any], loop: dict[str, Any]) -> None:
        assert self.loop is not None
        self._trainer.optimizer.load_state_dict(optimizer)
        self.loop.load_state_dict(loop)


def _checksum(model: nn.Module) -> int:
    """Return a checksum of the weights that are trained."""
    found = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            found = crc32(host_bytes(parameter), found)
    return found
