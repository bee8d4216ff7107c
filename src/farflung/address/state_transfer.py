# SPDX-License-Identifier: Apache-2.0
"""The state that members share, on its way to a newcomer while they train.

One member sends it in a thread, over connections to this newcomer alone, and sends again what rounds have changed
meanwhile. A tensor whose bits the newcomer has already is not sent twice. On the wire there are JSON and plain bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farflung.address.member_store import Heartbeats
from farflung.address.transport import Entered
from farflung.base.bars import Bar, bar
from farflung.base.errors import RankFailure, Unreachable
from farflung.comm.group import Group
from farflung.comm.tensor_memory import bytes_of, fingerprint
from farflung.comm.threads import start_until_exit

_SMALL = 16_000_000  # bytes for which no newcomer waits another round
_CONNECT_S = 5.0


class StateSender:
    """Sends a state to one newcomer, each tensor as often as it has changed.

    Args:
        connect: returns a group in which this rank is 0 and the newcomer 1, given whether all waits in it are to end.

    Attributes:
        is_over: nothing will be sent any more; if `finish` was not called before, it has failed.
    """

    def __init__(self, connect: Callable[[Callable[[], bool]], Group]) -> None:
        self._connect = connect
        self._changed = threading.Condition()
        self._forms: dict[str, Any] = {}
        self._prints: dict[str, int] = {}  # of what was offered, or is there already, by tensor
        self._left: dict[str, Tensor] = {}  # to be sent, the oldest first
        self._total = self._num_sent = 0  # bytes
        self._is_sending = self._is_paused = self._is_final = False
        self.is_over = False
        self._thread = start_until_exit(self._run, "send a state", self.stop)

    def offer(self, parts: Mapping[str, Any]) -> None:
        """Have parts of the state sent, in place of what was offered by these names before.

        Args:
            parts: by name, trees of dicts, lists, tuples, numbers, texts and tensors; their memory is taken over.
        """
        for part, tree in parts.items():
            tensors: dict[str, Tensor] = {}
            form = form_of(tree, part, tensors)
            prints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
            with self._changed:
                changed = {name: one.cpu() for name, one in tensors.items() if prints[name] != self._prints.get(name)}
                self._forms[part] = form
                self._total += sum(one.nbytes for name, one in changed.items() if name not in self._prints)
                self._prints |= prints
                for name, tensor in changed.items():
                    self._left.pop(name, None)
                    self._left[name] = tensor
                self._is_paused = False
                self._changed.notify()

    def pause(self) -> None:
        """Leave the line to others until the next `offer`."""
        self._is_paused = True

    @property
    def may_finish(self) -> bool:
        """Whether members would hardly wait for the rest; or the line is too slow for all to be sent between rounds."""
        with self._changed:
            return self._total <= _SMALL or not (self._left or self._is_sending) or self._num_sent > 2 * self._total

    def finish(self, parts: Mapping[str, Any]) -> None:
        """Send all that is left, and these parts; return at once."""
        self.offer(parts)
        with self._changed:
            self._is_final = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        group = self._connect(lambda: self.is_over)
        try:
            with suppress(RankFailure, Unreachable):  # whoever asked for it sees that it is over
                self._leave_out(_receive_json(group, 1))
                while (chosen := self._next()) is not None:
                    self._send(group, *chosen)
                if not self.is_over:
                    _send_json(group, {"forms": self._forms})
        finally:
            self.is_over = True
            group.free(reusable=self._is_final)

    def _leave_out(self, there: Mapping[str, int]) -> None:
        """Send nothing that the receiver has from elsewhere: tensors with these fingerprints."""
        with self._changed:
            for name in [name for name, one in there.items() if self._prints.setdefault(name, one) == one]:
                self._left.pop(name, None)

    def _next(self) -> tuple[str, Tensor] | None:
        """Wait for something to send; None at the end."""
        with self._changed:
            self._is_sending = False
            self._changed.wait_for(lambda: self.is_over or self._is_final or (self._left and not self._is_paused))
            self._is_sending = bool(self._left) and not self.is_over
            name = next(iter(self._left)) if self._is_sending else ""
            return (name, self._left.pop(name)) if self._is_sending else None

    def _send(self, group: Group, name: str, tensor: Tensor) -> None:
        kind = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        with self._changed:
            left = sum(one.nbytes for one in (tensor, *self._left.values()))
        _send_json(group, {"name": name, "left": left, **kind})
        for piece in _pieces(tensor.contiguous(), group):
            with self._changed:
                self._changed.wait_for(lambda: self.is_over or self._is_final or not self._is_paused)
            if self.is_over:
                raise RankFailure("it was stopped")
            group.broadcast(piece, 0).wait()
            self._num_sent += piece.nbytes


class StateReceiver:
    """Receives what a `StateSender` sends, and switches to another member that begins to send it.

    Args:
        find: returns the name of the latest transfer to this rank, and the member that sends it; None if there is none.
        connect: returns the group of such a transfer, in which this rank is 1; otherwise as for `StateSender`.
        pause_s: between two looks for a transfer.
        have: returns tensors of such a state, by name, that this rank has from elsewhere.
        is_shown: whether a bar shows how much has come.

    Attributes:
        state: the parts that were offered, once all have come.
        num_bytes: received so far.
    """

    def __init__(
        self,
        find: Callable[[], tuple[str, int] | None],
        connect: Callable[[str, int, Callable[[], bool]], Group],
        pause_s: float,
        have: Callable[[], Mapping[str, Tensor]] = dict,
        is_shown: bool = True,
    ) -> None:
        self._have, self._is_shown = have, is_shown
        self._find, self._connect, self._pause_s = find, connect, pause_s
        self.state: dict[str, Any] = {}
        self.num_bytes = 0
        self._over = threading.Event()
        self._thread = start_until_exit(self._run, "receive a state", self._over.set)

    def wait(self, seconds: float) -> bool:
        """Return whether all has come, after waiting for so long at most."""
        return self._over.wait(seconds) and bool(self.state)

    def stop(self, seconds: float) -> None:
        """Wait for nothing any more, and for so long at most until nothing runs here."""
        self._over.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        found = tried = None
        while not self._over.is_set():
            with suppress(Unreachable):
                found = self._find()
            if found is None or found == tried:
                self._over.wait(self._pause_s)
                continue
            tried = found
            with suppress(RankFailure, Unreachable):
                tensors = dict(self._have())
                with bar("Receiving the trained state", 0, self._is_shown) as shown:
                    self._receive(self._connect(*found, partial(self._is_over, found)), tensors, shown)

    def _is_over(self, found: tuple[str, int]) -> bool:
        return self._over.is_set() or self._find() not in (None, found)

    def _receive(self, group: Group, tensors: dict[str, Tensor], shown: Bar) -> None:
        try:
            _send_json(group, {name: fingerprint(tensor) for name, tensor in tensors.items()}, 1)
            while not self._over.is_set():
                said = _receive_json(group)
                if "forms" in said:
                    self.state = {part: filled(form, tensors) for part, form in said["forms"].items()}
                    self._over.set()
                    return
                tensor = torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]))
                shown.total = shown.num_done + said["left"]
                for piece in _pieces(tensor, group):
                    group.broadcast(piece, 0).wait()
                    self.num_bytes += piece.nbytes
                    shown.advance(piece.nbytes)
                tensors[said["name"]] = tensor
        finally:
            group.free(reusable=bool(self.state))


class TransferWatch:
    """Ends the waits of a transfer when the other replica is known to be gone; nobody is ever late in one.

    Args:
        other: its id.
        is_over: whether this replica has no more use for the transfer.
    """

    connect_s = _CONNECT_S

    def __init__(self, heartbeats: Heartbeats, other: int, is_over: Callable[[], bool]) -> None:
        self._heartbeats, self._other, self._is_over = heartbeats, other, is_over

    def look(self, entered: Entered, waited_s: float) -> None:
        with suppress(Unreachable):
            why = "it was stopped" if self._is_over() else ""
            if why := why or self._heartbeats.ended(self._other) or self._heartbeats.unheard(self._other):
                raise RankFailure(why)

    def note_end(self, entered: Entered, took_s: float) -> None:
        return None

    def break_off(self, reason: str, author: int | None = None) -> RankFailure:
        return RankFailure(reason)


def _pieces(tensor: Tensor, group: Group) -> Sequence[Tensor]:
    """Cut a tensor: between two pieces a round may begin, and others see progress."""
    plain, size = bytes_of(tensor), group.piece_bytes
    return [plain[begin : begin + size] for begin in range(0, len(plain), size)]


def _send_json(group: Group, content: Any, rank: int = 0) -> None:
    encoded = bytearray(json.dumps(content).encode())
    group.broadcast(torch.tensor([len(encoded)]), rank).wait()
    group.broadcast(torch.frombuffer(encoded, dtype=torch.uint8), rank).wait()


def _receive_json(group: Group, rank: int = 0) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    group.broadcast(length, rank).wait()
    encoded = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(encoded, rank).wait()
    return json.loads(encoded.numpy().tobytes())


def form_of(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a tree as JSON can hold it, and put its tensors into `tensors`, by name."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[key, form_of(value, f"{name}.{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [form_of(value, f"{name}.{number}", tensors) for number, value in enumerate(tree)]}
    return tree


def filled(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `form_of`."""
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: filled(value, tensors) for key, value in content}
    children = [filled(value, tensors) for value in content]
    return tuple(children) if kind == "tuple" else children
