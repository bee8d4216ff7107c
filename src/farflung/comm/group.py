# SPDX-License-Identifier: Apache-2.0
"""What a set of ranks can do together: the collectives, all made of two, and what ranks tell each other besides.

Every collective starts at once and returns a `Work`; nothing may be read before `wait()`. On CUDA `wait()` makes the
current stream wait, on gloo it blocks the caller. A wait that can not end, because a rank left or died, raises
`RankFailure` within seconds and says what is known of that rank, and ranks that wait for each other in different calls
all raise the same `CollectiveMismatch`; the group is of no use from then on.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import HOP_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

Op = Literal["sum", "max", "min"]
COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # the others in their own dtype


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block (or make the current stream wait) until the result may be read."""


class Group(Protocol):
    """Ranks that talk to each other. All tensors are contiguous; every rank makes the same calls in the same order.

    The collectives are made of `all_gather` and `broadcast`. A group for which there are shorter ways has its own. What
    it tells of lost ranks is right if all ranks live in one thread, so that none can be lost alone.

    Attributes:
        is_concurrent: a thread may use a `duplicate` while another one uses the group itself.
        is_direct: values travel between the members; otherwise as objects of a store, in requests.
        lists_at_once: a listing of that store takes one request, and has all objects that are there now.
        piece_bytes: what is worth being sent at a time if a long transfer must leave the line to others in between.
        hop_bytes: what a second hop of a collective has to save.
    """

    rank: int
    size: int
    is_concurrent: bool = False
    is_direct: bool = True
    lists_at_once: bool = False
    piece_bytes: int = 256 * 1024
    hop_bytes: int = HOP_BYTES

    def duplicate(self, in_background: bool = False) -> Self:
        """Return the same ranks once more, in an order of collectives of its own (`MPI_Comm_dup`): a collective.

        `in_background`: for a thread that works on behalf of another one.
        """
        return self

    def free(self, reusable: bool = True) -> None:
        """Give back a duplicate or a block, for others to use; it is closed if a rank has not ended all in it."""
        return None

    def hand_over(self) -> Callable[[Future[None]], None]:
        """Count a job for this group that this thread gives to another one; what is returned waits for its end."""
        return lambda future: None

    def split(self, size: int) -> Self:
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

    def _block(self, begin: int, end: int) -> Self:
        """Return the group of the ranks from `begin` to below `end`, which include this one: a collective."""
        raise Unsupported(f"A {type(self).__name__} can't be split into blocks of its ranks.")

    def agree_min(self, number: int, name: str) -> int:
        """Return the smallest `number` of all ranks that still live, after a failure that all of them hear of."""
        return number

    def leave(self, reason: str, for_good: bool = False, cause: Cause = Cause.OWN) -> None:
        """Tell the ranks that wait, now or later, that this one will not come. Never waits for them.

        Args:
            for_good: this process fails, so end their waits in torch's own collectives too, such as DDP's, if there
                is a connection that can be closed.
            cause: of the end of this rank; a rank that fails because of another one is not named to ranks that wait.
        """
        return None

    def raise_if_broken(self) -> None:
        """Raise RankFailure when another rank is known to have left, to be dead, or to be late for too long."""
        return None

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Fill `out` `[size * n]` with each rank's `x` `[n]`, in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int) -> Work:
        """Overwrite `x` with the one of rank `src`."""

    def supports(self, device: str) -> bool:
        """Return whether tensors on this kind of device, `cpu` or `cuda`, can travel as they are."""
        return True

    @property
    def wire_device(self) -> torch.device:
        """The device on which bytes of the host travel: the host, unless the group talks between GPUs alone."""
        return torch.device("cpu") if self.supports("cpu") else torch.device("cuda", torch.cuda.current_device())

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        """Reduce `x` in place, here in rank order and half precision in fp32; every rank ends with the same bits."""

        def reduced(rows: Tensor) -> Tensor:
            return reduce(COMBINE[op], rows.to(SUMMED_IN.get(x.dtype, x.dtype)).unbind())

        return self._gathered(x, x, reduced)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send part k of `x` `[size * n]` to rank k; `out` `[size * n]` holds what came, in rank order."""
        return self._gathered(out, x, lambda rows: rows.view(self.size, self.size, -1)[:, self.rank])

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        """Send `x` `[n]` to the rank `to` and fill `out` `[n]` with what `source` sends; each rank is sent to once."""
        return self._gathered(out, x, lambda rows: rows[source])

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        """Fill `out` with `parts[rank]` of rank `src`; the others pass None."""
        if parts is None:
            sent = out.new_empty(self.size * out.numel())
        else:
            sent = torch.cat([part.detach().view(-1) for part in parts])
        return _Filling(self.broadcast(sent, src), out, lambda: sent.view(self.size, -1)[self.rank])

    def all_gather_json(self, content: Any) -> list[Any]:
        """Return the lists, dicts, numbers and texts of each rank, in rank order, which unlike pickles run no code."""
        if self.size == 1:
            return [content]
        encoded = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        lengths = self.all_gather_small(torch.tensor([encoded.numel()])).flatten().tolist()
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=self.wire_device)
        mine[: encoded.numel()] = encoded
        everyone = mine.new_empty(self.size * mine.numel())
        self.all_gather(everyone, mine).wait()
        rows = everyone.cpu().view(self.size, -1)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.all_gather_small(torch.zeros(1))

    def all_gather_small(self, x: Tensor) -> Tensor:
        """Gather a few numbers, `[n]` on the CPU, as `[size, n]`, and look out for ranks that left while waiting."""
        return self.begin_all_gather_small(x)()

    def begin_all_gather_small(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin what `all_gather_small` does; calling what is returned ends it."""
        mine = x.to(self.wire_device)
        everyone = mine.new_empty(self.size * mine.numel())
        work = self.all_gather(everyone, mine)

        def end() -> Tensor:
            work.wait()
            return everyone.cpu().view(self.size, -1)

        return end

    def _gathered(self, out: Tensor, x: Tensor, result: Callable[[Tensor], Tensor]) -> Work:
        """Fill `out` with the `result` of each rank's `x` `[n]`, which it is given as `[size, n]`."""
        everyone = x.new_empty(self.size * x.numel())
        work = self.all_gather(everyone, x.detach().view(-1))
        return _Filling(work, out, lambda: result(everyone.view(self.size, -1)))


class _Filling:
    """A collective under way, of whose result `out` is filled."""

    def __init__(self, work: Work, out: Tensor, result: Callable[[], Tensor]) -> None:
        self._work, self._out = work, out
        self._result: Callable[[], Tensor] | None = result  # None: `out` is filled, and its owner's to change

    def wait(self) -> None:
        self._work.wait()
        if self._result is not None:
            self._out.detach().view(-1).copy_(self._result().reshape(-1))
            self._result = None


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
        out.view(-1).copy_(x.detach().view(-1))
        return Done()

    def broadcast(self, x: Tensor, src: int) -> Work:
        return Done()
