# SPDX-License-Identifier: Apache-2.0
"""The engine: who counts how much, what a round does when things go wrong, and that a run can be taken up again."""

import math

import pytest
import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch, ConfigError, RankFailure, StateError
from farflung.comm.group import SoloGroup
from farflung.outer import Cast, OuterLoop, diloco, hierarchical, local_sgd, streaming_diloco
from farflung.testing.sim import run_replicas
from farflung.votes.ballot import Ballot, Island
from tests.errors import error_of
from tests.outer.replicas import Counting, Run, linear, on_replicas, same, shift, through_a_file, train, values


class Point(nn.Module):
    """One parameter that each step of rank r moves by 2**r."""

    def __init__(self, n=3):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(n))

    def move(self, rank):
        shift([self.x], 2.0**rank)


def uneven(group, counts, every):
    model = Point()
    with OuterLoop(model, local_sgd(every), group) as outer:
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
    weights, stats = zip(*run_replicas(uneven, 3, counts, every), strict=True)
    expected, rounds = averaged_by_hand(counts, every)
    assert same(*weights)
    assert torch.allclose(weights[0]["x"], torch.full((3,), expected), rtol=1e-6)
    assert [(one.steps, one.rounds) for one in stats] == [(count, rounds) for count in counts]


@on_replicas(2)
def test_what_is_due_waits_for_its_call_and_is_done_once(group):
    model, rounds = Point(), []
    outer = OuterLoop(model, local_sgd(2), group)
    for due in (False, False, True, True, False, True):
        model.move(group.rank)
        outer.count()
        if due:
            outer.sync_if_due()
            outer.sync_if_due()
        rounds.append(outer.stats().rounds)
    assert rounds == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("recipe", [local_sgd(1), streaming_diloco(2, 1, delay=1)])
@on_replicas(2)
def test_statistics_are_averaged_counters_take_the_maximum_masks_stay(group, recipe):
    model = nn.BatchNorm1d(2, affine=False)
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    model.register_buffer("seen", torch.tensor([group.rank == 1, False]))
    outer = OuterLoop(model, recipe, group)
    model.running_mean = torch.tensor([1.0, 3.0]) * 2**group.rank  # another tensor, as assignments make them
    model.num_batches_tracked.fill_(2**53 + group.rank)
    model.seen[group.rank] = True
    held = model.running_mean
    for _ in range(3):
        outer.step()
    assert model.running_mean is held
    assert held.tolist() == [1.5, 4.5]
    assert model.num_batches_tracked.item() == 2**53 + 1
    assert model.seen.tolist() == [True, True]
    assert model.mask.isinf().sum() == 1


@pytest.mark.law("equal-at-the-end")
@pytest.mark.parametrize("recipe", [local_sgd(2), diloco(2)], ids=["local_sgd", "diloco"])
@on_replicas(2)
def test_what_an_observer_has_seen_is_alike_at_the_end_though_it_begins_at_infinity(group, recipe):
    model = nn.Linear(2, 2)
    model.register_buffer("least", torch.tensor(math.inf))
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    outer = OuterLoop(model, recipe, group)
    for _ in range(3):
        shift(model.parameters(), 1.0 + group.rank)
        model.least = torch.tensor(-1.0 - 2 * group.rank)
        outer.step()
    outer.close()
    assert model.least.item() == -2.0
    assert model.mask.isinf().sum() == 1


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


def with_a_nan(group, recipe, where):
    model, seen = Point(64), []
    outer = OuterLoop(model, recipe, group, bucket_bytes=32)  # eight buckets
    for step in range(4):
        model.move(group.rank)
        if step < 3 and group.rank == 1:
            model.x.data[where] = (math.nan, math.inf, model.x.data[where - 1])[step]
        outer.step()
        seen.append(model.x.unique().tolist())
    outer.close()
    return seen, (outer.stats().rounds, outer.stats().dropped_rounds)


