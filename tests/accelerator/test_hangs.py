# SPDX-License-Identifier: Apache-2.0
"""No rank waits for long for one that does not come: it learns within seconds who that is, where it is, and why."""

import ctypes
import io
import json
import re
import sys
import threading
import time
from contextlib import redirect_stderr
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, WatchdogKwargs
from farflung.base.errors import ConfigError, RankFailure
from farflung.comm.presence import PresenceStore
from farflung.comm.torch_group import explained
from farflung.comm.waits import Wait
from farflung.config import environ
from farflung.launch.network import get_free_port
from farflung.outer import OuterLoop, local_sgd
from farflung.process import watchdog, world
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration, InitProcessGroupKwargs, ParallelismConfig
from tests.accelerator.conftest import on_ranks

LATE = 1
WATCHDOG = ["farflung watchdog", "farflung watchdog guard"]


def gathers(run):
    run.accelerator.gather(torch.ones(2))


def gathers_much(run):
    run.accelerator.gather(torch.ones(1 << 20))


def reduces(run):
    run.accelerator.reduce(torch.ones(2))


def waits(run):
    run.accelerator.wait_for_everyone()


def lets_one_go_first(run):
    with run.accelerator.main_process_first():
        pass


def loads(run):
    list(run.loader)


def averages(run):
    OuterLoop(nn.Linear(2, 1), local_sgd(1))


def learns(run):
    run.accelerator.backward(run.model(torch.ones(1, 2)).sum())


def started(call=None, timeout_s=None):
    """A rank with what `call` uses."""
    watchdog._TICK_S = 0.1
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    run = SimpleNamespace(accelerator=accelerator, rank=accelerator.process_index)
    if call is loads:
        run.loader = accelerator.prepare(DataLoader(range(64), batch_size=4))
    if call is learns:
        run.model = accelerator.prepare(nn.Linear(2, 1))
        for _ in range(3):  # until DDP has nothing more to settle before a forward pass
            learns(run)
    accelerator.wait_for_everyone()
    if timeout_s is not None:
        Accelerator(kwargs_handlers=[WatchdogKwargs(timeout_s)])
    return run


def is_told(path, call, run):
    """Make the call, and return what its error says and how long it took."""
    began = time.monotonic()
    try:
        call(run)
    except RankFailure as error:
        return str(error), time.monotonic() - began
    finally:
        (path / str(run.rank)).touch()
    return "nothing was raised", time.monotonic() - began


def evaluates_alone(path, num_others=1):
    while len(list(path.iterdir())) < num_others:
        time.sleep(0.05)


def comes_late(path, call, timeout_s=0.5):
    run = started(call, timeout_s)
    if run.rank == LATE:
        evaluates_alone(path, dist.get_world_size() - 1)
    return is_told(path, call, run)


@pytest.mark.parametrize("call", [gathers, lets_one_go_first, loads, averages, learns])
def test_a_late_rank_is_named_with_the_line_waited_in_and_the_line_it_is_at(call, tmp_path):
    (said, seconds), _ = run_ranks(comes_late, 2, tmp_path, call)
    assert "rank 1 did not reach `" in said
    assert "within 0.5 s" in said
    assert f"{__file__}:" in said.split("\n")[0]
    assert "in evaluates_alone" in said
    assert seconds < patience(5)


def test_all_that_wait_are_told_and_the_late_rank_learns_it_when_it_comes(tmp_path):
    for said, seconds in run_ranks(comes_late, 4, tmp_path, gathers, 1.5):
        assert "rank 1 did not reach `gather`" in said
        assert "`run.accelerator.gather(torch.ones(2))`) within 1.5 s" in said
        assert "FARFLUNG_HANG_TIMEOUT_S" in said
        assert seconds < patience(8)


@on_ranks(2)
def test_torchs_own_collectives_end_too_and_the_report_is_printed(tmp_path):
    run = started(timeout_s=0.5)
    if run.rank == LATE:
        return evaluates_alone(tmp_path)
    with redirect_stderr(io.StringIO()) as printed, pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(2))
    (tmp_path / "done").touch()
    assert raised.type is RuntimeError
    assert "rank 1 did not reach `all_reduce` (" in printed.getvalue()
    assert "`dist.all_reduce(torch.ones(2))`)" in printed.getvalue()
    assert "in evaluates_alone" in printed.getvalue()


def trains(path, accelerator, model, optimizer):
    with accelerator.outer(model, local_sgd(2)):
        for step in range(8):
            if step == 3 and accelerator.process_index == LATE:
                evaluates_alone(path, 3)
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()


