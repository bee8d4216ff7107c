# SPDX-License-Identifier: Apache-2.0
"""A loader goes on where its state was taken: same batches, and random numbers as if nothing had happened.

Each test trains a toy loop, which draws random numbers of its own in each step, once in one go and once from each of
its states, through a file, with fresh objects.
"""

import io
import random
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.checkpoint import rng
from farflung.checkpoint.reader import allowed
from farflung.data.prepare import skip_first_batches
from farflung.loop.state import LoopState
from tests.accelerator.conftest import on_ranks
from tests.data.support import Stream, prepared, world


class Noisy(Dataset):
    """Draws from each source of random numbers for each of its samples."""

    def __init__(self, n):
        self.n = n

    def __getitem__(self, index):
        return {"x": torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])}

    def __len__(self):
        return self.n


class Wrapped(dict):
    """A batch of a class of the script's, which no checkpoint holds."""


class NoisyStream(IterableDataset):
    """Draws too; has no state."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for index in range(self.n):
            yield torch.tensor([float(index)])


class Stateful(IterableDataset):
    """Knows how far it was read, and draws for each sample; a fresh iteration begins at the beginning."""

    def __init__(self, n):
        self.n, self.at, self.loaded = n, 0, False

    def __iter__(self):
        self.at, self.loaded = (self.at, False) if self.loaded else (0, False)
        while self.at < self.n:
            self.at += 1
            yield torch.tensor([float(self.at - 1), torch.rand(())])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


class Shuffled(Stateful):
    """Draws its order too, with a generator of its own."""

    def __init__(self, n):
        super().__init__(n)
        self.generator, self.order = torch.Generator(), []

    def __iter__(self):
        if not self.loaded:
            self.order = torch.randperm(self.n, generator=self.generator).tolist()
        for item in super().__iter__():
            yield torch.tensor([float(self.order[int(item[0])]), item[1]])

    def state_dict(self):
        return {**super().state_dict(), "order": self.order}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.order = state["order"]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with torch.serialization.safe_globals(allowed()):
        return torch.load(file, weights_only=True)


def tolist(batch):
    """The rows of a batch, or of what a step has seen of it."""
    if isinstance(batch, tuple):
        return batch[0]
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()


def step(batch, loader):
    """What a step of training sees: the batch, random numbers after it, the end and the remainder."""
    worker_states = (torch.rand(()).item(), random.random(), np.random.rand())
    return tolist(batch), worker_states, loader.end_of_dataloader, loader.remainder


def in_one_go(make, epochs=3):
    """The steps of each epoch, and the states after each of them and between the epochs."""
    seed()
    loader, seen, states = make(), [], []
    for epoch in range(epochs):
        states.append((epoch, 0, "between", through_a_file([loader.state_dict(), rng.read()])))
        seen.append([])
        for batch in loader:
            seen[-1].append(step(batch, loader))
            state = through_a_file([loader.state_dict(), rng.read()])
            states.append((epoch, len(seen[-1]), "inside", state))
    return seen, states


def seed():
    random.seed(5), np.random.seed(5), torch.manual_seed(5)


def gone_on(make, state, epoch, epochs=3, skip=None, asks=True):
    """The steps from a state on, by epoch; `asks` says whether the script has its first epoch from the loader."""
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    loader = make()
    loader.load_state_dict(state[0])
    rng.write(state[1])
    assert not asks or skip is not None or loader.iteration >= epoch
    seen = []
    for number in range(epoch, epochs):
        active = skip_first_batches(loader, skip) if skip is not None and number == epoch else loader
        seen.append([step(batch, active) for batch in active])
    return seen


def check(make, pick=1):
    """Go on from each state, or from one in `pick`."""
    seen, states = in_one_go(make)
    is_even = not ((loader := make()).may_be_uneven or loader.ends_apart)
    for epoch, done, where, state in states[::pick]:
        expected = [seen[epoch][done:], *seen[epoch + 1 :]]
        assert gone_on(make, state, epoch) == expected, f"{where} epoch {epoch}, after {done}"
        if where == "inside" and done == len(seen[epoch]) and is_even:  # scripts divide their steps by an epoch's
            assert gone_on(make, state, epoch + 1, asks=False) == expected[1:], f"after epoch {epoch}"


def shuffled(generator=None, drop_last=False, **settings):
    return prepared(DataLoader(Noisy(11), 2, shuffle=True, generator=generator, drop_last=drop_last), **settings)


def with_workers(n, workers, persistent=False, shuffle=False):
    return prepared(DataLoader(Noisy(n), 2, shuffle=shuffle, num_workers=workers, persistent_workers=persistent))


def first_numbers(steps):
    """The samples in steps or batches, without what was drawn for them."""
    return [[row[0] for row in tolist(batch)] for batch in steps]


@pytest.mark.parametrize(
    "make",
    [
        shuffled,
        lambda: shuffled(generator=torch.Generator().manual_seed(3)),
        lambda: shuffled(use_seedable_sampler=True),
        lambda: shuffled(drop_last=True),
        lambda: prepared(DataLoader(Noisy(11), 3)),
        lambda: prepared(DataLoader(Noisy(9), 2, sampler=RandomSampler(range(9), replacement=True))),
        lambda: prepared(
            DataLoader(Noisy(9), batch_sampler=BatchSampler(RandomSampler(range(9), num_samples=14), 4, False))
        ),
        lambda: prepared(DataLoader(Noisy(1), 2)),
    ],
    ids=["shuffled", "own generator", "seedable", "drop_last", "in order", "replacement", "batch sampler", "one batch"],
)
def test_a_loader_over_indices_goes_on_at_any_batch(make):
    check(make)


def test_what_no_checkpoint_can_hold_is_read_again():
    """The samples are the same, and so is every random number of the training; only those of that one batch are not."""

    def make():
        return prepared(DataLoader(Noisy(7), 2, collate_fn=lambda rows: Wrapped(x=torch.stack([r["x"] for r in rows]))))

    seen, states = in_one_go(make)
    for epoch, done, _, state in states:
        found = gone_on(make, state, epoch)
        expected = [seen[epoch][done:], *seen[epoch + 1 :]]
        for steps, others in zip(found, expected, strict=True):
            assert [one[1:] for one in steps] == [other[1:] for other in others]
            assert first_numbers(steps) == first_numbers(others)
            assert steps[1:] == others[1:]


@pytest.mark.parametrize("n", [0, 1, 7, 8])
@pytest.mark.parametrize("kind", [NoisyStream, Stateful, Shuffled])
def test_a_stream_goes_on_at_any_batch(kind, n, capsys):
    check(lambda: prepared(DataLoader(kind(n), 2)))
    assert ("reading" in capsys.readouterr().err) == (kind is NoisyStream and n > 0)


def test_a_stream_with_state_is_not_read_again():
    read = []

    class Watched(Stateful):
        def __iter__(self):
            for item in super().__iter__():
                read.append(int(item[0]))
                yield item

    _, states = in_one_go(lambda: prepared(DataLoader(Watched(12), 2)), epochs=1)
    read.clear()
    gone_on(lambda: prepared(DataLoader(Watched(12), 2)), states[3][-1], 0, epochs=1)
    assert read == [8, 9, 10, 11], "six were handed out, and two more were read ahead and came from the state"


@pytest.mark.parametrize(
    ("dataset", "persistent", "workers", "pick"),
    [
        ("table", False, 1, 8),
        ("table", False, 2, 5),
        pytest.param("table", False, 4, 3, marks=pytest.mark.long),
        ("table", True, 2, 5),  # torch takes 5 s to end a persistent worker that has had a second epoch
        ("stream", False, 2, 4),
    ],
)
@on_ranks(1)  # in a process of its own, where forking is quick
def test_workers_go_on_with_the_numbers_that_they_would_have_drawn(dataset, persistent, workers, pick):
    if dataset == "table":
        check(lambda: with_workers(11, workers, persistent, shuffle=True), pick)
    else:
        check(lambda: prepared(DataLoader(Stream(9), 2, num_workers=workers)), pick)


@pytest.mark.parametrize("persistent", [False, True])
@on_ranks(1, timeout_s=90)
def test_workers_that_are_there_when_a_state_is_loaded_do_not_draw_for_it(persistent):
    """A state is loaded while workers of the same loader are in the middle of other batches."""
    make = partial(with_workers, 9, 2, persistent, shuffle=True)
    seen, states = in_one_go(make)
    seed()
    loader = make()
    for epoch, done, _, state in states[2::7]:
        loader.load_state_dict(state[0])
        rng.write(state[1])
        expected = [seen[epoch][done:], *seen[epoch + 1 :]]
        assert [[step(batch, loader) for batch in loader] for _ in range(epoch, 3)] == expected
        for _ in loader:
            break


@on_ranks(1, timeout_s=90)
def test_workers_that_are_there_when_a_state_is_loaded_are_not_taken_for_that_runs():
    """Workers are there when the state of a run that had started none is loaded, and it is interrupted once more."""
    make = partial(with_workers, 7, 1, persistent=True, shuffle=True)
    seen, states = in_one_go(make, epochs=1)
    loader = make()
    list(loader)
    loader.load_state_dict(states[0][-1][0])
    rng.write(states[0][-1][1])
    for batch in loader:
        assert step(batch, loader) == seen[0][0]
        state = through_a_file([loader.state_dict(), rng.read()])
        break
    assert gone_on(make, state, 0, epochs=1) == [seen[0][1:]]


@pytest.mark.parametrize("persistent", [False, True])
@on_ranks(1, timeout_s=90)
def test_workers_go_on_after_an_iteration_that_was_broken_off(persistent):
    """Nobody knows what persistent workers drew for batches that were thrown away, until each has made another one."""
    make = partial(with_workers, 13, 2, persistent)
    seed()
    loader, seen, states = make(), [], []
    for _ in loader:
        break
    for batch in loader:
        seen.append(step(batch, loader))
        states.append(through_a_file([loader.state_dict(), rng.read()]))
    for done, state in list(enumerate(states, 1))[1 if persistent else 0 :]:
        assert gone_on(make, state, 0, epochs=1) == [seen[done:]]


def test_a_loader_with_another_number_of_workers_says_that_it_draws_other_numbers():
    loader = with_workers(9, 2)
    for _ in loader:
        state = through_a_file(loader.state_dict())
        break
    for workers in (0, 1, 2):
        other = with_workers(9, workers)
        other.load_state_dict(state)
        word = f", with {counted(workers, 'worker')} instead of 2, which draw different random numbers"
        assert other.describe_position() == "continues after batch 1 of 5 of epoch 0" + (word if workers != 2 else "")
        assert [batch["x"][:, 0].tolist() for batch in other] == [[2, 3], [4, 5], [6, 7], [8]]


def test_loaders_whose_batches_take_another_way_are_left_as_they_are():
    class Mine(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                assert isinstance(batch, dict)
                yield batch

    class Transforming(DataLoader):
        def _get_iterator(self):
            return map(dict.copy, super()._get_iterator())

    raws = [kind(Noisy(5), 2, num_workers=2) for kind in (Mine, Transforming)]
    for raw in (*raws, DataLoader(Noisy(5), 2, num_workers=2, in_order=False)):
        assert sum(len(batch["x"]) for batch in prepared(raw)) == 5


def test_skipping_replaces_the_position_and_never_adds_to_it():
    seen, states = in_one_go(shuffled)
    for epoch, done, where, state in states:
        if where == "inside":
            length = len(seen[epoch])
            expected = [seen[epoch][done:], *seen[epoch + 1 :]]
            assert gone_on(shuffled, state, epoch, skip=done) == expected
            if done == length and epoch + 1 < 3:  # scripts count on: step 6 of 6 is step 0 of the next epoch
                assert gone_on(shuffled, state, epoch + 1, skip=0) == seen[epoch + 1 :]
            elif 1 < done < length:  # another number is obeyed, in the order of that epoch
                found = gone_on(shuffled, state, epoch, skip=1)
                assert first_numbers(found[0]) == first_numbers(seen[epoch][1:])


def test_set_epoch_keeps_the_place_in_that_epoch_and_leaves_any_other():
    seen, states = in_one_go(lambda: shuffled(use_seedable_sampler=True))
    epoch, done, _, state = states[9]
    assert (epoch, done) == (1, 2)
    for chosen in range(3):
        loader = shuffled(use_seedable_sampler=True)
        loader.load_state_dict(state[0])
        loader.set_epoch(chosen)
        assert first_numbers(loader) == first_numbers(seen[chosen])[2 if chosen == 1 else 0 :]


def test_an_epoch_that_is_chosen_after_one_that_was_over_begins_as_it_would_have():
    seen, states = in_one_go(shuffled)
    state = next(state for *at, _, state in states if at == [0, 6])
    loader = shuffled()
    loader.load_state_dict(state[0])
    rng.write(state[1])
    loader.set_epoch(1)
    assert [(loader.iteration, [step(batch, loader) for batch in loader]) for _ in range(2)] == [*enumerate(seen)][1:]


@pytest.mark.parametrize("own", [None, torch.Generator()])
def test_a_state_that_was_loaded_can_be_taken_back(own):
    _, states = in_one_go(lambda: shuffled(torch.Generator()))
    loader = shuffled(own)
    loader.set_epoch(5)
    before, undo = str(loader.state_dict()), loader.keep()
    loader.load_state_dict(states[3][-1][0])
    assert str(loader.state_dict()) != before
    undo()
    assert str(loader.state_dict()) == before


def test_a_stream_that_has_become_shorter_than_what_was_read_of_it_is_refused():
    _, states = in_one_go(lambda: prepared(DataLoader(NoisyStream(12), 2)), epochs=1)
    with pytest.raises(ConfigError, match="had 4 batches when the checkpoint was written, and 3 now"):
        gone_on(lambda: prepared(DataLoader(NoisyStream(5), 2)), states[4][-1], 0, epochs=1)


def test_a_state_that_was_loaded_and_not_used_yet_is_given_back():
    seen, states = in_one_go(shuffled)
    state = states[3][-1]
    loader = shuffled()
    loader.load_state_dict(state[0])
    again = through_a_file([loader.state_dict(), state[1]])
    assert gone_on(shuffled, again, 0) == [seen[0][3:], *seen[1:]]


def test_after_a_break_the_next_epoch_is_next():
    loader, other = (shuffled(use_seedable_sampler=True) for _ in range(2))
    for _ in loader:
        break
    state = through_a_file(loader.state_dict())
    assert state["position"] is None
    other.load_state_dict(state)
    assert first_numbers(other) == first_numbers(loader)
    assert other.iteration == loader.iteration == 2


def test_a_state_of_something_else_changes_nothing():
    loader = shuffled()
    before = through_a_file(loader.state_dict())
    for bad in ({}, {**before, "position": {"batches": 3}}, {**before, "position": 3}):
        with pytest.raises((KeyError, TypeError)):
            loader.load_state_dict(bad)
    assert str(loader.state_dict()) == str(before)


def test_a_state_replaces_another_that_was_loaded_before():
    _, states = in_one_go(shuffled)
    loader = shuffled()
    for epoch, done in ((0, 6), (2, 3)):  # nothing is left of the first one
        loader.load_state_dict(next(state[0] for *at, _, state in states if at == [epoch, done]))
        assert loader.describe_position().split(":")[0].endswith(f"of epoch {epoch}")


KINDS = ["sharded", "dispatched", "stream", "stateful stream", "dispatched stream", "dispatched stateful stream"]


def of_two_ranks(kind, settings, drop_last, n):
    streams = "stream" in kind
    data = Noisy(n) if not streams else Shuffled(n) if "stateful" in kind else NoisyStream(n)
    batch_size = 4 if settings.get("split_batches") else 2
    loader = DataLoader(data, batch_size, shuffle=not streams, drop_last=drop_last)
    return prepared(loader, world(), LoopState(), dispatch_batches="dispatched" in kind, **settings)


SETTINGS = [{}, {"split_batches": True}, {"even_batches": False}]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_two_ranks_go_on_together(kind):
    """Go on from each state of the plain loader; with other settings from one before an epoch and after each batch."""
    for settings, n in product(SETTINGS, (10, 11)):
        if n == 10 and settings == SETTINGS[2] and kind in ("sharded", "stateful stream"):
            continue  # one rank has a step more, which this way of comparing can't follow
        seed()
        random.seed(world().rank)
        is_plain = n == 11 and not settings
        check(lambda settings=settings, n=n: of_two_ranks(kind, settings, False, n), 1 if is_plain else 3)
    if kind in KINDS[:4]:
        check(lambda: of_two_ranks(kind, {}, True, 11), 2)
