# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group of torch's default world as a `Group`, whose waits end when a rank has left or died."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from farflung.base.causes import Cause, cause_of, gloo_limit_s
from farflung.base.errors import CollectiveMismatch, FarflungError, RankFailure, StateError
from farflung.base.torch_internals import (
    add_joint_axis,
    group_serial,
    newest_group,
    num_collectives,
    raise_group_serial,
)
from farflung.comm.c10d_group import WATCH_S, C10dGroup, transport_said
from farflung.comm.group import Group
from farflung.comm.presence import PresenceStore
from farflung.comm.waits import Wait, Waits, handed_over

TORCHS = "torch's own"  # the collectives that did not go through a group of ours


@dataclass(frozen=True)
class SharedState:
    """What a process group shares with its duplicates, and with groups of some of its ranks."""

    presence: PresenceStore  # what the ranks publish outside their collectives
    waits: Waits  # what this process has entered, and waits for
    ranks: list[int]  # those of the process group, in the numbers of all
    arrivals: dict[int, int] = field(default_factory=dict)  # calls of each rank that were matched, see `matching`
    spare: dict[tuple[int | bool, ...], list[TorchGroup]] = field(default_factory=dict)  # given back, by what they are
    serials: Iterator[int] = field(default_factory=count)  # one for each use of a group, the same on all ranks
    parts: dict[str, TorchGroup] = field(default_factory=dict)  # what `within` made, by name


@cache
def _shared_state_of(group: weakref.ref[dist.ProcessGroup]) -> SharedState:
    """Return the one object for a process group, whoever asks; a reference to a group that is gone equals no other."""
    pg = group()
    assert pg is not None
    presence = PresenceStore(f"farflung/{pg.group_name}", dist.get_rank(pg), dist.get_world_size(pg))
    return SharedState(presence, Waits(presence), dist.get_process_group_ranks(pg))


@cache
def _closed_groups() -> list[str]:
    """Return the one list of the names of groups that were closed, and whose keys are still in the store."""
    return []


@cache
def _aborted_groups() -> weakref.WeakSet[dist.ProcessGroup]:
    """Return the one set of the groups that are to be destroyed once no younger one is left."""
    return weakref.WeakSet()


