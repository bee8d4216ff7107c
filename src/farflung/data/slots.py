# SPDX-License-Identifier: Apache-2.0
"""Epochs that replicas share while they come and go: each claims a data slot, goes through it, and claims the next.

`docs/concepts/data.md` says how an order is cut into slots, and has the guarantees, and their exceptions. A batch is
done once the outer loop has applied the round that contains its step.

Calls go one way: the samplers that `Slots` makes and the outer loops that it follows report to it, as their `Claims`.
These keep a `Ledger` of the replica's batches and write to the boards.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import chain
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from farflung.base.errors import ConfigError, StateError
from farflung.base.words import counted
from farflung.comm.collectives import from_first
from farflung.data.asking import asks_by_next
from farflung.data.claims import Claims
from farflung.data.ledger import Share
from farflung.data.loader import DataLoaderShard
from farflung.data.resume.iteration import Iteration
from farflung.data.samplers import SamplerView, filled
from farflung.data.slot_board import Claim, SlotBoard, agreed_order, digest_of, num_slots, proposed_seed
from farflung.data.torch_loaders import Source

# What ranks of a replica do together, as errors name it.
_START, _NEXT = "iter(loader)", "next(iterator of a loader)"


class Slots(Claims):
    """The claims of a replica, and what makes its shares of all its loaders."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kind = SlotLoader  # of the loaders whose batches are shares
        self._samplers: list[SlotSampler] = []

    def shared(self, source: Source, per_round: int, num_parts: int = 1, is_prepared: bool = True) -> Source:
        """Return a copy of a loader whose batches are this replica's share.

        Args:
            per_round: how many batches the ranks of the replica consume together.
            num_parts: among how many of its ranks the loader's sampler shares out the data by itself.
            is_prepared: it is numbered in this order on all replicas; False: as it is first trained from, as some
                replicas may evaluate less than others.

        Raises:
            ConfigError: it can't be cut into slots.
        """
        if not source.by_index:
            raise ConfigError(
                f"Replicas that come and go share the batches of a data set by index, but this loader reads "
                f"{type(source.dataset).__name__} as a stream. Use a data set with __len__ and __getitem__; a stream "
                "whose replicas each draw their own samples can be iterated unprepared."
            )
        if getattr(source.sampler, "num_replicas", 1) > num_parts:
            raise ConfigError(
                f"This loader's {type(source.sampler).__name__} hands out fixed shares, but the replicas of this run "
                "come and go. Prepare the loader without it (with shuffle=True, if it shuffles)."
            )
        try:
            len(source.indices)
        except TypeError:
            raise ConfigError(
                f"Replicas that come and go share epochs whose number of batches is known; "
                f"{type(source.indices).__name__} has no __len__. Give it one."
            ) from None
        made = SlotSampler(source, self, per_round)
        if is_prepared:
            made.enroll()
        self._samplers.append(made)
        return source.with_indices(made, in_order=True)  # batches are recorded as done in the order of their shares

    def shared_as_it_is(self, loader: DataLoader[Any], num_parts: int) -> tuple[DataLoader[Any], SlotSampler]:
        """Return a copy of a loader that is not prepared, and this replica's share of it; see `shared`."""
        made = self.shared(Source(loader), 1, num_parts, is_prepared=False)
        return made.loader, made.indices

    def described(self) -> list[str]:
        """Return a description that must be the same on all replicas: the numbers of batches of prepared loaders."""
        return [counted(sampler.num_batches, "batch") for sampler in self._samplers]


