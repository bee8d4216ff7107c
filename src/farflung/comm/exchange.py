# SPDX-License-Identifier: Apache-2.0
"""The state behind collectives over nested data: buffers and headers that are made once and used again and again.

Every operation begins with the same collective: each rank gathers the others' packets, cut to a capacity. Small values
are complete with that. What did not fit, and what lies on another device, follows in a second step that the operation
chooses; by then every rank has every header, so that all of them choose alike, or raise alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, WrongType
from farflung.base.torch_internals import foreach_copy_
from farflung.base.tree import Spec, flatten, not_a_tensor
from farflung.comm.group import Group
from farflung.comm.mismatch import called, calls_differ
from farflung.comm.packet import LENGTHS, Call, Form, aligned, header_of, header_of_failure, is_plain, raw

MIN_CAPACITY = 4 * 1024
MAX_CAPACITY = 128 * 1024  # up to here gloo's time is nearly all latency
_MEMORY = 4  # packets whose largest sets the capacity
_MAX_FORMS = 256  # forms remembered before all are forgotten; a training loop knows a handful
_KEPT_BYTES = 64 * 1024 * 1024  # scratch larger than this is given back after use


def carrier(group: Group) -> torch.device:
    """Return the device on which bytes of the host travel: the host, unless the group talks between GPUs alone."""
    return torch.device("cpu") if group.supports("cpu") else torch.device("cuda", torch.cuda.current_device())


class Board:
    """The buffers of one capacity, and the views into them that forms have asked for."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):  # they are written in place later, in whatever mode
            self.mine = torch.zeros(capacity, dtype=torch.uint8, device="cpu")
            self.everyone = torch.zeros(size * capacity, dtype=torch.uint8, device="cpu")
        self.content = raw(self.everyone)
        self._rows = self.everyone.view(size, capacity)
        self._form: Form | None = None  # whose header lies in `mine`
        self._views: dict[tuple[Form, int | str], list[Tensor]] = {}

    def write(self, form: Form, leaves: list[Tensor]) -> None:
        """Put a packet into `mine`: as much of lengths, header and payload as fits."""
        if form is not self._form:
            head = LENGTHS.pack(len(form.header), form.carried) + form.header
            fitting = head if len(head) <= self.capacity else head[: LENGTHS.size]
            raw(self.mine)[: len(fitting)] = fitting
            self._form = form
        if form.carried and form.payload_at + form.carried <= self.capacity:
            with torch.no_grad():
                foreach_copy_(self._seen(form, "mine", self.mine), leaves)

    def stacked(self, form: Form) -> list[Tensor]:
        """Return each leaf's place in the packets of all ranks, `[size, *shape]`, where all are of `form`."""
        return self._seen(form, "everyone", self._rows)

    def views(self, form: Form, rank: int) -> list[Tensor]:
        """Return each leaf's place in the packet of `rank`, which is of `form`."""
        return self._seen(form, rank, self._rows[rank])

    def _seen(self, form: Form, which: int | str, packets: Tensor) -> list[Tensor]:
        views = self._views.get((form, which))
        if views is None:
            with torch.inference_mode(False):  # a view made in inference mode could not be written outside of it
                views = self._views[form, which] = form.views(packets)
        return views


class Parcel:
    """What an exchange brought. All views into it are of scratch that the next exchange overwrites.

    Attributes:
        forms: what each rank's header says, by rank.
        same: the headers are all the same.
        came: for each rank, whether its payload came along with the header.
    """

    def __init__(self, forms: list[Form], came: list[bool], board: Board) -> None:
        self.forms = forms
        self.came = came
        self.same = all(form is forms[0] for form in forms)
        self._board = board

    def stacked(self) -> list[Tensor]:
        """Return each leaf of all ranks as a view `[size, *shape]`; only where all headers are the same."""
        return self._board.stacked(self.forms[0])

    def views(self, rank: int) -> list[Tensor]:
        """Return the leaves that `rank` sent, as views."""
        return self._board.views(self.forms[rank], rank)


