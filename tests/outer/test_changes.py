# SPDX-License-Identifier: Apache-2.0
"""H as a quantity that changes: agreed on in votes, after the same step everywhere, and as if it had been planned."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from farflung.base.errors import ConfigError
from farflung.outer import Change, Streaming, Warmup, diloco
from farflung.outer.schedule import Apply, Changing, Clock, Launch
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, kept_of, same, through_a_file
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
    return Changing(Warmup(warmup, first) if warmup else first, tuple(changes))


@pytest.mark.law("a-changed-h-is-a-planned-h")
@settings(max_examples=200)
@given(plans())
def test_a_change_splits_no_round_and_nothing_is_under_way_across_it(plan):
    warmup = plan.first.steps if isinstance(plan.first, Warmup) else 0
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


@pytest.mark.parametrize(
    ("step", "every", "why"),
    [(6, 8, r"within a round: .* such as step=8"), (4, 8, "is within a round"), (8, 0, "every is 0")],
)
def test_a_change_within_a_round_is_refused(step, every, why):
    with pytest.raises(ConfigError, match=why):
        replace(diloco(4), changes=(Change(4, 4), Change(step, every)))


def changed(group, name, planned=None, resumes=(), steps=26):
    """Train with changes that the last rank proposes, or `planned` ones; return weights, anchors and the changes."""
    recipe = RECIPES[name] if planned is None else replace(RECIPES[name], changes=planned)
    run = Run(group, recipe, bucket_bytes=64)
    run.outer.listeners.append(lambda this: weights.append((this.step, this.weights)))
    weights, proposals = [], dict(zip((1, 12), NEXT[name], strict=True))
    for step in range(1, steps + 1):
        run.steps(step)
        if planned is None and step in proposals and group.rank == group.size - 1:
            run.outer.change_schedule(proposals[step])
        if step in resumes:
            state, optimizer = through_a_file(run.outer.state_dict()), run.optimizer.state_dict()
            run.outer.detach()
            run = Run(group, recipe, bucket_bytes=64)
            run.outer.load_state_dict(state)
            run.optimizer.load_state_dict(optimizer)
            run.outer.listeners.append(lambda this: weights.append((this.step, this.weights)))
    kept, changes = kept_of(run.outer), run.outer.changes
    return run.end(), kept, changes, weights


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
    there, resumed = run_replicas(changed, 2, name), run_replicas(changed, 2, name, None, range(1, 26))
    for (weights, kept, changes, _), (others, theirs, same_changes, _) in zip(there, resumed, strict=True):
        assert changes == same_changes
        assert len(changes) == 2
        assert same(weights, others)
        assert equal(kept, theirs)
