# SPDX-License-Identifier: Apache-2.0
"""An outer loop around unchanged scripts: `--outer` takes over torch's DDP, whoever made it.

`docs/outer-loop.md` has a table of what each of its calls becomes.
"""

from __future__ import annotations

import gc
import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.torch_internals import is_flattened
from farflung.base.words import counted
from farflung.comm.bucket import broadcast_values
from farflung.comm.exchange import Exchange
from farflung.comm.recording import uncompiled
from farflung.comm.shards import is_sharded
from farflung.comm.torch_group import TorchGroup
from farflung.config import environ
from farflung.config.launch import launched_outer
from farflung.hosts.driver import Driver, together
from farflung.hosts.elastic import members_of, slots_of
from farflung.hosts.evaluation import follow_modes
from farflung.hosts.followed import FollowedLoop, FollowedModel
from farflung.hosts.frameworks import follow_frameworks, show_in_trainer, to_make_ddp, without_group
from farflung.hosts.patching import around
from farflung.hosts.rounds import RoundFigures, RoundOutputs, note_attached
from farflung.hosts.spawned import follow_processes
from farflung.hosts.training_data import TrainingData, is_by_accelerate, sampler_of
from farflung.loop.optimizer import parameters_of
from farflung.loop.scheduler import planned_updates
from farflung.methods.arguments import OuterConfig, recipe_of
from farflung.methods.fragments import training
from farflung.methods.inner import is_outermost_step
from farflung.outer.checks import check_inner
from farflung.process.mesh import Mesh, make_mesh, replicas_here, require_replicas, stated_island_size
from farflung.process.place import FIXED, Place
from farflung.process.watchdog import Watchdog
from farflung.process.world import has_accelerator


