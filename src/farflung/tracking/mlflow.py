# SPDX-License-Identifier: Apache-2.0
"""MLflow, with a server or a local store."""

from __future__ import annotations

import json
import os
from itertools import islice
from operator import attrgetter
from typing import Any

from farflung.base.tree import listify
from farflung.config import environ
from farflung.tracking.base import ClientTracker, guarded, is_number, taken


@guarded
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
        self._client.log_metrics(taken(self, listify(values), is_number, "numbers"), step=step, **kwargs)

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
