# SPDX-License-Identifier: Apache-2.0
"""How a launcher begins a run of replicas, or finds one that has begun, and starts its own replicas in it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from farflung.address.member_store import LauncherNotes
from farflung.address.run_record import KeyMismatch, knock
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, Unreachable
from farflung.base.events import Kind, record
from farflung.base.lazy import LazyModule
from farflung.base.words import counted
from farflung.comm.patience import aloud, waiting
from farflung.config import environ
from farflung.config.key import key_variables, run_key
from farflung.config.launch import LaunchSettings, flags_for
from farflung.config.resolve import Resolved
from farflung.launch.agent import scratch_folder
from farflung.launch.dry_run import described
from farflung.launch.folder import RunFolder
from farflung.launch.network import NAME_WAIT_S, choose_interface, is_loopback, resolve_host
from farflung.launch.plan import (
    Script,
    check_recipe,
    count_gpus,
    has_launchers,
    make_plan,
    network_variables,
    num_replicas,
    one_machine,
    one_replica,
    torch_is_loaded,
)
from farflung.launch.replicas import Launcher, new_machine_name, started
from farflung.launch.shell import start_of
from farflung.process.identity import has_ended
from farflung.process.sockets import listening_socket

if TYPE_CHECKING:
    from farflung.address import c10d_transport, keyed_store, schemes as comm_address
    from farflung.address.transport import Transport
else:
    comm_address = LazyModule("farflung.address.schemes")
    c10d_transport = LazyModule("farflung.address.c10d_transport")
    keyed_store = LazyModule("farflung.address.keyed_store")

_ASK_S = 0.5
_FIND_WITHIN_S = 60.0  # torch loads, where all launchers start together
# Flags of the launcher that serves the store, or of this machine alone.
_OF_THE_FIRST = (
    *("elastic", "replicas", "grace_s", "join", "meet", "main_process_ip", "main_process_port", "network_interface"),
    *("config_file", "run_dir"),
)


class Replicas:
    """Starts replicas that may fail, leave and join at any time, each a world of its own.

    The exit code is 0 if a replica has finished, here or on another machine, and the launcher has given up none.

    Raises:
        ConfigError: the settings can't work on this machine, or there is no run to join.
    """

    goes_on = is_lone = False

    def __init__(self, resolved: Resolved, script: Script) -> None:
        self._resolved, self._settings, self._script = resolved, resolved.settings, script
        self._replica = one_replica(self._settings)
        runs = script.name if script.start is None else __file__  # no command starts what is no process
        self._plan = make_plan(self._replica, runs, script.arguments, reported=True)
        self._count = num_replicas(self._settings)
        self._machine = new_machine_name()
        self._transport: Transport | None = None  # once it is prepared
        self._address = ""  # as it is printed
        self._variables = dict(self._plan.variables)
        self._is_open = False

    def described(self) -> str:
        check_recipe(self._resolved, self._plan.variables, self._settings.bounds[1])
        return described(self._resolved, self._plan)

    def prepare(self) -> dict[str, Any]:
        settings, count = self._settings, self._count
        at_port = (settings.meet or "").partition("tcp://")[2]
        host, _, port = (settings.join or at_port or f"{settings.main_process_ip or '127.0.0.1'}:").rpartition(":")
        host = host.strip("[]")
        address = resolve_host(host, NAME_WAIT_S if settings.join or at_port else 0.0)
        interface = None if is_loopback(address) else choose_interface(settings, host)
        meeting = dataclasses.replace(one_machine(host), interface=interface)
        self._variables |= network_variables(meeting, settings)
        if not settings.debug:  # a store that is gone is our line, not torch's stacks
            self._variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._variables |= key_variables(settings.key_file)
        key = run_key(settings.key_file)
        check_recipe(self._resolved, self._variables, settings.bounds[1])
        with torch_is_loaded(self._variables):
            sealed = None if key is None else Seal(key)
            leaves = interface is not None or (settings.meet or "").startswith(("s3:", "gs:", "az:", "hf:"))
            self._is_open = leaves and key is None
            if at_port:
                self._transport = _served_or_found(settings, host, int(port), count, self._machine, sealed)
            elif settings.meet is not None:
                self._transport = _met(settings, count, self._machine, sealed)
            elif settings.join is not None:
                found = comm_address.transport_at(settings.join, _FIND_WITHIN_S, sealed)
                self._transport = _found(found, "join", settings.join)
            else:
                self._transport = _served(settings, host, settings.main_process_port or 0, count, self._machine, sealed)
        self._address = address = self._transport.address if at_port else settings.meet or self._transport.address
        how = ""
        if settings.meet:
            how = "the same line on any machine adds more"
        elif not settings.join:
            flags = flags_for(settings, without=_OF_THE_FIRST)
            words = ["farflung", "launch", "--join", address, *flags, self._script.name, *self._script.arguments]
            how = f"more join with `{shlex.join(words)}`"
        return {"replicas": count, "address": address, "join": how}

    def follow(self, folder: RunFolder) -> int:
        settings, script, command = self._settings, self._script, self._plan.command
        assert self._transport is not None
        if self._is_open:
            message = (
                f"this run has no key: whoever can reach {self._address} can take part, end it, and read its weights. "
                "`farflung key run7.key`, then --key_file run7.key on each machine"
            )
            record(Kind.NOTE, message=message)
        places = _gpus_of_each(settings, self._count)
        if has_launchers(settings):
            gpus = "all" if any(places) else self._replica.gpu_ids  # all that CUDA_VISIBLE_DEVICES shows it
            replica = dataclasses.replace(folder.with_logs(self._replica), gpu_ids=gpus)
            stated = json.dumps(dataclasses.asdict(replica))  # whatever files and variables say
            start = (*start_of("farflung.launch.main"), "launch", "--stated", stated)
            command = (*start, script.name, *script.arguments)
        variables = {**self._variables, **folder.variables}
        make = script.start or partial(started, command)
        with scratch_folder() as reports:
            launcher = Launcher(
                settings, lambda own: make({**variables, **own}), self._transport, reports, self._machine
            )
            return launcher.run(places)


def _gpus_of_each(settings: LaunchSettings, count: int) -> list[dict[str, str]]:
    """Return for each replica of this machine the variable that gives it GPUs of its own; if too few, they share."""
    size, shown = settings.ranks_per_replica, environ.text("CUDA_VISIBLE_DEVICES")
    found = 0 if settings.use_cpu or count == 1 else count_gpus()
    visible = settings.gpu_list or (shown or ",".join(map(str, range(found)))).split(",")[:found]
    parts = [visible[at : at + size] for at in range(0, len(visible) - size + 1, size)] if found else []
    if 0 < len(parts) < count:
        enough = f"start {len(parts)} for GPUs of their own"
        record(Kind.NOTE, message=f"{counted(count, 'replica')} share {counted(len(visible), 'GPU')}: {enough}")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(parts[k % len(parts)])} if parts else {} for k in range(count)]


def _served(settings: LaunchSettings, host: str, port: int, count: int, machine: str, sealed: Seal | None) -> Transport:
    """Serve the store of a run that begins."""
    try:
        store = keyed_store.KeyedServer(listening_socket(host, port), host, sealed)
    except OSError as error:
        raise ConfigError(f"This machine can't listen at {host}:{port}: {error.strerror}.") from None
    transport = c10d_transport.C10dTransport(store, seal=sealed)
    transport.board.put("first", machine.encode())
    transport.board.put("run", _described(settings, count))
    return transport


def _served_or_found(
    settings: LaunchSettings, host: str, port: int, count: int, machine: str, sealed: Seal | None
) -> Transport:
    """Serve the store of a run, if it is this machine's to do so and nobody does it yet; else find it."""
    try:
        return _served(settings, host, port, count, machine, sealed)
    except ConfigError:
        found = comm_address.transport_at(f"{host}:{port}", _FIND_WITHIN_S, sealed)
        transport = _found(found, "meet", f"tcp://{host}:{port}")
    _tell_differences(settings, transport, count)
    return transport


