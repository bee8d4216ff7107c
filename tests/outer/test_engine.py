# SPDX-License-Identifier: Apache-2.0
"""The engine: who counts how much, what a round does when things go wrong, and that a run can be taken up again."""

import math

import pytest
import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch, ConfigError, RankFailure
from farflung.comm.group import SoloGroup
from farflung.outer import Cast, Identity, OuterLoop, diloco, local_sgd, streaming_diloco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Counting, linear, same, through_a_file, train, values


class Point(nn.Module):
    """One parameter that each step of rank r moves by 2**r."""

    def __init__(self, n=3):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(n))

    @torch.no_grad()
    def move(self, rank):
        self.x.add_(2.0**rank)


def uneven(group, counts, every, make_recipe):
    model = Point()
    with OuterLoop(model, make_recipe(every), group) as outer:
        for _ in range(counts[group.rank]):
            model.move(group.rank)
            outer.step()
    return values(model), outer.stats()


def averaged_by_hand(counts, every):
    """Each round weighs a rank by its steps since the last one; a rank without data has weight 0."""
    x, rounds = 0.0, 0
    for start in range(0, max(counts), every):
        done = [min(max(count - start, 0), every) for count in counts]
        x = sum(n * (x + n * 2.0**rank) for rank, n in enumerate(done)) / sum(done)
        rounds += 1
    return x, rounds


@pytest.mark.law("equal-at-the-end")
@pytest.mark.parametrize("counts", [(0, 3, 10), (4, 4, 4), (0, 0, 0), (5, 0, 0), (1, 2, 3), (8, 6, 7), (3, 9, 9)])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_ranks_that_run_out_of_data_stay_with_no_weight_and_nothing_is_averaged_twice(counts, every):
    outcomes = run_replicas(uneven, 3, counts, every, local_sgd)
    expected, rounds = averaged_by_hand(counts, every)
    assert same(*(weights for weights, _ in outcomes))
    assert torch.allclose(outcomes[0][0]["x"], torch.full((3,), expected), rtol=1e-6)
    assert {stats.rounds for _, stats in outcomes} == {rounds}
    assert [stats.steps for _, stats in outcomes] == list(counts)


def sent_at_the_end(group, codec):
    counting = Counting(group)
    model = Point()
    with OuterLoop(model, local_sgd(2, codec=codec), counting) as outer:
        for _ in range(4):
            model.move(group.rank)
            outer.step()
        before = len(counting.calls)
    return [kind for kind, _, _ in counting.calls[before:]], values(model)


def test_where_no_one_has_moved_since_the_last_round_two_messages_say_so():
    """A vote, and the fingerprint of frozen weights."""
    for codec in (Identity(), Cast("bf16")):
        (calls, weights), (others, theirs) = run_replicas(sent_at_the_end, 2, codec)
        assert calls == others == ["all_gather_small"] * 2
        assert same(weights, theirs)


def flushed_twice(group):
    model = Point()
    outer = OuterLoop(model, local_sgd(4), group)
    seen = []
    for steps in ((6, 3)[group.rank], 4):
        for _ in range(steps):
            model.move(group.rank)
            outer.step()
        outer.flush()
        seen.append(values(model))
    outer.close()
    outer.close()
    return seen, outer.stats().rounds


def test_after_a_flush_the_schedule_goes_on_from_the_furthest_step():
    (first, rounds), (second, also) = run_replicas(flushed_twice, 2)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert rounds == also == 4  # after 4 steps, at the flush (after 6 and 3), after 8, at the second flush


def skipping(group):
    model = Point()
    with OuterLoop(model, local_sgd(4), group) as outer:
        for step in range(4):
            done = group.rank == 0 or step == 0
            if done:
                model.move(group.rank)
            outer.count(done)
            outer.sync_if_due()
    return values(model), outer.stats()


def test_a_skipped_step_moves_the_schedule_but_has_no_weight():
    (weights, stats), (other, theirs) = run_replicas(skipping, 2)
    assert same(weights, other)
    assert torch.equal(weights["x"], torch.full((3,), (4 * 4.0 + 1 * 2.0) / 5))
    assert (stats.steps, stats.attempts, stats.rounds) == (4, 4, 1)
    assert (theirs.steps, theirs.attempts, theirs.rounds) == (1, 4, 1)


def counting_apart(group):
    model = Point()
    outer = OuterLoop(model, local_sgd(2), group)
    rounds = []
    for due in (False, False, True, True, False, True):
        model.move(group.rank)
        outer.count()
        if due:
            outer.sync_if_due()
            outer.sync_if_due()
        rounds.append(outer.stats().rounds)
    return rounds


