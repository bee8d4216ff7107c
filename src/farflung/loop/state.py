# SPDX-License-Identifier: Apache-2.0
"""Where a training loop stands: the accumulation windows it is in and the loaders that are being iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from farflung.base.forward import Forward, unchecked
from farflung.base.tree import batch_size_of
from farflung.loop.uneven import JoinedRanks, UnevenDataCheck

_NO_BATCH: Any = object()


class ActiveLoader(Protocol):
    """What the loop needs to know of an iteration of a loader that is under way."""

    num_batches: int  # that it has handed out
    end_of_dataloader: bool  # the batch handed out last was the final one
    remainder: int  # samples of the final global batch that are no padding; 0: all of them, -1: not known
    is_beside: bool  # an iteration that began before it continues meanwhile, so its end is no end of an epoch

    @property
    def loader(self) -> Any:
        """The loader that is iterated."""

    @property
    def position(self) -> str | None:
        """Which batch is in hand, if ranks may have different numbers of them."""


class Observer(Protocol):
    """Hears where iterations of prepared loaders start and end; all ranks may be there."""

    def iteration_starts(self, loader: Any) -> None:
        """Called when an iteration of `loader` starts, before it draws or reads anything."""

    def iteration_ended(self, iteration: ActiveLoader, at_end: bool) -> None:
        """Called when an iteration is over: it came to its end, or was left early."""


class Trace:
    """Follows something that happens again and again inside a loop over a loader."""

    def __init__(self) -> None:
        self.source: ActiveLoader | None = None  # the iteration whose loop it is
        self.seen = 0  # batches that all loaders had handed out when it happened last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}  # a copy is in no loop


class Window(Trace):
    """The micro-batches between two steps of some models' optimizers; the end of the loader `source` ends it too."""

    def __init__(self, models: tuple[nn.Module, ...] = (), divisor: int = 1) -> None:
        super().__init__()
        self.models = models  # that accumulate together; none stands for all
        self.optimizers: list[Any] = []  # that train these models
        self.step = 0  # micro-batches since the data began, counted on through broken-off loops
        self.size = 0  # micro-batches in the window so far
        self.complete = True  # the current micro-batch is the window's last
        self.divisor = divisor  # of the loss of the current micro-batch
        self.items = 0.0  # that `backward(num_items=)` counted in the window so far, on this process
        self.scale: float | None = None  # by which the window's losses with `num_items` were multiplied so far

    def parameters(self) -> Iterable[nn.Parameter]:
        for model in self.models:
            yield from model.parameters()


_KEPT = ("step", "size", "complete", "divisor", "items", "scale")  # what a checkpoint knows of a window


