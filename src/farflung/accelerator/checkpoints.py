# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `load_state`: the session's side of checkpoints, and the words that an Accelerator has for them."""

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
from typing import Any, TypeVar, get_args

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from farflung.accelerator import contents, lazy
from farflung.accelerator.contents import Loaded, Run
from farflung.accelerator.operations import extract_model_from_parallel
from farflung.accelerator.session import flushed
from farflung.base.checks import check_callable, check_path, check_protocol, check_type, check_word
from farflung.base.errors import CheckpointError, ConfigError, FarflungError, Unsupported
from farflung.base.former_name import FORMER_NAME
from farflung.base.optional import installed_version
from farflung.base.words import counted
from farflung.checkpoint import atomic, discovery, layout
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.export import save_sharded
from farflung.checkpoint.manager import Busy, CheckpointGroup, Saver, SaveRequest
from farflung.checkpoint.save import save_object
from farflung.config.handlers import ProjectConfiguration

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
        request = self._request(output_dir)
        staged = saver.begin(request)
        parts: list[Entry] = []
        try:
            saver.group.agree(request.doing, lambda: parts.extend(self._parts(staged.folder, safe)))
        except BaseException:
            staged.discard()
            raise
        if block:
            saver.write(request, staged, parts)
        else:
            saver.write_behind(request, staged, parts)
        self._project.iteration += 1
        return request.target

    def _request(self, output_dir: Path_ | None) -> SaveRequest:
        run, project, automatic = self._run, self._project, self.automatic
        facts = {
            "step": run.loop.step,
            "optimizer_steps": [optimizer.completed_steps for optimizer in run.registry.optimizers],
            "iteration": project.iteration,
            "world_size": run.world.size,
            "written_at": time.time(),
            "versions": {name: installed_version(name) for name in ("farflung", "torch")},
        }
        if automatic is None:
            if output_dir is None:
                raise ConfigError(
                    "save_state() without a folder needs automatic_checkpoint_naming=True. Name a folder, or set it."
                )
            return SaveRequest(Path(output_dir).expanduser(), None, facts)
        target = automatic / layout.checkpoint(project.iteration)
        aside = _aside(automatic)

        def prune() -> None:
            atomic.sweep(aside)
            if project.total_limit is not None:
                old = sorted(_numbered(automatic) - {target}, key=lambda path: int(path.name[len(layout.PREFIX) :]))
                for folder in old[: max(0, len(old) + 1 - project.total_limit)]:
                    atomic.remove(folder, aside)

        return SaveRequest(target, aside, facts, prune, must_be_new=True)

    def _parts(self, folder: Path, safe: bool) -> list[Entry]:
        run = self._run
        models = run.bare_models
        weights = [model.state_dict() for model in models]
        for hook in self.save_hooks.values():
            hook(models, weights, os.fspath(folder))
        leader = self.saver.group.leader
        mine = []
        if run.world.rank in range(leader, leader + run.world.local_size):
            # A machine's ranks share the writing: the leader has the weights, which hooks may have changed there alone.
            shared = contents.shared_entries(run, weights, safe)
            helpers = 1 if run.replicas_differ or run.custom else run.world.local_size
            big = {layout.optimizer(k): (1 + k) % helpers for k in range(len(run.registry.optimizers))}
            mine = [part for part in shared if leader + big.get(part.name, 0) == run.world.rank]
        return mine + contents.own_entries(run, run.world.rank == leader)

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

        def choose_folder() -> Any:
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
            facts = None if found.manifest is None else (found.manifest.world_size, found.manifest.optimizer_steps)
            return os.fspath(found.folder), facts, found.passed

        name, facts, passed = group.agree(doing, choose_folder)[group.leader]
        size, steps = facts or (None, None)
        folder = Path(name)
        models = run.bare_models
        if self.load_hooks:
            group.agree(doing, lambda: [hook(models, name) for hook in self.load_hooks.values()] and None)
        read: list[tuple[Loaded, list[dict[str, Any]]]] = []

        def look() -> None:
            found = contents.read(run, folder, size)
            found.steps = steps
            weights = [contents.read_model(model, folder, k, strict) for k, model in enumerate(models)]
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

        group.agree(doing, look_and_verify)
        found, weights = read[0]
        undo: list[contents.Undo] = []
        try:
            group.agree(doing, lambda: undo.extend(contents.apply(run, found)))
        except BaseException:
            for step in undo:
                step()
            raise
        group.agree(doing, lambda: self._load_weights(found, models, weights, strict))
        self._count_on(folder, automatic)
        self._report(folder, size, passed, found)

    def _load_weights(
        self, found: Loaded, models: list[nn.Module], weights: list[dict[str, Any]], strict: bool
    ) -> None:
        for model, named in zip(models, weights, strict=True):
            joined = {name: value for name, value in found.weights.items() if name in named}
            model.load_state_dict({**named, **joined}, strict=strict)
        contents.apply_own_buffers(self._run, found.own)
        self._run.outers.load(found.loops)

    def _count_on(self, folder: Path, automatic: Path | None) -> None:
        """Let the next automatic checkpoint come after the one that was loaded, and after any that is there."""
        if automatic is not None and folder.parent == automatic and layout.NAMED.fullmatch(folder.name):
            numbers = [int(path.name[len(layout.PREFIX) :]) for path in _numbered(automatic)]
            self._project.iteration = max([self._project.iteration, *(number + 1 for number in numbers)])

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