@pytest.mark.law("whole-round-or-none")
@pytest.mark.parametrize("where", [1, 40, 63])
@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1, lr=1.0, momentum=0.0)])
def test_a_round_with_a_value_that_is_not_finite_is_dropped_whole_and_later_rounds_go_on(recipe, where):
    with pytest.warns(RuntimeWarning) as caught:
        (mine, rounds), (_, theirs) = run_replicas(with_a_nan, 2, recipe, where)
    assert mine[:2] == [[1.0], [2.0]]  # the healthy rank keeps its own moves
    assert mine[2] == [(3 * 1.0 + 3 * 2.0) / 2]  # and all its steps count, once there is a round
    assert rounds == theirs == (2, 2)
    said = (
        "a round was dropped, as the weights of rank 1 are not finite, too large for Identity(), or all unusual. All "
        "ranks continue with their own weights. Further dropped rounds are only counted, in stats().dropped_rounds."
    )
    messages = sorted((str(one.message), one.filename) for one in caught)
    assert messages == [(f"Rank {rank}: {said}", __file__) for rank in range(2)]  # once each


def filled(group, n, codec, value):
    """A round in which all ranks have a value everywhere."""
    model = Point(n)
    outer = OuterLoop(model, local_sgd(1, codec=codec), group)
    model.x.data.fill_(value)
    outer.step()
    return model.x.unique().tolist(), outer.stats().rounds, outer.stats().dropped_rounds


@pytest.mark.law("whole-round-or-none")
def test_what_a_codec_cannot_hold_drops_the_round_instead_of_becoming_infinite():
    with pytest.warns(RuntimeWarning, match=r"ranks 0 and 1 .*too large for Cast\(dtype='fp16'\)"):
        assert run_replicas(filled, 2, 3, Cast("fp16"), 4e4) == [([4e4], 0, 1)] * 2


def test_large_finite_values_are_no_reason_to_drop_a_round():
    assert run_replicas(filled, 2, 1024, None, 1e38) == [([pytest.approx(1e38)], 1, 0)] * 2


@pytest.mark.parametrize(("spoiled", "after"), [((1,), 3.0), ((0, 1, 2), math.inf)])
@on_replicas(3)
def test_a_rank_with_spoiled_statistics_gets_those_of_the_others_if_there_are_any(group, spoiled, after):
    model = nn.BatchNorm1d(2, affine=False)
    outer = OuterLoop(model, local_sgd(1), group)
    model.running_var.fill_(math.inf if group.rank in spoiled else 3.0)
    outer.step()
    assert model.running_var.tolist() == [after, after]
    assert outer.stats().dropped_rounds == 0


@on_replicas(4)
def test_narrow_weights_are_averaged_in_fp32_and_rounded_once(group):
    model = linear().bfloat16()
    outer = OuterLoop(model, local_sgd(1), group)
    model.weight.data.fill_(1.0 + 2**-7 * group.rank)
    outer.step()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.unique().tolist() == [1.015625]  # 1 + 1.5 * 2**-7 lies half way, to even