def test_what_is_due_waits_for_its_call_and_is_done_once():
    assert run_replicas(counting_apart, 2) == [[0, 0, 1, 2, 2, 3]] * 2


def buffers(group):
    model = nn.BatchNorm1d(2, affine=False)
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    model.register_buffer("seen", torch.tensor([group.rank == 1, False]))
    outer = OuterLoop(model, local_sgd(1), group)
    model.running_mean = torch.tensor([1.0, 3.0]) * 2**group.rank  # another tensor, as assignments make them
    model.num_batches_tracked.fill_(2**53 + group.rank)
    model.seen[group.rank] = True
    held = model.running_mean
    outer.step()
    assert model.running_mean is held
    return values(model)


def test_statistics_are_averaged_counters_take_the_maximum_masks_stay():
    first, second = run_replicas(buffers, 2)
    assert same(first, second)
    assert first["running_mean"].tolist() == [1.5, 4.5]
    assert first["num_batches_tracked"].item() == 2**53 + 1
    assert first["seen"].tolist() == [True, True]
    assert first["mask"].isinf().sum() == 1


def moved_by_forward_passes(group, recipe):
    model = nn.BatchNorm1d(2)
    outer = OuterLoop(model, recipe, group)
    for _ in range(4):
        outer.step()
    outer.flush()
    for _ in range(2 + group.rank):
        model(torch.full((3, 2), float(group.rank)))
    outer.flush()
    return values(model)


@pytest.mark.parametrize("recipe", [local_sgd(2), diloco(2), streaming_diloco(2, 2), diloco(3)])
def test_a_flush_without_steps_brings_buffers_together(recipe):
    first, second = run_replicas(moved_by_forward_passes, 2, recipe)
    assert same(first, second)
    assert first["num_batches_tracked"].item() == 3


def started_apart(group):
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(group.rank)
    pointers = [p.data_ptr() for p in model.parameters()]
    OuterLoop(model, local_sgd(1), group, bucket_bytes=16)
    assert pointers == [p.data_ptr() for p in model.parameters()]
    return values(model)


def test_all_start_from_rank_0s_values_in_place():
    torch.manual_seed(0)
    expected = nn.Linear(3, 2).state_dict()
    first, *others = run_replicas(started_apart, 3)
    assert same(first, *others)
    assert torch.equal(first["0.weight"], expected["weight"])
    assert first["1.running_mean"].tolist() == [0, 0]


def with_a_nan(group, recipe, where):
    model = Point(64)
    outer = OuterLoop(model, recipe, group, bucket_bytes=32)  # eight buckets
    seen = []
    for step in range(4):
        model.move(group.rank)
        if step in (0, 1) and group.rank == 1:
            model.x.data[where] = (math.nan, math.inf)[step]
        if step == 2 and group.rank == 1:
            model.x.data[where] = model.x.data[where - 1]
        outer.step()
        seen.append(values(model)["x"])
    outer.close()
    return seen, outer.stats()


@pytest.mark.law("whole-round-or-none")
@pytest.mark.parametrize("where", [1, 40, 63])
@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1, lr=1.0, momentum=0.0)])
def test_a_round_with_a_value_that_is_not_finite_is_dropped_whole_and_later_rounds_go_on(recipe, where):
    with pytest.warns(RuntimeWarning) as caught:
        (mine, stats), (_, theirs) = run_replicas(with_a_nan, 2, recipe, where)
    assert mine[0].unique().tolist() == [1.0]  # the healthy rank keeps its own moves
    assert mine[1].unique().tolist() == [2.0]
    assert mine[2].unique().tolist() == [(3 * 1.0 + 3 * 2.0) / 2]  # and all its steps count, once there is a round
    assert (stats.rounds, stats.dropped_rounds) == (theirs.rounds, theirs.dropped_rounds) == (2, 2)
    messages = sorted(str(warning.message) for warning in caught)
    assert [message[:6] for message in messages] == ["Rank 0", "Rank 1"]  # once each
    assert all("rank 1 are not finite" in message for message in messages)


def too_large(group):
    model = Point()
    outer = OuterLoop(model, local_sgd(1, codec=Cast("fp16")), group)
    model.x.data.fill_(4e4)
    outer.step()
    return values(model)["x"].tolist(), outer.stats().dropped_rounds


@pytest.mark.law("whole-round-or-none")
def test_what_a_codec_cannot_hold_drops_the_round_instead_of_becoming_infinite():
    with pytest.warns(RuntimeWarning, match=r"ranks 0 and 1 .*too large for Cast\(dtype='fp16'\)"):
        assert run_replicas(too_large, 2) == [([4e4] * 3, 1)] * 2


