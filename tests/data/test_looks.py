# SPDX-License-Identifier: Apache-2.0
"""Scripts look at a batch, or ask by `next()`, where replicas come and go: no batch is lost, no epoch is an error."""

import sys
from collections import Counter
from unittest.mock import MagicMock

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.data.asking import asks_by_next
from farflung.data.slots import Slots
from farflung.hosts.training_data import TrainingData
from tests.data.support import prepared
from tests.data.test_slots import Run, membership

EPOCHS = 3


class Prepared:
    """A replica whose script has prepared its loader."""

    def __init__(self, run, member, **options):
        self.slots = Slots(run.board, member, Exchange(SoloGroup()), most=run.most, expected=2)
        among, self.position, self.seen = membership(), 0, []
        among.record.ids = (1, 2)
        self.followed = self.slots.follow(among)
        self.loader = self.read(DataLoader(run.dataset, batch_size=2, **options))

    def read(self, loader):
        return prepared(loader, None, device=None, slots=self.slots)

    def batches(self):
        return iter(self.loader)

    def step(self, batch):
        self.position += 1
        self.followed.step_attempted(self.position, 1)
        self.seen += batch.tolist()


class Plain(Prepared):
    """A replica whose script reads a `DistributedSampler` by torch's loader."""

    def read(self, loader):
        self.data = TrainingData(lambda: True, MagicMock())
        self.data.slots = self.slots
        sampler = DistributedSampler(loader.dataset, 1, 0)
        return DataLoader(loader.dataset, batch_size=2, sampler=sampler, num_workers=loader.num_workers)

    def batches(self):
        return self.data.iterate(DataLoader.__iter__, self.loader)


@pytest.fixture(params=[Prepared, Plain])
def kind(request):
    return request.param


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_a_batch_of_an_epoch_takes_none_of_it(kind, workers):
    run = Run(16)
    replicas = [kind(run, member, num_workers=workers) for member in (1, 2)]
    for _ in range(EPOCHS):
        for one in replicas:
            looked = [next(one.batches()).tolist() for _ in range(2)]
            assert looked[0] == looked[1]
        passes = [one.batches() for one in replicas]
        firsts = [next(batches) for batches in passes]
        for one, batches, first in zip(replicas, passes, firsts, strict=True):
            one.step(first)
            for batch in batches:
                one.step(batch)
    assert Counter(sample for one in replicas for sample in one.seen) == dict.fromkeys(range(16), EPOCHS)


@pytest.mark.parametrize("workers", [0, 1])
def test_who_comes_late_for_epochs_may_look_at_a_batch_of_each_and_trains_on_none(kind, workers):
    run = Run(16)
    early, late = (kind(run, member, num_workers=workers) for member in (1, 2))
    for _ in range(EPOCHS):
        for batch in early.batches():
            early.step(batch)
    for _ in range(EPOCHS):
        assert len(next(late.batches())) == 2
        for batch in late.batches():
            late.step(batch)
    assert not late.seen
    assert len(next(late.batches())) == 2
    for batch in late.batches():
        late.step(batch)
    assert sorted(late.seen) == list(range(16))


def test_a_script_that_asks_again_where_an_epoch_has_ended_gets_a_batch(kind):
    run = Run(16)
    early, late = (kind(run, member) for member in (1, 2))
    for _ in range(EPOCHS):
        for batch in early.batches():
            early.step(batch)
    batches = late.batches()
    for _ in range(EPOCHS + 8):
        try:
            batch = next(batches)
        except StopIteration:
            batches = late.batches()
            batch = next(batches)
        late.step(batch)
    assert {*range(16)} <= {*late.seen}


def test_who_asks_with_a_default_or_by_a_loop_of_its_own_finds_an_epoch_that_is_over_empty(kind):
    run = Run(16)
    early, late = (kind(run, member) for member in (1, 2))
    for batch in early.batches():
        early.step(batch)
    assert next(late.batches(), None) is None
    for _ in range(EPOCHS):
        for batch in early.batches():
            early.step(batch)
    with pytest.raises(StopIteration):
        following(late.batches())
    assert [*late.batches()] == []


def following(batches):
    """As prefetchers do."""
    try:
        return next(batches)
    except StopIteration:
        raise StopIteration from None


ASKED = """
def ask(batches):
    {}
"""


@pytest.mark.parametrize(
    ("lines", "is_asked"),
    [
        (["next(batches)"], True),
        (["size = len(next(batches))"], True),
        (["try:", "    next(batches)", "except (KeyError, StopIteration):", "    pass"], False),
        (["try:", "    {}[0]", "except KeyError:", "    next(batches)"], True),
        (["try:", "    next(batches)", "except KeyboardInterrupt:", "    pass"], True),
        (["next(batches, None)"], False),
        (["for _ in batches:", "    break"], False),
        (["first, *_ = list(batches)"], False),
    ],
)
def test_who_asks_an_iterator_by_a_next_that_would_fail_at_its_end(tmp_path, lines, is_asked):
    path, found, scope = tmp_path / "asking.py", [], {}
    path.write_text(ASKED.format("\n    ".join(lines)))
    exec(compile(path.read_text(), str(path), "exec"), scope)

    def batches():
        found.append(asks_by_next(sys._getframe(1)))
        yield "batch"

    scope["ask"](batches())
    assert found == [is_asked]