def comes_late_in_its_island(path, layout):
    watchdog._TICK_S = 0.1
    accelerator = Accelerator(cpu=True, kwargs_handlers=[WatchdogKwargs(1)], **layout)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    began = time.monotonic()
    with redirect_stderr(io.StringIO()) as printed, pytest.raises(RuntimeError) as raised:
        trains(path, accelerator, *prepared)
    seconds = time.monotonic() - began
    (path / str(accelerator.process_index)).touch()
    return printed.getvalue() + str(raised.value), seconds


LAYOUTS = [{"island_size": 2}, {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["ddp", "fsdp"])
def test_in_islands_the_rank_that_all_wait_for_in_the_end_is_named(layout, tmp_path):
    first, _, third, last = run_ranks(comes_late_in_its_island, 4, tmp_path, layout)
    for said, seconds in (first, third, last):
        assert "ank 1 did not reach `" in said
        assert "rank 0 did not reach" not in said
        assert "in evaluates_alone" in said
        assert seconds < patience(6)


def holds_the_lock(path):
    watchdog._ANSWER_S = 0.5
    run = started(timeout_s=0.5)
    if run.rank == LATE:
        ctypes.PyDLL(None).sleep(4)  # native code that does not let other threads run
    return is_told(path, gathers, run)


def test_a_rank_that_cannot_answer_is_named_all_the_same(tmp_path):
    (said, seconds), _ = run_ranks(holds_the_lock, 2, tmp_path)
    assert "`gather`" in said
    assert "rank 1 did not answer: the process is gone or stopped, or in native code" in said
    assert seconds < patience(4)


def loses_the_store(path):
    environ.export({"TORCHELASTIC_ERROR_FILE": str(path / "error.json")})
    watchdog._ANSWER_S = 0.5
    run = started(timeout_s=0.5)
    if run.rank == LATE:
        time.sleep(60)
    PresenceStore.asked = lambda presence: time.sleep(60)  # a line that was cut
    gathers(run)


def test_a_rank_whose_store_answers_no_more_ends_and_says_where_it_waited(tmp_path):
    with pytest.raises(RankFailure, match="rank 0: the process died with exit code 1"):
        run_ranks(loses_the_store, 2, tmp_path, timeout_s=20, grace_s=0.1)  # the other one sleeps
    said = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert "where the run's store is) did not answer for " in said
    assert "`gather`" in said
    assert "`run.accelerator.gather(torch.ones(2))`" in said


def explains(call, run):
    """Make a call whose error nobody catches; torch's own is explained then."""
    try:
        call(run)
    except RuntimeError as error:
        raise explained(error, world.joined_world().group) from error


def runs_out_of_time(path, port, call, late_call=None, noticed_s=2.0):
    """Have only what plain environment variables say, and torch's own time-out, which the script makes short.

    The late rank evaluates alone before it comes, or makes `late_call` instead. The watchdog notices a wait after
    `noticed_s`: before torch does, as on a busy machine, if that is less than 2 s.
    """
    environ.remove("TORCHELASTIC_USE_AGENT_STORE")
    environ.export({"MASTER_PORT": str(port)})
    watchdog._TICK_S, watchdog._TURN_S = 0.1, 0.5
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
    world.joined_world().watchdog._timeout_s = noticed_s
    run = SimpleNamespace(accelerator=accelerator, rank=accelerator.process_index)
    if learns in (call, late_call):
        run.model = accelerator.prepare(nn.Linear(2, 1))
        learns(run)
    if run.rank == LATE and late_call is None:
        evaluates_alone(path)
    call = late_call if run.rank == LATE and late_call else call
    said, _ = is_told(path, lambda run: explains(call, run), run)
    evaluates_alone(path, 2)  # rank 0 serves the store
    return said


@pytest.mark.parametrize(("call", "noticed_s"), [(waits, 2.0), (gathers, 2.0), (gathers, 0.5), (learns, 2.0)])
def test_without_a_launcher_a_time_out_of_torchs_names_the_late_rank_too(call, noticed_s, tmp_path):
    said, late_said = run_ranks(runs_out_of_time, 2, tmp_path, get_free_port(), call, None, noticed_s, connect=False)
    for text in (said, late_said):
        assert "rank 1 did not reach " in text
        assert f"within {noticed_s:g} s" in text
        assert "allow more: InitProcessGroupKwargs(timeout=)" in text
        assert "in evaluates_alone" in text
        assert "different sizes" not in text


@pytest.mark.parametrize(("call", "late_call"), [(waits, learns), (learns, waits)])
def test_ranks_that_run_out_of_time_in_different_calls_are_told_where_one_of_them_was(call, late_call, tmp_path):
    for text in run_ranks(runs_out_of_time, 2, tmp_path, get_free_port(), call, late_call, connect=False):
        assert re.search(r"rank \d did not reach `\w+` .* within 2 s\nrank \d was here", text), text


def time_allowed():
    return world.joined_world().watchdog._timeout_s  # nothing else says it before it is over


@on_ranks(2, each=[3600.0, 20.0], connect=False)
def test_the_script_counts_before_the_launcher():
    with environ.patched({"FARFLUNG_HANG_TIMEOUT_S": "600"}):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=1))])
        seen = [time_allowed()]
        Accelerator(kwargs_handlers=[WatchdogKwargs(20)])
        Accelerator()
        return [*seen, time_allowed()]


