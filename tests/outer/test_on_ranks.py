# SPDX-License-Identifier: Apache-2.0
"""The outer loop over gloo: the same as DDP where it must be, and one clear error where a rank is gone."""

import gc
import os
import time
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.base.errors import CollectiveMismatch, RankFailure, Unsupported
from farflung.base.torch_internals import default_store, num_groups
from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop, diloco, local_sgd, post_local_sgd, streaming_diloco
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from tests.errors import error_of
from tests.outer.replicas import batch, linear, same, shift, train, values


def random_linear():
    torch.manual_seed(5)
    return nn.Linear(3, 2)


def both_ways():
    """By an optimizer and a model: what DDP has learnt, and what replicas have that are averaged after each step."""
    outcomes, rank = [], dist.get_rank()
    for kind, make in (torch.optim.SGD, linear), (torch.optim.SGD, random_linear), (torch.optim.Adam, random_linear):
        by_ddp, by_loop = DistributedDataParallel(make()), make()
        optimizers = [kind(model.parameters(), lr=2.0**-3) for model in (by_ddp, by_loop)]
        with OuterLoop(by_loop, local_sgd(1)).attach(optimizers[1]):
            for step in range(2):
                train(by_ddp, optimizers[0], step, rank)
                train(by_loop, optimizers[1], step, rank)
        outcomes.append((values(by_ddp.module), values(by_loop)))
    return outcomes


def near(first, second):
    return all(torch.allclose(value, second[name], rtol=0, atol=1e-6) for name, value in first.items())


@pytest.mark.law("each-step-is-ddp")
def test_averaging_after_each_plain_step_is_ddp_and_with_adam_it_is_not():
    for exact, random, adam in run_ranks(both_ways, 2):
        assert same(*exact)
        assert near(*random)
        assert not near(*adam)


def in_phases():
    """Two loops one after the other, and between them one that was never made, on a model and on DDP around it."""
    ends = []
    for wrap in (lambda model: model, DistributedDataParallel):
        model = wrap(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-3)
        for phase in range(2):
            with OuterLoop(model, diloco(2)).attach(optimizer):
                for step in range(4):
                    train(model, optimizer, 4 * phase + step, dist.get_rank())
            with suppress(CollectiveMismatch):
                OuterLoop(model, diloco(2 + dist.get_rank()))
        ends.append([value.tolist() for value in model.parameters()])
    return ends


def test_loops_follow_each_other_on_a_ddp_model_as_on_any_other():
    ends = [end for ranks in run_ranks(in_phases, 2) for end in ranks]
    assert ends == [ends[0]] * 4


def back_in_the_warmup(is_loaded):
    """Gradients of two passes, the first in no_sync(), after a loop without a warm-up is loaded or dropped."""
    model, rank = DistributedDataParallel(linear()), dist.get_rank()
    outer = OuterLoop(model, post_local_sgd(2))
    state = outer.state_dict()
    outer.count()
    outer.count()
    outer.sync_if_due()
    model(batch(0, rank)[0]).sum().backward()
    alone = model.module.weight.grad.tolist()
    if is_loaded:
        outer.load_state_dict(state)
    else:
        del outer
        gc.collect()
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(batch(1, rank)[0]).sum().backward()
        model(batch(2, rank)[0]).sum().backward()
    return alone, model.module.weight.grad.tolist()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_ddp_averages_again_where_a_loop_is_back_in_its_warmup_or_gone(is_loaded):
    (first, both), (second, others) = run_ranks(back_in_the_warmup, 2, is_loaded)
    assert first != second
    assert both == others


def with_synced_statistics():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(Unsupported, match="1 is a SyncBatchNorm, which averages statistics over other ranks"):
        OuterLoop(model, local_sgd(2))


def test_statistics_that_are_sent_in_each_pass_are_refused():
    run_ranks(with_synced_statistics, 2)


def leave_again_and_again(by_all, recipe):
    """Leave many loops by an exception, on all ranks or on one; return what is open after two, and last, and rounds."""
    process, store, rounds = psutil.Process(), default_store(), 0

    def count():
        return process.num_fds(), process.num_threads(), num_groups(), store.num_keys()

    for attempt in range(6):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with suppress(KeyError, RankFailure), OuterLoop(model, recipe).attach(optimizer) as outer:
            for step in range(5):
                optimizer.step()
                if step == 2 and (by_all or dist.get_rank() == 1):
                    rounds += outer.stats().rounds
                    raise KeyError("stop here")
        if attempt == 0 and by_all:
            time.sleep(0.3 * dist.get_rank())  # the other rank has to wait in its next loop, and looks around there
            continue
        dist.barrier()
        if attempt == 1:
            first = count()
        dist.barrier()
    deadline = time.monotonic() + patience(10)
    while any(now > before for now, before in zip(count(), first, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)  # gloo ends the threads of a closed group in its own time
    last = count()
    dist.barrier()
    return first, last, rounds


def leave_an_older_loop():
    """One loop fails while a younger one trains; then another begins, and both end."""
    younger = None
    with suppress(MemoryError), OuterLoop(linear(), diloco(2)) as older:
        younger = OuterLoop(linear(), diloco(2))
        older.step()
        raise MemoryError
    for _ in range(2):
        with OuterLoop(linear(), diloco(2)) as again:
            for _ in range(3):
                again.step()
                younger.step()
    younger.close()
    return True


def test_a_loop_may_fail_while_a_younger_one_trains():
    assert run_ranks(leave_an_older_loop, 2) == [True, True]


@pytest.mark.parametrize("recipe", [diloco(2), streaming_diloco(4, 2, delay=1)], ids=["diloco", "streaming"])
@pytest.mark.parametrize("by_all", [True, False])
def test_loops_left_by_exceptions_leave_nothing_open(by_all, recipe):
    for first, last, rounds in run_ranks(leave_again_and_again, 2, by_all, recipe):
        assert rounds == 6 or not by_all, "the ranks of a loop that all left begin no other one"
        assert all(now <= before for now, before in zip(last, first, strict=True)), (first, last)


def outlive(folder):
    """Rank 1 leaves and says if the others end while it lives on; they return what they are told, and their weights."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1 << 12)) for _ in range(8)])
    outer = OuterLoop(model, local_sgd(1), bucket_bytes=1 << 13)
    (folder / str(os.getpid())).touch()
    outer.step()
    if dist.get_rank() == 1:
        others = [psutil.Process(int(file.name)) for file in folder.iterdir() if int(file.name) != os.getpid()]
        TorchGroup().leave("ValueError: it went on elsewhere")
        return len(psutil.wait_procs(others, timeout=patience(25))[1])
    shift(model, 1.0)
    return error_of(RankFailure, outer.step), model[-1].unique().tolist()


def test_survivors_of_a_rank_that_left_are_told_keep_their_steps_and_end(tmp_path):
    """A gloo operation that waits for a rank that will not come has held up the exit of processes."""
    first, alive, third = run_ranks(outlive, 3, tmp_path)
    assert alive == 0
    for message, last_weights in (first, third):
        assert "rank 1 left (ValueError: it went on elsewhere)" in message
        assert last_weights == [1.0]  # the step that no one has averaged is still there
