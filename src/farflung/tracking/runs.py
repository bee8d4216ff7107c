# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, and the clients that follow its interface: a run that takes dictionaries."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from farflung.tracking.base import ClientTracker, guarded


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