def comes_alone(path):
    if int(environ.text("RANK")) == LATE:
        return evaluates_alone(path)
    with environ.patched({"FARFLUNG_HANG_TIMEOUT_S": "0.5"}):
        return is_told(path, lambda run: Accelerator(cpu=True), SimpleNamespace(rank=0))


def test_a_rank_that_never_makes_an_accelerator_is_named(tmp_path):
    (said, seconds), _ = run_ranks(comes_alone, 2, tmp_path, timeout_s=20, connect=False)
    assert "Rank 1 did not reach `Accelerator()` within 0.5 s" in said
    assert seconds < patience(5)


@on_ranks(2, each=2.0)
def test_a_rank_within_the_time_and_a_long_transfer_raise_no_alarm():
    accelerator = started(timeout_s=1.2).accelerator
    for _ in range(3):
        time.sleep(0.3 * accelerator.process_index)
        accelerator.gather(torch.ones(2))
    group = world.joined_world().group
    (name, number), *_ = group.waits.entered.items()
    group.waits.waiting[threading.get_ident()] = Wait(name, number, "")  # takes long, but every rank has entered it
    time.sleep(2.5)
    group.waits.waiting.clear()
    return accelerator.gather(torch.ones(1)).sum().item()


def fails(path, call):
    run = started(call)
    if run.rank == LATE:
        try:
            raise ValueError("no such file")
        except ValueError:
            sys.excepthook(*sys.exc_info())  # what the interpreter does when nobody catches it
        evaluates_alone(path, dist.get_world_size() - 1)
        return None
    return is_told(path, call, run)


@pytest.mark.parametrize("call", [gathers_much, reduces, waits, loads, averages, learns])
def test_a_failure_reaches_the_others_within_seconds_though_its_process_lives_on(call, tmp_path):
    first, _, third = run_ranks(fails, 3, tmp_path, call)
    for said, seconds in (first, third):
        assert "rank 1 left (ValueError: no such file)" in said
        assert seconds < patience(5)


def threads():
    return [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


@on_ranks(2, each=[WATCHDOG, WATCHDOG, []])
def test_it_watches_until_the_end_and_is_given_its_time_later():
    accelerator = started().accelerator
    seen = [threads()]
    Accelerator(kwargs_handlers=[WatchdogKwargs(30)])
    seen.append(threads())
    with pytest.raises(ConfigError, match="60 s, but this process has 30 s"):
        Accelerator(kwargs_handlers=[WatchdogKwargs(60)])
    accelerator.end_training()
    return [*seen, threads()]


@pytest.mark.parametrize(("text", "seconds"), [("20.5", 20.5), ("0", float("inf")), ("", 1800)])
@on_ranks(2)
def test_the_environment_says_for_how_long_or_not_at_all(text, seconds):
    with environ.patched({"FARFLUNG_HANG_TIMEOUT_S": text}):
        accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()  # or one rank ends while the other one still connects
    assert (threads(), time_allowed()) == (WATCHDOG, seconds)


def test_nothing_is_started_in_one_process():
    hook = sys.excepthook
    Accelerator(cpu=True, kwargs_handlers=[WatchdogKwargs(1)])
    assert threads() == []
    assert sys.excepthook is hook
    assert world.joined_world().watchdog is None


@on_ranks(2)
def test_a_group_that_the_script_ends_is_no_failure():
    started(timeout_s=30).accelerator.gather(torch.ones(1))
    dist.destroy_process_group()  # the script ends the group itself; the watchdog must not fail over it
    time.sleep(0.3)
