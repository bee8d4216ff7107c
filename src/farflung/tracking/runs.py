# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, and the clients that follow its interface: a run that takes dictionaries."""

from __future__ import annotations

from typing import Any

from farflung.tracking.base import GeneralTracker, on_main_process


class _RunTracker(GeneralTracker):
    """A client whose `init` returns a run.

    Args:
        run_name: the name of the project.
        kwargs: arguments of the client's `init`.
    """

    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def _client(self) -> Any:
        raise NotImplementedError

    @property
    def tracker(self) -> Any:
        """The client's run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        self.run = self._client().init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._client().config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values.

        Args:
            kwargs: arguments of the run's `log`.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class _WithImages(_RunTracker):
    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images, arrays or PIL's, by name."""
        image = self._client().Image
        for key, images in values.items():
            self.log({key: [image(each) for each in images]}, step=step, **kwargs)


class WandBTracker(_WithImages):
    """Weights & Biases.

    Args:
        run_name: the name of the project.
        kwargs: arguments of `wandb.init`.
    """

    name = "wandb"

    def _client(self) -> Any:
        import wandb

        return wandb

    @on_main_process
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
        table = self._client().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(_WithImages):
    """SwanLab.

    Args:
        run_name: the name of the project.
        kwargs: arguments of `swanlab.init`.
    """

    name = "swanlab"

    def _client(self) -> Any:
        import swanlab

        return swanlab


class TrackioTracker(_RunTracker):
    """Trackio.

    Args:
        run_name: the name of the project.
        kwargs: arguments of `trackio.init`.
    """

    name = "trackio"

    def _client(self) -> Any:
        import trackio

        return trackio
