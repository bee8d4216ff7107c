# SPDX-License-Identifier: Apache-2.0
"""The base class of all parts of a run that are saved, and the checkpoint that one rank writes or reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from farflung.base.words import counted, numbered
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.entries import Entry, Staging
from farflung.checkpoint.manifest import Manifest
from farflung.resume.run import Run


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written, as one rank sees it."""

    folder: Path  # where its files are meanwhile
    safe: bool  # weights are written as safetensors
    leads: bool  # this rank writes what is the same on all
    writes: Callable[[str], bool]  # says so of the file of a name, as some of them are shared out


@dataclass
class Loading:
    """A checkpoint that is being read, as one rank sees it."""

    checkpoint: Checkpoint
    rank: int
    size: int  # how many ranks there are
    strict: bool = True  # models need all weights that they have, and no others
    ranks_here: Sequence[int] | None = None  # whose own states the folder has, if all ranks wrote it; None: all
    notes: list[str] = field(default_factory=list)  # what could not be the same, for people

    @cached_property
    def _manifest(self) -> Manifest | None:
        """The checkpoint's, unless no rank wrote its own state: then it is another program's, and may be converted."""
        found = self.checkpoint.manifest
        has_own = found is not None and any(paths.loop_state(rank) in found.files for rank in range(found.world_size))
        return found if has_own else None

    @property
    def old_size(self) -> int:
        """How many ranks wrote it; as many as here, if it does not say."""
        return self.size if self._manifest is None else self._manifest.world_size

    @cached_property
    def known(self) -> list[int]:
        """The ranks that wrote their own states into it: all but those that did not call `save_state`."""
        manifest = self._manifest
        ranks = range(self.old_size)
        return [rank for rank in ranks if manifest is None or paths.loop_state(rank) in manifest.files]

    @property
    def lacks_some(self) -> bool:
        """Whether some ranks have not written their own states."""
        return bool(self.known) and not set(self.ranks_here or range(self.old_size)) <= set(self.known)

    @property
    def is_other(self) -> bool:
        """Whether ranks continue from the state of others: another number of them wrote it, or some wrote nothing."""
        return self.old_size != self.size or self.lacks_some

    @cached_property
    def own(self) -> dict[str, Any] | None:
        """What this rank alone knew; None if another number of ranks, or another program, wrote the checkpoint."""
        return None if self.is_other else self.checkpoint.read_if_there(paths.loop_state(self.rank))

    @cached_property
    def owns(self) -> list[dict[str, Any]]:
        return [self.checkpoint.read(paths.loop_state(rank)) for rank in self.known]

    @property
    def first(self) -> dict[str, Any] | None:
        """What this rank knew, or the first one of another number."""
        return self.owns[0] if self.is_other else self.own

    @cached_property
    def apart(self) -> dict[str, Any]:
        """What this rank had of its own because replicas train apart: outer loops, and states that are usually one."""
        state = None if self.is_other else self.checkpoint.read_if_there(paths.outer_state(self.rank))
        return state or {}

    def apart_of(self, kind: str, index: int) -> Any:
        """Return the state that this rank had of its own of something that is usually one; None: it had none."""
        return self.apart[kind][index] if index < len(self.apart.get(kind, ())) else None

    def note_others(self) -> None:
        """Record what the ranks that have written no state of their own continue from."""
        old, size = self.old_size, self.size
        if self.lacks_some:
            known = numbered("rank", self.known)
            self.notes.append(
                f"not all processes called save_state: positions in the data are those of {known}, and what the others "
                "knew is missing"
            )
        if old != size:
            self.notes.append(
                f"it was written by {counted(old, 'process')} and resumes with {size}: steps see a different number of "
                "samples"
            )
        new = [rank for rank in range(size) if rank not in self.known]
        if new:
            one, several = "is new: its random numbers begin a stream", "are new: their random numbers begin streams"
            self.notes.append(f"{numbered('rank', new)} {one if len(new) == 1 else several} of their own")


class Part:
    """Something of a run that is saved, in its three scopes: the same on all ranks, spread as shards, each rank's own.

    `farflung.resume.table` lists them. To save something more, write a part and list it there. One object serves one
    checkpoint: what `read` finds it keeps for `load` and `fill`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def check(self) -> None:
        """Raise ConfigError if something here can't be saved."""

    def gather(self, saving: Saving) -> None:
        """Gather what is sharded, to be written whole: a collective, called if the run asks for that."""

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        """Return the files of what is the same on all ranks, those that this rank writes."""
        return ()

    def sharded(self) -> Mapping[str, dict[str, Any]]:
        """Return this rank's shards of what is spread over ranks, by the name of the folder."""
        return {}

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        """Return what only this rank knows, by the name of its file: entries, as several parts may share one."""
        return {}

    def begin(self, source: Loading) -> None:
        """Make hooks of the script load what they keep by themselves, before anything is read."""

    def read(self, source: Loading) -> None:
        """Read and check all of it, changing nothing; CheckpointError if it is missing, damaged or of other objects.

        If another number of ranks wrote the checkpoint, take what comes nearest, and note what is not the same.
        """

    def load(self, undo: ExitStack) -> None:
        """Put back what was read, once `undo` has what makes it as it was: a later part or another rank may fail."""

    def fill(self) -> None:
        """Put back what needs no undoing: it was checked, and all ranks have loaded the rest."""


def change(owner: Any, state: Any, undo: ExitStack) -> None:
    """Load a state into an object that can give its own one back."""
    (before,) = Staging().copied([Entry("", owner.state_dict())])
    undo.callback(_restore, owner, before.content)
    owner.load_state_dict(state)


def _restore(owner: Any, state: Any) -> None:
    with suppress(Exception):  # the error that counts is the first one
        owner.load_state_dict(state)