def large_but_finite(group):
    model = Point(1024)
    outer = OuterLoop(model, local_sgd(1), group)
    model.x.data.fill_(1e38)
    outer.step()
    return outer.stats().rounds, model.x.isfinite().all().item()


def test_large_finite_values_are_no_reason_to_drop_a_round():
    assert run_replicas(large_but_finite, 2) == [(1, True)] * 2


def spoiled_statistics(group):
    model = nn.BatchNorm1d(2, affine=False)
    outer = OuterLoop(model, local_sgd(1), group)
    model.running_var.fill_(math.inf if group.rank == 1 else 3.0)
    outer.step()
    return model.running_var.tolist(), outer.stats().dropped_rounds


def test_a_rank_with_spoiled_statistics_gets_those_of_the_others():
    assert run_replicas(spoiled_statistics, 3) == [([3.0, 3.0], 0)] * 3


def in_bf16(group, recipe):
    model = linear().bfloat16()
    outer = OuterLoop(model, recipe, group)
    with torch.no_grad():
        model.weight.fill_(1.0 + 2**-7 * group.rank)
    outer.step()
    return model.weight.dtype, model.weight.float().unique().tolist()


def test_narrow_weights_are_averaged_in_fp32_and_rounded_once():
    outcomes = run_replicas(in_bf16, 4, local_sgd(1))
    assert outcomes == [(torch.bfloat16, [1.015625])] * 4  # 1 + 1.5 * 2**-7 lies half way, to even


def moved(group):
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    outer = OuterLoop(model, local_sgd(1), group)
    model[0].weight.data = torch.full((2, 3), float(group.rank))
    model[1].weight = nn.Parameter(torch.full((2, 2), 2.0 * group.rank))
    held = model[1].weight
    outer.step()
    assert model[1].weight is held
    return model[0].weight.unique().tolist(), held.unique().tolist()


def test_weights_that_someone_moved_or_replaced_are_still_averaged():
    assert run_replicas(moved, 2) == [([0.5], [1.0])] * 2


def run(group, recipe, steps, state=None, stop=None):
    """Train a model with statistics; resume from `state`, or stop and return one."""
    torch.manual_seed(3 if state is None else 4)
    model = nn.Sequential(linear(), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = OuterLoop(model, recipe, group, bucket_bytes=28)
    if state is not None:
        outer.load_state_dict(state[group.rank])
        outer.sync_if_due()
    for step in steps:
        train(model, optimizer, step, group.rank)
        outer.count(done=not (step == 1 and group.rank == 0))
        if step != stop:
            outer.sync_if_due()
    if stop is not None:
        return outer.state_dict()
    outer.close()
    return values(model), outer.stats()


@pytest.mark.law("resume-is-exact")
@pytest.mark.parametrize("recipe", [local_sgd(4), diloco(4, lr=0.7, momentum=0.9)])
@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
def test_a_run_taken_up_in_the_middle_of_a_round_ends_with_the_same_bits(recipe, stop):
    """Also between counting a step and the round that was due after it (stop 3 and 7)."""
    whole = run_replicas(run, 2, recipe, range(10))
    states = run_replicas(run, 2, recipe, range(stop + 1), None, stop)
    states = [through_a_file(state) for state in states]
    again = run_replicas(run, 2, recipe, range(stop + 1, 10), states)
    assert same(*(weights for weights, _ in whole), *(weights for weights, _ in again))
    assert [(s.rounds, s.steps, s.attempts) for _, s in again] == [(s.rounds, s.steps, s.attempts) for _, s in whole]
    assert [s.bytes_sent for _, s in again] == [s.bytes_sent for _, s in whole]


def test_a_state_is_a_copy():
    model = Point()
    outer = OuterLoop(model, diloco(2), SoloGroup())
    state = outer.state_dict()
    for _ in range(2):
        model.move(0)
        outer.step()
    assert state["rounds"]["fragments"][0]["local"]["x"].tolist() == [0, 0, 0]
    assert state["rounds"]["fragments"][0]["agreed"]["anchor"]["chunks"][0].tolist() == [0, 0, 0]
    assert state["position"] == 0


@pytest.mark.parametrize("other", [diloco(3), local_sgd(2), diloco(2, lr=0.5)])
def test_a_state_of_another_recipe_or_model_is_refused(other):
    state = OuterLoop(Point(), diloco(2), SoloGroup()).state_dict()
    with pytest.raises(ConfigError, match=r"another outer loop, with .* \(here "):
        OuterLoop(Point(), other, SoloGroup()).load_state_dict(state)
    with pytest.raises(ConfigError, match="another"):
        OuterLoop(Point(4), diloco(2), SoloGroup()).load_state_dict(state)


def test_attached_to_an_optimizer_there_is_nothing_to_call():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with OuterLoop(model, diloco(2), SoloGroup()).attach(optimizer) as outer:
        for step in range(5):
            train(model, optimizer, step, 0)
    assert (outer.stats().steps, outer.stats().rounds) == (5, 3)
    train(model, optimizer, 5, 0)  # nothing hangs on to the optimizer
    assert outer.stats().steps == 5


class GpuOnly(SoloGroup):
    def supports(self, device):
        return device == "cuda"


def test_a_model_that_its_group_cannot_send_is_refused():
    with pytest.raises(ConfigError, match="cpu:gloo,cuda:nccl"):
        OuterLoop(linear(), local_sgd(2), GpuOnly())


def test_without_a_group_one_process_is_enough():
    model = linear()
    with OuterLoop(model, local_sgd(1)) as outer:
        outer.step()
    assert (outer.stats().rounds, outer.stats().bytes_sent, outer.stats().bytes_voting) == (1, 0, 0)


def differing(group, what):
    model = Point(4 if what == "size" and group.rank == 1 else 3)
    every = 3 if what == "every" and group.rank == 1 else 2
    try:
        outer = OuterLoop(model, local_sgd(every), group)
        state = outer.state_dict()
        state["rounds"]["num_votes"] += group.rank == 1
        outer.load_state_dict(state)
        outer.flush()
    except CollectiveMismatch as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("every", "Every(every=2)", "Every(every=3)"),
        ("size", "3 trainable values", "4 trainable values"),
        ("round", "vote 1 ", "vote 2 "),
    ],
)
def test_ranks_that_differ_are_told_how(what, first, second):
    messages = run_replicas(differing, 3, what)
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert "ranks 0 and 2" in lines[1]
    assert first in lines[1]
    assert "rank 1:" in lines[2]
    assert second in lines[2]


