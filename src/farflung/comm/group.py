# SPDX-License-Identifier: Apache-2.0
"""What a set of ranks can do together: one protocol, and its form for one rank alone.

Every collective starts at once and returns a `Work`; nothing may be read before `wait()`. On CUDA `wait()` makes the
current stream wait, on gloo it blocks the caller. A wait that can not end, because a rank left or died, raises
`RankFailure` within seconds and says what is known of that rank, and ranks that wait for each other in different calls
all raise the same `CollectiveMismatch`; the group is of no use from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from torch import Tensor

from farflung.base.errors import ConfigError

Op = Literal["sum", "max", "min"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block (or make the current stream wait) until the result may be read."""


class Group(Protocol):
    """Ranks that talk to each other. All tensors are contiguous; every rank makes the same calls in the same order.

    Methods that are complete here do what is right where all ranks live in one thread, so none can be lost alone.

    Attributes:
        is_concurrent: a thread may use a `duplicate` while another one uses the group itself.
    """

    rank: int
    size: int
    is_concurrent: bool = False

    def supports(self, device: str) -> bool:
        """Return whether tensors on this kind of device, `cpu` or `cuda`, can travel as they are."""
        return True

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        """Reduce `x` in place; every rank ends with the same bits."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Fill `out` `[size * n]` with each rank's `x` `[n]`, in rank order."""

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send part k of `x` `[size * n]` to rank k; `out` `[size * n]` holds what came, in rank order."""

    def broadcast(self, x: Tensor, src: int) -> Work:
        """Overwrite `x` with the one of rank `src`."""

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        """Fill `out` with `parts[rank]` of rank `src`; the others pass None."""

    def barrier(self) -> None:
        """Return when every rank has come here."""
        return None

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        """Send `x` `[n]` to the rank `to` and fill `out` `[n]` with what `source` sends; each rank is sent to once."""

    def all_gather_small(self, x: Tensor) -> Tensor:
        """Gather a few numbers, `[n]` on the CPU, as `[size, n]`, and look out for ranks that left while waiting."""
        return self.begin_all_gather_small(x)()

    def begin_all_gather_small(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin what `all_gather_small` does; calling what is returned ends it."""
        everyone = x.new_empty(self.size, x.numel())
        work = self.all_gather(everyone, x)

        def end() -> Tensor:
            work.wait()
            return everyone

        return end

    def duplicate(self, in_background: bool = False) -> Group:
        """Return the same ranks once more, in an order of collectives of its own (`MPI_Comm_dup`): a collective.

        `in_background`: for a thread that works on behalf of another one.
        """
        return self

    def free(self, reusable: bool = True) -> None:
        """Give back a duplicate or a block, for others to use; it is closed where a rank has not ended all in it."""
        return None

    def hand_over(self) -> Callable[[Future[None]], None]:
        """Count a job for this group that this thread gives to another one; what is returned waits for its end."""
        return lambda future: None

    def split(self, size: int) -> Group:
        """Return this rank's block of `size` neighbouring ranks; the last block may be smaller. A collective.

        ConfigError: a rank would be alone in its block.
        """
        if self.size == 1:
            return self
        if size < 2 or self.size % size == 1:
            raise ConfigError(
                f"{self.size} ranks can't be split into blocks of {size}: one rank would be left alone. Use another "
                "size."
            )
        begin = self.rank - self.rank % size
        return self._block(begin, min(begin + size, self.size))

    def _block(self, begin: int, end: int) -> Group:
        """Return the group of the ranks from `begin` to below `end`, which include this one: a collective."""
        return self

    def agree_min(self, number: int, name: str) -> int:
        """Return the smallest `number` of all ranks that still live, after a failure that all of them hear of."""
        return number

    def leave(self, reason: str, for_good: bool = False) -> None:
        """Tell the ranks that wait, now or later, that this one will not come. Never waits for them.

        Args:
            for_good: this process fails, so end their waits in torch's own collectives too, such as DDP's, where there
                is a connection that can be closed.
        """
        return None

    def raise_if_broken(self) -> None:
        """Raise RankFailure when another rank is known to have left, to be dead, or to be late for too long."""
        return None


class Done:
    """A collective that needed no one else."""

    def wait(self) -> None:
        return None


class SoloGroup(Group):
    """One rank alone: every collective is a copy."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        out.view(-1).copy_(x.view(-1))
        return Done()

    all_to_all = all_gather

    def broadcast(self, x: Tensor, src: int) -> Work:
        return Done()

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        assert parts is not None
        return self.all_gather(out, parts[0])

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        return self.all_gather(out, x)
