# SPDX-License-Identifier: Apache-2.0
"""The progress of a prepared loader's iterations: their positions, and where the next one begins or continues."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from farflung.base.torch_internals import is_exhausted
from farflung.base.words import counted
from farflung.checkpoint import rng
from farflung.data.batches import plain_or_none, state_of
from farflung.data.resume.iteration import NOTHING, Iteration, Position, RandomStates, pack_batches
from farflung.data.resume.workers import Workers, checked, known
from farflung.data.torch_loaders import Source
from farflung.loop.state import LoopState


class Progress:
    """Where the iterations of a loader, and of its copies that skip batches, stand.

    `reads` says whether this rank reads the data. `pack` returns what an iteration has prefetched as plain data, None
    if it is none.
    """

    def __init__(self, reads: bool = True, pack: Callable[[list[Any]], Any] = pack_batches) -> None:
        self._reads = reads
        self._pack = pack
        self.workers = Workers()
        self._passes = 0
        self.number = 0  # the epoch of the iteration that is under way, or of the next one when none is
        self.under_way = False  # an iteration of epoch `number` has begun; it may have been broken off
        self.position: Position | None = None  # where the next iteration continues, once a state was loaded
        self.host: dict[str, Any] | None = None  # random states with which it starts, whatever was drawn since then
        self.chosen: int | None = None  # the epoch that was chosen for it, if nothing is left of that of `position`
        self.may_be_over = False  # nothing is left of that epoch, and the next one begins unless the script counts so
        self.newest: Iteration | None = None  # the one that began last
        self.run_number: int | None = None  # of the loader among those of its run; None: it is in none

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "run_number": None, "newest": None}  # the copy is in no run and in no iteration

    @property
    def epoch(self) -> int:
        return self.number if self.chosen is None else self.chosen

    def choose(self, number: int) -> None:
        """Make the next iteration epoch `number`. A loaded position stays if it is in that epoch."""
        self.may_be_over = False
        if self.position is not None and number != self.number:
            if self.position.ended:
                self.chosen = number
                return
            self.position = None
        self.chosen = None
        self.number = number
        self.under_way = False

    def settle(self) -> None:
        """Count an iteration that was broken off as one epoch."""
        if self.under_way and self.position is None:
            self.choose(self.number + 1)

    def begin(self, loader: Any, agree: Callable[[], None] | None, has_asked: bool) -> Iteration:
        """Start an iteration, or continue the loaded one; `agree` makes ranks draw the same random order.

        After the last batch, this is the rest of its epoch for scripts that `has_asked` for it; else the next epoch.
        """
        source, skip, exactly = loader.base_source, loader.skip_batches, loader.skips_exactly
        position, self.position = self.position, None
        if self.host is not None:
            rng.write(self.host)
            self.host = None
        if position is not None and position.ended:
            is_passed = skip < position.batches if exactly else self.may_be_over and not has_asked
            if is_passed or self.chosen is not None:
                self._run_out(loader, position)
                position = None
        now = RandomStates.of(source)
        if position is not None:
            skip = skip if exactly else position.batches
            position = position if skip == position.batches else position.moved(skip)
            position.start.restore(source)
        if agree is not None:
            agree()
        self.under_way = True
        source.announce(self.number)
        self.workers.renew(source)
        self._passes += 1
        name = None if self.run_number is None else f"{self.run_number}/{self._passes}"
        has_workers = self.workers.are_there(source) if position is None else position.has_workers
        self.newest = Iteration(loader, self.number, skip, has_workers, name, position, now)
        return self.newest

    def _run_out(self, loader: Any, position: Position) -> None:
        """Run an exhausted iteration to its end, so that its generators are where it leaves them."""
        chosen, self.chosen = self.chosen, None
        self.position, self.may_be_over = position, False
        whole: Any = copy.copy(loader)
        whole.__dict__.update(skip_batches=0, skips_exactly=False)
        list(whole)
        if chosen is not None:
            self.choose(chosen)

    def complete(self, one: Iteration) -> None:
        if self.under_way and one.epoch == self.number and self.position is None:
            self.choose(one.epoch + 1)

    def leave(self, one: Iteration) -> None:
        """Forget an iteration that came to its end, was broken off or thrown away. Its workers end with it."""
        one.prefetched, one.in_hand, one.source = [], NOTHING, None
        if self.newest is one:
            if self.under_way and one.num_batches == 1 and one.began_with is None:
                self._passes -= 1  # a look at a batch, perhaps on this rank alone
            self.newest = None  # it knows the loader, which is freed at once when nobody else holds it

    def state_dict(self, loader: Any, state: LoopState) -> dict[str, Any]:
        """Return the state of a loader; see `PreparedLoader`. `state` knows the iterations that are under way."""
        source, one, position = loader.base_source, self.newest, self.position
        around, inner = state.nesting()
        if one is not None and position is None and any(one is other for other in state.loaders):
            position = self._position_of(one, source, again=any(one is other for other in around))
        # What a loop does before the one in it is done again, and may draw random numbers again.
        is_inner = bool(around) and inner.base_dataloader is loader.base_dataloader
        return {
            "host": rng.read_host() if is_inner else self.host,
            "epoch": self.number,
            "under_way": self.under_way,
            "position": None if position is None else position.to_dict(),
            **_orders_of(source),
            "has_workers": self.workers.are_there(source),
            "worker_states": known(self.workers.states),
            "total_batch_size": loader.total_batch_size,
        }

    def _position_of(self, one: Iteration, source: Source, again: bool) -> Position:
        """Return the position after the batches that were handed out; before the last of them if it comes `again`."""
        batches = one.skip + one.num_batches - again
        read = [one.in_hand] * (again and one.in_hand is not NOTHING) + one.prefetched
        prefetched = self._pack(read)
        keeper = source.keeper if self._reads else None
        first, dataset = None, None
        if keeper is not None and (not read or prefetched is not None):
            first = plain_or_none(one.first)
            dataset = state_of(keeper) if one.first is None or first is not None else None
        return Position(
            batches=batches,
            ended=one.end_of_dataloader and not again,
            start=one.start,
            num_prefetched=len(read),
            prefetched=prefetched,
            again=again,
            first=first,
            dataset=dataset,
            has_workers=one.has_workers,
            worker_plan=None if one.history is None else one.history.worker_plan(batches),
            exhausted=one.end_of_dataloader or is_exhausted(one.source),
        )

    def load_state_dict(self, source: Source, saved: dict[str, Any]) -> None:
        """Make the next iteration continue at the position of a state; if it is no such state, change nothing."""
        position = None if saved["position"] is None else Position.from_dict(saved["position"])
        number, under_way, were_started = int(saved["epoch"]), bool(saved["under_way"]), bool(saved["has_workers"])
        states, host = checked(saved.get("worker_states")), saved.get("host")
        if host is not None:
            rng.check(host)
        _set_orders(source, saved["generators"], saved["seeds"])
        self.number, self.under_way, self.position, self.chosen = number, under_way, position, None
        self.host = host
        is_inner = bool(saved.get("is_inner", host is not None))  # such a loop is entered again
        self.may_be_over = position is not None and position.ended and not is_inner
        workers = self.workers
        workers.were_started, workers.states, workers.is_loaded = were_started, states, True

    def keep(self, source: Source) -> Callable[[], None]:
        own, workers, orders = dict(vars(self)), dict(vars(self.workers)), _orders_of(source)
        without = [sampler for sampler in source.samplers if getattr(sampler, "generator", sampler) is None]

        def undo() -> None:
            for sampler in without:  # a loaded state may have brought a generator
                sampler.generator = None
            vars(self).update(own)
            vars(self.workers).update(workers)
            _set_orders(source, **orders)

        return undo

    def describe(self, loader: Any) -> str:
        position, epoch = self.position, self.number
        if position is None:
            return f"starts epoch {epoch + self.under_way}"
        try:
            total = f" of {len(loader)}"
        except TypeError:  # a stream that does not know its length
            total = ""
        if position.ended:
            loop = "the first loop over it ends immediately"
            return f"continues after the last batch of epoch {epoch}: " + (
                f"epoch {epoch + 1} begins, or if the script reads .iteration, {loop}" if self.may_be_over else loop
            )
        where = f"continues after batch {position.batches}{total} of epoch {epoch}"
        where += ", with the one that was in hand" if position.again else ""
        now = loader.base_dataloader.num_workers
        then = 0 if position.worker_plan is None else len(position.worker_plan.workers)
        if then and then != now:
            where += f", with {counted(now, 'worker')} instead of {then}, which draw different random numbers"
        return where


def _orders_of(source: Source) -> dict[str, Any]:
    """Return the states on which the order of the data depends."""
    generators = [generator.get_state() for generator in source.generators]
    return {"generators": generators, "seeds": [sampler.initial_seed for sampler in source.seeded_samplers]}


def _set_orders(source: Source, generators: list[Any], seeds: list[int]) -> None:
    source.set_generators(generators)
    for sampler, seed in zip(source.seeded_samplers, seeds, strict=False):
        sampler.initial_seed = seed
