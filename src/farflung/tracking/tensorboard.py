# SPDX-License-Identifier: Apache-2.0
"""TensorBoard, through torch's writer or tensorboardX's."""

from __future__ import annotations

import os
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from farflung.base.tree import listify
from farflung.tracking.base import ClientTracker, guarded, is_number, taken

_LOGGABLE = "numbers, texts, and dictionaries of numbers"


@guarded
class TensorBoardTracker(ClientTracker):
    """Writes event files into `{logging_dir}/{run_name}`; it takes the arguments of `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True
    tracker = property(attrgetter("writer"), doc="The `SummaryWriter`.")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir

    def start(self) -> None:
        try:
            from torch.utils import tensorboard
        except ModuleNotFoundError:
            import tensorboardX as tensorboard  # type: ignore[no-redef]
        self.logging_dir = os.path.join(self.logging_dir_param, self.run_name)
        self.writer = tensorboard.SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record hyperparameters, and write them to `hparams.yml`; what is no number or text becomes its text."""
        plain = {key: value if _is_hyperparameter(value) else str(value) for key, value in values.items()}
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
        (folder / "hparams.yml").write_text(yaml.safe_dump(numbers), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, texts and dictionaries of numbers, by `add_scalar`, `add_text` and `add_scalars`."""
        for key, value in taken(self, listify(values), _is_loggable, _LOGGABLE).items():
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images `[n, channels, height, width]` by name, or of another layout with `dataformats`."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    def finish(self) -> None:
        self.writer.close()


def _is_hyperparameter(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_loggable(value: Any) -> bool:
    return (
        is_number(value) or isinstance(value, str) or (isinstance(value, dict) and all(map(is_number, value.values())))
    )
