# SPDX-License-Identifier: Apache-2.0
"""Epochs that replicas share while they come and go: each takes a slot, goes through it, and takes the next.

An epoch's batches, in an order that all replicas agree on, are cut into S slots: slot s has the batches s, s + S,
s + 2S ... The run's store records which replica holds each slot, and how many of its batches are done. A batch is done
when the outer loop's round is applied that its step went into. What a replica had taken and not done is free again when
it is lost, or left out as late: another one takes it from the first batch that is not done. `docs/concepts/data.md` has
what is promised, and the exceptions.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, SequentialSampler

from farflung.base.errors import ConfigError, StateError, Unreachable
from farflung.base.words import counted
from farflung.comm.c10d_transport import StoreBoard, TextBoard
from farflung.comm.collectives import from_first
from farflung.comm.exchange import Exchange
from farflung.data.loader import DataLoaderShard
from farflung.data.resume.iteration import Iteration
from farflung.data.samplers import SamplerView, filled
from farflung.data.slot_board import Claim, SlotBoard, agreed_order, digest_of, num_slots, proposed_seed
from farflung.data.torch_loaders import Source

if TYPE_CHECKING:
    from farflung.base.torch_internals import Store
    from farflung.outer.elastic import Elastic
    from farflung.outer.stats import Round

# What ranks of a replica do together, as errors name it.
_START, _NEXT = "iter(loader)", "next(iterator of a loader)"
_Entry = tuple[int, int, int, int]  # tenure, epoch, slot, how many batches of the slot are done with this one


@dataclass(eq=False)
class Slots:
    """The shares of one replica in the epochs of all its loaders."""

    store: StoreBoard | Store  # that all replicas of the run share
    member: int  # this replica's id
    exchange: Exchange  # of the ranks of this replica, of which the first speaks with the store
    most: int  # how many replicas there will be at most
    expected: int = 1  # how many the run begins with
    is_training: Callable[[], bool] = lambda: True  # whether a pass that begins now is one of training

    def __post_init__(self) -> None:
        self.is_first = self.exchange.group.rank == 0
        self.kind = SlotLoader  # of the loaders whose batches are shares
        self._board = TextBoard.of(self.store).part("data")
        self._samplers: list[SlotSampler] = []
        self._follows: list[FollowedLoop] = []
        self._unrecorded: deque[tuple[int, SlotSampler, list[_Entry]]] = deque()  # with the number given by then
        self.tenure = 0  # how often this replica has come in; what it had taken before is no more its own
        self.num_given = self.num_steps = 0  # batches that the training of this rank got, steps that it made of them
        self.is_gone = False  # the store can't be reached any more

    def shared(self, loader: Source, per_round: int, num_parts: int = 1) -> Source:
        """Return a copy of a loader whose batches are this replica's share.

        Args:
            per_round: how many batches the ranks of the replica consume together.
            num_parts: among how many of its ranks the loader's sampler shares out the data by itself.

        Raises:
            ConfigError: it can't be cut into slots.
        """
        if not loader.by_index:
            raise ConfigError(
                f"Replicas that come and go share the batches of a data set by index, but this loader reads "
                f"{type(loader.dataset).__name__} as a stream. Use a data set with __len__ and __getitem__; a stream "
                "whose replicas each draw their own samples can be iterated unprepared."
            )
        source, sampler = loader.indices, loader.sampler
        if getattr(sampler, "num_replicas", 1) > num_parts:
            raise ConfigError(
                f"This loader's {type(sampler).__name__} hands out fixed shares, but the replicas of this run come and "
                "go. Prepare the loader without it (with shuffle=True, if it shuffles)."
            )
        try:
            len(source)
        except TypeError:
            raise ConfigError(
                f"Replicas that come and go share epochs whose number of batches is known; {type(source).__name__} has "
                "no __len__. Give it one."
            ) from None
        board = SlotBoard(self._board.part(str(len(self._samplers))), self.member)
        made = SlotSampler(source, loader, self, board, per_round)
        self._samplers.append(made)
        return loader.with_indices(made)

    def shared_as_it_is(self, loader: DataLoader[Any], num_parts: int) -> tuple[DataLoader[Any], SlotSampler]:
        """Return a copy of a loader that nobody prepares, and its share, where its sampler has so many parts."""
        made = self.shared(Source.of(loader), 1, num_parts)
        return made.loader, made.indices

    def described(self) -> str:
        """Return what must be the same on all replicas: how many batches the loaders have that were prepared so far."""
        return ", ".join(counted(one.num_batches, "batch") for one in self._samplers)

    def follow(self, membership: Elastic, num_fragments: int) -> FollowedLoop:
        """Record from now on what the rounds of an outer loop bring into the common weights."""
        made = FollowedLoop(self, membership, num_fragments)
        self._follows.append(made)
        return made

    def leave(self, followed: FollowedLoop) -> None:
        """Forget an outer loop that has ended."""
        self._follows.remove(followed)

    def is_here(self, member: int) -> bool:
        """Whether a replica takes part, as far as this one knows."""
        records = [one.membership.record for one in self._follows]
        return all(record is None or member in record.ids for record in records)

    def reach(self, act: Callable[..., Any], *args: Any) -> Any:
        """Return what `act` finds in the store; None once that is gone, which ends no training."""
        if not self.is_gone:
            try:
                return act(*args)
            except Unreachable:
                self.is_gone = True
                warnings.warn(
                    "The run's store is gone, so replicas can't share the rest of this epoch, which ends here. "
                    "Later epochs are shared by the members' places.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return None

    def tell(self, act: Callable[..., Any], *args: Any) -> None:
        """Write to the store, on one rank of the replica."""
        if self.is_first:
            self.reach(act, *args)

    def own_slots(self, number: int) -> range:
        """Return which of `number` slots are this replica's by member rank, once the store is lost."""
        records = [one.membership.record for one in self._follows]
        ids = next((record.ids for record in records if record is not None), (self.member,))
        return range(ids.index(self.member), number, len(ids)) if self.is_gone else range(0)

    def look(self) -> None:
        """Give up what was taken, if this replica has been left out meanwhile and is back as a newcomer."""
        if any(one.joined != one.membership.joined for one in self._follows):
            self.tenure += 1
            self._unrecorded.clear()
            for one in self._follows:
                one.begin_anew()
            for sampler in self._samplers:
                sampler.give_up()

    def give(self, sampler: SlotSampler, entries: list[_Entry]) -> None:
        """Note that the training gets these batches."""
        self.num_given += 1
        self._unrecorded.append((self.num_given, sampler, entries))
        sampler.given |= {(epoch, slot): done for _, epoch, slot, done in entries}

    def step_attempted(self) -> None:
        """Say in the store what would be in rounds that are sent off now."""
        self.num_steps += 1
        steps = [(one.number, one.step) for one in self._follows]
        for sampler in self._samplers:
            if sampler.given:
                self.tell(sampler.board.say_sent, steps, sampler.given)

    def record(self) -> None:
        """Record what all outer loops have in their common weights."""
        landed = min(one.num_landed for one in self._follows)
        done: dict[SlotSampler, dict[tuple[int, int], int]] = {}
        while self._unrecorded and self._unrecorded[0][0] <= landed:
            _, sampler, entries = self._unrecorded.popleft()
            done.setdefault(sampler, {}).update({(epoch, slot): count for _, epoch, slot, count in entries})
        for sampler, counts in done.items():
            sampler.given = {place: one for place, one in sampler.given.items() if counts.get(place) != one}
            self.tell(sampler.board.note, counts)

    def note_lost(self) -> None:
        """Note for replicas that were lost what they did not live to note themselves."""
        for lost in {member for one in self._follows for member in one.met if not self.is_here(member)}:
            landed = [one.met.pop(lost, (0, -1)) for one in self._follows]
            for sampler in self._samplers:
                self.tell(sampler.board.note_for, lost, landed)


