# SPDX-License-Identifier: Apache-2.0
"""`save_state`, `load_state` and the other methods of an Accelerator that write files; their rooms load when used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from farflung.accelerator import lazy
from farflung.accelerator.operations import extract_model_from_parallel
from farflung.accelerator.session import Session, flushed
from farflung.base.checks import (
    Address,
    check_callable,
    check_optional,
    check_path,
    check_place,
    check_protocol,
    check_type,
    check_word,
)
from farflung.base.errors import CheckpointError, ConfigError, Unsupported, WrongType
from farflung.base.events import Kind, record
from farflung.base.lazy import LazyModule
from farflung.base.signals import REQUEUE
from farflung.comm.matching import match
from farflung.comm.preemption import PreemptionVote
from farflung.comm.shards import model_has_dtensor
from farflung.comm.torch_group import TorchGroup
from farflung.config.handlers import ProjectConfiguration
from farflung.process.failure import PREEMPTED, leave_note
from farflung.resume.run import Run

if TYPE_CHECKING:
    from farflung.accelerator import checkpointer
    from farflung.accelerator.controller import OuterController
    from farflung.checkpoint.manager import Busy
else:
    checkpointer = LazyModule("farflung.accelerator.checkpointer")

Path_ = str | os.PathLike[str]


class Checkpointing:
    """Checkpoint methods of an Accelerator, under Accelerate's names."""

    project_configuration: ProjectConfiguration
    _run: Run
    _controller: OuterController
    _finish_trackers: Callable[[], None]
    _vote: PreemptionVote | None = None
    _series: Path | Address | None = None  # of numbered checkpoints, if a signal saves
    _has_earlier = False  # it had some when this Accelerator was made
    _is_resumed = False  # the script has loaded a checkpoint, or has asked for the newest

    @cached_property
    def _checkpointer(self) -> checkpointer.Checkpointer:
        return checkpointer.Checkpointer(replace(self._run, outers=self._controller), self.project_configuration)

    def _settle_checkpoints(self) -> None:
        """Wait for a checkpoint that is being written in the background."""
        if "_checkpointer" in vars(self):
            self._checkpointer.saver.settle()

    def save_state(
        self,
        output_dir: Path_ | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
        busy: Busy = "wait",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write all that the run needs to continue: every process calls this, after the optimizer's step.

        The checkpoint is written to a temporary folder and renamed once, so it is either complete or absent; then the
        oldest one beyond `total_limit` is deleted. An error on one process is raised on all, and training can continue.

        Unless models are sharded, the main process may call this alone. The call then waits until the others are in
        another collective, as in the next round of replicas that train independently, and the checkpoint lacks their
        random states, their positions in the data, and what such replicas have trained since the last round.

        Args:
            output_dir: its folder, or its address (`s3://bucket/run`), to which the files are sent. With automatic
                naming it is `project_dir/checkpoints/checkpoint_N` instead.
            safe_serialization: write weights as safetensors, not with torch.
            block: False copies the state and returns; it is written in the background. A failure is raised by the next
                call, or at the end of training.
            busy: what to do when the one before is still being written: `wait`, or `refuse`.

        Returns:
            the folder.

        Raises:
            CheckpointError: it could not be written; the checkpoints before it are as they were.
            CollectiveMismatch: not all processes call it, and models are sharded.
            ConfigError: no folder, or one of that number is there already.
            StateError: `busy` is `refuse`, and one is being written; or the main process does not call this.
        """
        if save_model_func_kwargs:
            raise Unsupported(
                f"save_state: {sorted(save_model_func_kwargs)} are for engines that Farflung does not support."
            )
        if output_dir is not None:
            check_place("save_state: output_dir", output_dir)
        check_word("save_state: busy", busy, ("wait", "refuse"))
        return os.fspath(self._checkpointer.save(output_dir, safe_serialization, block, busy))

    def load_state(
        self, input_dir: Path_ | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Resume from a checkpoint: every process calls this, after `prepare`. Prints where the data resume.

        All of it is read and checked before anything is changed. Only plain data is loaded, never code. Under DDP a
        process may call it alone; the weights of the others stay as they are.

        Args:
            input_dir: the checkpoint; or a folder or an address of several, or `latest`, or None with automatic naming:
                then the newest complete one is loaded, and a line names each newer one that is not complete.
            load_kwargs: nothing but `weights_only=True`.
            load_model_func_kwargs: `strict=False` leaves weights alone that are not there; `map_location` is accepted
                and needs nothing.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is of other objects; the running state is as it was.
            ConfigError: there is no such folder.
        """
        check_optional("load_state: load_kwargs", load_kwargs, dict, "a dictionary")
        strict = bool(load_model_func_kwargs.pop("strict", True))
        load_model_func_kwargs.pop("map_location", None)
        if load_model_func_kwargs or (load_kwargs or {}) not in ({}, {"weights_only": True}):
            odd = sorted({*load_model_func_kwargs, *(load_kwargs or {})})
            raise Unsupported(
                f"load_state: {odd} can't be set: checkpoints hold plain data only, and are loaded onto the CPU first."
            )
        self._checkpointer.load(input_dir, strict)
        self._is_resumed = True

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint that a signal left, if there is one; return whether there was.

        Every process calls this, after `prepare` and `register_for_checkpointing`. The folder is that of
        `save_on_signal`; without one nothing is loaded. `loader.iteration` is the epoch to continue with.

        Raises:
            CheckpointError: checkpoints are there, and none is complete or fits; the running state is as it was.
        """
        self._is_resumed = True
        if self._series is None or not self._has_earlier:
            return False
        self._checkpointer.load(self._series, True, series=self._series)
        return True

    def stop_if_signalled(self) -> None:
        """Save and end here if a signal asks for it: for loops that take their batches from no prepared loader.

        Every process calls this after each step, when all is as the next step needs it. Without `save_on_signal`, and
        as long as there is no signal, it does nothing.

        Raises:
            SystemExit: the run was saved, and is to be started again.
        """
        self._run.loop.boundary()

    def _save_on_signal(self, session: Session, folder: Path_ | None) -> None:
        """Save this run in a folder and end it at a signal, unless an Accelerator before this one does so."""
        if folder is None or session.vote is not None:
            return
        world, series = self._run.world, check_place("save_on_signal", folder)
        self._series = series.absolute() if isinstance(series, Path) else series
        if world.place.member is not None:
            raise ConfigError(
                "save_on_signal is for fixed ranks. Replicas that come and go sign out on SIGTERM and SIGUSR1; the "
                "others, or the address of --meet, keep the state."
            )
        self._has_earlier = self._checkpointer.open_series(self._series)
        self._vote = session.vote = PreemptionVote(world.rank, world.size)
        if world.watchdog is not None:
            world.watchdog.vote = self._vote
        self._run.loop.at_boundary = partial(self._boundary, self._vote, self._series)

    def _boundary(self, vote: PreemptionVote, series: Path | Address) -> None:
        """Save the next of some numbered checkpoints and end this rank, if all ranks stop here."""
        is_main = self._run.world.is_main
        if threading.current_thread() is not threading.main_thread():  # which reads ahead of the training
            return
        if self._has_earlier and not self._is_resumed and not vote.passed and is_main:
            raise ConfigError(
                f"{series} has checkpoints of an earlier start of this run, but the script trains from the "
                "beginning. Call accelerator.resume() after prepare, or name another folder for save_on_signal."
            )
        if not vote.passes():
            return
        try:
            self._settle_checkpoints()
        except CheckpointError as error:
            record(Kind.WARNING, message=f"an earlier checkpoint was not written: {error}")
        saved = self._checkpointer.save(None, safe=True, block=True, busy="wait", series=series)
        if is_main:
            said = f"{vote.why}: saved {saved}, from which accelerator.resume() continues (exit code {REQUEUE})"
            record(Kind.ENDING, message=said)
        leave_note(PREEMPTED)
        self._controller.drop()
        self._finish_trackers()
        raise SystemExit(REQUEUE)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load objects that have `state_dict` and `load_state_dict` too, in this order.

        Raises:
            ConfigError: some have not; the message names all of them.
        """
        wrong = []
        for index, each in enumerate(objects):
            wanted = "an object that has state_dict() and load_state_dict()"
            try:
                check_protocol(f"Item at index {index}", each, ("state_dict", "load_state_dict"), wanted)
            except WrongType as error:
                wrong.append(str(error))
        if wrong:
            raise WrongType(f"register_for_checkpointing: {' '.join(wrong)}")
        self._run.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called by `save_state` before it writes.

        `weights` are the models' state dicts; those that the hook takes out of the list are not written. What it writes
        to `output_dir` becomes part of the checkpoint; the folder is put in its place only afterwards.
        """
        check_callable("register_save_state_pre_hook: hook", hook, "hook(models, weights, output_dir)")
        handle = RemovableHandle(self._run.save_hooks)
        self._run.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, input_dir)` called by `load_state` once the checkpoint is known to be whole.

        Models that it takes out of the list are not loaded.
        """
        check_callable("register_load_state_pre_hook: hook", hook, "hook(models, input_dir)")
        handle = RemovableHandle(self._run.load_hooks)
        self._run.load_hooks[handle.id] = hook
        return handle

    def save_model(
        self,
        model: nn.Module,
        save_directory: Path_,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for others to load: one file, or several and an index if they are larger.

        A model that is sharded is gathered first: every process calls this.

        Args:
            max_shard_size: bytes, or a number with a unit: KB, MB, GB (powers of 1000), KiB, MiB, GiB.

        Raises:
            ConfigError: the directory is a file, or weights are on the meta device.
        """
        check_type("save_model: model", model, nn.Module, "an nn.Module")
        directory = check_path("save_model: save_directory", save_directory)
        state = self._state_of(model, True, self._writes, "save_model")

        def write() -> None:
            if self._writes:
                lazy.export.save_sharded(state, directory, max_shard_size, safe_serialization)

        if model_has_dtensor(model):  # all ranks are here, and none continues while another one fails
            lazy.manager.CheckpointGroup(self._run.world.exchange, 0, "save_model").agree(
                f"Writing {save_directory}", write
            )
        else:
            write()

    def save(self, obj: Any, f: Path_, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` on the first process (of each machine with `save_on_each_node`). Talks to no one.

        With `safe_serialization` a dictionary of tensors is written as safetensors instead of with `torch.save`.
        """
        if not hasattr(f, "write"):
            f = check_path("save: f", f)
        if self._writes:
            lazy.writer.save_object(obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of a prepared model, with the names of the bare one unless `unwrap` is False.

        Inside an outer loop whose replicas agree on weights now and then, it is those. Weights that a hook keeps on
        the CPU or on the disk are brought to the CPU. Talks to no one, unless the model is sharded: then every process
        calls this, the first one gets whole weights on the CPU, and the others an empty dictionary.
        """
        check_type("get_state_dict: model", model, nn.Module, "an nn.Module")
        return self._state_of(model, unwrap, self._run.world.is_main, "get_state_dict")

    def _state_of(self, model: nn.Module, unwrap: bool, keep: bool, call: str) -> dict[str, Any]:
        """Return the state of a model; if it is sharded, on ranks that `keep` it, and if all make this `call`."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model
        is_sharded = model_has_dtensor(inner)
        if is_sharded:
            world = self._run.world
            if isinstance(world.group, TorchGroup):  # by the store: gloo would take FSDP's data for ours, and crash
                match(world.group, call, "", required="the model is sharded over the processes")
            flushed(world.exchange)
        state = self._controller.state_of(inner)
        if is_sharded:
            return lazy.models.gathered_model(inner, state, keep)
        has_hooks = any(hasattr(module, "_hf_hook") for module in inner.modules())
        if has_hooks and any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
            state = lazy.load.get_state_dict_offloaded_model(inner)
        return state

    @property
    def _writes(self) -> bool:
        world = self._run.world
        is_writer = world.is_local_main if self.project_configuration.save_on_each_node else world.is_main
        return is_writer and self._controller.leads
