# SPDX-License-Identifier: Apache-2.0
"""What every experiment tracker is: a name, and how to start, log and finish."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from farflung.base.errors import Unsupported
from farflung.process.bootstrap import read_rank_info
from farflung.process.world import current_world

Function = TypeVar("Function", bound=Callable[..., Any])


def on_main_process(function: Function) -> Function:
    """Make a tracker's method run on the main process alone, unless the tracker's `main_process_only` is False."""

    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            world = current_world()  # None in a script that makes its tracker before its Accelerator
            if not (world.is_main if world is not None else read_rank_info().rank == 0):
                return None
        return function(self, *args, **kwargs)

    return guarded  # type: ignore[return-value]


class GeneralTracker:
    """The base of all trackers. Derive from it to write your own, and pass an instance as `log_with`.

    A subclass defines `name`, `requires_logging_directory` and the property `tracker`, and the methods that it needs.

    Attributes:
        name: what `get_tracker` knows it by.
        requires_logging_directory: whether it is made with `Accelerator.logging_dir`, after the name of the project.
        tracker: the client's own object.
        main_process_only: whether the methods under `on_main_process` do nothing on other processes. An Accelerator
            calls its trackers on the main process in any case.

    Raises:
        Unsupported: a NotImplementedError; the subclass lacks one of the three.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    if TYPE_CHECKING:

        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        required = ("name", "requires_logging_directory", "tracker")  # in dir(): `tracker` may need `start` first
        missing = [] if _blank else [name for name in required if name not in dir(self)]
        if missing:
            raise Unsupported(f"{type(self).__name__} has no {' and no '.join(missing)}. Define it in the class.")

    def start(self) -> None:
        """Begin the run. The Accelerator's processes are connected by now."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings that the run begins with."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values, of the optimizer step `step` if that is given."""

    def finish(self) -> None:
        """End the run."""


class ClientTracker(GeneralTracker):
    """A tracker of ours: most are over the official client of a service, whose library has the tracker's name.

    Its public methods are under `on_main_process`.

    Args:
        run_name: the name of the project.
        kwargs: arguments of what `start` opens.
    """

    requires_logging_directory = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, on_main_process(method))

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name: Any = run_name
        self.init_kwargs = kwargs

    @property
    def _client(self) -> Any:
        return __import__(self.name)


def taken(
    tracker: GeneralTracker, values: Mapping[str, Any], takes: Callable[[Any], bool], what: str
) -> dict[str, Any]:
    """Return those of `values` that the tracker's client takes, and warn of the others, saying `what` it takes.

    The warning names the type, not the value, which differs from step to step: Python shows equal warnings once.
    """
    kept = {key: value for key, value in values.items() if takes(value)}
    for key in values.keys() - kept.keys():
        kind = type(values[key]).__name__
        message = f"The tracker {tracker.name} does not record {key!r} of type {kind}: it takes {what}."
        warnings.warn(message, stacklevel=7)  # the line of the script that calls the Accelerator
    return kept