class ActiveLoaders:
    """The iterations of loaders that are under way, whichever loop these report to."""

    def __init__(self) -> None:
        self.ends: UnevenDataCheck | None = None  # if ranks say that their data end; None: there is one rank
        self.observers: WeakKeyDictionary[Observer, None] = WeakKeyDictionary()  # in the order they came
        self.counts_samples = False  # `LoopState.samples_of` is wanted
        self.has_asked = False  # the script has read a loader's epoch since its state was loaded
        self.handed_out = 0  # batches of all loaders
        self.loaders: list[ActiveLoader] = []
        self.latest: dict[int, int] = {}  # which of the batches was a loader's latest, by the loader's id
        self.starts: dict[int, int] = {}  # how many there were when it started
        self.samples: dict[int, int] = {}  # that it has handed out

    def __getstate__(self) -> dict[str, Any]:  # of a copy
        none: dict[str, Any] = {"loaders": [], "latest": {}, "starts": {}, "samples": {}}
        return {**self.__dict__, **none, "observers": list(self.observers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, observers=WeakKeyDictionary(dict.fromkeys(state["observers"])))


class LoopState:
    """The accumulation windows and the loaders under way. Loaders report to it; optimizers and schedulers read it.

    Args:
        num_steps: micro-batches in one accumulation window.
        under_way: the active loaders, if other loops share them.
        sync_with_dataloader: the last batch of a loader completes its window.
        sync_each_batch: gradients are synchronized on each micro-batch, though the optimizer waits for the window.
    """

    def __init__(
        self,
        num_steps: int = 1,
        under_way: ActiveLoaders | None = None,
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self._num_steps = num_steps
        self.under_way = under_way or ActiveLoaders()
        self._own: set[int] = set()  # the ids of the iterations that report to this loop
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.joined: JoinedRanks | None = None  # the ranks to agree with, inside `join_uneven_inputs`
        self.backwards = 0  # passes; what an optimizer has not stepped on since is unfinished
        self.keeps_loss = False  # `loss` is wanted
        self.loss: tuple[Tensor, float | Tensor] | None = None  # of the latest `backward`, with its number of items
        self.at_boundary: Callable[[], None] | None = None  # may raise SystemExit to end the loop there
        self._steps = Trace()
        self.optimizers: list[Any] = []  # each an `AcceleratedOptimizer`, in the order they were made
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, windows and optimizers of a copy, in which no loader is under way."""
        left_out: dict[str, Any] = {
            "under_way": copy(self.under_way),
            "joined": None,
            "loss": None,
            "at_boundary": None,
            "resumed_in": None,
            "stepped_in": None,
            "_around": [],
            "_own": set(),
            "_windows": list(self._windows.values()),
        }
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._windows: dict[tuple[int, ...], Window] = {tuple(map(id, one.models)): one for one in state["_windows"]}

    def reset(self) -> None:
        """Forget all windows, iterations and optimizers; one that is still used follows the window entered last."""
        for optimizer in self.optimizers:
            optimizer.window = None
        self.optimizers = []
        self.window = Window(divisor=self._num_steps)  # the one that was entered last
        self._windows = {(): self.window}
        for loader in [one for one in self.loaders if id(one) in self._own]:
            self._forget(loader)
        self._around: list[ActiveLoader] = []  # the iterations around that of the latest step, outermost first
        self.resumed_in: Any = None  # the loader in whose loop the steps were when the run was saved, if it was nested
        self._beginning: Any = None  # the loader whose next iteration starts, at a boundary right before it
        self._is_between = False  # at a boundary
        self.told: set[str] = set()  # the kinds of differences after a resume that a save has named
        self._seen = 0  # how many there were at the last micro-batch
        self.stepped_in: ActiveLoader | None = None  # the iteration of the steps since the last boundary

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for window in self._windows.values():
            window.divisor = value

    @property
    def has_one_window(self) -> bool:
        return len(self._windows) <= 2  # the one for all, and at most one of its own

    @property
    def sync_gradients(self) -> bool:
        return self.window.complete

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        for window in self._windows.values():
            window.complete = value

    @property
    def step(self) -> int:
        """The micro-batches of the window that was entered last, since the data began."""
        return self.window.step

    @step.setter
    def step(self, value: int) -> None:
        for window in self._windows.values():
            window.step = value

    ends = Forward[UnevenDataCheck | None]("under_way.ends")
    loaders = Forward[list[ActiveLoader]]("under_way.loaders")

    @property
    def _followed(self) -> list[ActiveLoader]:
        """The active iterations of this loop's own loaders, or of all loaders if it has none."""
        return [one for one in self.loaders if id(one) in self._own] or self.loaders

    @property
    def current(self) -> ActiveLoader | None:
        """The iteration that handed out the latest batch, among those that are still under way."""
        return self.loaders[-1] if self.loaders else None

    @property
    def end_of_dataloader(self) -> bool:
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the final global batch that are no padding; 0: all of them, -1: not known or no loader."""
        return self.loaders[-1].remainder if self.loaders else -1

    @property
    def position(self) -> str | None:
        return self.loaders[-1].position if self.loaders else None

    def observe(self, observer: Observer) -> None:
        """Tell `observer` where iterations start and end, after those that came before it, as long as it exists."""
        self.under_way.observers[observer] = None

    def begin(self, loader: Any) -> None:
        for observer in list(self.under_way.observers):
            observer.iteration_starts(loader)
        if self.stepped_in is not None and self.stepped_in.loader.base_dataloader is loader.base_dataloader:
            self.boundary(before=loader)

    def step_attempted(self) -> None:
        """Called after each attempted step of an optimizer."""
        source = self.around(self._steps)
        if self.at_boundary is not None:
            self.stepped_in = source
        start = -1 if source is None else self.under_way.starts.get(id(source), -1)
        self._around = [one for one in self._followed if self.under_way.latest[id(one)] < start]

    def nesting(self) -> tuple[list[ActiveLoader], Any]:
        """Return the iterations around the loop of the steps, outermost first, and the loader of that loop.

        What each of those has in hand is not done: the loop in it had started when it was handed out. Once that loop is
        over, the one around it takes its place.
        """
        source, fresh = self._steps.source, self._since(self._steps.seen)
        if self._beginning is not None:  # the loop of the latest step was left, and nothing was done with later batches
            known = set(map(id, self._around))
            return [one for one in self._followed if id(one) in known or one in fresh], self._beginning
        around = [one for one in self._around if any(one is other for other in self._followed)]
        if not around:
            return [], None
        if source is not None and any(source is one for one in self._followed):
            return around, source.loader
        return around[:-1], around[-1].loader

    @property
    def is_nesting_unclear(self) -> bool:
        """Whether a loop over another loader has started in that of the steps so far, which it may make from now on."""
        starts, last = self.under_way.starts, self.under_way.latest.get(id(self._steps.source))
        return last is not None and not self._is_between and any(starts[id(one)] > last for one in self._followed)

    def asked_for_next(self, loader: ActiveLoader) -> None:
        """Called where the loop comes back for another batch. A step since the last one is over, scheduler and all.

        Replicas that train apart and may have different numbers of batches are at one boundary between iterations only.
        """
        if loader is not self.stepped_in:
            return
        if loader.position is None or not any(optimizer.in_lockstep for optimizer in self.optimizers):
            self.boundary()

    def boundary(self, before: Any = None) -> None:
        """Pass a boundary between two steps: all of one is done, and nothing of the next.

        Ranks that answer each other's collectives pass none.

        Args:
            before: the loader whose next iteration starts right after it, if one does.
        """
        if self.at_boundary is not None and self.joined is None:
            self.stepped_in, self._beginning, self._is_between = None, before, True
            self.at_boundary()
            self._beginning, self._is_between = None, False

    def enter(self, loader: ActiveLoader, batch: Any = _NO_BATCH, *, again: bool = False) -> None:
        """Take `loader` as the current one: it starts, or it hands out a batch.

        Args:
            again: the batch was in hand when the run was saved, in a loop inside of this loader's.
        """
        under_way, key = self.under_way, id(loader)
        under_way.handed_out += 1
        self._own.add(key)
        under_way.starts.setdefault(key, under_way.handed_out)
        if under_way.counts_samples and batch is not _NO_BATCH:
            under_way.samples[key] = self.samples_of(loader) + (batch_size_of(batch) or 0)
        under_way.latest[key] = 0 if again else under_way.handed_out  # the first one is no sign of its loop
        if self.ends is not None and batch is not _NO_BATCH:
            self.ends.publish(loader)
        if len(self.loaders) > 1:
            start, others = under_way.starts[key], [id(other) for other in self._followed if other is not loader]
            loader.is_beside = any(under_way.starts[other] < start < under_way.latest[other] for other in others)
        if self.current is not loader:
            under_way.loaders = [*(other for other in self.loaders if other is not loader), loader]

    def leave(self, loader: ActiveLoader, at_end: bool = False) -> None:
        """Forget `loader`, if that was not done: its iteration came to its end, or was broken off or thrown away."""
        if all(other is not loader for other in self.loaders):
            return
        self._forget(loader)
        if self.ends is not None and at_end and loader.num_batches == 0:
            self.ends.publish(loader)
        for observer in list(self.under_way.observers):
            observer.iteration_ended(loader, at_end)

    def _forget(self, loader: ActiveLoader) -> None:
        self._own.discard(id(loader))
        under_way = self.under_way
        under_way.loaders = [other for other in self.loaders if other is not loader]
        for known in (under_way.latest, under_way.starts, under_way.samples):
            known.pop(id(loader), None)

    def samples_of(self, loader: ActiveLoader) -> int:
        """Return how many samples an iteration under way has handed out on this process, if they are counted."""
        return self.under_way.samples.get(id(loader), 0)

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Return where the accumulation windows stand. Models are identified by their first places in `models`."""
        places = {id(model): place for place, model in reversed(list(enumerate(models)))}
        return {
            "windows": [
                {
                    "models": [places[id(model)] for model in window.models],
                    "is_latest": window is self.window,
                    **{name: getattr(window, name) for name in _KEPT},
                }
                for window in self._windows.values()
                if all(id(model) in places for model in window.models)
            ]
        }

    def load_state_dict(self, saved: dict[str, Any], models: Sequence[nn.Module]) -> None:
        """Take over what `state_dict` returned; LookupError or TypeError if it is of other models, or no state."""
        chosen = [tuple(models[place] for place in one["models"]) for one in saved["windows"]]
        values = [{name: one[name] for name in _KEPT} for one in saved["windows"]]
        for key, kept, one in zip(chosen, values, saved["windows"], strict=True):
            window = self.window_of(key)
            for name, value in kept.items():
                setattr(window, name, value)
            window.source = None  # the loop around the next micro-batch is another one
            if one["is_latest"]:
                self.window = window
        for optimizer in self.window.optimizers:
            optimizer.window = self.window

    def window_of(self, models: tuple[nn.Module, ...]) -> Window:
        """Return the window that `models` accumulate in; the optimizers that train them follow it from now on."""
        if self.window.models == models:
            return self.window
        key = tuple(map(id, models))
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window(models, self._num_steps)
            window.optimizers = [one for one in self.optimizers if one.owns(window.parameters())]
        for optimizer in window.optimizers:
            optimizer.window = window
        return window

    def adopt(self, optimizer: Any) -> None:
        """Take an optimizer into the loop; it follows the windows of the models that it trains."""
        self.optimizers.append(optimizer)
        for window in self._windows.values():
            if optimizer.owns(window.parameters()):
                window.optimizers.append(optimizer)
                optimizer.window = window
        if optimizer in self.window.optimizers:
            optimizer.window = self.window

    def advance(self, window: Window | None = None) -> bool:
        """Count one micro-batch of `window` (of the one entered last when None); return whether it completes it."""
        if window is None:
            window = self.window
        self.window = window
        num_steps = self._num_steps
        if window.complete:
            window.size, window.items, window.scale = 0, 0.0, None
        window.size += 1
        window.divisor = num_steps
        window.step += 1
        source = self.around(window)
        ends = self.sync_with_dataloader and source is not None and source.end_of_dataloader
        if self.joined is not None and num_steps > 1:
            # All ranks synchronize or none does, so if one rank's data end the windows of all are complete.
            ends = self.joined.any(ends or window.step % num_steps == 0)
        if ends:
            window.step = 0
            window.divisor = min(window.size, num_steps)  # a short last window is the mean of what is in it
        window.complete = window.step % num_steps == 0
        return window.complete

    def around(self, trace: Trace, is_likely: Callable[[Any], bool] = lambda loader: True) -> ActiveLoader | None:
        """Return the loader of the loop around what happens now, such as a micro-batch; a window ends where it ends.

        It is the first that handed out a batch since the last micro-batch of any window, and stays the same as long as
        it hands out a batch each time that this happens, whatever else is iterated inside its loop. When it is iterated
        again it is the one again.

        Args:
            is_likely: returns whether a loader comes before those for which it returns False, if there are several.
        """
        followed = self._followed
        if trace.source is None or not followed or trace.source is not followed[-1]:
            fresh = self._since(trace.seen)
            before = trace.source
            if not any(before is one for one in fresh or followed):
                loader = self.resumed_in if before is None else before.loader
                again = [one for one in fresh if one.loader is loader]
                found = sorted(again or self._since(self._seen) or fresh, key=lambda one: not is_likely(one))
                trace.source = next(iter(found), None)
        trace.seen = self._seen = self.under_way.handed_out
        return trace.source

    def _since(self, count: int) -> list[ActiveLoader]:
        """Return the loaders whose latest batch came after the first `count` of all, the one of the latest last."""
        return [loader for loader in self._followed if self.under_way.latest[id(loader)] > count]


class LoopView:
    """Where a training loop stands, under the names by which scripts and trainers read it; it owns nothing."""

    sync_gradients = Forward[bool](
        "_loop.sync_gradients", "Whether the current micro-batch completes its accumulation window.", unchecked
    )
    num_steps = Forward[int]("_loop.num_steps", "Micro-batches in one accumulation window.")
    sync_with_dataloader = Forward[bool](
        "_loop.sync_with_dataloader", "Whether the last batch of a loader completes its window."
    )
    end_of_dataloader = Forward[bool](
        "_loop.end_of_dataloader", "Whether the latest batch was the last one of its loader."
    )
    remainder = Forward[int](
        "_loop.remainder",
        "Samples of the final global batch that are no padding; 0: all of them, -1: not known or no loader.",
    )
    is_xla_gradients_synced = False  # XLA is not supported

    _loop: Forward[LoopState]

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    @property
    def active_dataloader(self) -> Any:
        """The loader that handed out the latest batch, None outside of all loops over loaders."""
        current = self._loop.current
        return None if current is None else current.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, the current one last."""
        return [under_way.loader for under_way in self._loop.loaders]

    in_dataloader = Forward[bool](
        lambda self: self.active_dataloader is not None, "Whether a loader is being iterated."
    )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Return whether the micro-batch in hand completes its window, for loops that count on their own."""
        self._loop.sync_gradients = sync_gradients