class Checkpointing:
    """Accelerate's words for checkpoints, as an Accelerator has them."""

    project_configuration: ProjectConfiguration
    _checkpointer: Checkpointer

    def save_state(
        self,
        output_dir: Path_ | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
        busy: Busy = "wait",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write all that the run needs to go on: every process calls this. Call it after the optimizer's step.

        The checkpoint is written aside and put in place by one rename, so that it is whole or not there; the oldest of
        `total_limit` goes after that. An error on one process is raised on all, and training can go on.

        Args:
            output_dir: its folder. With automatic naming it is `project_dir/checkpoints/checkpoint_N` instead.
            safe_serialization: write weights as safetensors, not with torch.
            block: False copies the state and returns; it is written in the background. A failure is raised by the next
                call, or at the end of training.
            busy: what to do when the one before is still being written: `wait`, or `refuse`.

        Returns:
            the folder.

        Raises:
            CheckpointError: it could not be written; the checkpoints before it are as they were.
            ConfigError: no folder, or one of that number is there already.
            StateError: `busy` is `refuse`, and one is being written.
        """
        if save_model_func_kwargs:
            raise Unsupported(
                f"save_state: {sorted(save_model_func_kwargs)} are for engines that Farflung does not support."
            )
        if output_dir is not None:
            check_path("save_state: output_dir", output_dir)
        check_word("save_state: busy", busy, get_args(Busy))
        return os.fspath(self._checkpointer.save(output_dir, safe_serialization, block, busy))

    def load_state(
        self, input_dir: Path_ | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Go on where a checkpoint stands: every process calls this, after `prepare`. One line says where data go on.

        All of it is read and checked before anything is changed. Only plain data is loaded, never code.

        Args:
            input_dir: the checkpoint; or a folder of several, or `latest`, or None with automatic naming: then the
                newest complete one is taken, and those that were passed over are named.
            load_kwargs: nothing but `weights_only=True`.
            load_model_func_kwargs: `strict=False` leaves weights alone that are not there; `map_location` is accepted
                and needs nothing.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is of other objects; the running state is as it was.
            ConfigError: there is no such folder.
        """
        if input_dir is not None:
            check_path("load_state: input_dir", input_dir)
        if load_kwargs is not None:
            check_type("load_state: load_kwargs", load_kwargs, dict, "a dictionary")
        strict = bool(load_model_func_kwargs.pop("strict", True))
        load_model_func_kwargs.pop("map_location", None)
        if load_model_func_kwargs or (load_kwargs or {}) not in ({}, {"weights_only": True}):
            odd = sorted({*load_model_func_kwargs, *(load_kwargs or {})})
            raise Unsupported(
                f"load_state: {odd} can't be set: checkpoints hold plain data only, and are loaded onto the CPU first."
            )
        self._checkpointer.load(input_dir, strict)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects that have `state_dict` and `load_state_dict` saved and loaded too, in this order.

        Raises:
            ConfigError: one has not.
        """
        for each in objects:
            wanted = "an object that has state_dict() and load_state_dict()"
            check_protocol("register_for_checkpointing: an object", each, ("state_dict", "load_state_dict"), wanted)
        self._checkpointer.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called by `save_state` before it writes.

        `weights` are the models' state dicts; those that the hook takes out of the list are not written. What it writes
        to `output_dir` becomes part of the checkpoint; the folder is put in its place only afterwards.
        """
        check_callable("register_save_state_pre_hook: hook", hook, "hook(models, weights, output_dir)")
        handle = RemovableHandle(self._checkpointer.save_hooks)
        self._checkpointer.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, input_dir)` called by `load_state` once the checkpoint is known to be whole.

        Models that it takes out of the list are not loaded.
        """
        check_callable("register_load_state_pre_hook: hook", hook, "hook(models, input_dir)")
        handle = RemovableHandle(self._checkpointer.load_hooks)
        self._checkpointer.load_hooks[handle.id] = hook
        return handle

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    def save_model(
        self,
        model: nn.Module,
        save_directory: Path_,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for others to load: one file, or several and an index where they are larger.

        Args:
            max_shard_size: bytes, or a number with a unit: KB, MB, GB (powers of 1000), KiB, MiB, GiB.

        Raises:
            ConfigError: the directory is a file, or weights are on the meta device.
        """
        check_type("save_model: model", model, nn.Module, "an nn.Module")
        check_path("save_model: save_directory", save_directory)
        state = self.get_state_dict(model)
        if self._writes:
            save_sharded(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Path_, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` on the first process (of each machine with `save_on_each_node`). Talks to no one.

        Args:
            safe_serialization: write a dictionary of tensors as safetensors instead of with `torch.save`.
        """
        if not hasattr(f, "write"):
            check_path("save: f", f)
        if self._writes:
            save_object(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of a prepared model, with the names of the bare one unless `unwrap` is False.

        Inside an outer loop whose replicas agree on weights now and then, it is those. Weights that a hook keeps on
        the CPU or on the disk are brought to the CPU. Talks to no one.
        """
        check_type("get_state_dict: model", model, nn.Module, "an nn.Module")
        inner = extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model
        state = self._checkpointer.state_of(inner)
        has_hooks = any(hasattr(module, "_hf_hook") for module in inner.modules())
        if has_hooks and any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
            state = lazy.get_state_dict_offloaded_model(inner)
        return state

    @property
    def _writes(self) -> bool:
        world = self._checkpointer._run.world
        return world.is_local_main if self.project_configuration.save_on_each_node else world.is_main


def _explained(look: Callable[[Any], T], at: Any) -> T:
    try:
        return look(at)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Nothing was loaded.") from error


def _numbered(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if layout.NAMED.fullmatch(path.name) and path.is_dir()}


def _aside(automatic: Path) -> Path:
    """Return where numbered checkpoints are written: outside of their folder, where others look for numbers alone."""
    outside = automatic.parent
    if automatic.exists() and automatic.stat().st_dev != outside.stat().st_dev:
        return automatic
    return outside


def _report_last_failure(saver: weakref.ref[Saver]) -> None:
    found = saver()
    if found is not None:
        try:
            found.settle()
        except FarflungError as error:
            print(f"farflung: the last checkpoint was not written: {error}", file=sys.stderr)
