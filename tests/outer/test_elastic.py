# SPDX-License-Identifier: Apache-2.0
"""Replicas that die, hang, leave and join, as real processes: survivors lose no step and wait for nobody."""

import re
import signal
import time
from itertools import product

import psutil
import pytest

from farflung.address.member_store import MemberStore
from farflung.address.saved_state import SavedStates
from farflung.address.schemes import transport_at
from farflung.outer import diloco, local_sgd, streaming_diloco
from farflung.testing.patience import patience
from tests.faults import PHASES, stop
from tests.outer.conftest import in_turn
from tests.outer.elastic_run import EVERY, ElasticRun, as_of_many, replica, wrong

TWO_HOPS = diloco(EVERY, lr=1.0, momentum=0.0, codec="e3m0", exchange="reduce_scatter")
BEFORE = {"admission", "a state"}
DIES = [(phase, 17 if phase == "local step" else 4, None, replica) for phase in PHASES if phase not in BEFORE]
# In the first hop of a bucket or in the second.
IN_TWO_HOPS = [(phase, number, TWO_HOPS, replica) for phase in ("exchange", "arrival") for number in (4, 5, 6, 7)]
AS_OF_MANY = [
    pytest.param((phase, 4, None, as_of_many), place, marks=pytest.mark.long, id=f"of many, {phase}, {place}")
    for phase, place in product(
        ("vote", "after the vote", "confirmation", "confirmed"), ("folder with a key", "bucket")
    )
]
AT_A_GATEWAY = [
    pytest.param((phase, 4, None, replica), "hub", marks=pytest.mark.long, id=f"{phase}, hub")
    for phase in ("vote", "exchange")
]


@pytest.mark.parametrize(
    ("dies", "address"), [*in_turn([*DIES, *IN_TWO_HOPS]), *AS_OF_MANY, *AT_A_GATEWAY], indirect=["address"]
)
def test_a_replica_may_die_at_any_time_and_come_back(dies, address):
    phase, number, recipe, play = dies
    with ElasticRun(address=address, expected=3, grace_s=20.0, recipe=recipe, play=play) as run:
        first, second = run.start(0), run.start(1)
        lost = run.start(2, dies=(phase, number), saves=3)
        run.until(lambda: run.has_ended(lost))
        back = run.joins(2)
        said = run.finish()
        assert not wrong(said)
        ends = {one["member"]: one["end"] for one in said if "end" in one}
        assert ends.keys() == {first, second, back}
        assert len(set(ends.values())) == 1
        assert any("replica 2 is out: killed by SIGKILL" in event for event in run.events)
        assert any("replica 2 joined; 3 replicas" in event for event in run.events)
        rounds = [one for one in said if "round" in one and one["member"] in (first, second)]
        assert [one["lost"] for one in rounds if one["lost"]] == [{lost: "killed by SIGKILL"}] * 2
        assert [one["new"] for one in rounds if one["new"]] == [(back,)] * 2
        assert all((one["recovering_s"] > 0) == bool(one["lost"]) for one in rounds)


def test_one_that_dies_while_it_joins_or_lets_others_in_is_left_out(address):
    with ElasticRun(address=address, expected=3, grace_s=20.0) as run:
        first, second, giver = run.start(0), run.start(1), run.start(2, dies=("admission", 1))
        run.until(lambda: run.joined(first, second, giver))
        dies = run.start(3, dies=("admission", 1))
        run.until(lambda: run.has_ended(dies, giver))
        back = run.joins(3)
        said = run.finish()
        assert not wrong(said)
        assert {one["member"] for one in said if "end" in one} == {first, second, back}


def test_a_newcomer_to_a_large_model_gets_its_state_while_rounds_change_it(address):
    # More than what is sent at once.
    with ElasticRun(address=address, expected=2, grace_s=20.0, numel=1_100_000) as run:
        there = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*there))
        late = run.start(2)
        run.until(lambda: run.joined(late), 60.0)
        said = run.finish()
        assert not wrong(said)
        assert {one["member"] for one in said if "end" in one} == {*there, late}


def test_two_die_at_once_one_is_left_and_others_come(address):
    with ElasticRun(address=address, expected=3, grace_s=20.0) as run:
        members = [run.start(name) for name in range(3)]
        run.until(lambda: run.at(9))
        run.kill(*members[1:])
        run.go_on(20)
        back = [run.start(name) for name in range(1, 4)]
        run.until(lambda: run.joined(*back))
        # Generations before have left nothing, nor have their groups.
        run.until(lambda: len(set(re.findall(r"loop\d+/[a-z]+(\d+)/", "\n".join(run.board.list(""))))) <= 2)
        said = run.finish()
        assert not wrong(said)
        assert {one["member"] for one in said if "end" in one} == {members[0], *back}
        assert max(one["ranks"] for one in said if "ranks" in one) == 4


