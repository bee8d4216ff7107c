# SPDX-License-Identifier: Apache-2.0
"""Thin adapters over the official clients of Aim, ClearML, Comet, DVCLive, Weights & Biases, SwanLab and Trackio."""

from __future__ import annotations

import os
from operator import attrgetter
from typing import Any

from farflung.base.errors import ConfigError
from farflung.base.tree import listify
from farflung.config import environ
from farflung.tracking.base import ClientTracker, guarded, is_number, taken


@guarded
class CometMLTracker(ClientTracker):
    """Comet, by `comet_ml.start`, whose further arguments it takes. Its key is read from Comet's own configuration."""

    name = "comet_ml"
    tracker = property(attrgetter("writer"), doc="Comet's experiment.")

    def start(self) -> None:
        begin = getattr(self._client, "start", None) or self._client.Experiment  # `start` came with 3.41
        self.writer = begin(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers, dictionaries of numbers, and texts, by `log_metric`, `log_metrics` and `log_other`."""
        if step is not None:
            self.writer.set_step(step)
        loggable = taken(
            self, listify(values), lambda value: is_number(value) or isinstance(value, (str, dict)), "numbers and texts"
        )
        for key, value in loggable.items():
            if isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                self.writer.log_metric(key, value, step=step, **kwargs)

    def finish(self) -> None:
        self.writer.end()


@guarded
class AimTracker(ClientTracker):
    """Aim, by `aim.Run`, whose further arguments it takes; `logging_dir` is the folder of Aim's repository."""

    name = "aim"
    requires_logging_directory = True
    tracker = property(attrgetter("writer"), doc="Aim's run.")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def start(self) -> None:
        self.writer = self._client.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values; keyword arguments are those of the run's `track`."""
        for key, value in values.items():
            self.writer.track(value, name=key, step=step, **kwargs)

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record an image, or an image and its caption, by name.

        `kwargs` has arguments of `aim.Image` under `aim_image`, and of the run's `track` under `track`.
        """
        given = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = self._client.Image(image, caption=caption, **given.get("aim_image", {}))
            self.writer.track(picture, name=key, step=step, **given.get("track", {}))

    def finish(self) -> None:
        self.writer.close()


@guarded
class ClearMLTracker(ClientTracker):
    """ClearML, by `clearml.Task.init` with the further arguments. A task that runs already is used, and left open.

    A name that begins with `eval_`, `test_` or `train_` is reported without that, in the series of the same name; any
    other in the series `train`. `run_name` is the project's and the task's name where CLEARML_PROJECT and CLEARML_TASK
    are not set.
    """

    name = "clearml"
    tracker = property(attrgetter("task"), doc="ClearML's task.")

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._initialized_externally = False

    def start(self) -> None:
        running = self._client.Task.current_task()
        self._initialized_externally = bool(running)
        name = self.user_provided_run_name
        names = {
            "project_name": environ.text("CLEARML_PROJECT", name),
            "task_name": environ.text("CLEARML_TASK", name),
        }
        self.task = running or self._client.Task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers: as points at `step` by `report_scalar`, or, without one, by `report_single_value`."""
        logger = self.task.get_logger()
        for key, value in taken(self, listify(values), is_number, "numbers").items():
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record an image by name; keyword arguments are those of `report_image`."""
        for key, image in values.items():
            title, series = _title_and_series(key)
            self.task.get_logger().report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table, given by its rows (the first names the columns if `columns` is None) or as a data frame."""
        if dataframe is None and data is None:
            raise ConfigError(
                f"log_table: the table {table_name!r} has neither data nor a dataframe. Give one of them."
            )
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        if not self._initialized_externally:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    series, _, title = name.partition("_")
    return (title, series) if title and series in ("eval", "test", "train") else (name, "train")


@guarded
class DVCLiveTracker(ClientTracker):
    """DVCLive: `live`, or a new `dvclive.Live` of the further arguments. It has no names for runs."""

    name = "dvclive"
    tracker = property(attrgetter("live"), doc="The `dvclive.Live`.")

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def start(self) -> None:
        self.live = self.live if self.live is not None else self._client.Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record metrics, and go on to the next step; keyword arguments are those of `log_metric`."""
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for key, value in taken(self, listify(values), Metric.could_log, "numbers and texts").items():
            self.live.log_metric(key, value, **kwargs)
        self.live.next_step()

    def finish(self) -> None:
        self.live.end()


@guarded
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


@guarded
class _WithImages(_RunTracker):
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images, arrays or PIL's, by name."""
        image = self._client.Image
        for key, images in values.items():
            self.log({key: [image(each) for each in images]}, step=step, **kwargs)


@guarded
class WandBTracker(_WithImages):
    """Weights & Biases, by `wandb.init`, whose further arguments it takes."""

    name = "wandb"

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


class SwanLabTracker(_WithImages):
    """SwanLab, by `swanlab.init`, whose further arguments it takes."""

    name = "swanlab"


class TrackioTracker(_RunTracker):
    """Trackio, by `trackio.init`, whose further arguments it takes."""

    name = "trackio"
