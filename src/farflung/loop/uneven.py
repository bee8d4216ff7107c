# SPDX-License-Identifier: Apache-2.0
"""Ranks whose data differ though they must not: in number of batches, in order, or in stream.

Different numbers are detected before one rank waits for the others for ever, or joined.

A loader knows its last batch when it hands it out, and each rank publishes that in the store. A rank whose forward or
backward pass waits for others looks there: with its last batch, as ranks that share the rounds of one order differ by
one batch at most; with every batch if they read streams of their own. Loaders that are even publish nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch, ConfigError, RankFailure
from farflung.base.words import counted, numbered
from farflung.comm.group import Group
from farflung.comm.torch_group import TorchGroup

_MORE = "more"
SAY_SHARDED = (
    "If each rank reads its own share, set DataLoaderConfiguration(already_sharded=True), or already_sharded=True in "
    "prepare_data_loader."
)
_TICK_S = 0.002  # between two looks for the first word of a rank


class UnevenDataCheck:
    """What the ranks have published of their loaders."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._checked: Any = None

    def add(self, loader: Any) -> None:
        """Take in a loader that all ranks prepare now."""
        loader._progress.run_number = next(self._group.presence.loader_numbers)

    def publish(self, one: Any) -> None:
        """Publish what is known of an iteration that hands out a batch, or ends without one."""
        if one.began_with is not None and one.name is not None:
            self._compare(one)
        if not one.loader.may_be_uneven or one.name is None:
            return
        if one.end_of_dataloader or one.num_batches == 0:
            self._group.presence.post(str(one.skip + one.num_batches), "data", one.name)
        elif one.num_batches == 1:
            self._group.presence.post(_MORE, "data", one.name)

    def _compare(self, one: Any) -> None:
        """Raise ConfigError if an iteration began with other data than a rank's that has published what it began with.

        Nobody waits, and the last rank to publish sees what all others have published. Ranks look less and less often.
        """
        presence = self._group.presence
        if one.same_on is None:
            one.same_on = {self._group.rank}
            presence.post(one.began_with, "first", one.name)
        others = set(range(self._group.size)) - one.same_on
        is_turn = one.num_batches & (one.num_batches - 1) == 0 or one.end_of_dataloader
        found = presence.posts("first", one.name, ranks=others) if others and is_turn else {}
        one.same_on |= found.keys()
        odd = [rank for rank, word in found.items() if word != one.began_with]
        if odd:
            error = ConfigError(
                f"Ranks {self._group.rank} and {odd[0]} began a pass over a loader with different data, though each "
                f"keeps its share of what must be one order on all: samples are lost and doubled. {SAY_SHARDED} If it "
                "is a random order, give its sampler or data set a generator, or seed it alike on all ranks; if "
                "samples are changed at random, say already_sharded=False."
            )
            self._group.leave(f"ConfigError: {error}", for_good=True)
            raise error

    def check(self, one: Any, awaited: Group | None, model: nn.Module) -> None:
        """Raise CollectiveMismatch if data of ranks that `model` waits for ended before the batch it computes with."""
        loader, at = one.loader, one.skip + one.num_batches
        may_be_alone = loader.may_be_uneven and (one.end_of_dataloader or loader.ends_apart)
        if not may_be_alone or one.name is None or self._checked == (one.name, at):
            return
        ranks = awaited.ranks if isinstance(awaited, TorchGroup) else ()
        others = [rank for rank in ranks if rank != self._group.rank]
        if not others:
            return
        presence = self._group.presence
        while len(words := presence.posts("data", one.name, ranks=others)) < len(others) and one.num_batches == 1:
            self._group.raise_if_broken()  # no pass has waited for them yet
            time.sleep(_TICK_S)
        gone = {rank: int(word) for rank, word in words.items() if word != _MORE and int(word) < at}
        if gone:
            who = numbered("rank", sorted(gone))
            error = CollectiveMismatch(
                f"Rank {self._group.rank} has batch {at} of a loader, but the data of {who} ended after "
                f"{counted(max(gone.values()), 'batch')}, so a pass of {type(model).__name__} would wait for {who} for "
                "ever. Use even_batches=True, or with DDP join_uneven_inputs([model])."
            )
            self._group.leave(f"CollectiveMismatch: {error}", for_good=True)  # so that all hear of it
            raise error
        self._checked = one.name, at


def check_even(awaited: Callable[[nn.Module], Group | None], loop: Any, model: nn.Module, *_: Any) -> None:
    """Check before a forward pass of a model that the ranks it or its backward pass waits for have the batch.

    `awaited` returns those ranks; `loop` is the `LoopState`.
    """
    one = loop.current
    if one is not None and loop.joined is None and one.loader.may_be_uneven:
        loop.ends.check(one, awaited(model), model)


class JoinedRanks:
    """Ranks that sum two numbers each: a value, and whether they have data.

    `group` is used for nothing else. `everyone` are the same ranks as they train; if a rank fails, it is aborted,
    which ends their waits.
    """

    def __init__(self, group: TorchGroup, everyone: TorchGroup) -> None:
        self.group = group
        self._everyone = everyone
        self._responder = Thread(target=self._respond, name="farflung join responder", daemon=True)

    def any(self, mine: bool) -> bool:
        return self._sums(float(mine), 1.0)[0] > 0

    def sum(self, mine: float) -> float:
        return self._sums(mine, 1.0)[0]

    def respond(self) -> None:
        """Answer the others with zeros from now on, in a thread, until none of them has data."""
        self._responder.start()

    def wait(self) -> None:
        """Return when there is nothing more to answer."""
        if self._responder.ident is not None:
            self._responder.join()

    def _respond(self) -> None:
        try:
            while self._sums(0.0, 0.0)[1]:
                pass
        except RankFailure:
            self._everyone.abort()  # or this rank would wait in torch's `Join` for ranks that will not come

    def _sums(self, value: float, has_data: float) -> list[float]:
        both = torch.tensor([value, has_data], dtype=torch.float64)
        self.group.all_reduce(both).wait()
        return both.tolist()