class DDPTakeover:
    """Follows every DDP model and optimizer of this process, for the outer loop that `config` asks for.

    Args:
        slots: makes the shares of the data, where replicas come and go: `farflung.data.slots.Slots`.
        place: the replica that this process belongs to, if replicas come and go.
    """

    def __init__(self, config: OuterConfig, slots: Callable[..., Any] | None = None, place: Place = FIXED) -> None:
        self._config, self._make_slots, self.place = config, slots, place
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()  # as they were made
        self._schedulers: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        self._joins: weakref.WeakSet[Join] = weakref.WeakSet()  # that hand over to the rounds
        self._data = TrainingData(lambda: any(one.local.module.training for one in self._followed), self, place)
        self.read_ranks()
        self.forget()

    def read_ranks(self) -> None:
        """Read from the launcher's variables which rank of its world this process is."""
        self._local_size = environ.integer("LOCAL_WORLD_SIZE") or 1
        here = replicas_here(self._local_size, stated_island_size(self._local_size) or 1)
        self._recipe = recipe_of(self._config, here)
        self._outputs = RoundOutputs(self._config, environ.integer("RANK") or 0, self.place.member)

    def forget(self) -> None:
        """Forget all models and optimizers, as in a process that was forked from another one."""
        self._mesh: Mesh | None = None
        self._followed: list[FollowedModel] = []
        self._driven: weakref.WeakKeyDictionary[Optimizer, list[FollowedLoop]] = weakref.WeakKeyDictionary()
        self._watchdog: Watchdog | None = None
        self._has_ended = False  # what a script trains after its process group is gone is its own business
        self._is_in_round = False  # then it is the outer optimizer that steps
        self._is_skipped = False  # by a GradScaler: the step under way

    def install(self) -> None:
        """Begin: before the script is loaded, as it may import the functions that are wrapped."""
        register_optimizer_step_pre_hook(uncompiled(lambda optimizer, *_: self._about_to_step(optimizer)))
        register_optimizer_step_post_hook(uncompiled(lambda optimizer, *_: self._stepped(optimizer)))
        around(LRScheduler, "__init__", self._make_scheduler)
        around(Optimizer, "__init__", self._make_optimizer)
        around(Optimizer, "add_param_group", self._add_param_group)
        self._data.install()
        around(DistributedSampler, "set_epoch", self._set_epoch)
        around(Join, "__init__", self._make_join)
        around(Join, "__exit__", self._leave_join)
        around(dist, "barrier", self._barrier)
        around(dist, "destroy_process_group", self._destroy_group)
        around(DistributedDataParallel, "__init__", self._make_ddp)
        follow_modes(self)
        around(nn.Module, "load_state_dict", self._load)
        around(torch.amp.GradScaler, "step", self._scaler_step)

    def mode_changed(self, module: nn.Module, was_training: bool) -> None:
        """Give a model the agreed weights for an evaluation; scripts that train in eval mode are there already."""
        for one in self._followed:
            if one.holds(module) or module is one.local.ddp:
                one.evaluation.change(module.training, one.driver if was_training else None)

    def _load(self, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = inspect.signature(load).bind(*args, **options)
        module = given.arguments["self"]
        for one in self._followed:
            if one.driver is not None and not (one.holds(module) or module is one.local.ddp):
                given.arguments["state_dict"] = one.saved.as_own(given.arguments["state_dict"], one.driver.attempts)
        return load(*given.args, **given.kwargs)

    def close(self) -> None:
        """End all loops with a last flush: a collective of all ranks."""
        if dist.is_initialized():
            self._open_all()
            for one in self._loops:
                one.epochs.flush_owed()
        for driver in self._ended():
            with self._in_round():
                driver.end()
            self._say(driver.loop.advice(by_flags=True))

    def leave(self, error: BaseException) -> None:
        """End all loops because of an error, and notify the other ranks. Nothing is exchanged."""
        for driver in self._ended():
            driver.end(error)

    def _ended(self) -> list[Driver]:
        """Restore the gradient synchronization of all DDP models; return the drivers whose loops have to be ended."""
        followed, drivers = self._followed, [one.take_driver() for one in self._loops]
        self._followed, self._has_ended = [], True
        self._driven.clear()
        self._mesh = None
        for one in followed:
            one.end()
        return [driver for driver in drivers if driver is not None and dist.is_initialized()]

    @property
    def _loops(self) -> list[FollowedLoop]:
        return list(dict.fromkeys(one.shared for one in self._followed))

    @contextmanager
    def _in_round(self) -> Iterator[None]:
        before, self._is_in_round = self._is_in_round, True
        try:
            yield
        finally:
            self._is_in_round = before

    def _make_ddp(self, make: Callable[..., None], *args: Any, **options: Any) -> None:
        """Follow a DDP model that the script makes; if there are islands, make it over this rank's."""
        if has_accelerator() or not dist.is_initialized():
            make(*args, **options)  # an Accelerator of ours calls, and opens loops itself; or torch raises an error
            return
        given = inspect.signature(make).bind(*args, **options)
        self._end_loop_over(given.arguments["module"])
        mesh = self._islands(given.arguments["module"])
        own = given.arguments.get("process_group"), given.arguments.get("device_mesh")
        if mesh.device_mesh is not None and own in ((None, None), (dist.group.WORLD, None)):
            given.arguments["process_group"] = mesh.row.get_group()
        make(*given.args, **given.kwargs)
        ddp = given.arguments["self"]
        follow_frameworks(
            self._flush_all, lambda: any(one.epochs.is_behind or one.epochs.is_owed for one in self._loops), self._data
        )
        # Where replicas come and go, each at its own pace, they would wait for each other in rounds of several loops.
        there = [one for one in self._loops if one.driver is None] if self.place.member is not None else []
        shared = there[0] if there else FollowedLoop(self._flush)
        trains = partial(self._about_to_train, shared)
        self._followed.append(FollowedModel(ddp, self._recipe.may_warm_up, mesh, shared, trains))
        self._driven.clear()  # each optimizer finds its models again at its next step
        if mesh.device_mesh is not None:  # DDP has made the ranks of each island equal
            broadcast_values([*ddp.module.parameters(), *ddp.module.buffers()], mesh.replicas)

    def _end_loop_over(self, module: nn.Module) -> None:
        """End the loops over a model that is about to be wrapped again, as a second fit does, and over lost ones.

        A collective.
        """
        for one in [one for one in self._followed if one.holds(module)]:
            self._end_loop(one)
        for one in self._lost():  # once ranks that the first ones wait for in a round are here too
            self._end_loop(one)

    def _end_loop(self, one: FollowedModel) -> None:
        self._followed.remove(one)
        self._driven.clear()
        driver = one.shared.take_driver()
        one.end()
        if driver is not None:
            with self._in_round():
                driver.end()

    def _lost(self) -> list[FollowedModel]:
        """Return the models that no rank has any more, such as those of earlier folds: a collective."""
        if not self._followed or self.place.member is not None:
            return []
        gc.collect()  # DDP refers to itself
        are_gone = [all(each.local.ddp is None for each in one.shared.models) for one in self._followed]
        found = TorchGroup().all_gather_small(torch.tensor(are_gone, dtype=torch.float64)).all(0).tolist()
        return [one for one, is_lost in zip(self._followed, found, strict=True) if is_lost]

    def _islands(self, module: nn.Module) -> Mesh:
        """Return which ranks train a replica together: at the first call a collective."""
        if self._mesh is None:
            everyone = TorchGroup()
            size = stated_island_size(self._local_size, None, everyone, self.place) or 1
            device = next(module.parameters(), torch.empty(0)).device
            mesh = make_mesh(everyone, size, device.type)
            require_replicas(mesh, self.place)
            self._mesh = mesh
            if everyone.size > 1:
                self._watchdog = Watchdog(everyone)  # ends waits in a round and in a call of the script for each other
                self._watchdog.start(math.inf)
            if self.place.member is not None and self._make_slots is not None and self._data.slots is None:
                self._data.num_parts = everyone.size
                slots = slots_of(self.place, self._make_slots, Exchange(everyone), self._data.is_training)
                self._data.slots = slots
        return self._mesh

    def _about_to_train(self, shared: FollowedLoop) -> None:
        """Open the loop over several models before a forward pass: one may be in the graph of what another one trains.

        The first step of an optimizer would be too late: the others' gradients are of weights that opening replaces.
        """
        if len(shared.models) > 1 and shared.driver is None and torch.is_grad_enabled():
            self._open_all()

    def _about_to_step(self, optimizer: Optimizer) -> None:
        """Open the loops over the models that `optimizer` trains, if this is its first step and they can work here."""
        for shared in self._driven.get(optimizer, ()) if not self._is_in_round else ():
            shared.end_evaluations()
        is_afterwards = self._has_ended and not dist.is_initialized()
        if self._is_in_round or is_afterwards or optimizer in self._driven:
            return
        if has_accelerator() and not (self._followed and self._trained_by(optimizer)):
            return
        loops = list(dict.fromkeys(one.shared for one in self._trained_by(optimizer)))
        self._check(optimizer, parameters_of(optimizer), bool(loops))
        self._driven[optimizer] = loops
        for shared in loops:
            shared.end_evaluations()
            if shared.driver is None:
                shared.driver = self._opened(shared, optimizer)
            elif optimizer not in shared.optimizers:
                check_inner(f"--outer {self._config.recipe}", self._recipe, 1 + len(shared.optimizers))
            shared.optimizers.add(optimizer)

    def _trained_by(self, optimizer: Optimizer) -> list[FollowedModel]:
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        return [one for one in self._followed if any(id(each) in ids for each in one.local.module.parameters())]

    def _check(self, optimizer: Optimizer, trained: list[torch.Tensor], has_models: bool) -> None:
        asked = f"--outer {self._config.recipe}"
        engine = next((name for name in ("deepspeed", "megatron") if name in sys.modules), None)
        if self._recipe.weighs_items:
            raise ConfigError(
                f"{asked}: weigh_by={self._recipe.weigh_by!r} needs an Accelerator, whose backward(num_items=) counts "
                "them."
            )
        if not dist.is_initialized() or (dist.get_world_size() == 1 and self.place.member is None):
            raise ConfigError(f"{asked}: {without_group(self.place)}")
        if any(map(is_flattened, trained)):
            raise ConfigError(
                f"{asked}: FullyShardedDataParallel sends parameters, or with NO_SHARD gradients, over all "
                f"{dist.get_world_size()} ranks in each step. Use DDP in place of NO_SHARD; or shard over some of the "
                "ranks with an Accelerator (docs/islands.md)."
            )
        if any(map(is_sharded, trained)):
            raise ConfigError(
                f"{asked}: its parameters are shards. Shard over some ranks with an Accelerator, or leave out --outer: "
                'OuterLoop(model, recipe, mesh=mesh, outer="replica") takes a mesh of your own (docs/islands.md).'
            )
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise ConfigError(f"{asked}: ZeroRedundancyOptimizer sends all parameters in each step. Use a plain one.")
        if has_models:
            return
        if engine is not None:
            raise ConfigError(f"{asked}: {engine} averages gradients by itself. Use DDP, or leave out --outer.")
        where = f"none of the {len(self._followed)} DDP models has" if self._followed else "no DDP model has"
        raise ConfigError(
            f"{asked}: this {type(optimizer).__name__} trains {counted(len(trained), 'parameter')} which {where}, so "
            f"nothing would average them: {to_make_ddp(self.place)}"
        )

    def _opened(self, shared: FollowedLoop, optimizer: Optimizer) -> Driver:
        """Open the loop over models at the first step of `optimizer`, and say so."""
        module = together([one.local.module for one in shared.models])
        mesh, number = shared.models[0].mesh, self._followed.index(shared.models[0])
        members = members_of(self.place, mesh, self._data.slots)
        before = {id(parameter) for one in shared.models for parameter in one.trained()}
        with self._in_round(), training(module, lambda each: each.requires_grad or id(each) in before):
            trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
            driver = Driver(
                module,
                self._recipe,
                members,
                optimizer,
                lambda: planned_updates(each for each in self._schedulers if each.optimizer is optimizer),
                lambda advice: self._say(f"as the learning rate schedule has it, {advice}"),
            )
        driver.epochs, driver.models = shared.epochs, shared.models
        for other in self._optimizers:
            if any(one.shared is shared for one in self._trained_by(other)):
                driver.iteration.expect(other)
        self._outputs.listen(driver.loop, number)
        show_in_trainer(RoundFigures(driver.loop, number))
        note_attached(module, mesh.island.size, dist.get_world_size(), dist.get_rank() == 0)
        record = None if members.membership is None else members.membership.record
        size = mesh.replicas.size if record is None else len(record.ids)
        each, where = "", "on their rank"
        what, whose = "a DDP model", "its"
        if len(shared.models) > 1:
            what, whose = counted(len(shared.models), "DDP model"), "their"
        if mesh.island.size > 1:
            each, where = f", each on {mesh.island.size} ranks,", "within their replica"
        self._say(
            f"{self._config.recipe} over {counted(size, 'replica')}{each} of {what} with {trained:,} "
            f"parameters: {driver.timetable}; {whose} gradients stay {where}"
        )
        return driver

    def _open_all(self) -> None:
        """Open the loops that this rank has not opened yet, because it skipped all its steps or got no data."""
        for optimizer in list(self._optimizers):
            if any(one.driver is None for one in self._trained_by(optimizer)):
                self._about_to_step(optimizer)

    def _stepped(self, optimizer: Optimizer, done: bool = True) -> None:
        if self._is_in_round or optimizer not in self._driven or not is_outermost_step(optimizer):
            return
        self._is_skipped = False
        around = self._data.stepped()
        with self._in_round():
            for shared in self._driven[optimizer]:
                assert shared.driver is not None
                shared.driver.step_attempted(optimizer, done, around)

    def _make_scheduler(self, make: Callable[..., None], scheduler: LRScheduler, *args: Any, **options: Any) -> None:
        make(scheduler, *args, **options)
        self._schedulers.add(scheduler)

    def _make_optimizer(self, make: Callable[..., None], optimizer: Optimizer, *args: Any, **options: Any) -> None:
        make(optimizer, *args, **options)
        if not self._is_in_round:
            self._optimizers[optimizer] = None

    def _add_param_group(self, add: Callable[..., None], optimizer: Optimizer, *args: Any, **options: Any) -> None:
        add(optimizer, *args, **options)
        self._driven.pop(optimizer, None)  # it finds the models that it trains at its next step

    def _set_epoch(
        self, set_epoch: Callable[..., None], sampler: DistributedSampler[Any], *args: Any, **options: Any
    ) -> None:
        if sampler in self._data and not self._data.is_inside:
            for one in self._loops:
                one.epochs.flush_owed()
                if self._data.slots is None:  # a script may read ahead, and step after the last batch was handed out
                    one.epochs.flush()
        set_epoch(sampler, *args, **options)

    def iteration_starts(self, loader: Any) -> None:
        for one in self._loops:
            one.epochs.iteration_starts(loader)

    def iteration_ended(self, ended: Any, at_end: bool) -> None:
        sampler = sampler_of(ended.base_dataloader)
        for one in self._loops:
            is_ahead = sampler in self._data.read_ahead or is_by_accelerate(sampler)
            one.epochs.iteration_ended(ended, at_end, ended.may_train, is_ahead)
            one.epochs.is_ahead = sampler in self._data.read_ahead  # Accelerate's scripts wait for others after a step

    def _flush(self, shared: FollowedLoop) -> None:
        """Stay in the rounds of a loop until all ranks have come here: a collective."""
        self._open_all()
        if shared.driver is not None:
            with self._in_round():
                shared.driver.flush()

    def _flush_all(self, if_behind: bool = False, at_end: bool = False) -> None:
        """Flush all loops, so that the weights in memory are equal: a collective.

        Args:
            at_end: of a fit, which leaves the weights of the state dict in memory, until something trains them again.
        """
        for shared in [one for one in self._loops if one.epochs.is_behind or one.epochs.is_owed or not if_behind]:
            shared.epochs.flush()
            for one in shared.models if at_end else ():
                one.evaluation.change(False, one.driver)

    def _make_join(self, make: Callable[..., None], join: Join, joinables: Any, *args: Any, **options: Any) -> None:
        """Keep torch's `join()` from sending: in rounds ranks wait for those without data anyway."""
        given = inspect.signature(make).bind(join, joinables, *args, **options)
        followed = {id(one.local.ddp) for one in self._followed}
        own = [id(joinable) in followed for joinable in joinables]
        if any(own) and given.arguments.get("enable", True):
            asked = f"--outer {self._config.recipe}: join()"
            if not all(own):
                raise ConfigError(f"{asked} also joins objects other than DDP models, which send in each step.")
            if any(one.mesh.island.size > 1 for one in self._followed):
                raise ConfigError(
                    f"{asked} can't work in islands of several ranks, where a rank without data leaves its island. "
                    "Give the ranks of an island equally many batches (drop_last=True), and leave join() out."
                )
            if given.arguments.get("throw_on_early_termination"):
                raise ConfigError(
                    f"{asked} with throw_on_early_termination asks all ranks in each step. Leave it out: ranks without "
                    "data stay in the rounds until all have come to the end of the block."
                )
            given.arguments["enable"] = False
            self._joins.add(join)
        make(*given.args, **given.kwargs)

    def _leave_join(self, leave: Callable[..., None], join: Join, kind: Any, *error: Any) -> None:
        if kind is None and join in self._joins:
            self._flush_all()
        leave(join, kind, *error)

    def _barrier(
        self, wait: Callable[..., Any], group: dist.ProcessGroup | None = None, *args: Any, **more: Any
    ) -> Any:
        if group in (None, dist.group.WORLD) and not self._is_in_round:
            for one in self._loops:
                if one.driver is not None and not one.epochs.is_ahead:  # else it may be called before a backward pass
                    one.epochs.flush_owed()
        return wait(group, *args, **more)

    def _destroy_group(self, destroy: Callable[..., None], group: dist.ProcessGroup | None = None) -> None:
        if group is None or group == dist.group.WORLD:
            error = sys.exc_info()[1]  # frameworks clean up on the way of an error
            self.close() if error is None else self.leave(error)
            if self._watchdog is not None:
                self._watchdog.stop()
        destroy(group)

    def _scaler_step(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        """Count a step that a GradScaler skips: it does not call the optimizer's hooks then."""
        bare = getattr(optimizer, "optimizer", optimizer)  # as wrappers of optimizers call it
        self._about_to_step(bare)
        self._is_skipped = True
        result = step(scaler, optimizer, *args, **options)
        if self._is_skipped:
            self._stepped(bare, done=False)
        return result

    def _say(self, line: str) -> None:
        if line and environ.integer("RANK") == 0:
            record(Kind.NOTE, message=line)


def take_over(slots: Callable[..., Any]) -> DDPTakeover:
    """Take over the DDP models of the script that comes next, with the outer loop that the launcher asks for.

    Args:
        slots: see `DDPTakeover`.
    """
    config = launched_outer(OuterConfig)
    assert config is not None
    takeover = DDPTakeover(config, slots, Place.launched())
    takeover.install()
    follow_processes(takeover, partial(take_over, slots))
    return takeover