def test_one_that_is_stopped_is_left_out_after_the_grace_and_comes_back_as_a_newcomer(address):
    grace_s = patience(10.0 if address and address.startswith("hf:") else 1.0)  # a gateway is asked every few seconds
    with ElasticRun(address=address, expected=3, grace_s=grace_s) as run:
        members = [run.start(name) for name in range(3)]
        run.until(lambda: run.at(9))
        run.signal(members[2], signal.SIGSTOP)
        run.lets_back(members[2], 2, 12)
        said = run.finish()
        mine = [one for one in said if one["member"] == members[2] and "position" in one]
        assert not wrong([one for one in said if one["member"] != members[2]])
        # Until then it had stood still.
        assert not wrong([one for one in mine if one["generation"] == mine[-1]["generation"]])
        stats = {one["member"]: one["stats"] for one in said if "end" in one}
        assert stats.keys() == set(members)
        assert all(stats[one]["replicas_lost"] >= 1 for one in members[:2])
        assert 0 <= stats[members[2]]["steps_lost"] <= EVERY  # more than 0 if it was stopped in a round


def newest(run):
    """The step of the newest state that lies at the address of a run."""
    return next(SavedStates(run.board.part("loop1")).newest()).position


@pytest.mark.law("a-run-outlives-its-members")
def test_one_that_is_stopped_as_it_writes_a_state_and_wakes_after_the_end_replaces_nothing(tmp_path):
    with ElasticRun(address=tmp_path.as_uri(), expected=2, grace_s=patience(2.0), state_every=2) as run:
        late, other = run.start(0, dies=("a state", 2, stop)), run.start(1)
        run.until(lambda: any("replica 0 is out" in event for event in run.events))
        furthest = max(one["position"] for one in list(run.said) if "position" in one)
        run.board.put("last", str(furthest + 10).encode())
        run.until(lambda: run.has_ended(other))
        end = newest(run)
        assert end == furthest + 10
        run.signal(late, signal.SIGCONT)
        run.until(lambda: run.has_ended(late))
        assert newest(run) == end


@pytest.mark.law("a-run-outlives-its-members")
def test_where_all_are_told_to_end_at_once_what_they_have_trained_lies_at_the_address(tmp_path):
    with ElasticRun(address=tmp_path.as_uri(), expected=2, grace_s=20.0, state_every=1000) as run:
        members = [run.start(name) for name in range(2)]
        run.until(lambda: run.at(3 * EVERY + 1))
        for member in members:
            run.signal(member, signal.SIGTERM)
        run.until(lambda: run.has_ended(*members))
        run.until(lambda: not run._pipes)
        rounds = [one for one in run.said if "round" in one]
        last = {one["member"]: one["step"] for one in rounds}.values()  # one may be a step ahead in the same round
        assert min(last) <= newest(run) <= max(last)
        assert newest(run) > 3 * EVERY


def test_replicas_come_and_go_beside_rounds_that_overlap_with_training(address):
    recipe = streaming_diloco(8, 2, delay=2, lr=1.0, momentum=0.0)
    with ElasticRun(address=address, recipe=recipe, expected=3, grace_s=20.0) as run:
        members = [run.start(name) for name in range(3)]
        run.until(lambda: run.at(9))
        run.signal(members[1], signal.SIGKILL)
        run.until(lambda: any("replica 1 is out" in event for event in run.events))
        back = run.joins(1)
        ends = {one["member"]: (one["end"], one["weight"]) for one in run.finish(20) if "end" in one}
        assert ends.keys() == {members[0], members[2], back}
        assert len(set(map(str, ends.values()))) == 1


@pytest.mark.law("alike-but-unsent")
@pytest.mark.parametrize("recipe", [local_sgd(4), diloco(4, lr=0.5, momentum=0.5)], ids=["no anchor", "momentum"])
def test_a_newcomer_goes_on_with_the_weights_and_the_momentum_of_the_others(recipe):
    with ElasticRun(recipe=recipe, expected=1, grace_s=20.0) as run:
        run.start(0)
        run.until(lambda: run.at(9))
        run.joins(1)
        said = run.finish()
        assert recipe.has_anchor or not wrong(said)
        first, second = [(one["weight"], one["unsaved"]) for one in said if "end" in one]
        assert first == second


