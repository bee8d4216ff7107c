# SPDX-License-Identifier: Apache-2.0
"""How a process learns who it is: the launcher's variables, a device, and a process group if there are several.

If `WORLD_SIZE > 1` there is a group in the end, or an error; never several copies that train for themselves.
"""

from __future__ import annotations

import atexit
import math
import os
import warnings
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from socket import gethostbyname
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from farflung.base.causes import Cause, cause_of
from farflung.base.errors import ConfigError, RankFailure, Unsupported
from farflung.base.events import tell
from farflung.base.words import counted, numbered
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.comm.patience import interruptible, waiting
from farflung.comm.threads import await_gloo
from farflung.comm.torch_group import TorchGroup, explained
from farflung.config import environ
from farflung.config.handlers import InitProcessGroupKwargs, WatchdogKwargs
from farflung.config.tasks import STARTERS, in_slurm_step, on_each_node, step_address
from farflung.process.failure import install_failure_report
from farflung.process.place import Place
from farflung.process.sockets import serve_store
from farflung.process.watchdog import Watchdog
from farflung.process.world import RankInfo, World, clear_world, current_world, kept_store, num_worlds_left, set_world

# Each launcher's name for a number, torchrun's first.
_RANK = ("RANK", *(starter.rank for starter in STARTERS))
_SIZE = ("WORLD_SIZE", *(starter.size for starter in STARTERS))
_LOCAL_RANK = ("LOCAL_RANK", *(starter.local_rank for starter in STARTERS))
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", *(starter.local_size for starter in STARTERS))

_LOOK_S, _LOOK_LATER_S = 0.005, 0.1  # between two looks whether all ranks are there
_MEET_WITHIN = timedelta(minutes=30)  # torch's own

_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def read_rank_info() -> RankInfo:
    """Read what the launcher says about this process from its variables: torchrun's, Open MPI's, PMI's or Slurm's."""
    in_step = in_slurm_step()
    size = environ.integer(*_SIZE, *(["SLURM_STEP_NUM_TASKS"] if in_step else []))
    if size is None or size == 1:
        return RankInfo(0, 1, environ.integer(*_LOCAL_RANK) or 0, 1)
    rank = environ.integer(*_RANK, *(["SLURM_PROCID"] if in_step else []))
    if size < 1 or rank is None or not 0 <= rank < size:
        raise ConfigError(
            f"WORLD_SIZE is {size} and RANK is {rank}; a run of several processes needs 0 <= RANK < WORLD_SIZE. "
            "Start it with `farflung launch` or `torchrun`, which set both."
        )
    local_rank = environ.integer(*_LOCAL_RANK, *(["SLURM_LOCALID"] if in_step else []))
    local_size = environ.integer(*_LOCAL_SIZE) or (int(on_each_node(size).value) if in_step else None)
    if local_rank is None:
        raise ConfigError(
            f"WORLD_SIZE is {size} but LOCAL_RANK is not set, so this process can't tell which device of its machine "
            "is its own. Set LOCAL_RANK, or start with `farflung launch` or `torchrun`."
        )
    return RankInfo(rank, size, local_rank, local_size if local_size is not None else size)


