# SPDX-License-Identifier: Apache-2.0
"""The table of all that a run keeps in its checkpoints, and what is done with each of its parts to save and to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farflung.checkpoint.entries import Entry
from farflung.checkpoint.manager import CheckpointGroup
from farflung.checkpoint.reader import damage_as
from farflung.comm.recording import lasting
from farflung.resume import lazy
from farflung.resume.loops import OuterLoops
from farflung.resume.models import Models, OwnBuffers
from farflung.resume.objects import Loaders, RegisteredObjects, RNGStates, Scaler, Schedulers
from farflung.resume.optimizers import Optimizers
from farflung.resume.part import Loading, Part, Saving
from farflung.resume.run import Run
from farflung.resume.window import AccumulationWindow

if TYPE_CHECKING:
    from farflung.checkpoint.sharded import ShardPlanner

# In the order in which they are saved, read, loaded and filled. Weights are mapped into memory, so they come after the
# optimizers: by then the reading that checks the files has fetched them, in larger pieces than the mapping would.
PARTS: tuple[type[Part], ...] = (
    Optimizers,
    Models,
    OwnBuffers,
    Schedulers,
    RegisteredObjects,
    Scaler,
    AccumulationWindow,
    Loaders,
    RNGStates,
    OuterLoops,
)
_ORIGINS = {"loop_state": "the training loop", "outer_state": "the outer loop"}  # by folder, for errors


def collect(run: Run, group: CheckpointGroup, doing: str, saving: Saving) -> list[Entry]:
    """Return what this rank writes: a collective of all ranks of `group`, on which errors are the same."""
    parts = [kind(run) for kind in PARTS]
    if run.spread is not None:
        group.agree(doing, lambda: _each(part.check for part in parts))
    if run.gathers:
        for part in parts:
            part.gather(saving)
    entries: list[Entry] = []
    planners: list[ShardPlanner] = []

    def look() -> list[object]:
        entries.extend(entry for part in parts for entry in part.replicated(saving))
        files: dict[str, dict[str, object]] = {}
        for part in parts:
            for name, state in part.per_rank(saving).items():
                files.setdefault(name, {}).update(state)
        entries.extend(Entry(name, state, origin=_ORIGINS.get(name.split("/")[0], "")) for name, state in files.items())
        if run.spread is not None and not run.gathers:
            takes_part = not run.replicas_differ or group.leader in run.spread[0]
            folders = {name: state for part in parts for name, state in part.sharded().items()}
            planners.extend(lazy.sharded.ShardPlanner(*folder, saving.leads, takes_part) for folder in folders.items())
        return [planner.plan for planner in planners]

    plans = group.agree(doing, look)
    folders = [planner.entry([plan[k] for plan in plans], group.exchange.rank) for k, planner in enumerate(planners)]
    return entries + folders


@lasting()
def load(run: Run, group: CheckpointGroup, doing: str, source: Loading, verify: Callable[[], None]) -> None:
    """Read all of a checkpoint, check it, and continue from it: a collective of all ranks of `group`.

    `verify` is called when all has been read, and raises if that is not what was written. After an error on one rank,
    all is as it was on all of them.
    """
    parts = [kind(run) for kind in PARTS]
    if run.load_hooks:
        group.agree(doing, lambda: _each((part.begin for part in parts), source))

    def read() -> None:
        try:
            with damage_as(f"{source.checkpoint.folder} holds something other than the state of a run"):
                if source.is_other:
                    source.note_others()
                for part in parts:
                    part.read(source)
        finally:  # what is wrong with the bytes explains what is wrong with their content
            verify()

    group.agree(doing, read)
    with ExitStack() as undo:
        group.agree(doing, lambda: _each((part.load for part in parts), undo))
        undo.pop_all()
    group.agree(doing, lambda: _each(part.fill for part in parts))


def _each(methods: Iterable[Callable[..., None]], *arguments: object) -> None:
    for method in methods:
        method(*arguments)