def test_more_than_the_most_wait_until_one_leaves():
    with ElasticRun(expected=2, most=2, grace_s=20.0) as run:
        first, second = run.start(0), run.start(1)
        run.until(lambda: run.joined(first, second))
        third = run.start(2)
        asked = MemberStore(run.board.part("loop1"))
        run.until(lambda: any(one.member == third for one in asked.asks().values()))
        run.go_on(20)
        assert not run.joined(third)
        run.signal(second, signal.SIGKILL)
        run.until(lambda: run.joined(third))
        assert not wrong(run.finish())


def test_without_the_store_training_goes_on_until_the_next_one_is_lost():
    with ElasticRun(expected=2, grace_s=20.0) as run:
        members = [run.start(name) for name in range(2)]
        run.until(lambda: run.at(9))
        run.close_store()
        run.go_on(20)
        run.signal(members[1], signal.SIGKILL)
        run.until(lambda: run.has_ended(*members))
        assert not wrong(run.said)
        assert run.codes[members[0]] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])  # the end, and Slurm's warning before it
def test_one_that_is_told_to_end_takes_part_in_a_round_before_but_does_not_wait_for_it_long(number):
    with ElasticRun(recipe=diloco(50, lr=1.0, momentum=0.0), expected=3, grace_s=4.0) as run:
        members = [run.start(name) for name in range(3)]
        run.until(lambda: run.at(60))
        for _ in range(2):  # as a scheduler, and a launcher that the scheduler tells too
            run.signal(members[2], number)
        run.until(lambda: run.has_ended(members[2]))
        run.until(lambda: any("replica 2 is out" in event for event in run.events))
        mine = [one for one in list(run.said) if one["member"] == members[2]]
        assert mine[-1]["ranks"] == 3, mine[-3:]  # a round, and nothing after it
        assert mine[-2]["position"] < 150
        assert run.codes[members[2]] == -signal.SIGTERM
        # Stopped while the two connect, it would wait ten seconds for one that is gone.
        run.until(lambda: any((one["member"], one["generation"]) == (members[1], 2) for one in list(run.said)))
        run.signal(members[1], signal.SIGSTOP)
        run.signal(members[0], number)
        run.until(lambda: run.has_ended(members[0]))
        run.signal(members[1], signal.SIGCONT)
        run.until(lambda: any("training continues with 1 replica" in event for event in run.events))
        said = run.finish()
        assert {one["member"] for one in said if "end" in one} == {members[1]}
        assert not any("replica 1 is out" in event for event in run.events)


# ---- in a bucket, and in many rounds


@pytest.mark.parametrize(
    "faults",
    [{"error_s": 2.0}, {"loses": 10}, pytest.param({"late_s": 0.3}, marks=pytest.mark.long)],
    ids=["503", "loses", "late"],
)
@pytest.mark.parametrize("address", ["bucket", pytest.param("hub", marks=pytest.mark.long)], indirect=True)
def test_no_replica_is_lost_while_the_server_fails(address, s3, faults):
    with ElasticRun(address=address, expected=2, grace_s=30.0) as run:
        members = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*members) and run.at(3 * EVERY))
        s3.set(**faults)
        time.sleep(faults.get("error_s", 0))
        reached = max(one.get("position", 0) for one in list(run.said))
        run.until(lambda: run.at(reached + 3 * EVERY), 60.0)
        s3.set()
        said = run.finish()
    assert not wrong(said)
    assert not any(one.get("lost") for one in said)
    assert {one["member"] for one in said if "end" in one} == set(members)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_nothing_grows_in_three_hundred_rounds(kind, tmp_path, request):
    address = tmp_path.as_uri() if kind == "folder" else request.getfixturevalue("bucket")
    objects = transport_at(address).board
    counts, figures = [], []

    def look(process):
        counts.append(len(objects.list("")))
        with process.oneshot():
            figures.append((process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6))

    with ElasticRun(address=address, expected=2, grace_s=30.0, step_s=0.0) as run:
        members = [run.start(name) for name in range(2)]
        process = psutil.Process(run.processes[members[0]].pid)
        for rounds in range(50, 301, 50):
            run.until(lambda rounds=rounds: run.at(rounds * EVERY), 120.0)
            for _ in range(5):
                look(process)
        assert not wrong(run.finish())
    assert max(counts) <= 110
    assert max(counts[5:10]) + 20 >= max(counts[-5:])
    before, after = (tuple(map(max, zip(*rows, strict=True))) for rows in (figures[5:10], figures[-5:]))
    assert after[0] <= before[0] + 8  # connections that are kept
    assert after[1] <= before[1] + 8
    assert after[2] <= before[2] * 1.1 + 10
    print(f"objects {max(counts)}, files, threads and MB {before} -> {after}")