class TorchGroup(C10dGroup):
    """The ranks of a c10d process group (the default one when none is given).

    Args:
        shared: of the group that this is a duplicate or a part of. None: of this process group.
        in_background: only threads use it that work on behalf of others.
    """

    pickled_as: Callable[[], TorchGroup] | None = None  # finds it when it is unpickled; None: it can't be pickled

    def __init__(
        self, pg: dist.ProcessGroup | None = None, shared: SharedState | None = None, in_background: bool = False
    ) -> None:
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None, "TorchGroup needs torch.distributed to be initialized"
        # Weakly, for a group that is destroyed must be gone: threads of one that someone still holds may run into the
        # interpreter's end, which then aborts.
        self._pg = weakref.ref(group)
        self.rank = dist.get_rank(self.pg)
        self.size = dist.get_world_size(self.pg)
        config = str(dist.get_backend_config(self.pg))
        backends = dict(part.split(":") for part in config.split(","))
        self._backend = next(iter(backends.values())) if len(set(backends.values())) == 1 else config
        # gloo moves tensors from a GPU too, but not in every collective.
        self.supported = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
        self.shared = shared or _shared_state_of(self._pg)
        self.presence, self.waits = self.shared.presence, self.shared.waits
        self.in_background = in_background
        self._name = self.pg.group_name
        self.waits.join(self._name)
        self._serial = 0
        self._is_block = False  # within a group: who leaves that one has left this one too
        self._spare: list[TorchGroup] | None = None  # where it goes when it is given back

    def __reduce__(self) -> tuple[Callable[[], TorchGroup], tuple[()]]:
        if self.pickled_as is None:
            raise pickle.PicklingError("A group of some of the ranks can't be pickled. Pickle what uses all ranks.")
        return self.pickled_as, ()

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group; StateError if it has been destroyed."""
        group = self._pg()
        if group is None:
            raise StateError("The process group of these ranks has been destroyed.")
        return group

    @property
    def ranks(self) -> list[int]:
        """Its ranks, in the numbers of all."""
        return dist.get_process_group_ranks(self.pg)

    def collectives(self) -> dict[str, int]:
        """Return how many collectives this rank has started in this group and its parts, whoever made them."""
        return {group.pg.group_name: num_collectives(group.pg) - group.num_probes for group in self.with_parts()}

    def collectives_of_torch(self) -> dict[str, int]:
        """Return how many of them are not Farflung's: DDP's, FSDP's and the script's."""
        return {f"{TORCHS} {name}": count - self.waits.entered[name] for name, count in self.collectives().items()}

    @property
    def is_destroyed(self) -> bool:
        return self._pg() is None

    @property
    def is_default(self) -> bool:
        return not self.is_destroyed and self._pg() is dist.group.WORLD

    def enter(self, kind: str, nbytes: int) -> Wait:
        return self.waits.enter(self._name, kind)

    @contextmanager
    def watching(self, entered: Wait) -> Iterator[Callable[[], None]]:
        with self.waits.noted(entered, self.in_background) as check:

            def look() -> None:
                check()
                self.raise_if_broken()

            yield look

    is_concurrent = True

    def duplicate(self, in_background: bool = False) -> TorchGroup:
        return self._among(self.ranks, self.shared, in_background)

    def within(self, pg: dist.ProcessGroup) -> TorchGroup:
        """Return a group of some of these ranks, such as a mesh's row, whose waits end when any of these is lost.

        Its errors name the ranks by their numbers in this group.
        """
        self.shared.parts[pg.group_name] = part = TorchGroup(pg, self.shared)
        part.await_connections()
        return part

    def with_parts(self) -> list[TorchGroup]:
        """Return this group and those that `within` made, as far as they have not been destroyed."""
        return [group for group in (self, *self.shared.parts.values()) if not group.is_destroyed]

    def free(self, reusable: bool = True) -> None:
        if self._spare is None or self.is_destroyed:
            return
        if reusable:
            self._spare.append(self)
            return
        self.abort()
        # Its name may come again, and whoever connects under it must not read where these ranks listened.
        _closed_groups().append(self._name)
        self.waits.part(self._name)
        _aborted_groups().add(self.pg)
        # torch names a group by how many there are: if an older one went, the next would get the name of the youngest.
        while (newest := newest_group()) in _aborted_groups():
            dist.destroy_process_group(newest)

    def hand_over(self) -> Callable[[Future[None]], None]:
        wait = self.waits.enter(handed_over(self._name), "")

        def end(future: Future[None]) -> None:
            if wait_for([future], WATCH_S).not_done:
                with self.waits.noted(wait) as check:
                    while wait_for([future], WATCH_S).not_done:
                        check()  # what it publishes ends the other thread's wait, and so this one

        return end

    def _block(self, begin: int, end: int) -> TorchGroup:
        is_block = self.size != self.presence.size  # else what is made of all ranks, as for checkpoints, is apart
        shared = self.shared if is_block else None
        block = self._among(self.ranks[begin:end], shared, False)
        block._is_block = is_block
        return block

    def _among(self, members: list[int], shared: SharedState | None, in_background: bool) -> TorchGroup:
        """Return a group that was given back, or make one once all ranks have come: torch's own wait has no checks."""
        spare = self.shared.spare.setdefault((*members, shared is None, in_background), [])
        if spare:
            spare[-1]._serial = next(self.shared.serials)
            return spare.pop()
        self.barrier()  # of a kind of its own, so that ranks which are elsewhere hear of it
        self.presence.forget(_closed_groups())
        _closed_groups().clear()
        # A script's own group of some ranks may have left them with different ones.
        raise_group_serial(int(self.all_gather_small(torch.tensor([group_serial()])).max()))
        pg = dist.new_group(members, backend=self._backend, use_local_synchronization=True)
        made = TorchGroup(pg, shared, in_background)
        made._spare, made._serial = spare, next(self.shared.serials)
        made.await_connections()
        return made

    def agree_min(self, number: int, name: str) -> int:
        return self.presence.agree_min(number, f"{self._serial}/{name}")  # not the name: other islands take part

    def leave(self, reason: str, for_good: bool = False, cause: Cause = Cause.OWN) -> None:
        if not self._is_block:
            self.presence.mark_left(reason, cause)
        for group in self.with_parts() if for_good else ():
            group.abort()

    def raise_if_broken(self) -> None:
        if self.presence.describe_left() or self.presence.has_alarm():
            raise self._broken(f"Rank {self.presence.rank} stopped waiting")

    def raise_if_closed(self, ranks: set[int]) -> None:
        """Raise RankFailure when one of `ranks`, in the numbers of `presence`, has closed its connection with us."""
        if self._closed() & ranks:
            raise self._broken(f"Rank {self.presence.rank} stopped waiting")

    def failure(self, error: RuntimeError) -> RankFailure | CollectiveMismatch:
        said = f" The transport said: {transport_said(error)}."
        if (limit_s := gloo_limit_s(error)) is not None:
            self.waits.await_report(Wait(self._name, self.waits.entered[self._name], ""), limit_s)
        return self._broken(f"A collective of rank {self.presence.rank} failed", said)

    def _broken(self, what: str, said: str = "") -> RankFailure | CollectiveMismatch:
        """Close the connections; return why. A rank that is late comes before those that left because of it."""
        mismatch = self.presence.published("mismatch")
        known = mismatch or self.presence.published("hang") or self.presence.describe_left()
        known = known or self.presence.check_alive(self._closed)
        cause = Cause.LATE if known == self.presence.published("hang") else Cause.PEER
        self.abort()
        return CollectiveMismatch(mismatch) if mismatch else RankFailure(f"{what}: {known}.{said}", cause)

    def _closed(self) -> set[int]:
        """Return the ranks, in the numbers of `presence`, that have closed their connection with this one."""
        if self.is_destroyed:
            return set()
        closed = [self.ranks[peer] for peer in self.closed_by()]
        return {self.shared.ranks.index(rank) for rank in closed if rank in self.shared.ranks}

    def abort(self) -> None:
        if not self.is_destroyed:
            super().abort()


def explained(error: BaseException, group: Group) -> BaseException:
    """Return an error that names the lost rank of `group`, in place of the transport's `error`; or `error` itself.

    torch's own collectives name no rank. `group` should be as large as possible, so that the lost rank is in it.
    """
    if isinstance(error, FarflungError) or not isinstance(error, RuntimeError):
        return error
    if not isinstance(group, TorchGroup) or cause_of(error) in (Cause.OWN, Cause.WRONG_USE):
        return error
    return group.failure(error).with_traceback(error.__traceback__)


def mesh_along(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the mesh, of one dimension, of the ranks that differ from this one along dimensions of these names alone.

    A collective of all ranks of `mesh`, if these are several dimensions.
    """
    return mesh[names[0]] if len(names) == 1 else add_joint_axis(mesh, names, "_".join(names))
