# SPDX-License-Identifier: Apache-2.0
"""What a replica of `farflung launch --elastic` gets from the run: its membership, and its share of the data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farflung.address.board import Log, vanished
from farflung.address.member_store import LauncherNotes
from farflung.address.schemes import transport_at
from farflung.address.seal import Seal
from farflung.address.transport import Transport
from farflung.base.errors import ConfigError
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group
from farflung.comm.recording import uncompiled
from farflung.config import environ
from farflung.config.key import run_key
from farflung.hosts.driver import LoopMembers
from farflung.hosts.patching import around
from farflung.hosts.rounds import record_rounds
from farflung.members.elastic import Elastic
from farflung.process.failure import MEMBER, has_note, leave_note
from farflung.process.mesh import Mesh, require_replicas
from farflung.process.place import Place


def launched_membership(island: Group | None = None) -> Elastic | None:
    """Return this replica's membership in the run of `farflung launch --elastic`, for one outer loop.

        OuterLoop(model, recipe, membership=launched_membership())

    Args:
        island: the ranks that train this replica; None: this process alone.

    Returns:
        None if the replicas of this run don't come and go.

    Raises:
        ConfigError: the variables of the launcher can't be understood, or the run's key can't be read.
        Unreachable: the launcher's store can't be reached.
    """
    return membership_of(Place.launched(), island)


def membership_of(here: Place, island: Group | None) -> Elastic | None:
    """Return the membership of the replica `here`, as `launched_membership` does; have the rounds of loops recorded."""
    record_rounds()
    if here.member is None:
        return None
    leave_note(MEMBER)
    transport, settings = _run_of(here)
    return Elastic(transport, here.member, island=island, **settings)


def require_loop() -> None:
    """Have a replica's first step of an optimizer raise ConfigError if no outer loop is there, and none is to come."""

    def check(optimizer: Optimizer, *_: Any) -> None:
        if not has_note(MEMBER) and "farflung.elastic" not in sys.modules:
            raise ConfigError(
                f"This {type(optimizer).__name__} makes its first step in a replica of --elastic, which is a world of "
                "its own, and there is no outer loop: each replica would train a model of its own. Start with --outer "
                "diloco, which takes over a DDP model or one that an Accelerator has prepared; or open a loop before, "
                "as OuterLoop(model, recipe, membership=farflung.elastic.launched_membership())."
            )
        hook.remove()

    hook = register_optimizer_step_pre_hook(uncompiled(check))


def members_of(here: Place, mesh: Mesh, slots: Any) -> LoopMembers:
    """Return the replicas of one outer loop: those of `mesh`, or the members of the elastic run that `here` is in.

    Args:
        slots: the data that an elastic replica shares, a `farflung.data.slots.Slots`; None: it shares none.
    """
    require_replicas(mesh, here)
    membership = membership_of(here, mesh.island)
    if membership is None:
        return LoopMembers(mesh.replicas, mesh.island)
    return LoopMembers(membership=membership, slots=slots)


def slots_of(here: Place, make: Callable[..., Any], exchange: Exchange, is_training: Callable[[], bool]) -> Any:
    """Return the data slots of the replica `here`.

    Args:
        make: `farflung.data.slots.Slots`.
        exchange, is_training: its fields of these names.
    """
    _follow_trainer()
    transport, settings = _run_of(here)
    bounds = {name: settings[name] for name in ("most", "expected")}
    return make(transport.board, here.member, exchange, **bounds, is_training=is_training)


def _follow_trainer() -> None:
    """Have transformers' Trainer, if it is loaded, train from where an epoch begins, and not from its first step.

    After an evaluation it would fetch a batch in eval mode first, and so all data. Of an epoch it takes len(loader)
    batches. ConfigError, before its first step, if each replica were to end with a best model of its own.
    """
    handler: Any = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)

    def begin(begun: Callable[..., Any], callbacks: Any, arguments: Any, *args: Any, **options: Any) -> Any:
        if getattr(arguments, "load_best_model_at_end", False):
            raise ConfigError(
                "load_best_model_at_end=True: where replicas come and go, each would evaluate at steps of its own and "
                "end with another best model. Leave it out, or start a fixed set of processes, without --elastic."
            )
        callbacks.model.train()
        if (share := getattr(callbacks.train_dataloader, "share", None)) is not None:
            share.is_counted = True
        return begun(callbacks, arguments, *args, **options)

    if handler is not None and not hasattr(handler.on_epoch_begin, "__wrapped__"):
        around(handler, "on_epoch_begin", begin)


def expected_of(here: Place) -> int:
    """Return with how many replicas the run begins that the replica `here` is in."""
    return int(_run_of(here)[1]["expected"])


def place() -> tuple[int, int]:
    """Return which part of the data this process should read, and how many parts there are, for scripts that split it.

        part, parts = place()
        dataset = dataset[part::parts]

    Under `farflung launch --elastic` each replica is a world of its own, so `RANK` does not tell it from the others. It
    gets the first part that no living replica has; a restarted replica thus takes a part that became free. There are as
    many parts as the run begins with replicas; an additional replica cuts the data into more, so that its part, and a
    seed made of it, is nobody else's. In other runs the result is `RANK` and `WORLD_SIZE`.

    Raises:
        ConfigError, Unreachable: see `launched_membership`.
    """
    rank, size = environ.integer("RANK") or 0, environ.integer("WORLD_SIZE") or 1
    here = Place.launched()
    if here.member is None:
        return rank, size
    transport, settings = _run_of(here)
    notes, mine = LauncherNotes(transport.board), str(here.member).encode()

    def holders(number: int) -> Log:
        return Log(transport.board, f"place/{number}")

    number = next(one for one in count() if holders(one).last()[1] in (None, mine))
    if holders(number).last()[1] != mine:
        number = next(one for one in count() if _takes(holders(one), mine, notes))
    return number * size + rank, max(settings["expected"], number + 1) * size


def _takes(holders: Log, mine: bytes, notes: LauncherNotes) -> bool:
    """Take a place, if no living replica has it."""
    after, holder = holders.last()
    is_free = holder is None or bool(notes.get("gone", int(holder)) or notes.get("left", int(holder)))
    return holder == mine or (is_free and holders.append(after, mine))


def _run_of(here: Place) -> tuple[Transport, dict[str, Any]]:
    """Connect to the run of a replica; return how its replicas meet, and its settings."""
    key = run_key()
    transport = transport_at(here.address, seal=None if key is None else Seal(key))
    if (content := transport.board.get("run")) is None:
        raise vanished("run")
    return transport, json.loads(content)