def choose_device(info: RankInfo, cpu: bool) -> torch.device:
    """Return this process's device: the CPU when asked for or when there is nothing else, else its own accelerator.

    `ACCELERATE_TORCH_DEVICE` names another one, unless the CPU is asked for.
    """
    named = environ.text("ACCELERATE_TORCH_DEVICE")
    if cpu or environ.flag("ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    if named:
        return torch.device(named)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    available = torch.accelerator.device_count()
    if info.local_rank >= available:
        raise ConfigError(
            f"Local rank {info.local_rank} needs its own accelerator, but this machine has {available}. "
            f"Start at most {counted(available, 'process')} on it, or train on the CPU with `--cpu`."
        )
    device = torch.device(accelerator.type, info.local_rank)
    torch.accelerator.set_device_index(info.local_rank)
    return device


def join_world(
    cpu: bool = False, init: InitProcessGroupKwargs | None = None, watchdog: WatchdogKwargs | None = None
) -> World:
    """Return the world of this process; join it first if no call has done so yet.

    A default process group that the script initialized itself is used as it is. The first call sets the time that the
    watchdog allows, by `watchdog` or `FARFLUNG_HANG_TIMEOUT_S`; without one the watchdog ends no wait.

    Raises:
        ConfigError: the launcher's variables or the settings cannot work; or the world was joined with another device.
    """
    here = current_world()
    if here is not None and isinstance(here.group, TorchGroup) and not here.group.is_default:
        leave_world()  # the script has destroyed its process group
        here = None
    if here is not None:
        if cpu and here.device.type != "cpu":
            raise ConfigError(f"cpu=True, but this process already uses device {here.device}.")
        _warn_unused(here, init)
        _watch(here, watchdog)
        return here
    for variable, engine in _ENGINES.items():
        if environ.flag(variable):
            raise Unsupported(f"{variable} is set. {engine} is not supported. Use DDP, or an outer loop over it.")
    place, info = Place.launched(), _rank_info_of_group() if dist.is_initialized() else read_rank_info()
    device = choose_device(info, cpu)
    install_failure_report(info.rank, _explained, _leave if info.size > 1 else None)
    owns = info.size > 1 and not dist.is_initialized()
    if owns:
        _initialize(info, device, init or InitProcessGroupKwargs())
    torch_group = TorchGroup() if info.size > 1 else None
    if owns and torch_group is not None:
        torch_group.await_connections()
    group: Group = torch_group or SoloGroup()
    world = World(
        **vars(info),
        device=device,
        group=group,
        exchange=Exchange(group),
        place=place,
        backend=dist.get_backend() if info.size > 1 else None,
        owns_group=owns,
        init=copy(init or InitProcessGroupKwargs()) if owns else None,
        watchdog=Watchdog(torch_group) if torch_group else None,
    )
    if owns:
        atexit.register(leave_world)
    _warn_unused(world, init)
    _watch(world, watchdog, init)
    return set_world(world)


def _warn_unused(world: World, init: InitProcessGroupKwargs | None) -> None:
    """Warn of arguments for a process group that was made without them."""
    given = init.to_kwargs() if init is not None and world.size > 1 else {}
    used = {"timeout": _MEET_WITHIN, **({} if world.init is None else world.init.to_kwargs())}
    if str(given.get("backend")) in str(world.backend):  # one may name a part, as in `cpu:gloo,cuda:nccl`
        used["backend"] = given.get("backend")
    unused = {name: str(value) for name, value in given.items() if value != used.get(name)}
    if unused:
        warnings.warn(
            f"InitProcessGroupKwargs: {unused} has no effect on collectives, as this process has its process group "
            "already. Give it to the first Accelerator or PartialState of the script, or to the script's own "
            "init_process_group.",
            stacklevel=4,
        )


def leave_world() -> None:
    """Leave the world, and destroy its process group if Farflung made it. Without a world do nothing."""
    world = clear_world()
    if world is not None and world.watchdog is not None:
        world.watchdog.stop()
    if world is not None and world.owns_group:
        atexit.unregister(leave_world)
        if dist.is_initialized() and isinstance(world.group, TorchGroup) and world.group.is_default:
            await_gloo()
            dist.destroy_process_group()


def _leave(error: BaseException) -> None:
    """End the other ranks' waits at once, with the name of the uncaught error as the reason.

    Otherwise they would wait until this process is gone, which may take minutes: it may run `atexit` functions, or wait
    for its threads.
    """
    world = current_world()
    if world is not None and dist.is_initialized():
        world.group.leave(f"{type(error).__name__}: {error}"[:500], for_good=True, cause=cause_of(error))


def _watch(world: World, asked: WatchdogKwargs | None, init: InitProcessGroupKwargs | None = None) -> None:
    """Start the watchdog with the time that the script asks for, else with the launcher's, else with torch's own.

    The launcher's is not shorter than what the script allows a collective of torch's.
    """
    seconds = environ.number("FARFLUNG_HANG_TIMEOUT_S")
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigError(
            f"The environment variable FARFLUNG_HANG_TIMEOUT_S is {seconds:g}; give seconds, or 0 for none."
        )
    if world.watchdog is None:
        return
    if asked is not None:
        world.watchdog.start(asked.timeout_s)
    else:  # without a time it never asks of itself, and answers those that do
        allowed = init.timeout if init is not None else None
        allowed_s = (allowed or (_MEET_WITHIN if seconds is None else timedelta())).total_seconds()
        world.watchdog.start(math.inf if seconds == 0 else max(seconds or 0.0, allowed_s), is_default=True)


def _explained(error: BaseException) -> BaseException:
    """Return an error that names the lost rank, in place of the transport's `error`; or `error` itself."""
    world = current_world()
    return error if world is None else explained(error, world.group)


def _rank_info_of_group() -> RankInfo:
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = environ.integer(*_LOCAL_RANK), environ.integer(*_LOCAL_SIZE)
    return RankInfo(rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size)


def _initialize(info: RankInfo, device: torch.device, init: InitProcessGroupKwargs) -> None:
    # torch's env:// reads torchrun's names, so the other launchers' numbers are put under those.
    environ.export({"RANK": str(info.rank), "WORLD_SIZE": str(info.size), "LOCAL_RANK": str(info.local_rank)})
    if init.init_method is None and not (environ.text("MASTER_ADDR") and environ.text("MASTER_PORT")):
        host, port = step_address() if info.local_size != info.size else (None, None)
        if host is None and (info.local_size != info.size or environ.text("MASTER_ADDR")):
            raise ConfigError(
                f"WORLD_SIZE is {info.size}, but MASTER_ADDR is {environ.text('MASTER_ADDR')!r} and MASTER_PORT "
                f"{environ.text('MASTER_PORT')!r}, so the processes can't find each other. Set both, or start with "
                "`farflung launch` or `torchrun`."
            )
        met = environ.text("MASTER_ADDR") or (str(host.value) if host else "127.0.0.1")
        at = environ.text("MASTER_PORT") or (str(port.value) if port else "29500")
        environ.export({"MASTER_ADDR": met, "MASTER_PORT": at})
    arguments: dict[str, Any] = {"backend": _backend(device, init.backend), "rank": info.rank, "world_size": info.size}
    if init.timeout is not None:
        arguments["timeout"] = init.timeout
    if device.type == "cuda":
        arguments["device_id"] = device
    where = (init.init_method, environ.text("MASTER_ADDR"), environ.text("MASTER_PORT"))
    timeout = init.timeout or _MEET_WITHIN
    key = (os.getpid(), where, info)  # a forked process can't use the connection of its parent
    store = kept_store(key, lambda: _store(info, init.init_method, timeout))
    store.set_timeout(timeout)
    # The store outlives a group, and still has the addresses where its ranks were to be found.
    store = PrefixStore(f"world_{num_worlds_left()}", store)
    allowed_s = environ.number("FARFLUNG_HANG_TIMEOUT_S")
    if allowed_s != 0:
        _await_all(PrefixStore("came", store), info.rank, info.size, allowed_s or timeout.total_seconds())
    arguments["store"] = store
    # DDP loads it, and its default arguments keep the group of that moment for ever; at the top it would delay all.
    from torch.distributed.nn import functional  # noqa: F401  see above

    dist.init_process_group(**arguments)


def _store(info: RankInfo, init_method: str | None, timeout: timedelta) -> Store:
    """Connect to the run's store. If rank 0 serves it, it listens at MASTER_ADDR only.

    A store of torch's own listens on every interface. That one is still used if other machines may know this one by
    another address than it does itself, or if a store of an earlier world has the port.
    """
    host, port = environ.text("MASTER_ADDR") or "", environ.integer("MASTER_PORT") or 0
    by_variables = init_method in (None, "env://")
    if by_variables and info.rank == 0 and not environ.flag("TORCHELASTIC_USE_AGENT_STORE"):
        with suppress(OSError):
            if info.local_size == info.size or not ip_address(gethostbyname(host)).is_loopback:
                served: Store = serve_store(
                    host, port, world_size=info.size, timeout=timeout, multi_tenant=True, wait_for_workers=False
                )
                return served
    meet = partial(rendezvous, init_method or "env://", info.rank, info.size, timeout=timeout)
    store: Store = interruptible(lambda: next(meet())[0], "connect to the store of the run")
    return store


def _await_all(store: Store, rank: int, size: int, allowed_s: float) -> None:
    """Wait until all ranks have come here; raise RankFailure for those that have not come in time.

    torch itself would wait for half an hour, and name none.
    """
    store.set(str(rank), "")
    everyone = [str(other) for other in range(size)]

    def missing() -> list[int]:
        return [other for other in range(size) if not store.check([str(other)])]

    def say(waited_s: float) -> None:
        absent = missing()
        if absent and rank == min({*range(size)} - {*absent}):
            tell(f"rank {rank} still waits in `Accelerator()` for {numbered('rank', absent)}, after {waited_s:.0f} s")

    for _ in waiting(_LOOK_S, allowed_s, say, _LOOK_LATER_S):
        if store.check(everyone):
            return
    raise RankFailure(
        f"{numbered('rank', missing()).capitalize()} did not reach `Accelerator()` within {allowed_s:g} s: the "
        "process has ended, hangs before it, or can't be reached. If it may take so long, allow more with "
        "--hang_timeout_s or InitProcessGroupKwargs(timeout=).",
        Cause.LATE,
    )


def _backend(device: torch.device, asked: str | None) -> str:
    """Return the backend in torch's words: an accelerator's own together with gloo, which serves CPU tensors."""
    if device.type == "cpu":
        if asked is not None and asked not in ("gloo", "mpi", "ccl"):
            raise ConfigError(f"backend is {asked!r}, but this run is on CPUs. Use 'gloo', or leave out the backend.")
        return asked or "gloo"
    name = asked or dist.get_default_backend_for_device(device)
    return name if ":" in name or name == "gloo" else f"cpu:gloo,{device.type}:{name}"
