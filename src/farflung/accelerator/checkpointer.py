# SPDX-License-Identifier: Apache-2.0
"""The session's side of checkpoints: what is written when, and how one is found, checked and gone on from."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from farflung.accelerator import contents, restore, states
from farflung.accelerator.contents import WholeStates
from farflung.accelerator.restore import Loaded
from farflung.accelerator.run import Run
from farflung.accelerator.session import flushed
from farflung.base.errors import CheckpointError, ConfigError, FarflungError
from farflung.base.former_name import FORMER_NAME
from farflung.base.optional import installed_version
from farflung.base.words import counted
from farflung.checkpoint import atomic, discovery, layout
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.manager import Busy, CheckpointGroup, Saver, SaveRequest
from farflung.comm.shards import model_has_dtensor
from farflung.config.handlers import ProjectConfiguration

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from farflung.checkpoint.sharded import ShardPlanner

Path_ = str | os.PathLike[str]
T = TypeVar("T")


class Checkpointer:
    """Writes and reads the checkpoints of one Accelerator.

    Attributes:
        custom: registered objects.
        save_hooks, load_hooks: called with the models before they are written or read.
    """

    def __init__(self, run: Run, project: ProjectConfiguration) -> None:
        self.custom = run.custom
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._run = run
        self._project = project
        self._saver: Saver | None = None

    @property
    def saver(self) -> Saver:
        """What writes; made when it is first needed, as it may be a collective."""
        if self._saver is None:
            world = self._run.world
            leader = world.rank - world.local_rank if self._project.save_on_each_node else 0
            self._saver = Saver(CheckpointGroup(world.exchange, leader))
            atexit.register(_report_last_failure, weakref.ref(self._saver))
        return self._saver

    @property
    def automatic(self) -> Path | None:
        """The folder of automatic naming, None where that is off."""
        if not self._project.automatic_checkpoint_naming:
            return None
        if self._project.project_dir is None:
            raise ConfigError(
                "automatic_checkpoint_naming=True needs a project_dir. Set it in the ProjectConfiguration."
            )
        return Path(self._project.project_dir) / layout.CHECKPOINTS

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a model, with agreed weights where there are such."""
        return self._run.outers.state_of(module)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written in the background; raise if it could not be."""
        if self._saver is not None:
            self._saver.settle()

    # ---- saving

    def save(self, output_dir: Path_ | None, safe: bool, block: bool, busy: Busy) -> Path:
        """Write a checkpoint and return its folder; see `Checkpointing.save_state`."""
        flushed(self._run.world.exchange)
        saver = self.saver
        saver.settle(busy)
        folder = self._folder(output_dir)
        request = self._request(Path(os.path.abspath(folder)))  # the script may change its directory meanwhile
        staged = saver.begin(request)
        parts: list[Entry] = []
        planners: list[ShardPlanner] = []
        try:
            if self._run.spread is not None:
                saver.group.agree(request.doing, lambda: contents.check_optimizers(self._run))
            whole = contents.gathered(self._run, self._writes) if self._run.gathers else WholeStates()
            plans = saver.group.agree(request.doing, lambda: self._collect(staged.folder, safe, whole, parts, planners))
            for k, planner in enumerate(planners):
                parts.append(planner.entry([plan[k] for plan in plans], saver.group.exchange.rank))
        except BaseException:
            staged.discard()
            raise
        if block:
            saver.write(request, staged, parts)
        else:
            saver.write_behind(request, staged, parts)
        self._project.iteration += 1
        return folder

    def _folder(self, output_dir: Path_ | None) -> Path:
        """Return where the next checkpoint goes, in the words of the script."""
        if self.automatic is not None:
            return self.automatic / layout.checkpoint(self._project.iteration)
        if output_dir is None:
            raise ConfigError(
                "save_state() without a folder needs automatic_checkpoint_naming=True. Name a folder, or set it."
            )
        return Path(os.path.expanduser(output_dir))

    def _request(self, target: Path) -> SaveRequest:
        run, project = self._run, self._project
        facts = {
            "step": run.loop.step,
            "optimizer_steps": [optimizer.completed_steps for optimizer in run.registry.optimizers],
            "iteration": project.iteration,
            "world_size": run.world.size,
            "written_at": time.time(),
            "versions": {name: installed_version(name) for name in ("farflung", "torch")},
        }
        has_machines = project.save_on_each_node and run.world.local_size < run.world.size
        if has_machines and run.spread is not None and not run.gathers:
            raise ConfigError(
                "save_on_each_node=True keeps a whole checkpoint on each machine, but the shards of this model are "
                "spread over several. Use a folder that all machines share, or state_dict_type='FULL_STATE_DICT'."
            )
        if not project.automatic_checkpoint_naming:
            return SaveRequest(target, None, facts)
        automatic = target.parent
        aside = _aside(automatic)

        def prune() -> None:
            atomic.sweep(aside)
            if project.total_limit is not None:
                old = sorted(_numbered(automatic) - {target}, key=_number)
                for folder in old[: max(0, len(old) + 1 - project.total_limit)]:
                    atomic.remove(folder, aside)

        def check() -> None:
            others = sorted(_numbered(automatic), key=_number)
            if others and _number(others[-1]) >= _number(target):
                raise ConfigError(
                    f"{automatic} already has {others[-1].name} of another run, and {target.name} would be mixed up "
                    "with its checkpoints. Resume it with load_state(), use another project_dir, or delete or move "
                    "the old checkpoints."
                )

        return SaveRequest(target, aside, facts, prune, check)

    def _collect(
        self, folder: Path, safe: bool, whole: WholeStates, parts: list[Entry], planners: list[ShardPlanner]
    ) -> list[SavePlan]:
        """Collect what this rank writes, and what it could write of that which several ranks write together."""
        run = self._run
        models = run.bare_models
        sharded = [model_has_dtensor(model) for model in models]
        weights = [model.state_dict() for model, is_sharded in zip(models, sharded, strict=True) if not is_sharded]
        for hook in self.save_hooks.values():
            hook(models, weights, os.fspath(folder))
        waiting = list(weights)
        for k, is_sharded in enumerate(sharded):
            if k in whole.gathered:
                whole.models.append(whole.gathered[k])
            elif waiting and not is_sharded:
                whole.models.append(waiting.pop(0))
        leader = self.saver.group.leader
        if run.world.rank in range(leader, leader + run.world.local_size):
            shared = contents.shared_entries(run, whole, safe)
            parts += [part for part in shared if self._writes(part.name)]
        parts += contents.own_entries(run, run.world.rank == leader)
        if not run.gathers:
            planners += contents.planners(run, leader)
        return [planner.plan for planner in planners]

    def _writes(self, name: str) -> bool:
        """Say whether this rank writes a file that is the same on all ranks.

        A machine's ranks share the writing: the leader has the weights, which hooks may have changed there alone.
        """
        run, leader = self._run, self.saver.group.leader
        helpers = 1 if run.replicas_differ or run.custom else run.world.local_size
        big = {layout.optimizer(k): (1 + k) % helpers for k in range(len(run.registry.optimizers))}
        return leader + big.get(name, 0) == run.world.rank

    # ---- loading

    def load(self, input_dir: Path_ | None, strict: bool) -> None:
        """Read a checkpoint and go on from it; see `Checkpointing.load_state`."""
        flushed(self._run.world.exchange)
        self.saver.settle()
        with ThreadPoolExecutor(1, "farflung verifier") as background:
            self._load(input_dir, strict, background)

    def _load(self, input_dir: Path_ | None, strict: bool, background: ThreadPoolExecutor) -> None:
        run, group, doing = self._run, self.saver.group, "Loading a checkpoint"
        automatic = self.automatic
        verification: Future[None] | None = None

        def choose_folder() -> discovery.Found | None:
            nonlocal verification
            if not group.leads:
                return None
            folder, has_several = discovery.resolve(input_dir, automatic)
            if has_several:
                found = discovery.newest(folder)
            else:
                found = _explained(discovery.find, folder)
                verification = background.submit(_explained, discovery.verify, found)  # while the files are read
                if self.load_hooks:  # they may read them themselves, and change the models
                    verification.result()
            return found

        chosen: discovery.Found = group.agree(doing, choose_folder)[group.leader]
        folder, manifest = chosen.folder, chosen.manifest
        size, steps = (None, None) if manifest is None else (manifest.world_size, manifest.optimizer_steps)
        places = list(enumerate(run.bare_models))
        if self.load_hooks:
            group.agree(doing, lambda: self._call_load_hooks(places, os.fspath(folder)))
        read: list[tuple[Loaded, list[dict[str, Any]]]] = []

        def look() -> None:
            found = restore.read(run, folder, size)
            found.steps = steps
            weights = [states.read_model(one, folder, k, strict, k - number) for number, (k, one) in enumerate(places)]
            if run.outers.can_begin_here and not found.loops:
                found.notes.append("it was written without outer loops: they start from its weights")
            elif len(found.loops) < len(run.outers.live):
                raise CheckpointError(
                    f"{folder} has the state of {counted(len(found.loops), 'outer loop')}, but here there are "
                    f"{len(run.outers.live)}. "
                    "Call load_state before you open them."
                )
            read.append((found, weights))

        def look_and_verify() -> None:
            try:
                look()
            finally:  # what is wrong with the bytes explains what is wrong with their content
                if verification is not None:
                    verification.result()
                _explained(discovery.check_unchanged, chosen)

        group.agree(doing, look_and_verify)
        found, weights = read[0]
        undo: list[restore.Undo] = []
        try:
            group.agree(doing, lambda: undo.extend(restore.apply(run, found)))
        except BaseException:
            for step in undo:
                step()
            raise
        group.agree(doing, lambda: self._load_weights(found, [model for _, model in places], weights, strict))
        self._count_on(folder, automatic)
        self._report(folder, size, chosen.passed, found)

    def _call_load_hooks(self, places: list[tuple[int, nn.Module]], folder: str) -> None:
        """Call the hooks with the models that are not sharded, and leave out of `places` those that they take."""
        whole = [model for _, model in places if not model_has_dtensor(model)]
        given = list(whole)
        for hook in self.load_hooks.values():
            hook(given, folder)
        taken = [model for model in whole if all(model is not other for other in given)]
        places[:] = [(k, model) for k, model in places if all(model is not other for other in taken)]

    def _load_weights(
        self, found: Loaded, models: list[nn.Module], weights: list[dict[str, Any]], strict: bool
    ) -> None:
        for model, named in zip(models, weights, strict=True):
            joined = {name: value for name, value in found.weights.items() if name in named}
            states.load(model, {**named, **joined}, strict)
        restore.apply_own_buffers(self._run, found.own)
        self._run.outers.load(found.loops)

    def _count_on(self, folder: Path, automatic: Path | None) -> None:
        """Let the next automatic checkpoint come after the one that was loaded, and after any that is there."""
        if (
            automatic is not None
            and folder.resolve().parent == automatic.resolve()
            and layout.NAMED.fullmatch(folder.name)
        ):
            self._project.iteration = max([self._project.iteration, *(1 + _number(n) for n in _numbered(automatic))])

    def _report(self, folder: Path, size: int | None, passed: tuple[str, ...], found: Loaded) -> None:
        """Tell people, on the first process, where the run goes on, and what is not as it was."""
        lines = [f"passed over: {reason}" for reason in passed]
        lines.append(f"loaded {folder}")
        if layout.manifest(folder).name == layout.FORMER_MANIFEST:
            lines.append(f"it was written when this package was called {FORMER_NAME}")
        loaders = self._run.registry.loaders
        if found.own is not None:
            lines += [
                f"loader {k + 1} of {len(loaders)} {loader.describe_position()}" for k, loader in enumerate(loaders)
            ]
        elif loaders:
            lines.append(
                "it does not record the position in the data: loops start at the beginning, or use skip_first_batches"
            )
        lines += found.notes
        if self._run.world.is_main:
            print("\n".join(f"farflung: {line}" for line in lines), file=sys.stderr)


def _explained(look: Callable[[Any], T], at: Any) -> T:
    try:
        return look(at)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Nothing was loaded.") from error


def _numbered(folder: Path) -> set[Path]:
    if not folder.is_dir():
        return set()
    return {path for path in folder.iterdir() if layout.NAMED.fullmatch(path.name) and path.is_dir()}


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name[len(layout.PREFIX) :])


def _aside(automatic: Path) -> Path:
    """Return where numbered checkpoints are written: outside of their folder, where others look for numbers alone."""
    outside = automatic.parent
    if os.path.exists(automatic) and automatic.stat().st_dev != outside.stat().st_dev:
        return automatic
    return outside


def _report_last_failure(saver: weakref.ref[Saver]) -> None:
    found = saver()
    if found is not None:
        try:
            found.settle()
        except FarflungError as error:
            print(f"farflung: the last checkpoint was not written: {error}", file=sys.stderr)
