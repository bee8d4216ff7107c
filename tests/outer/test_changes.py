# SPDX-License-Identifier: Apache-2.0
"""H as a quantity that changes: agreed on in votes, after the same step everywhere, and as if it had been planned."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.nn.parallel import DistributedDataParallel

from farflung.base.errors import CollectiveMismatch, StateError
from farflung.comm.group import SoloGroup
from farflung.methods.momentum import delay_of, rate_of
from farflung.methods.schedule import Apply, ChangingSchedule, Clock, Launch
from farflung.outer import Change, OuterLoop, Streaming, Warmup, diloco, edit, local_sgd
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.elastic_run import ElasticRun, wrong
from tests.outer.islands import Grid, IslandRun
from tests.outer.replicas import Run, kept_of, net, on_replicas, same, train, values
from tests.recipes import RECIPES

# For each recipe that has an H: the one that is proposed after the first round, and the one after that.
NEXT = {name: (6, 3) if recipe.schedule.fragments > 1 else (5, 2) for name, recipe in RECIPES.items()}
CHANGING = [name for name in RECIPES if name not in ("hierarchical", "quadratic")]


@st.composite
def plans(draw):
    """A schedule, and changes of its H at the ends of rounds."""
    fragments, delays = draw(st.integers(1, 4)), draw(st.booleans())
    every = draw(st.integers(fragments, 9))
    first = Streaming(every, fragments, draw(st.integers(1, every)) if delays else 0)
    step, changes = draw(st.integers(0, 5)), []
    warmup = step
    for _ in range(draw(st.integers(1, 3))):
        step += every * draw(st.integers(1, 3))
        every = draw(st.integers(fragments, 9))
        changes.append(Change(step, every, draw(st.integers(0, every)) if delays else 0))
    return ChangingSchedule(Warmup(warmup, first) if warmup else first, tuple(changes))


@pytest.mark.law("a-changed-h-is-a-planned-h")
@settings(max_examples=200)
@given(plans())
def test_a_change_splits_no_round_and_nothing_is_under_way_across_it(plan):
    warmup = plan.first.steps if isinstance(plan.first, Warmup) else 0
    assert (plan.fragments, plan.delay) == (plan.first.fragments, plan.first.delay)
    sent, under_way, ends = dict.fromkeys(range(plan.fragments), warmup), set(), [one.step for one in plan.changes]
    for step in range(1, ends[-1] + 30):
        before = dict(sent)
        for action in plan(Clock(step)):
            if isinstance(action, Launch):
                assert action.fragment not in under_way
                assert action.steps == step - before[action.fragment]
                sent[action.fragment] = step
                under_way.add(action.fragment)
            elif isinstance(action, Apply):
                under_way.discard(action.fragment)
            else:
                assert action == plan.changes[ends.index(step)]
                assert not under_way
                assert sent[plan.fragments - 1] == step
    assert sent[0] > ends[-1]


def test_a_recipe_that_plans_changes_takes_no_other_ones_before_the_last():
    outer = OuterLoop(net(), replace(local_sgd(2), changes=(Change(4, 3),)), SoloGroup())
    for _ in range(4):
        with pytest.raises(StateError, match=r"plans Change\(step=4, every=3, delay=0\)"):
            outer.change_schedule(5)
        assert outer.schedule.every == 2
        outer.step()
    assert outer.schedule.every == 3
    outer.change_schedule(5)
    outer.detach()


def changed(group, name, planned=None, resumes=(), steps=20):
    """Train with changes that the last rank proposes, or `planned` ones; return weights, anchors and the changes."""
    recipe = RECIPES[name] if planned is None else replace(RECIPES[name], changes=planned)
    run, proposals = Run(group, recipe, bucket_bytes=64), dict(zip((1, 7), NEXT[name], strict=True))
    for step in range(1, steps + 1):
        run.steps(step)
        if planned is None and step in proposals and group.rank == group.size - 1:
            run.outer.change_schedule(proposals[step])
        run = run.resumed() if step in resumes else run
    kept, changes = kept_of(run.outer), run.outer.changes
    return run.end(), kept, changes, [(this.step, this.weights) for this in run.rounds]


def equal(one, other):
    return str(one) == str(other)


@pytest.mark.law("a-changed-h-is-a-planned-h")
@pytest.mark.parametrize("name", CHANGING)
def test_a_run_whose_h_changed_is_the_run_that_had_planned_it(name):
    there = run_replicas(changed, 3, name)
    (changes,) = {changes for _, _, changes, _ in there}
    assert [one.every for one in changes] == list(NEXT[name])
    planned = run_replicas(changed, 3, name, changes)
    for (weights, kept, _, rounds), (others, theirs, _, same_rounds) in zip(there, planned, strict=True):
        assert same(weights, others)
        assert equal(kept, theirs)
        assert rounds == same_rounds
    assert same(*(weights for weights, *_ in there))


@pytest.mark.law("resume-is-exact")
@pytest.mark.parametrize("name", CHANGING)
def test_a_run_that_resumes_at_any_step_of_a_change_goes_on_bit_for_bit(name):
    there, resumed = run_replicas(changed, 2, name), run_replicas(changed, 2, name, None, range(1, 20))
    for (weights, kept, changes, _), (others, theirs, same_changes, _) in zip(there, resumed, strict=True):
        assert changes == same_changes
        assert len(changes) == 2
        assert same(weights, others)
        assert equal(kept, theirs)


def uneven(group, name):
    """Train with steps that fp16 overflow skips on some ranks; return what was done, and the weights of rounds."""
    outer, done, rounds = OuterLoop(net(), replace(RECIPES[name], same_data=True), group), [], []
    outer.listeners.append(rounds.append)
    for step in range(1, 31):
        done.append(group.rank == 0 or step % (2 + group.rank) > 0)
        outer.count(done=done[-1])
        outer.sync_if_due()
        if step == 5 and group.rank == 1:
            outer.change_schedule(7)
    assert outer.schedule.every == 7
    return done, [(this.step, this.fragment, this.weights) for this in rounds]


@pytest.mark.law("weights-are-work")
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco", "streaming_diloco without delay"])
def test_replicas_count_by_the_steps_that_they_have_done_across_a_change(name):
    done, rounds = zip(*run_replicas(uneven, 3, name), strict=True)
    assert rounds[0] == rounds[1] == rounds[2]
    before = {}
    for step, fragment, weights in rounds[0]:
        work = [sum(steps[before.get(fragment, 0) : step]) for steps in done]
        assert weights == pytest.approx([one / sum(work) for one in work]), (step, fragment)
        before[fragment] = step


def proposing(group, proposals):
    """Propose as told, by step and rank; return the changes that came of it, and the outer settings at the end."""
    run = Run(group, diloco(8))
    for step in range(1, 41):
        run.steps(step)
        if (step, group.rank) in proposals:
            run.outer.change_schedule(proposals[step, group.rank])
    return run.outer.changes, run.outer._rounds.replica.fragments[0].weights._optimizer


def test_of_several_that_propose_the_lowest_decides_and_of_one_the_latest_counts():
    for proposals, changes in (
        ({(1, 1): 4, (2, 0): 12, (2, 2): 16}, [(16, 12)]),
        ({(1, 1): 4, (2, 1): 32}, [(16, 32)]),
        ({(1, 1): 4, (17, 2): 2}, [(16, 4), (24, 2)]),
        ({(1, 1): 32, (9, 2): 4}, [(16, 32)]),  # too late for this round
        ({(1, 1): 8}, []),
    ):
        for found, _ in run_replicas(proposing, 3, proposals):
            assert [(one.step, one.every) for one in found] == changes, proposals


def test_the_outer_rate_and_momentum_follow_h_unless_they_are_given():
    ((_, optimizer),) = run_replicas(proposing, 1, {(1, 0): 64})
    assert (optimizer.param_groups[0]["lr"], optimizer.delay) == (rate_of(64), delay_of(64))
    given = Run(SoloGroup(), diloco(2, lr=0.5, momentum=0.25))
    given.outer.change_schedule(64)
    given.steps(*range(1, 6))
    assert given.outer.schedule.every == 64
    assert "lr=0.5" in given.outer._rounds.replica.description
    (group,) = given.outer._rounds.replica.fragments[0].weights._optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.5, 0.25)


@on_replicas(2)
def test_replicas_that_move_further_as_rounds_are_longer_are_no_outliers(group):
    run = Run(group, edit(1, lr=0.1, momentum=0.0), lr=1e-3)
    for step in range(1, 80):
        run.steps(step)
        if step == 20 and group.rank == 0:
            run.outer.change_schedule(16)
    assert run.outer.changes == (Change(22, 16),)
    assert run.outer.stats().dropped_rounds == 0


@pytest.mark.law("equal-at-the-end")
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco"])
def test_a_rank_without_data_follows_a_change_in_the_rounds_of_the_others(name):
    def uneven(group):
        every = RECIPES[name].schedule.every
        run = Run(group, replace(RECIPES[name], changes=(Change(every, every + 1),)))
        run.steps(*range((1, 4 * every)[group.rank]))
        return run.end()

    assert same(*run_replicas(uneven, 2))


@on_replicas(2)
def test_ranks_that_differ_in_their_changes_say_so(group):
    run = Run(group, diloco(2))
    state = run.outer.state_dict()
    run.outer.load_state_dict(state | {"changes": [[2, 4, 0]] if group.rank else [], "position": 2, "synced": 2})
    with pytest.raises(CollectiveMismatch, match=r"Change\(step=2, every=4, delay=0\)"):
        run.steps(*range(3, 9))


def test_a_state_from_before_h_could_change_loads_as_it_did():
    run = Run(SoloGroup(), diloco(2))
    run.steps(1, 2, 3)
    state = run.outer.state_dict()
    run.outer.change_schedule(4)
    run.steps(4, 5, 6, 7)
    assert run.outer.changes
    run.outer.load_state_dict({key: state[key] for key in state.keys() - {"changes", "agreed", "proposed"}})
    assert (run.outer.changes, run.outer.schedule.every) == ((), 2)


def test_several_steps_that_are_counted_at_once_find_h_changed_among_them():
    outer = OuterLoop(net(), local_sgd(2), SoloGroup())
    outer.change_schedule(5)
    for _ in range(14):
        outer.count()
    outer.sync_if_due()
    assert outer.changes == (Change(4, 5),)
    outer.detach()


# ---- on real ranks


def in_islands():
    """Train as islands of two ranks, in shards and by DDP, and without islands; one rank of each loop proposes."""
    made, grid = {}, Grid()
    for wrap in ("alone", "sharded", "in_step"):
        run = IslandRun(grid, RECIPES["diloco"], wrap)
        for step in range(1, 16):
            run.steps(step)
            if step == 3 and dist.get_rank() in ((2, 3) if wrap == "alone" else (3,)):
                run.outer.change_schedule(6)
        run.outer.flush()
        made[wrap] = run.values(), run.outer.changes
        run.outer.close()
    return made


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
def test_islands_change_h_as_replicas_of_one_rank_do():
    for made in run_ranks(in_islands, 4):
        for wrap in ("sharded", "in_step"):
            assert made[wrap][1] == made["alone"][1] == (Change(6, 6),)
            assert same(made[wrap][0], made["alone"][0]), wrap


def taken_over(planned):
    """Train a model that DDP has wrapped, on ranks over gloo."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with OuterLoop(model, replace(RECIPES["streaming_diloco"], changes=planned)).attach(optimizer) as outer:
        for step in range(1, 24):
            train(model, optimizer, step, dist.get_rank())
            if not planned and step == 3 and dist.get_rank() == 1:
                outer.change_schedule(9, delay=4)
        changes = outer.changes
    return values(model.module), changes


def both_ways(planned):
    return taken_over(()), taken_over(planned)


@pytest.mark.law("a-changed-h-is-a-planned-h")
def test_a_model_that_ddp_has_wrapped_trains_on_with_another_h():
    planned = (Change(8, 9, 4),)
    found = [both for ranks in run_ranks(both_ways, 2, planned) for both in ranks]
    assert [changes for _, changes in found] == [planned] * 4
    assert same(*(weights for weights, _ in found))


@pytest.mark.law("a-run-outlives-its-members")
def test_a_run_continues_from_its_address_with_the_h_that_it_had(tmp_path):
    with ElasticRun(address=tmp_path.as_uri(), expected=2, grace_s=20.0, state_every=2) as run:
        members = [run.start(0), run.start(1, proposals={5: 6})]
        run.until(lambda: run.at(60))
        run.kill(*members)
        last = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*last))
        said = run.finish(steps=30)
    assert not wrong(said)
    assert min(one["joined"] for one in said if one["member"] in last and "joined" in one) > 20
    assert [one["changes"] for one in said if "end" in one] == [[(12, 6)]] * 2
    steps = {one["step"] for one in said if "round" in one and one["member"] in last}
    assert all((step - 12) % 6 == 0 for step in sorted(steps)[:-1])
