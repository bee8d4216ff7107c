# SPDX-License-Identifier: Apache-2.0
"""States of some ranks become one for another number of ranks, and nothing that was learnt is lost on the way."""

import pytest
import torch

from farflung.base.errors import ConfigError
from farflung.outer import ErrorFeedback, Int8, diloco, eager_diloco, local_sgd, merge_states, streaming_diloco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, net
from tests.recipes import made

RECIPES = {name: made(name, every=4) for name in ("local_sgd", "slowmo", "diloco")}
RECIPES["streaming_diloco"] = made("streaming_diloco without delay", every=6, fragments=2, codec="none")


def states_of(recipe, size, steps):
    """Train on `size` ranks, rank r for r steps less at the end; return their states."""

    def act(group):
        run = Run(group, recipe)
        for number in range(steps):
            if number < 4 or number < steps - group.rank:
                run.steps(number)
            else:
                run.outer.count(done=False)  # as where fp16 overflowed
                run.outer.sync_if_due()
        return run.outer.state_dict()

    return run_replicas(act, size)


def ended_from(recipe, size, states):
    """The weights of ranks that load a state each, the first one if there are no more, and close at once."""

    def act(group):
        run = Run(group, recipe)
        run.outer.load_state_dict(states[min(group.rank, len(states) - 1)])
        return run.end()

    return run_replicas(act, size)


@pytest.mark.law("merged-states-agree")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_all_agree_on_next_is_what_the_old_ranks_would_have_agreed_on(name, size):
    recipe = RECIPES[name]
    old = states_of(recipe, 3, 7)
    assert any(
        not torch.equal(old[0]["rounds"]["fragments"][0]["local"][key], value)
        for key, value in old[1]["rounds"]["fragments"][0]["local"].items()
    )
    before = ended_from(recipe, 3, old)
    state = merge_states(old).state
    for after in ended_from(recipe, size, [state]):
        for key, value in before[0].items():
            torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.law("merged-states-agree")
def test_what_was_under_way_counts_as_not_sent():
    recipe = streaming_diloco(6, 2, delay=2)
    old = states_of(recipe, 2, 7)
    (number,) = old[0]["rounds"]["open"]
    old[0]["position"] = 6  # behind
    old[0]["rounds"]["fragments"][number] |= {"history": {"seen": {0: [1, 0]}}, "num_rounds": 9, "digest": 5}
    state = merge_states(old).state
    assert (state["rounds"]["open"], state["position"]) == ({}, 7)
    part, parts = state["rounds"]["fragments"][number], [one["rounds"]["fragments"][number] for one in old]
    taken = [one["rounds"]["open"][number]["claimed_weight"][0] for one in old]
    assert part["pending_weight"][0] == sum(one["pending_weight"][0] for one in parts) / 2 + sum(taken) / 2
    assert min(taken) > 0
    assert (part["history"], part["num_rounds"], part["digest"]) == ({"seen": {}}, 9, -1)
    for chunk, before in zip(part["agreed"]["anchor"]["chunks"], parts[0]["agreed"]["anchor"]["chunks"], strict=True):
        assert torch.equal(chunk, before)
    for after in ended_from(recipe, 3, [state]):
        assert all(bool(torch.isfinite(value).all()) for value in after.values())


@pytest.mark.law("merged-states-agree")
def test_together_the_ranks_still_owe_what_error_feedback_has_kept_back():
    old = states_of(diloco(2, codec=ErrorFeedback(Int8())), 2, 5)
    residuals = [one["rounds"]["fragments"][0]["agreed"]["residuals"][0] for one in old]
    assert not torch.equal(*residuals)
    (mean,) = merge_states(old).state["rounds"]["fragments"][0]["agreed"]["residuals"]
    torch.testing.assert_close(mean, (residuals[0] + residuals[1]) / 2)


def test_an_eager_loop_begins_anew_at_the_mean():
    old = states_of(eager_diloco(3), 2, 5)
    found = merge_states(old[::-1])
    assert found.state is None
    local = [one["rounds"]["fragments"][0]["local"] for one in old]
    assert not torch.equal(local[0]["0.weight"], local[1]["0.weight"])
    assert local[0]["1.num_batches_tracked"] != local[1]["1.num_batches_tracked"]
    for key, value in found.weights.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (5 * local[0][key] + 4 * local[1][key]) / 9)
        else:
            assert value == max(local[0][key], local[1][key])


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_rank_with_a_nan_does_not_count_unless_all_have_one(spoiled):
    """The only rank that has done anything since the last round, or the one that brings nothing anyway."""
    old = states_of(local_sgd(4), 2, 5)
    parts = [one["rounds"]["fragments"][0] for one in old]
    assert [part["pending_weight"][0] for part in parts] == [1.0, 0.0]
    weights = [part["local"]["0.weight"] for part in parts]
    weights[spoiled].fill_(torch.nan)
    assert torch.equal(merge_states(old).weights["0.weight"], weights[1 - spoiled])
    weights[1 - spoiled].fill_(torch.nan)
    assert merge_states(old).weights["0.weight"].isnan().all()


def test_states_of_different_loops_are_not_merged():
    old = [states_of(diloco(2, lr=rate), 1, 5)[0] for rate in (0.7, 0.6)]
    with pytest.raises(ConfigError, match=r"another outer loop, with outer optimizer \S*SGD\(.*0\.6.*here.*0\.7"):
        merge_states(old)
    old = [{key: value for key, value in state.items() if key != "parts"} for state in old]  # as it was written before
    with pytest.raises(ConfigError, match=r"another outer loop, with Every\(.*0\.6.*here Every\(.*0\.7"):
        merge_states(old)
    with pytest.raises(ConfigError, match="saved by rank 1 of an island, and this is rank 0 of one"):
        merge_states([old[0], old[0] | {"shard": 1}])


def test_weights_that_were_exchanged_once_and_rest_now_are_among_the_merged_ones():
    def act(group):
        run = Run(group, diloco(2))
        run.steps(0, 1)
        run.model[0].requires_grad_(False)
        agreed = run.steps(2, 3)
        run.model[0].requires_grad_(True)
        return run.steps(4), agreed, run.outer.state_dict()

    weights, (agreed, _), states = zip(*run_replicas(act, 2), strict=True)
    assert not any(name.startswith("0.") for name in states[0]["rounds"]["fragments"][0]["local"])
    merged = merge_states(states)
    assert merged.weights.keys() == agreed.keys()
    turns = merged.state["rounds"]["trained"]
    assert {*turns["names"]} == {name for name, _ in net().named_parameters()}
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(merged.weights[name], (weights[0][name] + weights[1][name]) / 2)
        assert torch.equal(turns["before"][name], agreed[name])
