# SPDX-License-Identifier: Apache-2.0
"""The data slots that a replica holds: claimed on the run's board, recorded when done, given up when left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from farflung.address.board import Board
from farflung.base.errors import Unreachable, Unsupported
from farflung.comm.exchange import Exchange
from farflung.data.ledger import Ledger, Sent
from farflung.data.slot_board import Landed, Rounds, SlotBoard, landed_in
from farflung.members.elastic import Elastic
from farflung.outer.stats import Round


@dataclass(eq=False)
class Followed:
    """An outer loop that brings batches into the common weights, and reports its steps and rounds here."""

    claims: Claims
    membership: Elastic
    sent: Sent
    joined: int  # the generation in which this replica came in last, as far as the claims know

    def __post_init__(self) -> None:
        self.membership.round_listeners.append(self._round_begins)

    def step_attempted(self, step: int, num_fragments: int) -> None:
        """Count the batches that rounds sent after this step would contain; called before the rounds due then.

        Args:
            num_fragments: in which the model is sent from now on.
        """
        self._meet()
        self.sent.num_fragments = num_fragments
        self.claims.ledger.send(self.sent, step)
        self.claims.num_steps += 1
        if self.claims.ledger.mixed > 1:  # once, it may be a batch that a script has only looked at
            raise Unsupported(
                "Each step trains on batches of several loaders, but the replicas of this run come and go: they share "
                "the epochs of each loader at their own pace, so those of two loaders don't end together. Train from "
                "one loader of torch.utils.data.StackDataset, which has samples of several data sets, or of "
                "ConcatDataset."
            )

    def _round_begins(self) -> None:
        """Record the batches in the round, for others to know if this replica doesn't live to see it land."""
        claims, steps = self.claims, self.claims.ledger.steps()
        for loader, done in claims.ledger.open.items():
            if done:
                claims.write(claims.boards[loader].record_sent, steps, done)

    def round_ended(self, this: Round) -> None:
        """Record the batches that a round has applied to the common weights, if all members took part in it."""
        self._meet()
        claims, record = self.claims, self.membership.record
        if record is None or len(this.weights) != len(record.ids):
            return
        claims.landed[self.membership.loop] = record.number, this.number
        if this.dropped:
            return
        for loader, done in claims.ledger.land(self.sent, this.fragment, this.step).items():
            claims.write(claims.boards[loader].record, done)

    def end(self) -> None:
        self.membership.round_listeners.remove(self._round_begins)
        self.claims.loops.remove(self)
        self.claims.ledger.loops.remove(self.sent)

    def _meet(self) -> None:
        self.claims.follow_members()
        record = self.membership.record
        if record is not None:
            self.sent.meet(record.number, record.ids)


@dataclass(eq=False)
class Claims:
    """The slots of one replica in the epochs of all its loaders."""

    board: Board  # of the run, which all replicas share
    member: int  # this replica's id
    exchange: Exchange  # of the ranks of this replica; the first one talks to the board
    most: int  # replicas at most
    expected: int = 1  # replicas that the run begins with
    is_training: Callable[[], bool] = lambda: True  # whether a pass that begins now is one of training

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.boards: list[SlotBoard] = []  # one for each loader
        self.log_names: list[str] = []  # of the records of its epochs, one for each loader
        self.loops: list[Followed] = []
        self.landed: Landed = {}
        self.num_steps = 0
        self.is_gone = False  # the board can't be reached any more
        self._unwritten: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._is_first = self.exchange.group.rank == 0

    def add_loader(self) -> tuple[int, SlotBoard]:
        """Return the number of a further loader, and the board of its slots."""
        number = len(self.boards)
        self.log_names.append(f"data/{number}/epochs")
        self.boards.append(SlotBoard(self.board.part("data").part(str(number)), self.member, self._rounds))
        return number, self.boards[-1]

    def follow(self, membership: Elastic) -> Followed:
        """Record from now on the batches that the rounds of an outer loop apply to the common weights."""
        membership.keep_logs(self.log_names, partial(landed_in, membership.loop))
        loop = Followed(self, membership, Sent(), membership.joined)
        self.loops.append(loop)
        self.ledger.loops.append(loop.sent)
        return loop

    # ---- what the passes call

    def ask(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call `act` on the board and return its result; None once the board is gone for good; training continues.

        Unreachable: it has given no answer for as long as its requests are patient. It may come back, so nobody can
        know which batches are whose.
        """
        if not self.is_gone:
            try:
                while self._unwritten:
                    write, arguments = self._unwritten[0]
                    write(*arguments)
                    del self._unwritten[0]
                return act(*args)
            except Unreachable as error:
                if not error.is_gone:
                    raise
                self.is_gone = True
                warnings.warn(
                    "The run's store is gone, so replicas can't share the rest of this epoch, which ends here. "
                    "Later epochs are shared by the members' places.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return None

    def write(self, act: Callable[..., Any], *args: Any) -> None:
        """Write to the board, on one rank of the replica; before its next request, if it gives no answer now."""
        if self._is_first:
            try:
                self.ask(act, *args)
            except Unreachable:
                self._unwritten.append((act, args))

    def is_member(self, member: int) -> bool:
        records = (loop.membership.record for loop in self.loops)
        return all(record is None or member in record.ids for record in records)

    @property
    def num_members(self) -> int:
        """How many replicas train now, or with how many the run begins if they have not met yet."""
        records = [loop.membership.record for loop in self.loops]
        return next((len(record.ids) for record in records if record is not None), self.expected)

    def own_slots(self, number: int) -> range:
        """Return which of `number` slots are this replica's by member rank, once the board is lost."""
        records = [loop.membership.record for loop in self.loops]
        ids = next((record.ids for record in records if record is not None), (self.member,))
        return range(ids.index(self.member), number, len(ids)) if self.is_gone else range(0)

    def _rounds(self) -> Rounds:
        found: Rounds = {}
        for loop, record in [(one.membership.loop, one.membership.record) for one in self.loops]:
            if record is not None:
                found[loop] = record.began, max((record.number, 0), self.landed.get(loop, (0, 0)))
        return found

    def follow_members(self) -> None:
        """Give up all claims if this replica was left out meanwhile; record the batches that lost ones could not."""
        self.give_up_if_left_out()
        for lost, landed in self.ledger.lose(self.is_member).items():
            for board in self.boards:
                self.write(board.record_for, lost, landed)

    def give_up_if_left_out(self) -> None:
        """Free all claims for other replicas, if this one was left out meanwhile and is back as a newcomer.

        A replica of one rank that has kept its steps keeps its claims too, unless others have taken some of them.
        """
        changed = [loop for loop in self.loops if loop.joined != loop.membership.joined]
        if not changed:
            return
        for loop in changed:
            loop.joined = loop.membership.joined
        boards = [board for board in self.boards if board.has_begun]
        has_kept = self.exchange.group.size == 1 and all(loop.membership.has_kept for loop in changed)
        if has_kept and all(self.ask(board.holds_all) for board in boards):
            for loop in changed:
                loop.sent.send_again()
            return
        self.ledger.give_up()
        for board in boards:
            self.write(board.give_up)