class SlotSampler(SamplerView):
    """The batches of a batch sampler that this replica gets, or all of them in an evaluation.

    The last batch of an epoch, which may be short, comes last. `len()` is the share of one of the replicas that the run
    begins with, always the same: schedules are planned with it. In an evaluation it is the number of all batches; so it
    is before the first pass if nothing shuffles.

    Attributes:
        is_counted: the script takes `len()` batches of a pass and no more, as a trainer does, so a pass claims no slot
            that it would leave.
    """

    def __init__(self, source: Source, claims: Claims, per_round: int) -> None:
        super().__init__(source.indices)
        self.sampler: Any = source.sampler  # which may be replaced
        self.is_shared = not isinstance(self.sampler, SequentialSampler)  # the latest pass is one of training
        self.is_past = self.has_begun = False  # the others were through with the latest pass's epoch; there was a pass
        self.is_counted = False
        self._source, self._claims, self._per_round = source, claims, per_round
        self._number = -1  # until it is enrolled
        self._board: SlotBoard
        self._seed = 0
        self._epoch = self._ended = -1
        self._drawn: deque[tuple[Any, Share]] = deque()  # and not handed out
        self._num_drawn = self._num_steps = 0
        self._is_open = False  # a pass of training has begun, and has not come to its end
        self._rest: Iterator[tuple[Any, Share]] = iter(())  # of that pass
        self._unused: list[tuple[Any, Share]] = []  # what it has drawn before its first step
        self._shown: list[Any] = []  # all that the pass has if it is empty
        self._orders: dict[int, list[Any]] = {}
        self._own: Iterator[Claim] = iter(())  # without a store

    def enroll(self) -> None:
        """Take the next number among the loaders that replicas share, which must be the same on all of them."""
        self._number, self._board = self._claims.add_loader()

    @property
    def _whole(self) -> Any:
        return self.batch_sampler if hasattr(self.batch_sampler, "sampler") else self.sampler

    @property
    def num_batches(self) -> int:
        """Of all replicas together."""
        return len(self._whole)

    @property
    def epoch(self) -> int:
        """Of the latest pass of training; 0 before the first one."""
        return max(0, self._epoch)

    @property
    def num_members(self) -> int:
        return self._claims.num_members

    def __len__(self) -> int:
        whole = self.num_batches
        return -(-whole // self._claims.expected) if self.is_shared else whole

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown or (self._passed() if self.is_shared else self._whole))

    @property
    def is_unused(self) -> bool:
        """Whether the latest pass of training was left without a step, as by a script that looks at a batch."""
        return self._is_open and self._num_steps == self._claims.num_steps

    def begin(self, epoch: int) -> None:
        """Begin a pass, or the latest one again if it is unused: a collective of the ranks of this replica.

        Raises:
            ConfigError: this replica has been through this epoch; or the others have other data.
        """
        claims, most = self._claims, self._claims.most
        self.is_shared = claims.is_training()
        goes_on = self._is_open and self._num_drawn >= len(self)  # left after a share, as trainers count batches
        ahead = [one for one in self._drawn if goes_on]
        self._drawn.clear()
        self._num_drawn, self._shown = 0, []
        if self.is_shared and self.is_unused and epoch == self._epoch:
            return
        self.is_past = False
        if not self.is_shared:
            return
        self._orders.clear()
        if epoch <= self._ended:
            raise ConfigError(
                f"Epoch {epoch} of this loader was trained on already. Replicas that come and go name epochs by their "
                "numbers, so each must have another: leave set_epoch out, or count its argument up."
            )
        if not self.has_begun:
            if self._number < 0:
                self.enroll()
            self._seed = from_first(claims.exchange, lambda: self._board.seed(proposed_seed(self._source)), _START)
            self.has_begun = True
        self._epoch, self._num_steps = epoch, claims.num_steps
        order = self._order(epoch)

        def begun() -> tuple[bool, range]:
            is_past = claims.ask(self._board.begin, epoch, len(order), digest_of(order), most, goes_on)
            return bool(is_past), claims.own_slots(num_slots(len(order), most))

        self.is_past, mine = from_first(claims.exchange, begun, _START)
        self._own = iter([Claim(epoch, slot, 0) for slot in mine])
        self._is_open, self._unused = True, ahead
        self._rest = chain(self._rest if goes_on else (), self._claimed())

    def hands_out(self) -> bool:
        """Record that the next batch is handed out; return False if it has become another replica's."""
        if not self.is_shared:
            return True
        self._claims.give_up_if_left_out()
        shares = [self._drawn.popleft()[1] for _ in range(min(self._per_round, len(self._drawn)))]
        if any(share.tenure != self._claims.ledger.tenure for share in shares):
            return False
        self._claims.ledger.hand_out(shares)
        return True

    def close(self) -> None:
        """End a pass that came to its end. Batches that the ranks have dropped of a last round are done."""
        if self.is_shared:
            self._ended, self._is_open = self._epoch, False
            if self._num_drawn and self._num_steps == self._claims.num_steps:
                warnings.warn(
                    "A pass over a prepared loader made no step of training, but got this replica's share alone, as "
                    "the model was in train mode. Call model.eval() before an evaluation, which gets all of the data.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            rest = [share for _, share in self._drawn if share.tenure == self._claims.ledger.tenure]
            if rest:
                self._claims.ledger.hand_out(rest)

    def shows_one(self, frame: FrameType) -> bool:
        """Have a batch drawn that counts for nobody, if this pass is empty and a `next()` would fail at its end.

        Args:
            frame: from which the pass is read.
        """
        if self.is_shared and not self._num_drawn and asks_by_next(frame):
            self._shown = self._order(self._epoch)[:1] * self._per_round
        return bool(self._shown)

    def check_trains(self) -> None:
        """Raise StateError if other replicas get the same batches as this one, from which a step of training came."""
        if not self.is_shared:
            raise StateError(
                "This step trains on a loader whose pass began with the model in eval mode. That is taken for an "
                "evaluation, in which each replica gets all of the data. Call model.train() before the loop."
            )

    def synchronized(self) -> None:
        """Record that all replicas have come to the end of the epoch."""
        if self.is_shared:
            self._claims.write(self._board.end, self._epoch)

    def _passed(self) -> Iterator[Any]:
        for batch, share in list(self._unused):
            yield self._draw(batch, share)
        for batch, share in self._rest:
            if self.is_unused:
                self._unused.append((batch, share))
            yield self._draw(batch, share)

    def _claimed(self) -> Iterator[tuple[Any, Share]]:
        claims, ledger = self._claims, self._claims.ledger
        last: list[tuple[Any, Share]] = []  # batches of their epochs
        while not self.is_past and not (self.is_counted and self._num_drawn + len(last) >= len(self)):
            claim = from_first(claims.exchange, self._claim, _NEXT)
            if claim is None:
                break
            order, tenure = self._order(claim.epoch), ledger.tenure
            step = num_slots(len(order), claims.most)
            for done, index in enumerate(range(claim.slot + claim.done * step, len(order), step), claim.done + 1):
                share = Share(self._number, tenure, claim.epoch, claim.slot, done)
                if index == len(order) - 1:
                    last.append((order[index], share))
                    break
                yield order[index], share
                claims.give_up_if_left_out()
                if ledger.tenure != tenure:
                    while self._num_drawn % self._per_round:  # the ranks take their parts of a round from its place
                        yield order[index], share
                    break
        for number, (batch, share) in enumerate(last, 1):
            if share.tenure == ledger.tenure:
                is_short = number < len(last) and claims.exchange.group.size > 1 and self.batch_size is not None
                full = filled(batch, self._order(share.epoch)[0], self.batch_size or 0) if is_short else batch
                yield full, share

    def _draw(self, batch: Any, share: Share) -> Any:
        self._drawn.append((batch, share))
        self._num_drawn += 1
        return batch

    def _claim(self) -> Claim | None:
        claims = self._claims
        claims.follow_members()
        if claims.is_gone:
            return next(self._own, None)
        claimed: Claim | None = claims.ask(self._board.claim, self._epoch, claims.is_member)
        return claimed

    def _order(self, epoch: int) -> list[Any]:
        if epoch not in self._orders:
            self._orders[epoch] = agreed_order(self._whole, self._source, self._seed, epoch)
            self._source.announce(self._epoch)
        return self._orders[epoch]


class SlotLoader(DataLoaderShard):
    """A prepared loader of a replica that comes and goes: each pass of training hands out this replica's share."""

    @property
    def share(self) -> SlotSampler:
        return next(sampler for sampler in self.base_source.samplers if isinstance(sampler, SlotSampler))

    def skipping(self, num_batches: int) -> Any:
        raise ConfigError(
            f"skip_first_batches: num_batches is {num_batches}, but the replicas of this run come and go, so nobody "
            "has a fixed share whose first batches could be left out. Leave the call out: what the run has done of an "
            "epoch is not handed out again."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: the epoch. The run's board records what is done of it."""
        state = super().state_dict()
        if state["position"] is not None and not state["position"]["ended"]:
            state |= {"position": None, "under_way": False, "host": None}
        return state

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.share.is_unused:
            self._progress.under_way = False  # so it counts as no epoch
        yield from super().__iter__()

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        share = self.share
        share.begin(one.epoch)
        if share.is_shared and one.resumed_at is not None:
            one.arrive()
            if one.resumed_at.ended:
                return
            warnings.warn(
                f"The loaded position in epoch {one.epoch} is left out, as a replica that comes and goes has no fixed "
                "share: the epoch continues with what the replicas of this run have not done of it.",
                RuntimeWarning,
                stacklevel=3,
            )
            one.skip, one.resumed_at = 0, None
        for batch, last, real in super()._stream(one):
            if share.hands_out():
                yield batch, last, real
        if share.shows_one(sys._getframe()):
            yield from super()._stream(one)
        share.close()