class FollowedLoop:
    """Which batches are in the common weights of one outer loop."""

    def __init__(self, slots: Slots, membership: Elastic, num_fragments: int) -> None:
        self.membership = membership
        self._slots, self._num_fragments = slots, num_fragments
        self.num_landed = 0  # of the batches that were handed out
        self.number = self.step = 0  # of the generation, and of the loop's step, at the latest step
        # Since which generation other replicas have been in, and up to which step the rounds have landed
        # that they took part in, by their ids.
        self.met: dict[int, tuple[int, int]] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was sent off: this replica has been left out of it."""
        self.joined = self.membership.joined  # the generation in which it came in last
        self._steps: deque[tuple[int, int]] = deque()  # number of the step, batches handed out by then
        self._landed: dict[int, int] = {}  # step by fragment

    def step_attempted(self, position: int) -> None:
        """Called after a step of the training, before the rounds that are due then."""
        self._meet()
        self.step = position
        self._steps.append((position, self._slots.num_given))
        self._slots.step_attempted()

    def round_ended(self, this: Round) -> None:
        """Called with each round that has ended."""
        self._meet()
        record = self.membership.record
        if record is None or this.dropped or len(this.weights) != len(record.ids):  # all take part in what counts
            return
        self._landed[this.fragment] = this.step
        if len(self._landed) == self._num_fragments:
            step = min(self._landed.values())
            self.met = {member: (since, step) for member, (since, _) in self.met.items()}
            while self._steps and self._steps[0][0] <= step:
                self.num_landed = self._steps.popleft()[1]
            self._slots.record()

    def _meet(self) -> None:
        """See who has come, who has gone, and whether this replica has been left out."""
        self._slots.look()
        self._slots.note_lost()
        record = self.membership.record
        if record is not None:
            self.number = record.number
            for member in set(record.ids).difference(self.met):
                self.met[member] = record.number, -1


class SlotSampler(SamplerView):
    """The batches of a batch sampler that this replica gets, or all of them in an evaluation.

    The last batch of an epoch, which may be short, comes last. `len()` is the share of one of the replicas that the run
    begins with, always the same: schedules are planned with it. In an evaluation it is the number of all batches; so it
    is before the first pass if nothing shuffles.
    """

    def __init__(self, batch_sampler: Any, loader: Source, slots: Slots, board: SlotBoard, per_round: int) -> None:
        super().__init__(batch_sampler)
        self.sampler: Any = getattr(batch_sampler, "sampler", batch_sampler)  # which may be replaced
        self.board = board
        self.is_shared = not isinstance(self.sampler, SequentialSampler)  # the latest pass is one of training
        self.is_past = self.has_begun = False  # the others were through with the latest pass's epoch; there was a pass
        self._loader, self._slots, self._per_round = loader, slots, per_round
        self._seed = 0
        self._epoch = self._ended = -1
        self._drawn: deque[_Entry] = deque()
        self._num_drawn = self._num_steps = 0
        self.given: dict[tuple[int, int], int] = {}  # batches that were not recorded, by epoch and slot
        self._orders: dict[int, list[Any]] = {}
        self._own: Iterator[Claim] = iter(())  # without a store

    @property
    def _whole(self) -> Any:
        return self.batch_sampler if hasattr(self.batch_sampler, "sampler") else self.sampler

    @property
    def num_batches(self) -> int:
        """Of all replicas together."""
        return len(self._whole)

    def __len__(self) -> int:
        whole = self.num_batches
        return -(-whole // self._slots.expected) if self.is_shared else whole

    def __iter__(self) -> Iterator[Any]:
        return self._claimed() if self.is_shared else iter(self._whole)

    def begin(self, epoch: int) -> None:
        """Begin a pass: a collective of the ranks of this replica.

        Raises:
            ConfigError: this replica has been through this epoch; or the others have other data.
        """
        self.is_shared, self.is_past = self._slots.is_training(), False
        self._drawn.clear()
        self._orders.clear()
        self._num_drawn = 0
        if not self.is_shared:
            return
        if epoch <= self._ended:
            raise ConfigError(
                f"Epoch {epoch} of this loader was trained on already. Replicas that come and go name epochs by their "
                "numbers, so each must have another: leave set_epoch out, or count its argument up."
            )
        if not self.has_begun:
            self._seed = from_first(self._slots.exchange, lambda: self.board.seed(proposed_seed(self._loader)), _START)
            self.has_begun = True
        self._epoch, self._num_steps = epoch, self._slots.num_steps
        order = self._order(epoch)
        slots, most = self._slots, self._slots.most

        def begun() -> tuple[bool, range]:
            is_past = slots.reach(self.board.begin, epoch, len(order), digest_of(order), most)
            return bool(is_past), slots.own_slots(num_slots(len(order), most))

        self.is_past, mine = from_first(self._slots.exchange, begun, _START)
        self._own = iter([Claim(epoch, slot, 0) for slot in mine])

    def hands_out(self) -> bool:
        """Take note that the next batch is about to be handed out; say False where it has become another replica's."""
        if not self.is_shared:
            return True
        self._slots.look()
        entries = [self._drawn.popleft() for _ in range(min(self._per_round, len(self._drawn)))]
        if any(entry[0] != self._slots.tenure for entry in entries):
            return False
        self._slots.give(self, entries)
        return True

    def finish(self) -> None:
        """Take note that a pass came to its end. What the ranks have dropped of a last round is done."""
        if self.is_shared:
            self._ended = self._epoch
            if self._num_drawn and self._num_steps == self._slots.num_steps:
                warnings.warn(
                    "A pass over a prepared loader made no step of training, but got this replica's share alone, as "
                    "the model was in train mode. Call model.eval() before an evaluation, which gets all of the data.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            rest = [entry for entry in self._drawn if entry[0] == self._slots.tenure]
            if rest:
                self._slots.give(self, rest)

    def check_trains(self) -> None:
        """Raise StateError if other replicas get the same batches as this one, from which a step of training came."""
        if not self.is_shared:
            raise StateError(
                "This step trains on a loader whose pass began with the model in eval mode. That is taken for an "
                "evaluation, in which each replica gets all of the data. Call model.train() before the loop."
            )

    def synchronized(self) -> None:
        """Take note that all replicas have come to the end of the epoch."""
        if self.is_shared:
            self._slots.tell(self.board.end, self._epoch)

    def give_up(self) -> None:
        """Let others have what this replica has taken."""
        self.given = {}
        if self.has_begun:
            self._slots.tell(self.board.give_up)

    def _claimed(self) -> Iterator[Any]:
        last: list[tuple[Any, _Entry]] = []  # batches of their epochs
        while not self.is_past and (claim := from_first(self._slots.exchange, self._claim, _NEXT)) is not None:
            order, tenure = self._order(claim.epoch), self._slots.tenure
            step = num_slots(len(order), self._slots.most)
            for done, index in enumerate(range(claim.slot + claim.done * step, len(order), step), claim.done + 1):
                entry = (tenure, claim.epoch, claim.slot, done)
                if index == len(order) - 1:
                    last.append((order[index], entry))
                    break
                yield self._draw(order[index], entry)
                self._slots.look()
                if self._slots.tenure != tenure:
                    while self._num_drawn % self._per_round:  # the ranks take their parts of a round from its place
                        yield self._draw(order[index], entry)
                    break
        for number, (batch, entry) in enumerate(last, 1):
            if entry[0] == self._slots.tenure:
                is_short = number < len(last) and self._slots.exchange.group.size > 1 and self.batch_size is not None
                full = filled(batch, self._orders[entry[1]][0], self.batch_size or 0) if is_short else batch
                yield self._draw(full, entry)

    def _draw(self, batch: Any, entry: _Entry) -> Any:
        self._drawn.append(entry)
        self._num_drawn += 1
        return batch

    def _claim(self) -> Claim | None:
        self._slots.look()
        self._slots.note_lost()
        if self._slots.is_gone:
            return next(self._own, None)
        claimed: Claim | None = self._slots.reach(self.board.claim, self._epoch, self._slots.is_here)
        return claimed

    def _order(self, epoch: int) -> list[Any]:
        if epoch not in self._orders:
            self._orders[epoch] = agreed_order(self._whole, self._loader, self._seed, epoch)
            self._loader.announce(self._epoch)
        return self._orders[epoch]


class SlotLoader(DataLoaderShard):
    """A prepared loader of a replica that comes and goes: each pass of training hands out this replica's share."""

    @property
    def share(self) -> SlotSampler:
        """The batches of this replica."""
        return next(one for one in self.base_source.samplers if isinstance(one, SlotSampler))

    def skipping(self, num_batches: int) -> Any:
        raise ConfigError(
            f"skip_first_batches: num_batches is {num_batches}, but the replicas of this run come and go, so nobody "
            "has a fixed share whose first batches could be left out. Leave the call out: what the run has done of an "
            "epoch is not handed out again."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: the epoch. What is done of it stands in the run's store."""
        state = super().state_dict()
        if state["position"] is not None and not state["position"]["ended"]:
            state |= {"position": None, "under_way": False}
        return state

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        share = self.share
        share.begin(one.epoch)
        if share.is_shared and one.resumed_at is not None:
            one.arrive()
            if one.resumed_at.ended:
                return
            warnings.warn(
                f"The loaded position in epoch {one.epoch} is left out, as a replica that comes and goes has no fixed "
                "share: the epoch goes on with what the replicas of this run have not done of it.",
                RuntimeWarning,
                stacklevel=3,
            )
            one.skip, one.resumed_at = 0, None
        for batch, last, real in super()._stream(one):
            if share.hands_out():
                yield batch, last, real
        share.finish()