def _met(settings: LaunchSettings, count: int, machine: str, sealed: Seal | None) -> Transport:
    """Begin the run in a folder or a bucket, or find the one that another launcher has begun there."""
    assert settings.meet is not None
    if settings.meet.startswith("file://"):
        with suppress(OSError):  # then the transport tells why
            Path(unquote(settings.meet.removeprefix("file://"))).mkdir(exist_ok=True)
    try:
        there = comm_address.transport_of(settings.meet, seal=sealed)
        try:
            transport = there.of_run(_described(settings, count))
        except KeyMismatch:
            knock(there.board, machine)
            raise
        transport.board.put_new("first", machine.encode())
        LauncherNotes(transport.board).take_over(machine, has_ended)
        _tell_differences(settings, transport, count)
    except Unreachable as error:
        remedy = " Delete all of it, or give another address, to begin a run." if error.is_gone else ""
        raise ConfigError(f"meet is {settings.meet}, but {error}{remedy}") from None
    return transport


def _tell_differences(settings: LaunchSettings, transport: Transport, count: int) -> None:
    """Print which settings of the run are not those of this launcher, which count for nothing."""
    theirs = json.loads(transport.board.get("run") or b"{}")
    mine = json.loads(_described(settings, count))
    del mine["expected"]  # each launcher has as many replicas as it likes
    differ = {name: value for name, value in mine.items() if value is not None and theirs.get(name, value) != value}
    if differ:
        differences = ", ".join(f"{name} is {theirs[name] or 'not set'}, not {value}" for name, value in differ.items())
        record(Kind.NOTE, message=f"the run at {settings.meet} has settings of its own: {differences}")


def _described(settings: LaunchSettings, count: int) -> bytes:
    """Return the settings that all replicas of a run share."""
    least, most = settings.bounds
    run = {"expected": max(count, least), "least": least, "most": most, "grace_s": settings.grace_s}
    run |= {"state_every": settings.state_every}
    return json.dumps(run).encode()


def _found(transport: Transport, flag: str, where: str) -> Transport:
    """Wait a while for the run to join; its launcher may be about to start."""
    board, why = transport.board.patient(0), "its first launcher has recorded no settings"
    for _ in waiting(_ASK_S, _FIND_WITHIN_S, aloud("this launcher", f"for the run at {where}")):
        try:
            if board.has(["run"]):
                return transport
        except KeyMismatch as error:
            raise KeyMismatch(where, error.why) from None
        except Unreachable as error:
            why = str(error)
    raise ConfigError(f"{flag} is {where}, but no run can be reached there: {why}")
