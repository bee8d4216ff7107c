# SPDX-License-Identifier: Apache-2.0
"""The outer loop over gloo: the same as DDP where it must be, and one clear error where a rank is gone."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.base.errors import CollectiveMismatch, RankFailure
from laconic.outer import Cast, OuterLoop, diloco, local_sgd
from laconic.testing.ranks import run_ranks
from laconic.testing.sim import run_replicas
from tests.outer.replicas import linear, same, train, values


def optimizer_of(model, kind):
    return kind(model.parameters(), lr=2.0**-3)


def by_ddp(kind, steps, make):
    model = DistributedDataParallel(make())
    optimizer = optimizer_of(model, kind)
    for step in range(steps):
        train(model, optimizer, step, dist.get_rank())
    return values(model.module)


def by_local_sgd(kind, steps, make, recipe=None):
    model = make()
    optimizer = optimizer_of(model, kind)
    with OuterLoop(model, recipe or local_sgd(1)).attach(optimizer):
        for step in range(steps):
            train(model, optimizer, step, dist.get_rank())
    return values(model)


def random_linear():
    torch.manual_seed(5)
    return nn.Linear(3, 2)


def test_law_1_averaging_after_each_plain_step_is_ddp_bit_by_bit():
    arguments = (torch.optim.SGD, 2, linear)
    assert same(*run_ranks(by_ddp, 2, *arguments), *run_ranks(by_local_sgd, 2, *arguments))


def test_law_1_on_random_numbers_it_is_ddp_to_rounding_and_with_adam_it_is_not():
    for kind, close in ((torch.optim.SGD, True), (torch.optim.Adam, False)):
        ddp = run_ranks(by_ddp, 2, kind, 3, random_linear)[0]
        ours = run_ranks(by_local_sgd, 2, kind, 3, random_linear)[0]
        assert all(torch.allclose(ddp[name], ours[name], atol=1e-6) for name in ddp) is close


@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1, lr=0.5, momentum=0.5), local_sgd(1, codec=Cast("bf16"))])
def test_threads_and_processes_give_the_same_bits(recipe):
    def on_a_thread(group):
        model = linear()
        optimizer = optimizer_of(model, torch.optim.SGD)
        with OuterLoop(model, recipe, group).attach(optimizer):
            for step in range(2):
                train(model, optimizer, step, group.rank)
        return values(model)

    on_ranks = run_ranks(by_local_sgd, 2, torch.optim.SGD, 2, linear, recipe)
    assert same(*run_replicas(on_a_thread, 2), *on_ranks)


def many_shapes(steps):
    """Several buckets, a large one among them, of 3 ranks with different data and numbers of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 7).bfloat16())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with OuterLoop(model, diloco(2, rounds=10), bucket_bytes=20_000) as outer:
        for _ in range(steps[dist.get_rank()]):
            with torch.no_grad():
                for value in (*model.parameters(), model[1].running_mean):
                    value.add_(torch.randn(value.shape, generator=generator).to(value.dtype))
            outer.step()
    return values(model)


@pytest.mark.parametrize("steps", [(5, 5, 5), (0, 7, 2)])
def test_replicas_end_with_the_same_bits(steps):
    assert same(*run_ranks(many_shapes, 3, steps))


def differing():
    try:
        OuterLoop(linear(), local_sgd(2 + dist.get_rank()))
    except CollectiveMismatch as error:
        return str(error)


def test_ranks_that_differ_are_told_how():
    first, second = run_ranks(differing, 2)
    assert first == second
    assert "Every(every=2)" in first
    assert "Every(every=3)" in first


def left_by_an_exception():
    started = time.monotonic()
    model = linear()
    try:
        with OuterLoop(model, local_sgd(2)) as outer:
            for step in range(4):
                if step == 3 and dist.get_rank() == 1:
                    raise ValueError("bad sample")
                outer.step()
    except ValueError:
        return "left"
    except RankFailure as error:
        return str(error), time.monotonic() - started


def test_an_exception_leaves_and_the_others_hear_of_it_within_seconds():
    first, second, third = run_ranks(left_by_an_exception, 3, timeout_s=30)
    assert second == "left"
    for message, seconds in (first, third):
        assert "rank 1 left (ValueError: bad sample)" in message
        assert seconds < 8


def all_leave_and_begin_anew():
    model = linear()
    for attempt in range(3):
        try:
            with OuterLoop(model, local_sgd(2)) as outer:
                outer.step()
                if attempt < 2:
                    raise KeyError("stop here")
        except KeyError:
            time.sleep(0.3 * dist.get_rank())  # the other rank has to wait in its next loop, and look around
    return outer.stats().rounds


def test_ranks_that_all_left_can_begin_anew():
    assert run_ranks(all_leave_and_begin_anew, 2) == [1, 1]


SURVIVOR = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from laconic.base.errors import RankFailure
from laconic.outer import OuterLoop, local_sgd

where = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.ParameterList([nn.Parameter(torch.zeros(1 << 20)) for _ in range(8)])
outer = OuterLoop(model, local_sgd(1), bucket_bytes=1 << 20)
outer.step()
if rank == 1:
    if where == "before the vote":
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "in mid-round":
        calls, reduce = [], outer._group.all_reduce
        def dying(x, op="sum"):
            calls.append(0)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return reduce(x, op)
        outer._group.all_reduce = dying
    if where == "left, but lives on":
        outer._group.leave("ValueError: it went on elsewhere")
        time.sleep(30)
with torch.no_grad():
    for p in model:
        p.add_(1.0)
try:
    outer.step()
except RankFailure as error:
    print("TOLD:", error, flush=True)
    print("STEPS:", [sorted(set(p.tolist())) for p in model][-1], flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("before the vote", "ranks [1] gave no sign of life"),
        ("in mid-round", "ranks [1] gave no sign of life"),
        ("left, but lives on", "rank 1 left (ValueError: it went on elsewhere)"),
    ],
)
def test_survivors_of_a_killed_rank_are_told_keep_their_steps_and_end(where, told):
    """They must end by themselves: a gloo operation that waits for a dead rank has held up exits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SURVIVOR, where],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            printed, _ = ranks[rank].communicate(timeout=25)
            assert ranks[rank].returncode == 7
            assert printed.count("TOLD:") == 1
            assert told in printed
            assert "STEPS: [1.0]" in printed  # its own step of the last tensors is still there
        if where != "left, but lives on":
            assert ranks[1].wait(timeout=5) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()
