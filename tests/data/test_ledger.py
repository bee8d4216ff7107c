# SPDX-License-Identifier: Apache-2.0
"""The ledger: a batch is done once it has landed in all outer loops, and never before."""

from __future__ import annotations

from hypothesis import given, strategies as st

from farflung.data.ledger import Ledger, Sent, Share


def ledger_with(*fragments):
    ledger = Ledger()
    ledger.loops += [Sent(number) for number in fragments]
    return ledger


def shares(*done, loader=0, slot=0):
    return [Share(loader, 0, 0, slot, number) for number in done]


def test_what_the_ranks_of_a_replica_take_at_once_is_done_at_once():
    ledger = ledger_with(1)
    ledger.hand_out([*shares(1, 2), *shares(1, loader=1), *shares(4, slot=3)])
    ledger.send(ledger.loops[0], 1)
    assert ledger.land(ledger.loops[0], 0, 1) == {0: {(0, 0): 2, (0, 3): 4}, 1: {(0, 0): 1}}


def test_a_batch_is_handed_out_then_sent_then_lands():
    ledger = ledger_with(1)
    (loop,) = ledger.loops
    ledger.hand_out(shares(1))
    assert ledger.open == {0: {(0, 0): 1}}
    assert ledger.land(loop, 0, 5) == {}  # it was not sent
    ledger.send(loop, 6)
    ledger.hand_out(shares(2))
    assert ledger.land(loop, 0, 6) == {0: {(0, 0): 1}}
    assert ledger.open == {0: {(0, 0): 2}}
    ledger.send(loop, 7)
    assert ledger.land(loop, 0, 6) == {}
    assert ledger.land(loop, 0, 9) == {0: {(0, 0): 2}}
    assert ledger.open == {0: {}}


def test_parts_of_a_model_that_are_sent_apart_must_all_land():
    ledger = ledger_with(2)
    (loop,) = ledger.loops
    for step in (1, 2, 3):
        ledger.hand_out(shares(step))
        ledger.send(loop, step)
    assert ledger.land(loop, 0, 3) == {}
    assert ledger.land(loop, 1, 2) == {0: {(0, 0): 2}}
    assert ledger.land(loop, 1, 3) == {0: {(0, 0): 3}}


def test_what_was_given_up_never_lands():
    ledger = ledger_with(2)
    (loop,) = ledger.loops
    ledger.hand_out(shares(1))
    ledger.send(loop, 1)
    ledger.land(loop, 0, 1)
    ledger.give_up()
    assert (ledger.tenure, ledger.open) == (1, {})
    ledger.hand_out(shares(5, slot=2))
    ledger.send(loop, 2)
    assert ledger.land(loop, 1, 2) == {}  # nothing is known of the other part any more
    assert ledger.land(loop, 0, 2) == {0: {(0, 2): 5}}


def test_a_lost_replica_is_reported_with_the_step_up_to_which_its_rounds_landed():
    ledger = ledger_with(1, 1)
    one, other = ledger.loops
    one.meet(3, (1, 2))
    other.meet(4, (1, 2))
    one.meet(5, (1, 2, 7))
    ledger.send(one, 10)
    ledger.land(one, 0, 10)
    assert ledger.steps() == [(5, 10), (4, 0)]
    assert ledger.lose(lambda member: member != 2) == {2: [(3, 10), (4, -1)]}
    assert ledger.lose(lambda member: member == 1) == {7: [(5, 10), (0, -1)]}
    assert ledger.lose(lambda member: member == 1) == {}


EVENTS = st.lists(st.tuples(st.sampled_from(["hand out", "send", "land"]), st.integers(0, 2), st.integers(0, 1)))


@given(fragments=st.lists(st.integers(1, 2), min_size=1, max_size=3), events=EVENTS)
def test_a_batch_is_done_exactly_when_all_loops_have_landed_it(fragments, events):
    ledger = ledger_with(*fragments)
    handed_out = reported = 0
    sent = [[] for _ in fragments]  # (step, batches by then)
    landed = [{} for _ in fragments]  # step by fragment
    for step, (event, which, fragment) in enumerate(events, 1):
        loop = which % len(fragments)
        if event == "hand out":
            handed_out += 1
            ledger.hand_out(shares(handed_out))
        elif event == "send":
            sent[loop].append((step, handed_out))
            ledger.send(ledger.loops[loop], step)
        else:
            landed[loop][fragment % fragments[loop]] = step
            found = ledger.land(ledger.loops[loop], fragment % fragments[loop], step)
            reported = max(reported, found.get(0, {}).get((0, 0), 0))
        through = [min(one.values()) if len(one) == many else 0 for one, many in zip(landed, fragments, strict=True)]
        counts = [
            max((count for at, count in each if at <= last), default=0)
            for each, last in zip(sent, through, strict=True)
        ]
        assert reported == min(counts)
        assert ledger.open.get(0, {}) == ({(0, 0): handed_out} if reported < handed_out else {})
