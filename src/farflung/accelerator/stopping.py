# SPDX-License-Identifier: Apache-2.0
"""Saves and ends a run where its scheduler asks for that: all ranks at the same step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from farflung.base.errors import ConfigError
from farflung.checkpoint import atomic
from farflung.checkpoint.manager import CheckpointGroup
from farflung.comm.exchange import Exchange
from farflung.process.failure import PREEMPTED, leave_note
from farflung.process.log import get_logger
from farflung.process.preemption import REQUEUE, Preemption

if TYPE_CHECKING:
    from farflung.process.world import World


class Stopping:
    """Saves at a boundary between two steps, if any rank has got SIGTERM or SIGUSR1, and ends this rank.

    Args:
        folder: of numbered checkpoints, which all ranks must see. A collective.
        save: writes the next one, and returns it.
        end: ends what is open, when it has been saved.
        leader: the rank that makes this one's checkpoints.

    Attributes:
        is_resumed: the script has loaded a checkpoint, or has found none.

    Raises:
        ConfigError: nothing can be written there, or ranks don't see what others write there; or replicas come and go.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        save: Callable[[Path], Path],
        end: Callable[[], None],
        leader: int = 0,
    ) -> None:
        if world.place.member is not None:
            raise ConfigError(
                "save_on_signal is for fixed ranks. Replicas that come and go sign out on SIGTERM and SIGUSR1; the "
                "others, or the address of --meet, keep the state."
            )
        self.folder, self.is_resumed = folder.expanduser().absolute(), False
        self._world, self._save, self._end = world, save, end
        self._has_boundaries = self._has_warned = False
        _check_folder(self.folder, world.exchange, leader)
        self.signals = Preemption(world.rank, world.size)
        if world.watchdog is not None:
            world.watchdog.preemption = self.signals

    def boundary(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # which reads ahead of the training
            return
        if not self._has_boundaries and not self.is_resumed and self._world.is_main and self.has_checkpoints():
            raise ConfigError(
                f"{self.folder} has checkpoints of an earlier start of this run, but the script trains from the "
                "beginning. Call accelerator.resume() after prepare, or name another folder for save_on_signal."
            )
        self._has_boundaries = True
        if self.signals.passes():
            self._save_and_end()

    def stray_step(self) -> None:
        if not self._has_boundaries and not self._has_warned and self.signals.why:
            self._has_warned = True
            get_logger(__name__).warning(
                f"{self.signals.why}, but nothing can be saved: this loop takes its batches from no prepared loader. "
                "Let it call accelerator.stop_if_signalled() at the end of each step."
            )

    def has_checkpoints(self) -> bool:
        return bool(atomic.numbered(self.folder))

    def _save_and_end(self) -> NoReturn:
        saved = self._save(self.folder)
        if self._world.is_main:
            said = f"{self.signals.why}: saved {saved}, from which accelerator.resume() continues"
            print(f"farflung: {said} (exit code {REQUEUE})", file=sys.stderr, flush=True)
        leave_note(PREEMPTED)
        self._end()
        raise SystemExit(REQUEUE)


def _check_folder(folder: Path, exchange: Exchange, leader: int) -> None:
    """Raise ConfigError on all ranks if one of them does not see there what the leading one writes."""
    group, doing = CheckpointGroup(exchange, leader, "Accelerator"), "Looking at the folder of save_on_signal"
    with ExitStack() as stack:

        def write() -> str:
            if not group.leads:
                return ""
            try:
                folder.mkdir(parents=True, exist_ok=True)
                return Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix="."))).name
            except OSError as error:
                why = f"where nothing can be written: {error.strerror}. Name another folder."
                raise ConfigError(f"save_on_signal is {str(folder)!r}, {why}") from None

        def look() -> None:
            if not (folder / written).is_dir():
                why = f"but this rank does not see what rank {leader} writes there. Name one that all machines share."
                raise ConfigError(f"save_on_signal is {str(folder)!r}, {why}")

        written = group.agree(doing, write)[leader]
        group.agree(doing, look)
