# SPDX-License-Identifier: Apache-2.0
"""Slots: replicas that come and go see each batch of an epoch as often as is promised."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from farflung.address.board import Log
from farflung.address.c10d_transport import StoreBoard
from farflung.base.errors import ConfigError, StateError, Unreachable, Unsupported
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.data import slot_board
from farflung.data.prepare import skip_first_batches
from farflung.data.slot_board import digest_of
from farflung.data.slots import Slots
from farflung.data.torch_loaders import Source
from farflung.outer.stats import Round
from farflung.testing.sim import run_replicas
from tests.data.support import Late, Stream, out_of_order, prepared
from tests.outer.elastic_run import LocalLine


def membership():
    """What slots ask of `Elastic`."""
    record, listeners = SimpleNamespace(ids=(), number=0, began=0), []
    told = {"round_listeners": listeners, "loop": "loop1", "keep_logs": lambda names, landed_in: None}
    return SimpleNamespace(record=record, joined=0, has_kept=False, **told)


class Replica:
    """A replica whose loop is driven by hand: it takes batches, makes a step with each, and is sent to rounds."""

    def __init__(self, run, member, dataset=None, batch_size=1, fragments=1, group=None, **settings):
        self.run, self.member, self.membership, self.training = run, member, membership(), True
        exchange = Exchange(group or SoloGroup())
        self.slots = Slots(run.board, member, exchange, most=run.most, expected=2, is_training=lambda: self.training)
        self.followed = self.slots.follow(self.membership)
        dataset, settings = (
            run.dataset if dataset is None else dataset,
            {"device": None, "slots": self.slots, **settings},
        )
        loaders = (DataLoader(dataset, **{"batch_size": batch_size, **arguments}) for arguments in run.loaders)
        self.loaders = [prepared(loader, group, **settings) for loader in loaders]
        self.position, self.unsent, self.taken, self.batches, self.epoch = 0, [], [], None, 0
        self.fragments = fragments

    def open(self, which):
        return self.slots.ledger.open.get(which, {})

    def take(self, which=0):
        """Train on the next batch; at the end of the epoch return False."""
        loader = self.loaders[which]
        if self.batches is None:
            self.batches, self.epoch = iter(loader), loader.iteration
        before, batch = dict(self.open(which)), next(self.batches, None)
        if batch is None:
            self.batches = None
            return False
        given = self.open(which)  # its epoch is another one where it was left of the epoch before
        epoch, _ = next((place for place, done in given.items() if before.get(place) != done), next(reversed(given)))
        self.position += 1
        self.followed.step_attempted(self.position, self.fragments)
        self.unsent += [(which, epoch, one) for one in batch.tolist()]
        self.taken += [(epoch, one) for one in batch.tolist()]
        return True


class Run:
    """Replicas in lockstep: the weights that all have in common count what was trained on."""

    def __init__(self, num_batches=40, most=4, loaders=({"shuffle": True},), replicas=0):
        self.store, self.most, self.loaders = dist.HashStore(), most, loaders
        self.board = StoreBoard(LocalLine(self.store))
        self.dataset = torch.arange(num_batches)
        self.counted, self.live, self.num_members, self.number, self.began = Counter(), [], 0, 0, 0
        for _ in range(replicas):
            self.join()

    def join(self, **options):
        self.num_members += 1
        one = Replica(self, self.num_members, **options)
        one.position = max((other.position for other in self.live), default=0)
        self.live.append(one)
        self.members_changed()
        return one

    def come_back(self, one, **kept):
        """Let one that was lost be a newcomer."""
        self.live.append(one)
        self.members_changed()
        vars(one.membership).update(joined=self.number, **kept)

    def members_changed(self):
        self.number += 1
        for one in self.live:
            ids = tuple(other.member for other in self.live)
            one.membership.record = SimpleNamespace(ids=ids, number=self.number, began=self.began)

    def epochs(self):
        return Log(self.board.part("data").part("0"), "epochs")

    def lose(self, one):
        self.live.remove(one)
        one.unsent.clear()
        self.members_changed()

    def begin_round(self):
        for one in self.live:
            for listener in one.membership.round_listeners:
                listener()

    def round(self, dies=None):
        """Let all meet, at the furthest position; one may die after the others have applied it."""
        self.begin_round()
        position = max(one.position for one in self.live)
        for one in self.live:
            self.counted.update(one.unsent)
            one.unsent.clear()
        for one in self.live:
            one.position = position
            if one is not dies:
                one.followed.round_ended(ended(position, len(self.live)))
        if dies is not None:
            self.lose(dies)

    def expect(self, epochs, which=0):
        """Each batch of these epochs of a loader counts once."""
        found = {key: times for key, times in self.counted.items() if key[0] == which and key[1] in epochs}
        assert found == {(which, epoch, batch): 1 for epoch in epochs for batch in range(len(self.dataset))}


def ended(step, replicas, fragment=0, dropped=False):
    weights = (1 / replicas,) * replicas
    return Round(step, (), step, fragment, dropped, weights, weights, 0.0, 0.0, 0, 0, 0.0, 0.0)


def finish(run, each=4, which=0):
    """Let all come to the end of their epoch, with a round now and then."""
    going = list(run.live)
    while going:
        going = [one for one in going if all(one.take(which) for _ in range(each))]
        run.round()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 3, 40, 300])
def test_replicas_of_changing_speeds_share_an_epoch(replicas, num_batches):
    run, draw = Run(num_batches, replicas=replicas), random.Random(replicas)
    for epoch in range(2):
        going = list(run.live)
        while going:
            one = draw.choice([*going, going[0]])
            if not one.take():
                going.remove(one)
            if draw.random() < 0.2:
                run.round()
        run.round()
        run.expect([epoch])


@pytest.mark.parametrize("num_batches", [8, 40, 300])
def test_what_one_leaves_of_an_epoch_after_its_share_is_done_later(num_batches):
    run = Run(num_batches, replicas=2)
    fast, slow = run.live
    for _ in range(2):
        for number in range(len(fast.loaders[0])):  # as trainers count the batches of an epoch
            assert fast.take()
            if number % 3 == 0:
                slow.take()
        run.round()
        fast.batches = None
    for _ in range(3):
        finish(run)
    run.expect([0, 1, 2])


@pytest.mark.parametrize("num_batches", [16, 64])
def test_trainers_that_take_len_batches_of_an_epoch_leave_none_though_one_of_them_is_faster(num_batches):
    run = Run(num_batches, replicas=2)
    for _ in range(2):
        left = {one: len(one.loaders[0]) for one in run.live}
        for turn in range(3 * num_batches):
            for one in run.live if turn % 3 == 0 else run.live[:1]:
                one.loaders[0].share.is_counted = True
                left[one] = left[one] - 1 if left[one] and one.take() else 0
        run.round()
        for one in run.live:
            one.batches = None
    run.expect([0, 1])


@pytest.mark.parametrize("seedable", [False, True])
def test_an_order_is_drawn_anew_in_each_epoch_and_is_the_same_for_all_whatever_their_seeds(seedable):
    run = Run()
    for seed in range(2):
        torch.manual_seed(seed)
        run.join(use_seedable_sampler=seedable)
    for epoch in range(2):
        finish(run)
        run.expect([epoch])
    orders = [[batch for when, batch in run.live[0].taken if when == epoch] for epoch in range(2)]
    assert orders[0] != orders[1]
    assert all(order != sorted(order) for order in orders)


@pytest.mark.parametrize("steps_later", [0, 1, 3])
def test_what_is_in_a_round_that_lands_later_counts_though_its_replica_died_in_between(steps_later):
    run = Run(replicas=2)
    one, dying = run.live
    for _ in range(4):
        assert one.take()
        assert dying.take()
    run.begin_round()
    landed = [*one.unsent, *dying.unsent]
    for _ in range(steps_later):
        assert dying.take()
    run.counted.update(landed)
    one.unsent.clear()
    one.followed.round_ended(ended(4, 2))
    run.lose(dying)
    finish(run)
    run.expect([0])


def test_what_is_in_rounds_is_written_once_a_round_and_not_in_each_step():
    run = Run(replicas=1)
    with mock.patch.object(type(run.board), "put", autospec=True, side_effect=type(run.board).put) as put:
        for _ in range(4):
            for _ in range(8):
                assert run.live[0].take()
            run.round()
    keys = [call.args[1] for call in put.call_args_list]
    assert [key for key in keys if key.startswith("sent/")] == ["sent/1"] * 4


def test_threads_that_claim_at_once_share_an_epoch():
    run = Run(200, replicas=4)

    def train(one):
        while one.take():
            pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(train, run.live))
    assert sorted(batch for one in run.live for _, _, batch in one.unsent) == list(range(200))


EVENTS = ["take", "take", "take", "round", "lose", "dies in a round", "join", "out"]


@settings(max_examples=40)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=60), draw=st.randoms(use_true_random=False))
def test_each_batch_counts_once_whatever_happens(events, draw):
    """2 -> 1 -> 3 and all else. What is left of an epoch goes into the next one; the last one has nobody lost."""
    run = Run(24, most=3, replicas=2)
    waiting = set()  # those at the end of their epoch, where all meet

    def take(one):
        if one not in waiting and not one.take():
            waiting.add(one)

    for event in events:
        one = draw.choice(run.live)
        if event == "take":
            take(one)
        elif event == "round":
            run.round()
        elif event == "lose" and len(run.live) > 1:
            run.lose(one)
        elif event == "dies in a round" and len(run.live) > 1 and not waiting:
            position = max(other.position for other in run.live)
            while one.position < position and one not in waiting:
                take(one)
            if not waiting:
                run.round(dies=one)
        elif event == "join" and len(run.live) < 3 and not waiting:
            run.round()  # those that are there let others in right after one
            newcomer = run.join()
            while not newcomer.take() and newcomer.loaders[0].share.is_past:
                pass
            if newcomer.batches is None:
                waiting.add(newcomer)
        elif event == "out" and len(run.live) > 1 and one not in waiting:  # late, and back as a newcomer
            run.lose(one)
            run.round()
            run.come_back(one)
            one.position = max(other.position for other in run.live)
        if event in ("join", "out"):  # all make a step before they can hear of another loss
            for other in run.live:
                take(other)
        waiting &= set(run.live)
        if len(waiting) == len(run.live):
            run.round()
            for each in run.live:
                each.loaders[0].share.synchronized()
            waiting.clear()
    frontier = max((epoch for one in run.live for epoch, _ in one.taken), default=0)
    for one in run.live:
        while one not in waiting:
            take(one)
    run.round()
    finish(run)  # an epoch more, in which what lost ones have left is taken
    for epoch in range(frontier + 1):
        run.expect([epoch])


def test_a_newcomer_finds_epochs_that_are_over_empty_and_takes_part_in_the_one_of_now():
    run = Run()
    old = run.join()
    for _ in range(2):
        finish(run)
    old.take()
    run.round()
    newcomer = run.join()
    for _ in range(2):
        assert not newcomer.take()
        assert newcomer.loaders[0].share.is_past
    assert newcomer.take()
    assert newcomer.epoch == 2
    finish(run)
    run.expect([0, 1, 2])


def test_one_that_comes_after_all_have_ended_an_epoch_and_synchronized_goes_on_to_the_next():
    run = Run(8)
    old = run.join()
    finish(run)
    old.loaders[0].share.synchronized()
    newcomer = run.join()
    assert not newcomer.take()
    assert newcomer.loaders[0].share.is_past
    assert newcomer.take()
    assert newcomer.epoch == 1


def test_batches_are_handed_out_in_the_order_in_which_they_are_recorded_as_done():
    one = Run(loaders=[out_of_order(3)]).join(dataset=Late(range(6)))
    while one.take():
        pass
    assert one.taken == [(0, number) for number in range(6)]


def test_two_loaders_have_epochs_of_their_own():
    run = Run(20, loaders=({"shuffle": True}, {}), replicas=2)
    finish(run)
    finish(run, 1, which=1)
    run.expect([0])
    run.expect([0], which=1)


def test_data_that_one_replica_alone_evaluates_take_no_number_of_those_that_all_share():
    run, shares = Run(6, replicas=2), []
    for one in run.live:
        for trains in (True, False, True):  # two fits, and an evaluation between them
            loader, share = one.slots.shared_as_it_is(DataLoader(run.dataset, shuffle=True), 1)
            one.training = trains
            if trains or one.member == 1:
                share.begin(0)
                batches = iter(loader)
                if trains:
                    shares.append((len(one.slots.boards), [next(batches).item() for _ in range(2)]))
                else:
                    assert len(list(batches)) == 6
    assert [number for number, _ in shares] == [2, 3, 2, 3]  # after the prepared one
    assert all(set(first).isdisjoint(second) for (_, first), (_, second) in zip(shares[:2], shares[2:], strict=True))


@pytest.mark.parametrize("looks", [1, 9])
def test_steps_on_batches_of_two_loaders_at_once_are_refused_but_a_look_at_one_is_not(looks):
    one = Run(40, loaders=({"shuffle": True},) * 2).join()
    other = iter(one.loaders[1])
    with pytest.raises(Unsupported, match="StackDataset") if looks > 1 else nullcontext():
        for step in range(9):
            if step < looks:
                next(other)
            one.take()


def left_behind():
    """A run of two replicas after a round, one of which has made a step more."""
    run = Run(64, most=2, replicas=2)
    first, late = run.live
    late.take(), first.take()
    run.round()
    late.take()
    return run, first, late


def test_one_that_was_left_out_goes_on_with_nothing_that_it_had_read_ahead():
    run, first, late = left_behind()
    run.lose(late)
    finish(run)
    assert {batch for _, _, batch in run.counted} == set(range(64))
    run.come_back(late)
    assert not late.take()
    run.expect([0])


def test_a_run_whose_members_all_died_before_a_state_was_written_begins_its_epochs_again():
    run = Run(replicas=2)
    for one in run.live:
        assert one.take()
    run.round()
    for one in list(run.live):
        one.take()
        run.lose(one)
    run.counted.clear()  # the weights are those of the beginning
    run.began = run.number + 1
    run.join()
    run.join()  # a generation later, and the first to ask the board
    run.live.reverse()
    finish(run)
    run.expect([0])


def test_one_that_sleeps_as_others_continue_from_its_state_records_nothing_when_it_wakes():
    run = Run(64, most=2)
    asleep = run.join()
    asleep.take()
    run.round()
    log = run.epochs()
    number, of_the_state = log.last()
    run.live.remove(asleep)
    other = run.join()
    assert log.append(number, of_the_state)
    other.take()
    for _ in range(40):
        assert asleep.take()
    asleep.followed.round_ended(ended(asleep.position, 1))  # it does not know yet
    finish(run)
    run.expect([0])


@pytest.mark.parametrize("position", [1, 50])
@pytest.mark.parametrize("takes", [1, 60])
def test_one_that_was_left_out_and_has_kept_its_steps_keeps_its_batches_unless_others_have_taken_them(takes, position):
    run, first, late = left_behind()
    kept = list(late.unsent)
    run.live.remove(late)
    run.members_changed()
    for _ in range(takes):
        first.take()
    run.round()
    run.come_back(late, has_kept=True)
    late.position = first.position = position  # the others' may be behind its own
    run.round()  # which has what it has kept
    finish(run)
    if takes == 1:
        run.expect([0])
    else:
        assert {batch for _, _, batch in run.counted} == set(range(64))
        assert {place for place, times in run.counted.items() if times > 1} == set(kept)


def test_a_dropped_round_and_a_part_of_a_model_record_nothing():
    run = Run(32, most=1)
    one = run.join(fragments=2)

    def done():
        rows = json.loads(run.epochs().last()[1])[3]
        return sum(count for *_, held in rows for _, (_, count) in held)

    for _ in range(3):
        one.take()
    one.followed.round_ended(ended(3, 1, fragment=0))
    assert done() == 0
    one.followed.round_ended(ended(2, 2, fragment=1))  # not all that took part in it are members
    assert done() == 0
    one.followed.round_ended(ended(2, 1, fragment=1, dropped=True))
    assert done() == 0
    one.followed.round_ended(ended(2, 1, fragment=1))
    assert done() == 2


def test_a_model_that_is_sent_in_more_parts_from_a_round_on_still_records_its_batches():
    run = Run(32, most=1)
    one = run.join()
    one.take()
    one.followed.round_ended(ended(1, 1))
    one.fragments = 2
    for step in (2, 3):
        one.take()
        one.followed.round_ended(ended(step, 1, fragment=step % 2))
    rows = json.loads(run.epochs().last()[1])[3]
    assert sum(count for *_, held in rows for _, (_, count) in held) == 2


def test_keys_don_t_grow_with_epochs_and_losses(monkeypatch):
    monkeypatch.setattr(slot_board, "_DECIDED_AT_A_TIME", 4)
    run, sizes = Run(16, replicas=1), []
    for _ in range(4):
        lost = run.join()
        while not lost.take():
            pass
        run.round()
        run.lose(lost)
        finish(run)
        sizes.append(run.store.num_keys())
    assert max(sizes) - min(sizes) < 8  # as a log forgets eight records at a time


@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), (3, {}), (2, {"split_batches": True}), (2, {"even_batches": False})]
)
def test_the_ranks_of_a_replica_share_its_slots(size, options):
    run, record = Run(26), SimpleNamespace(ids=(1, 2), number=9, began=0)
    other = run.join(batch_size=2)
    other.take()
    run.round()
    other.membership.record = record

    def train(group):
        one = Replica(run, 2, batch_size=2, group=group, **options)
        one.membership.record = record
        while one.take():
            pass
        return [batch for _, _, batch in one.unsent]

    shares = run_replicas(train, size, seed=0)
    mine = Counter(batch for share in shares for batch in share)
    while other.take():
        pass
    others = {batch for _, _, batch in run.counted} | {batch for _, _, batch in other.unsent}
    assert not others & set(mine)
    assert others | set(mine) == set(range(26))
    assert sum(mine.values()) - len(mine) <= 2 * (size - 1)  # padding


def test_the_ranks_of_a_replica_that_was_left_out_stay_in_step():
    run = Run(60, most=1)

    def train(group):
        one = Replica(run, 1, group=group)
        one.take()
        one.membership.joined = 3
        while one.take():
            pass
        return [batch for _, _, batch in one.unsent]

    first, second = run_replicas(train, 2, seed=0)
    assert len(first) == len(second) == 31  # one round was made before, and its two batches are made again
    assert set(first) | set(second) == set(range(60))


class Store:
    """One that can be lost."""

    def __init__(self, store, is_gone):
        self.store, self.is_lost, self.is_gone = store, False, is_gone

    def __getattr__(self, name):
        if self.is_lost:
            raise Unreachable("The store of this run is gone.", self.is_gone)
        return getattr(self.store, name)


def over_stores(is_gone):
    """Two replicas that took a batch each, and their stores."""
    run, stores = Run(40, replicas=2), []
    for one in run.live:
        (board,) = one.slots.boards
        board._board = board._log._board = Store(board._board, is_gone)
        stores.append(board._board)
        one.take()
    return run, stores


def test_without_the_store_the_epoch_ends_and_later_ones_are_shared_by_places():
    run, stores = over_stores(is_gone=True)
    run.round()
    for store in stores:
        store.is_lost = True
    with pytest.warns(RuntimeWarning, match="The run's store is gone"):
        finish(run)
    finish(run)
    run.expect([1])


def test_an_address_that_refuses_for_a_while_skips_no_batch_and_its_records_follow():
    run, stores = over_stores(is_gone=False)
    for store in stores:
        store.is_lost = True
    run.round()  # its records can't be written now
    with pytest.raises(Unreachable):
        run.live[0].slots.ask(run.live[0].slots.boards[0].holds_all)
    for store in stores:
        store.is_lost = False
    finish(run)
    assert not any(one.slots.is_gone or one.slots._unwritten for one in run.live)
    run.expect([0])


def test_len_is_the_share_of_one_of_the_replicas_that_the_run_begins_with():
    one = Run(40, loaders=({"shuffle": True}, {})).join()
    assert [len(loader) for loader in one.loaders] == [20, 40]  # nothing shuffles the second: as for an evaluation
    one.take(1)
    assert len(one.loaders[1]) == 20


def test_an_evaluation_gets_all_of_the_data_and_a_step_on_them_is_refused():
    one = Run(40, replicas=2).live[0]
    one.training = False
    assert sorted(torch.cat(list(one.loaders[0])).tolist()) == list(range(40))
    assert len(one.loaders[0]) == 40
    with pytest.raises(StateError, match=r"Call model\.train\(\) before the loop"):
        one.loaders[0].share.check_trains()


def test_a_pass_without_steps_in_train_mode_is_warned_of():
    with pytest.warns(RuntimeWarning, match=r"Call model\.eval\(\) before an evaluation"):
        list(Run(4).join().loaders[0])


class Lengthless:
    batch_size = 1

    def __iter__(self):
        yield [0]


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(Stream(4)), "Use a data set with __len__ and __getitem__"),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), "Prepare the loader without it"),
        (DataLoader(range(4), batch_sampler=Lengthless()), "no __len__"),
    ],
)
def test_loaders_that_can_t_be_cut_are_refused(loader, says):
    slots = Slots(StoreBoard(LocalLine(dist.HashStore())), 1, Exchange(SoloGroup()), most=2)
    with pytest.raises(ConfigError, match=says):
        slots.shared(Source(loader), 1)


def test_an_order_of_numpys_integers_is_the_same_as_one_of_pythons():
    orders = [[[3, 1], [2, 0]], [[np.int64(3), np.int64(1)], [np.int32(2), 0]]]
    assert len({digest_of(order) for order in orders}) == 1
    assert digest_of([[1, 3], [2, 0]]) != digest_of(orders[0])
    assert digest_of([{object}]) == digest_of([{object}])


def test_what_has_no_meaning_among_replicas_that_come_and_go_is_refused():
    run = Run(8)
    one = run.join()
    with pytest.raises(ConfigError, match="Leave the call out"):
        skip_first_batches(one.loaders[0], 2)
    one.take()
    run.loaders = ({"shuffle": False, "batch_sampler": [[number] for number in range(8)]},)
    with pytest.raises(ConfigError, match="in another order at another replica"):
        run.join().take()
    run.loaders = ({"shuffle": True},)
    run.lose(run.live[-1])
    with pytest.raises(ConfigError, match="Epoch 0 has 8 batches at another replica, and 5 here"):
        run.join(dataset=torch.arange(5)).take()
    run.lose(run.live[-1])
    finish(run)
    one.loaders[0].set_epoch(0)
    with pytest.raises(ConfigError, match="Epoch 0 of this loader was trained on already"):
        one.take()
    for name in ("dispatch_batches", "already_sharded"):
        with pytest.raises(ConfigError, match=name):
            Run(8).join(**{name: True})


def test_a_checkpoint_says_the_epoch_and_the_store_what_is_done_of_it():
    run = Run(16)
    one = run.join()
    finish(run)
    one.take()
    run.round()
    saved = one.loaders[0].state_dict()
    run.lose(one)
    newcomer = run.join()
    newcomer.loaders[0].load_state_dict(saved)
    assert newcomer.take()
    assert newcomer.epoch == 1
    finish(run)
    run.expect([0, 1])


def test_a_position_in_a_fixed_share_is_left_out_unless_it_is_the_end():
    loader = prepared(DataLoader(range(8), 1, shuffle=True))
    states = [loader.state_dict() for _ in loader]
    for state, epoch in ((states[2], 0), (states[-1], 1)):
        one = Run(8).join()
        one.loaders[0].load_state_dict(state)
        with nullcontext() if epoch else pytest.warns(RuntimeWarning, match="position in epoch 0 is left out"):
            assert one.take() is (epoch == 0)
        while one.take():
            pass
        assert sorted(one.taken) == [(epoch, batch) for batch in range(8)]