def left_by_an_exception(group):
    counting = Counting(group)
    model = Point()
    calls = 0
    try:
        with OuterLoop(model, local_sgd(2), counting) as outer:
            for step in range(4):
                if step == 3 and group.rank == 1:
                    calls = len(counting.calls)
                    raise ValueError("bad sample")
                outer.step()
    except (ValueError, RankFailure) as error:
        return type(error), str(error), [call[0] for call in counting.calls[calls:]]


def test_an_exception_leaves_without_a_collective_and_the_others_are_told():
    first, second, third = run_replicas(left_by_an_exception, 3)
    assert second == (ValueError, "bad sample", ["leave"])
    for kind, message, _ in (first, third):
        assert kind is RankFailure
        assert "rank 1 left (ValueError: bad sample)" in message


def after_the_end(group):
    counting = Counting(group)
    try:
        with OuterLoop(Point(), local_sgd(2), counting) as outer:
            outer.close()
            raise ValueError("too late to matter")
    except ValueError:
        return [call[0] for call in counting.calls]


def test_a_loop_that_was_closed_has_nobody_to_tell():
    assert "leave" not in run_replicas(after_the_end, 2)[0]


def test_seconds_add_up():
    model = Point()
    outer = OuterLoop(model, diloco(1), SoloGroup())
    outer.step()
    stats = outer.stats()
    parts = stats.seconds_encoding + stats.seconds_landing
    assert 0 < parts <= stats.seconds_exposed
    assert stats.seconds_exposed < stats.seconds_total <= outer.stats().seconds_total


def sets_weights(group, differ):
    """Weights that a script sets after a flush, as averages of earlier ones, stay in a flush without steps."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with OuterLoop(model, diloco(4), group, inner=optimizer).attach(optimizer) as outer:
        for step in range(6):
            train(model, optimizer, step, group.rank)
        outer.flush()
        outer.flush()
        before = values(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0 + 2 * differ * group.rank)
        outer.flush()
        after = values(model)
        train(model, optimizer, 6, group.rank)
    return before, after, values(model)


@pytest.mark.parametrize("differ", [False, True])
def test_weights_that_a_script_sets_without_a_step_are_the_new_common_ones(differ):
    (before, after, end), others = run_replicas(sets_weights, 2, differ)
    assert same(before, others[0])
    assert same(after, others[1])
    assert same(end, others[2])
    assert all(torch.equal(one, torch.full_like(one, 1.0 + differ)) for one in after.values())
    assert not same(end, after)
