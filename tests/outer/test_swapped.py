# SPDX-License-Identifier: Apache-2.0
"""Two replicas that send each other their weights as they lie in memory: the mean, and nobody left waiting."""

import math
import multiprocessing as mp
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflung.base.errors import RankFailure
from farflung.comm import lent
from farflung.comm.group import TorchGroup
from farflung.config import environ
from farflung.outer import Cast, OuterLoop, diloco, local_sgd, part, post_local_sgd, streaming_diloco
from farflung.outer.lanes import Swapped
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Counting, same, values

LONG = 64


@pytest.fixture(autouse=True)
def short_tensors_are_long(monkeypatch):
    monkeypatch.setattr(lent, "_LONG", LONG)


def lane_of(outer):
    return outer._rounds.parts[0].weights


def layered():
    """Long and short tensors, one of them odd, more than a bucket of 1 kB of each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 48), *(nn.LayerNorm(48) for _ in range(6)), nn.Linear(48, 5))


def swaps(group, recipe, model):
    with OuterLoop(model, recipe, group) as outer:
        return isinstance(lane_of(outer), Swapped)


@pytest.mark.parametrize(
    ("size", "recipe", "make", "expected"),
    [
        (2, local_sgd(1), layered, True),
        (2, post_local_sgd(1, 2), layered, True),
        (3, local_sgd(1), layered, False),
        (2, local_sgd(1, codec=Cast("bf16")), layered, False),
        (2, diloco(1), layered, False),
        (2, streaming_diloco(2, 1, delay=1), layered, False),
        (2, local_sgd(1), lambda: layered().double(), False),
        (2, local_sgd(1), lambda: nn.ParameterList([torch.ones(4, 8).t()]), False),
    ],
)
def test_it_is_for_two_replicas_that_stand_still_and_average_their_weights(size, recipe, make, expected):
    assert run_replicas(lambda group: swaps(group, recipe, make()), size) == [expected] * size


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(st.tuples(floats, floats), min_size=1, max_size=150)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(8, 600), st.sampled_from([None, 0, 1]))
def test_both_get_the_bits_of_the_mean(pairs, bucket_bytes, held):
    pairs = torch.tensor(pairs)

    def averaged(group):
        mine = pairs[: LONG - 1, group.rank], pairs[LONG - 1 :, group.rank]
        model = nn.ParameterList([torch.zeros(len(part)) for part in mine])
        view = None if held is None else model[held].detach()
        with OuterLoop(model, local_sgd(1), group, bucket_bytes=bucket_bytes) as outer:
            with torch.no_grad():
                torch._foreach_copy_(list(model), mine)
            outer.step()
            assert isinstance(lane_of(outer), Swapped)
        assert view is None or torch.equal(view, model[held])
        return torch.cat([part.detach() for part in model])

    first, second = run_replicas(averaged, 2)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    halves = pairs / 2  # exact, unless they are smaller than all normal numbers
    is_exact = (halves * 2 == pairs).all(1)
    assert torch.equal(first[is_exact], halves.sum(1)[is_exact])
    assert bool((first.double() - pairs.double().mean(1)).abs()[~is_exact].le(2.0**-148).all())


def moved(group, recipe, amounts, spoilt=None, bucket_bytes=1024):
    """Rounds in which ranks do differently much."""
    model = layered()
    generator = torch.Generator().manual_seed(group.rank)
    seen = []
    with OuterLoop(model, recipe, group, bucket_bytes=bucket_bytes) as outer:
        for round_, amount in enumerate(amounts[group.rank]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
                if (group.rank, round_) == spoilt:
                    list(model.parameters())[-2].view(-1)[-1] = math.nan
            before = values(model)
            outer.step(items=amount)
            seen.append((before, values(model)))
        assert isinstance(lane_of(outer), Swapped)
        dropped = outer.stats().dropped_rounds
        outer.drop()
    return seen, dropped


def test_shares_that_differ_weigh_the_mean():
    outcomes = run_replicas(moved, 2, replace(local_sgd(1), weigh_by="items"), ((1, 3), (3, 3)))
    for number, weight in ((0, 0.25), (1, 0.5)):
        (before, after), (other, also) = (seen[number] for seen, _ in outcomes)
        assert same(after, also)
        for name, value in after.items():
            expected = weight * before[name].double() + (1 - weight) * other[name].double()
            assert torch.allclose(value.double(), expected, rtol=0, atol=1e-6)


def ended_unevenly(group):
    model = nn.ParameterList([torch.zeros(LONG) for _ in range(3)])
    with OuterLoop(model, local_sgd(8), group) as outer:
        for _ in range(3 - 2 * group.rank):
            with torch.no_grad():
                torch._foreach_add_(list(model), group.rank + 1)
            outer.step()
    return [parameter.unique().tolist() for parameter in model]


def test_long_weights_of_ranks_that_did_differently_much_are_weighed_at_the_end():
    assert run_replicas(ended_unevenly, 2) == [[[(3 * 3 + 1 * 2) / 4]] * 3] * 2


@pytest.mark.filterwarnings("ignore:Rank .. a round was dropped")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_that_is_not_finite_drops_the_round_and_leaves_all_weights_as_they_are(rank):
    outcomes = run_replicas(moved, 2, local_sgd(1), ((1, 1), (1, 1)), (rank, 0))
    for seen, dropped in outcomes:
        before, after = seen[0]
        assert dropped == 2  # the value is still there in the second round
        assert all(torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())


def over_gloo(group=None):
    lent._LONG = LONG
    model = layered()
    with OuterLoop(model, local_sgd(1), group, bucket_bytes=1024) as outer:
        rank = outer._group.rank
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_((-1) ** step * (rank + 1) / 3)
            outer.step()
        assert isinstance(lane_of(outer), Swapped)
        assert getattr(outer._group, "num_swaps", 0) == 0
        stats = outer.stats()
    return values(model), stats.bytes_sent, stats.rounds


def test_processes_and_threads_end_with_the_same_bits_and_count_the_same_bytes():
    outcomes = [*run_ranks(over_gloo, 2), *run_replicas(over_gloo, 2)]
    assert same(*(weights for weights, _, _ in outcomes))
    size = sum(4 * value.numel() for value in outcomes[0][0].values())
    assert [(sent, rounds) for _, sent, rounds in outcomes] == [(3 * size, 3)] * 4


def lost_in_mid_swap(variables, how, report):
    """Rank 1 is lost when the second of many buckets lands; the other one writes down what it is told."""
    environ.export(variables)
    torch.set_num_threads(1)
    lent._LONG = LONG
    dist.init_process_group("gloo")
    model = nn.ParameterList([nn.Parameter(torch.zeros(LONG)) for _ in range(12)])
    land, calls = Swapped.land, []

    def lose(self, *arguments):
        calls.append(0)
        if dist.get_rank() == 1 and len(calls) == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no room")
        land(self, *arguments)

    Swapped.land = lose
    began = time.monotonic()
    try:
        with OuterLoop(model, local_sgd(1), bucket_bytes=4 * LONG) as outer, torch.no_grad():
            for parameter in model:
                parameter.add_(2.0 * dist.get_rank() + 1)
            outer.step()
    except RankFailure as error:
        weights = [parameter.unique().tolist() for parameter in model]
        torch.save((str(error), time.monotonic() - began, weights), report)
        sys.exit(7)
    except OSError:
        time.sleep(30)  # it left, but its process lives on


@pytest.mark.parametrize(
    ("how", "told"), [("killed", "ranks [1] gave no sign of life"), ("failed", "rank 1 left (OSError: no room)")]
)
def test_a_rank_that_is_lost_in_mid_swap_is_named_within_seconds_and_no_weight_is_torn(how, told, tmp_path):
    context = mp.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [
        context.Process(target=lost_in_mid_swap, args=({**variables, "RANK": str(rank)}, how, tmp_path / "report"))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(timeout=25)
        assert ranks[0].exitcode == 7
        message, seconds, weights = torch.load(tmp_path / "report")
        assert told in message
        assert seconds < 8
        assert all(values in ([1.0], [2.0]) for values in weights)  # its own, or the mean
        assert [2.0] in weights
        assert weights[-1] == [1.0]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def rides(group, fast):
    """Whether the ballots travel with the first bucket, and what is learnt."""
    part._NEAR_BYTES_PER_S = 0.0 if fast else math.inf
    part._TELLING_BYTES = 0
    counting = Counting(group if group is not None else TorchGroup())
    model = layered()
    with OuterLoop(model, local_sgd(1), counting, bucket_bytes=1024) as outer:
        before = len(counting.calls)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(counting.rank / 3)
        outer.step()
        kinds = {kind for kind, _, _ in counting.calls[before:]}
    return "meet" not in kinds, values(model)


@pytest.mark.parametrize("fast", [False, True])
def test_only_on_a_fast_line_the_ballots_travel_with_the_first_bucket(fast, monkeypatch):
    monkeypatch.setattr(part, "_NEAR_BYTES_PER_S", 0.0)
    monkeypatch.setattr(part, "_TELLING_BYTES", 0)
    outcomes = [*run_replicas(rides, 2, fast), *run_ranks(rides, 2, None, fast)]
    assert [ride for ride, _ in outcomes] == [fast] * 4
    assert same(*(weights for _, weights in outcomes))