class Exchange:
    """Swaps nested values between the ranks of a group; whoever owns the group owns one of these.

    Not for use by several threads at a time.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = group.size
        self.rank = group.rank
        self._boards: dict[int, Board] = {}
        self._sizes = deque([MIN_CAPACITY], maxlen=_MEMORY)
        self._forms: dict[Any, Form] = {}  # of our own calls, by call, structure and kinds of leaves
        self._known: dict[bytes, Form] = {}  # of all ranks, by header
        self._scratch: dict[str, Tensor] = {}

    def take_apart(self, call: Call, tree: Any) -> tuple[list[Tensor], Spec]:
        """Flatten `tree`, which must hold tensors alone.

        Raises:
            TypeError: a leaf is no tensor; the other ranks raise too.
        """
        leaves, spec = flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.is_nested:
                self.fail(call, _unfit(call, leaf))
        return leaves, spec

    def form(self, call: Call, leaves: Sequence[Tensor], spec: Spec, limit: int = MAX_CAPACITY) -> Form:
        """Return what this rank's header says.

        Args:
            limit: bytes of payload that may travel behind the header; more travel by themselves.

        Raises:
            TypeError: a leaf is not made of plain bytes; the other ranks raise too.
        """
        key = call, spec, tuple([(type(x), x.shape, x.dtype, x.device, x.layout) for x in leaves])
        form = self._forms.get(key)
        if form is None:
            for leaf in leaves:
                if not is_plain(leaf):
                    self.fail(call, _unfit(call, leaf))
            form = self._forms[key] = self._recognized(header_of(call, spec, leaves))
            num_bytes = form.layout.nbytes
            fits = num_bytes <= limit and form.payload_at + num_bytes <= MAX_CAPACITY
            form.carried = num_bytes if fits and self.wire(leaves).type == "cpu" else 0
        return form

    def share(self, form: Form, leaves: list[Tensor]) -> Parcel:
        """Swap packets with all ranks.

        Raises:
            CollectiveMismatch: a rank failed, or made another call; every rank raises.
        """
        parcel = self._swap(form, leaves)
        if not parcel.same:
            for rank, other in enumerate(parcel.forms):
                if other.failed is not None:
                    raise CollectiveMismatch(f"{called(other.call)}: rank {rank} failed: {other.failed}")
            if any(other.call != form.call for other in parcel.forms):
                raise CollectiveMismatch(calls_differ([other.call for other in parcel.forms]))
        return parcel

    def fail(self, call: Call, error: Exception) -> NoReturn:
        """Raise `error`, after letting the other ranks know, so that they raise too and wait for nothing."""
        if self.size > 1:
            reason = f"{type(error).__name__}: {str(error)[:1000]}"
            self._swap(self._recognized(header_of_failure(call, reason)), [])
        raise error

    def wire(self, leaves: Sequence[Tensor]) -> torch.device:
        """Return the device on which the payload of `leaves` travels: their own where the group can use it."""
        for leaf in leaves:
            if leaf.device.type != "cpu" and self.group.supports(leaf.device.type):
                return leaf.device
        return carrier(self.group)

    def scratch(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer `[num_bytes]` uint8 that the next call with `name` may hand out again.

        On the CPU it is kept, because fresh pages cost more than the copy; elsewhere torch keeps blocks itself.
        """
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < num_bytes:
            with torch.inference_mode(False):
                kept = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            if num_bytes <= _KEPT_BYTES:
                self._scratch[name] = kept
        return kept[:num_bytes]

    def _recognized(self, header: bytes) -> Form:
        form = self._known.get(header)
        if form is None:
            form = self._known[header] = Form(header)
        return form

    def _swap(self, form: Form, leaves: list[Tensor]) -> Parcel:
        if len(self._forms) + len(self._known) > _MAX_FORMS:
            self._forms.clear()
            self._known.clear()
            self._boards.clear()
        board = self._board()
        board.write(form, leaves)
        self._gather(board.everyone, board.mine)
        capacity = board.capacity
        lengths = [LENGTHS.unpack_from(board.content, rank * capacity) for rank in range(self.size)]
        totals = [LENGTHS.size + aligned(header) + payload for header, payload in lengths]
        self._sizes.append(max(totals))
        if max(header for header, _ in lengths) <= capacity - LENGTHS.size:
            starts = range(LENGTHS.size, self.size * capacity, capacity)
            headers = [bytes(board.content[at : at + length]) for at, (length, _) in zip(starts, lengths, strict=True)]
        else:
            headers = self._long_headers(form, [header for header, _ in lengths])
        forms = [form if header == form.header else self._recognized(header) for header in headers]
        came = [
            payload == other.layout.nbytes and (total <= capacity or payload == 0)
            for total, (_, payload), other in zip(totals, lengths, forms, strict=True)
        ]
        return Parcel(forms, came, board)

    def _long_headers(self, form: Form, lengths: Sequence[int]) -> list[bytes]:
        longest = aligned(max(lengths))
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        raw(mine)[: len(form.header)] = form.header
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
        self._gather(everyone, mine)
        content = raw(everyone)
        return [bytes(content[rank * longest : rank * longest + length]) for rank, length in enumerate(lengths)]

    def _board(self) -> Board:
        capacity = min(max(max(self._sizes), MIN_CAPACITY), MAX_CAPACITY)
        capacity = 1 << (capacity - 1).bit_length()
        board = self._boards.get(capacity)
        if board is None:
            board = self._boards[capacity] = Board(self.size, capacity)
        return board

    def _gather(self, everyone: Tensor, mine: Tensor) -> None:
        if self.group.supports("cpu"):
            self.group.all_gather(everyone, mine).wait()
            return
        there = carrier(self.group)
        gathered = torch.empty_like(everyone, device=there)
        self.group.all_gather(gathered, mine.to(there)).wait()
        everyone.copy_(gathered)


def _unfit(call: Call, leaf: Any) -> WrongType:
    if not isinstance(leaf, Tensor):
        return not_a_tensor(call[0], leaf)
    sort = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
    return WrongType(
        f"{call[0]}: a {type(leaf).__name__} ({sort}, {leaf.dtype}, on {leaf.device}) can't be sent as plain bytes. "
        "Pass dense tensors (to_dense(), full_tensor(), dequantize()), or use gather_object or broadcast_object_list."
    )