def run(group, recipe, stop):
    """Train a model with statistics; at a stop, before what is due is done, another loop goes on from the state."""
    torch.manual_seed(3)
    model = nn.Sequential(linear(), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = OuterLoop(model, recipe, group, bucket_bytes=28)
    for step in range(10):
        train(model, optimizer, step, group.rank)
        outer.count(done=not (step == 1 and group.rank == 0))
        if step == stop:
            state = through_a_file(outer.state_dict())
            outer.detach()
            shift(model.state_dict().values(), 1)
            outer = OuterLoop(model, recipe, group, bucket_bytes=28)
            outer.load_state_dict(state)
        outer.sync_if_due()
    outer.close()
    stats = outer.stats()
    return values(model), (stats.rounds, stats.steps, stats.attempts, stats.bytes_sent)


@pytest.mark.law("resume-is-exact")
@pytest.mark.parametrize("recipe", [local_sgd(4), diloco(4, lr=0.7, momentum=0.9)])
@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
def test_a_run_taken_up_in_the_middle_of_a_round_ends_with_the_same_bits(recipe, stop):
    """Also between counting a step and the round that was due after it (stop 3 and 7)."""
    whole, again = (run_replicas(run, 2, recipe, number) for number in (None, stop))
    assert same(*(weights for weights, _ in (*whole, *again)))
    assert [counts for _, counts in again] == [counts for _, counts in whole]


@pytest.mark.parametrize("other", [diloco(3), local_sgd(2), diloco(2, lr=0.5)])
def test_a_state_of_another_recipe_or_model_is_refused(other):
    state = OuterLoop(Point(), diloco(2), SoloGroup()).state_dict()
    with pytest.raises(ConfigError, match=r"another outer loop, with .* \(here "):
        OuterLoop(Point(), other, SoloGroup()).load_state_dict(state)
    with pytest.raises(ConfigError, match="another"):
        OuterLoop(Point(4), diloco(2), SoloGroup()).load_state_dict(state)
    del state["rounds"]["fragments"][0]["local"]["x"]
    with pytest.raises(ConfigError, match=r"is of a different model: they differ in x\."):
        OuterLoop(Point(), diloco(2), SoloGroup()).load_state_dict(state)


def test_attached_to_an_optimizer_there_is_nothing_to_call():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with OuterLoop(model, diloco(2), SoloGroup()).attach(optimizer) as outer:
        for step in range(5):
            train(model, optimizer, step, 0)
    assert (outer.stats().steps, outer.stats().rounds) == (5, 3)
    train(model, optimizer, 5, 0)  # nothing hangs on to the optimizer
    assert outer.stats().steps == 5
    assert outer.state_dict()["rounds"]["trained"]["names"] == []


def test_a_model_that_its_group_cannot_send_is_refused(monkeypatch):
    monkeypatch.setattr(SoloGroup, "supports", lambda group, device: device == "cuda")
    why = "The model is on the CPU, but its group can't send CPU tensors .* the backend \"cpu:gloo,cuda:nccl"
    with pytest.raises(ConfigError, match=why):
        OuterLoop(linear(), local_sgd(2), SoloGroup())


def test_without_a_group_one_process_is_enough():
    with OuterLoop(linear(), local_sgd(1)) as outer:
        outer.step()
    assert (outer.stats().rounds, outer.stats().bytes_sent, outer.stats().bytes_voting) == (1, 0, 0)


def differing(group):
    """Vote as a rank of an island, in another round than the others and with other tensors."""
    odd = group.rank == 1
    lines = ["same", *(f"{name} float32 [{2 + odd}]" for name in "abc")]
    return error_of(CollectiveMismatch, Island(group, False, "3 trainable values", lines).ballot, Ballot(7 + odd, 1.0))


def test_ranks_that_differ_are_told_how():
    (said,) = set(run_replicas(differing, 3))
    assert said.split("\n  ") == [
        "The ranks of an outer loop are not in the same round:",
        "island ranks 0 and 2: vote 7 of 3 trainable values",
        "island rank 1: vote 8 of 3 trainable values",
        *(
            f"on island {who} alone: {x} float32 [{n}]"
            for x in "ab"
            for who, n in (("ranks 0 and 2", 2), ("rank 1", 3))
        ),
        "on island ranks 0 and 2 alone: c float32 [2]",
        "and 1 more",
        "Pipeline stages are no island: give each stage an OuterLoop of its own, over the ranks of its column as "
        "group=.",
    ]


def left_by_an_exception(group, in_its_block):
    counting = Counting(group)

    def fail(*_):
        counting.calls.clear()
        raise ValueError("bad sample" + 600 * "!")

    try:
        with OuterLoop(Point(), hierarchical({2: 3, 4: None}), counting) as outer:
            for step in range(3):
                if step == 2 and group.rank == 1:
                    fail() if in_its_block else outer.listeners.append(fail)  # which the last round calls
                outer.step()
    except (ValueError, RankFailure) as error:
        return type(error), str(error), [call[:2] for call in counting.calls]


@pytest.mark.parametrize("in_its_block", [True, False])
def test_an_exception_leaves_without_a_collective_and_the_others_are_told(in_its_block):
    first, second, third = run_replicas(left_by_an_exception, 3, in_its_block)
    said = "bad sample" + 600 * "!"
    assert second == (ValueError, said, [("leave", f"ValueError: {said}"[:500])] * 2)  # its block, too
    for kind, message, _ in (first, third):
        assert kind is RankFailure
        assert "rank 1 left (ValueError: bad sample!" in message


@on_replicas(2)
def test_a_loop_that_was_closed_has_nobody_to_tell(group):
    counting = Counting(group)
    caught = None
    try:
        with OuterLoop(Point(), local_sgd(2), counting) as outer:
            outer.close()
            raise ValueError("too late to matter")
    except ValueError as error:
        caught = str(error)
    assert caught == "too late to matter"
    assert "leave" not in [kind for kind, *_ in counting.calls]


def test_seconds_add_up():
    model, rounds = Point(), []
    outer = OuterLoop(model, diloco(1), SoloGroup())
    outer.listeners.append(rounds.append)
    outer.step()
    stats, parts = outer.stats(), [rounds[0].seconds_voting, rounds[0].seconds_encoding, rounds[0].seconds_landing]
    assert min(parts) > 0
    assert rounds[0].seconds_exposed == pytest.approx(sum(parts))
    assert (stats.seconds_voting, stats.seconds_landing) == (parts[0], parts[2])
    assert 0 < stats.seconds_encoding + stats.seconds_landing <= stats.seconds_exposed
    assert stats.seconds_exposed < stats.seconds_total <= outer.stats().seconds_total


def sets_weights(group, recipe, differ):
    """Weights that a script sets after a flush, as averages of earlier ones, stay in a flush without steps."""
    run = Run(group, recipe, linear)
    run.steps(*range(6))
    run.outer.flush()
    run.outer.flush()
    before = values(run.model)
    for parameter in run.model.parameters():
        parameter.data.fill_(1.0 + 2 * differ * group.rank)
    run.outer.flush()
    after = values(run.model)
    run.steps(6)
    return before, after, run.end()


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(
    "recipe", [diloco(4), local_sgd(4), hierarchical({2: 2, 4: None})], ids=["anchored", "averaged", "in levels"]
)
def test_weights_that_a_script_sets_without_a_step_are_the_new_common_ones(recipe, differ):
    one, other = run_replicas(sets_weights, 2, recipe, differ)
    assert all(map(same, one, other))
    _, after, end = one
    assert all(torch.equal(value, torch.full_like(value, 1.0 + differ)) for value in after.values())
    assert not same(end, after)


class CallsSuper(torch.optim.SGD):
    """Of a class whose step calls that of its super: torch calls hooks around each of both."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, CallsSuper])
def test_steps_of_an_attached_optimizer_are_counted_once(kind):
    model = Point(1)
    optimizer = kind(model.parameters(), lr=0.1)
    outer = OuterLoop(model, local_sgd(4)).attach(optimizer)
    with pytest.raises(StateError, match="the optimizer's steps are counted already"):
        outer.step()
    optimizer.step()
    assert outer.stats().attempts == 1
    outer.detach()


@pytest.mark.parametrize("when", ["build", "round", "flush", "load"])
@pytest.mark.parametrize("recipe", [local_sgd(2), diloco(2)], ids=["local_sgd", "diloco"])
@on_replicas(2)
def test_a_loop_goes_on_after_it_was_called_in_inference_mode(group, recipe, when):
    model = linear()
    model.extra = nn.Linear(2, 1)
    model.extra.requires_grad_(False)

    def in_mode(which):
        return torch.inference_mode(which == when)

    with in_mode("build"):
        outer = OuterLoop(model, recipe, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(8):
        if step == 2:
            model.extra.requires_grad_(True)  # what is new gets anchors in the next round, or in the flush
            with in_mode("flush"):
                outer.flush() if when == "flush" else None
        train(model, optimizer, step, group.rank)
        with in_mode("round"):
            outer.step()
        if step == 4:
            with in_mode("load"):
                outer.load_state_dict(outer.state_dict())
    outer.close()
