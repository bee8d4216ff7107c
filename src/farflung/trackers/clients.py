# SPDX-License-Identifier: Apache-2.0
"""Thin adapters over the official clients of TensorBoard, MLflow, Weights & Biases and Trackio."""

from __future__ import annotations

import json
import os
import time
from itertools import islice
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from farflung.base.checks import is_address
from farflung.base.tree import listify
from farflung.config import environ
from farflung.trackers.base import ClientTracker, taken


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
        self.logging_dir = os.path.expanduser(os.path.join(self.logging_dir_param, self.run_name))
        self.writer = tensorboard.SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record hyperparameters, and write them to `hparams.yml`; what is no number or text becomes its text.

        torch writes events to a bucket too; if `logging_dir` is the address of one, there is no such file.
        """
        plain = {key: _hyperparameter(value) for key, value in values.items()}
        self.writer.add_hparams(plain, metric_dict={})
        self.writer.flush()
        if is_address(self.logging_dir):
            return
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, texts and dictionaries of numbers, by `add_scalar`, `add_text` and `add_scalars`."""
        for key, value in taken(
            self, listify(values), _is_loggable, "numbers, texts, and dictionaries of numbers"
        ).items():
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


def _hyperparameter(value: Any) -> float | str:
    """Return a number or a text of Python's own kinds, as YAML has no form for others, such as NumPy's and enums."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str.__str__(value) if isinstance(value, str) else str(value)


def _is_loggable(value: Any) -> bool:
    is_numbers = isinstance(value, dict) and all(isinstance(number, Real) for number in value.values())
    return is_numbers or isinstance(value, (Real, str))


class MLflowTracker(ClientTracker):
    """A run of an MLflow experiment. Where the run is stored, MLflow's own settings say (`MLFLOW_TRACKING_URI`).

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN are read before
    the arguments.

    Args:
        experiment_name: the name of the project.
        logging_dir: where a new experiment keeps its artifacts.
        run_id: continue this run.
        tags: of the run and of a new experiment; a dictionary, or one as JSON.
        nested_run: the run is a child of the one that is active.
        run_name, description: of a new run.
    """

    name = "mlflow"
    tracker = property(attrgetter("active_run"), doc="MLflow's `ActiveRun`.")

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        tags = environ.text("MLFLOW_TAGS") or tags
        self.experiment_name = environ.text("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = environ.text("MLFLOW_RUN_ID", run_id)
        self.tags: dict[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = environ.flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.description = description

    def start(self) -> None:
        mlflow = self._client
        name, experiment_id = self.experiment_name, None  # None: MLflow's default experiment
        if name is not None:
            experiment = mlflow.get_experiment_by_name(name)
            place = None if self.logging_dir is None else os.fspath(self.logging_dir)
            experiment_id = (
                mlflow.create_experiment(name, artifact_location=place, tags=self.tags)
                if experiment is None
                else experiment.experiment_id
            )
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record parameters; a value whose text is longer than MLflow takes is left out, with a warning."""
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        limit = f"values of at most {MAX_PARAM_VAL_LENGTH} characters"
        pairs = iter(taken(self, values, lambda value: len(str(value)) <= MAX_PARAM_VAL_LENGTH, limit).items())
        while batch := dict(islice(pairs, MAX_PARAMS_TAGS_PER_BATCH)):
            self._client.log_params(batch)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers; keyword arguments are those of `mlflow.log_metrics`."""
        self._client.log_metrics(
            taken(self, listify(values), lambda value: isinstance(value, Real), "numbers"), step=step, **kwargs
        )

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure, of Matplotlib or Plotly, as the artifact `artifact_file`."""
        self._client.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record all files of a folder, below `artifact_path`."""
        self._client.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file, below `artifact_path`."""
        self._client.log_artifact(local_path=local_path, artifact_path=artifact_path)

    def finish(self) -> None:
        self._client.end_run()


class _RunTracker(ClientTracker):
    """A client whose `init` returns a run."""

    main_process_only = False
    tracker = property(attrgetter("run"), doc="The client's run.")

    def start(self) -> None:
        self.run = self._client.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._client.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; keyword arguments are those of the run's `log`."""
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        self.run.finish()


class WandBTracker(_RunTracker):
    """Weights & Biases, by `wandb.init`, whose further arguments it takes."""

    name = "wandb"

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images, arrays or PIL's, by name."""
        image = self._client.Image
        for key, images in values.items():
            self.log({key: [image(each) for each in images]}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table, given by its columns and rows or as a pandas data frame."""
        table = self._client.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class TrackioTracker(_RunTracker):
    """Trackio, by `trackio.init`, whose further arguments it takes."""

    name = "trackio"
