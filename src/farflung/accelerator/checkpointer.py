# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one Accelerator: choosing the folder, saving, loading, and reporting what was loaded."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farflung.accelerator.session import flushed
from farflung.base.checks import Address, check_path, check_place
from farflung.base.errors import CheckpointError, ConfigError, FarflungError, StateError
from farflung.base.events import Kind, record
from farflung.base.optional import installed_version
from farflung.checkpoint import atomic, paths
from farflung.checkpoint.checkpoint import Checkpoint, newest, resolve
from farflung.checkpoint.manager import Busy, CheckpointGroup, CheckpointSaver, SaveRequest
from farflung.checkpoint.remote import LazyFiles, RemoteCheckpoints, numbers_in
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.comm.matching import Made, match
from farflung.comm.torch_group import TorchGroup
from farflung.config.handlers import ProjectConfiguration
from farflung.resume import table
from farflung.resume.part import Loading, Saving
from farflung.resume.run import Run

Path_ = str | os.PathLike[str]


class Checkpointer:
    """Writes and reads the checkpoints of one Accelerator."""

    def __init__(self, run: Run, project: ProjectConfiguration) -> None:
        self._run = run
        self._project = project
        world = run.world
        leader = world.rank - world.local_rank if project.save_on_each_node else 0
        self._everyone = CheckpointGroup(world.exchange, leader, "save_state")
        self._said_alone = False
        self.saver = CheckpointSaver(self._everyone)
        atexit.register(_report_last_failure, weakref.ref(self.saver))

    @property
    def automatic(self) -> Path | Address | None:
        """The folder or the address of automatic naming, None if that is off."""
        if not self._project.automatic_checkpoint_naming:
            return None
        if self._project.project_dir is None:
            raise ConfigError(
                "automatic_checkpoint_naming=True needs a project_dir. Set it in the ProjectConfiguration."
            )
        return check_place("project_dir", self._project.project_dir) / paths.CHECKPOINTS

    # ---- saving

    @property
    def _keep_local(self) -> Path | None:
        folder = self._project.keep_local
        return None if folder is None else check_path("ProjectConfiguration: keep_local", folder).absolute()

    def save(
        self, output_dir: Path_ | None, safe: bool, block: bool, busy: Busy, series: Path | Address | None = None
    ) -> Path | Address:
        """Write a checkpoint and return its folder or address; see `Checkpointing.save_state`.

        It becomes the next of the numbered checkpoints in `series`; None: of those of automatic naming, if it is on.
        """
        saver, run, project, automatic = self.saver, self._run, self._project, series or self.automatic
        if series is not None:
            folder: Path | Address = series / paths.checkpoint(1 + max(numbers_in(series), default=-1))
        elif automatic is not None:
            if (
                run.slots is not None and run.outers.leads
            ):  # replicas write one after another, each counting its own saves
                project.iteration = max([project.iteration, *(1 + number for number in numbers_in(automatic))])
            folder = automatic / paths.checkpoint(project.iteration)
        elif output_dir is not None:
            folder = check_place("save_state: output_dir", output_dir)
        else:
            raise ConfigError(
                "save_state() without a folder needs automatic_checkpoint_naming=True. Name a folder, or set it."
            )
        saver.group, made = self._group_of("save_state", None if automatic else folder)
        if made == "not rank 0":
            raise StateError(
                f"save_state: rank {run.world.rank} calls it, but rank 0, which writes the weights, does not. Call "
                "it on every process, or on the main process alone."
            )
        saver.settle(busy)
        has_machines = project.save_on_each_node and run.world.local_size < run.world.size
        if has_machines and run.spread is not None and not run.gathers:
            raise ConfigError(
                "save_on_each_node=True keeps a whole checkpoint on each machine, but the shards of this model are "
                "spread over several. Use a folder that all machines share, or state_dict_type='FULL_STATE_DICT'."
            )
        if project.save_on_each_node and isinstance(folder, Address):
            raise ConfigError(
                f"save_on_each_node=True keeps a whole checkpoint on each machine, and {folder} is one place for all "
                "of them. Leave it out, or name a folder."
            )
        run.outers.end_evaluations()
        if made == "some":
            self._say_alone(folder)
        if not run.outers.leads or (made == "some" and run.world.rank != self._everyone.leader):
            project.iteration += 1
            return folder
        # The script may change its directory meanwhile.
        target = folder if isinstance(folder, Address) else Path(os.path.abspath(folder))
        limit, shown = project.total_limit, run.world.is_main
        keeps = self._keep_local if run.world.rank == run.world.local_rank else None  # on the leader's machine
        request = SaveRequest(target, self._facts(), automatic is not None, limit, shown, keeps)
        with saver.begin(request) as staged:
            saving = Saving(staged.folder, safe, saver.group.leads, self._writes)
            saver.write(request, staged, table.collect(run, saver.group, request.doing, saving), block)
        if automatic is not None:  # rank 0 names it, which may have saved alone before
            folder, project.iteration = automatic / staged.target.name, atomic.number_of(staged.target)
        project.iteration += 1
        return folder

    def _group_of(self, call: str, what: Path_ | None) -> tuple[CheckpointGroup, Made]:
        """Return the ranks that make a call together, this one or all, and which ranks make it."""
        world = self._run.world
        made: Made = "all"
        if isinstance(world.group, TorchGroup) and not world.group.is_default:  # it is destroyed
            if required := self._required(call):
                raise StateError(f"{call}: it needs every process, as {required}. Call it before end_training().")
            made = "some"
        elif isinstance(world.group, TorchGroup):
            made = match(world.group, call, None if what is None else os.fspath(what), self._required(call))
        if made == "all":
            flushed(world.exchange)
            return replace(self._everyone, call=call), made
        return CheckpointGroup(Exchange(SoloGroup()), 0, call), made

    def _required(self, call: str) -> str | None:
        """Why no process can save or load alone; None: one can, as it has all that others continue from."""
        run = self._run
        if run.spread is not None:
            return "models are sharded over the processes"
        if call == "load_state" and self._has_replicas:
            return "each process trains a replica of its own"
        return None

    @property
    def _has_replicas(self) -> bool:
        run = self._run
        return run.replicas_differ or bool(run.outers.live or run.outers.waiting)

    def _say_alone(self, folder: Path | Address) -> None:
        if self._said_alone:
            return
        self._said_alone = True
        rank, leader = self._run.world.rank, self._everyone.leader
        steps = ", and what they have trained since the last round" if self._has_replicas else ""
        missing = f"the random states and the positions in the data of the other processes{steps}"
        text = f"rank {rank} saved to {folder} alone: it lacks {missing}"
        if rank != leader:
            why = "as not all processes called save_state, or only after end_training()"
            text = f"rank {leader} saved without rank {rank}, {why}: it lacks {missing}"
        record(Kind.WARNING, message=text)

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self._run.loop.step,
            "optimizer_steps": [optimizer.completed_steps for optimizer in self._run.optimizers],
            "iteration": self._project.iteration,
            "world_size": self._run.world.size,
            "written_at": time.time(),
            "versions": {name: installed_version(name) for name in ("farflung", "torch")},
        }

    def _writes(self, name: str) -> bool:
        """Return whether this rank writes a file that is the same on all ranks.

        A machine's ranks share the writing: the leader has the weights, which hooks may have changed there alone.
        """
        run, leader, group = self._run, self._everyone.leader, self.saver.group
        helpers = 1 if run.replicas_differ or run.custom or group.exchange.size == 1 else run.world.local_size
        big = {paths.optimizer(k): (1 + k) % helpers for k in range(len(run.optimizers))}
        return leader + big.get(name, 0) == run.world.rank

    def open_series(self, folder: Path | Address) -> bool:
        """Make the folder of numbered checkpoints that a signal saves to, or try the address out; a collective.

        Returns:
            whether it has some.

        Raises:
            ConfigError: nothing can be written there, or a rank does not see what its leader writes there.
        """
        group, doing = replace(self._everyone, call="Accelerator"), "Looking at the folder of save_on_signal"
        with ExitStack() as stack:

            def write() -> tuple[str, bool]:
                if not group.leads:
                    return "", False
                if isinstance(folder, Address):
                    try:
                        RemoteCheckpoints(folder).try_out()
                    except (CheckpointError, ValueError) as error:
                        raise ConfigError(f"save_on_signal is {folder!r}, which can't be used. {error}") from None
                    return "", bool(numbers_in(folder))
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    made = stack.enter_context(TemporaryDirectory(dir=folder, prefix="."))
                except OSError as error:
                    why = f"in which nothing can be written: {error.strerror}. Name another folder."
                    raise ConfigError(f"save_on_signal is {str(folder)!r}, {why}") from None
                return Path(made).name, bool(atomic.numbered(folder))

            def look() -> None:
                if isinstance(folder, Path) and not (folder / written[group.leader][0]).is_dir():
                    why = f"but this rank does not see what rank {group.leader} writes there"
                    raise ConfigError(f"save_on_signal is {str(folder)!r}, {why}. Name one that all machines share.")

            written = group.agree(doing, write)
            group.agree(doing, look)
        return bool(written[0][1])

    # ---- loading

    def load(self, input_dir: Path_ | None, strict: bool, series: Path | Address | None = None) -> None:
        """Read a checkpoint and continue from it; see `Checkpointing.load_state`. `series` is that of `save`."""
        run, doing = self._run, "Loading a checkpoint"
        given = None if input_dir is None else check_place("load_state: input_dir", input_dir)
        group, made = self._group_of("load_state", given)
        run.outers.end_evaluations()
        self.saver.settle()
        with ThreadPoolExecutor(1, "farflung verifier") as background, ExitStack() as fetched:
            verification: Future[Checkpoint] | None = None
            is_lazy = not run.load_hooks  # which may read files themselves

            def choose() -> Checkpoint | None:
                nonlocal verification
                if not group.leads:
                    return None
                folder, has_several = resolve(input_dir, self.automatic)
                if isinstance(folder, Address):
                    keep, is_main, is_series = self._keep_local, run.world.is_main, series is not None
                    there: Checkpoint = _explained(
                        lambda at: at.newest(fetched, keep, is_main, is_series, is_lazy), RemoteCheckpoints(folder)
                    )
                    return there
                if has_several or series is not None:
                    return newest(folder, run.world.is_main)
                found: Checkpoint = _explained(Checkpoint.open, folder)
                look = partial(Checkpoint.verify, is_shown=run.world.is_main)
                verification = background.submit(_explained, look, found)  # while the files are read
                if not is_lazy:  # they may change the models, too
                    verification.result()
                return found

            def verify() -> None:
                if verification is not None:
                    verification.result()
                _explained(Checkpoint.check_unchanged, chosen)

            while True:
                chosen: Checkpoint = group.agree(doing, choose)[group.leader]
                if chosen.origin:
                    chosen = self._on_this_machine(group, doing, chosen, fetched, is_lazy)
                source = Loading(chosen, run.world.rank, run.world.size, strict, self._ranks_here)
                try:
                    table.load(run, group, doing, source, verify)
                    break
                except CheckpointError:
                    has_failed = partial(getattr, chosen.fetch_spans, "has_failed", False)
                    if not chosen.lazy or not any(group.agree(doing, has_failed)):
                        raise
                    is_lazy = False  # so that one whose shards are damaged is passed over
        named = chosen.folder.parent.resolve() / chosen.folder.name  # which may be a link, as `latest` may
        places = [Address(chosen.origin)] if chosen.origin else [named, named.resolve()]
        automatic = self.automatic
        numbered = [place.resolve() if isinstance(place, Path) else place for place in (automatic, series) if place]
        if automatic and any(one.parent in numbered and paths.NAMED.fullmatch(one.name) for one in places):
            taken = numbers_in(automatic)  # newer checkpoints than the loaded one keep theirs
            self._project.iteration = max([self._project.iteration, *(1 + number for number in taken)])
        self._report(source, made)

    def _on_this_machine(
        self, group: CheckpointGroup, doing: str, chosen: Checkpoint, stack: ExitStack, is_lazy: bool
    ) -> Checkpoint:
        """Fetch the checkpoint that the leader has chosen, by one rank of each machine; a collective."""
        world, exchange = self._run.world, group.exchange
        first = world.rank - world.local_rank if exchange.size > 1 else group.leader

        def fetch() -> Checkpoint | None:
            if exchange.rank != first:
                return None
            if group.leads:
                return chosen
            return RemoteCheckpoints(Address(chosen.origin)).fetch(
                chosen.save, stack, self._keep_local, is_lazy=is_lazy
            )

        found: Checkpoint = group.agree(doing, fetch)[first]
        return replace(found, passed=chosen.passed, fetch_spans=LazyFiles(found, world.is_main))

    @property
    def _ranks_here(self) -> range | None:
        """The ranks whose own states a checkpoint has, if all of them wrote it; None: all."""
        world = self._run.world
        if not self._project.save_on_each_node or world.local_size == world.size:
            return None
        return range(self._everyone.leader, self._everyone.leader + world.local_size)

    def _report(self, source: Loading, made: Made) -> None:
        found, loaders = source.checkpoint, self._run.loaders
        lines = [f"passed over: {reason}" for reason in found.passed]
        lines.append(f"loaded {found.origin or found.folder}")
        if source.is_other or source.own is not None:
            lines += [
                f"loader {k + 1} of {len(loaders)} {loader.describe_position()}" for k, loader in enumerate(loaders)
            ]
        elif loaders:
            lines.append(
                "it does not record the position in the data: loops start at the beginning, or use skip_first_batches"
            )
        lines += source.notes
        if made != "all":
            rank = self._run.world.rank
            lines.append(f"rank {rank} loaded it alone: the weights of other processes stay as they are")
        if self._run.world.is_main or made != "all":
            for line in lines:
                record(Kind.NOTE, message=line)


def _explained(look: Callable[[Any], Any], at: Any) -> Any:
    try:
        return look(at)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Nothing was loaded.") from error


def _report_last_failure(saver: weakref.ref[CheckpointSaver]) -> None:
    found = saver()
    if found is not None:
        try:
            found.settle()
        except FarflungError as error:
            record(Kind.WARNING, message=f"the last checkpoint was not written: {error}")
