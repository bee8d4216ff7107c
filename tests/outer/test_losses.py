# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in each phase of a round; the others get one clear error, agree, and have lost no step."""

import multiprocessing as mp
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farflung.base.errors import RankFailure
from farflung.comm.group import SoloGroup
from farflung.config import environ
from farflung.outer import Identity, OuterLoop, diloco, edit, streaming_diloco
from farflung.testing.patience import patience

PLAIN = {"lr": 1.0, "momentum": 0.0}
RECIPES = {
    "summed": diloco(1, **PLAIN),
    "whole": edit(1, **PLAIN, threshold=1e6, temperature=float("inf"), max_norm=1e6),
    "lengthened": diloco(1, **PLAIN, radial=True),
    "two in the air": streaming_diloco(4, 2, delay=3, alpha=0.0, codec=Identity(), **PLAIN),
}
OFTEN = ("local phase", "encode", "vote", "confirm", "apply")
# In "unevenly" one survivor has received two buckets less than the other when it hears of the loss.
PHASES = {
    "summed": (*OFTEN, "unevenly"),
    "whole": ("collectives", "confirm"),
    "lengthened": ("collectives", "lengthen", "confirm after that"),
    "two in the air": (*OFTEN, "collectives"),
}
STEPS = 16
LAST = 9  # the step in which rank 1 dies, or the first one after it in which it comes to that phase


def model_of_many_buckets():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def survive(variables, name, phase, folder):
    """Train until rank 1 is lost; the others write down where they ended, and end by themselves."""
    environ.export(variables)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = model_of_many_buckets()
    outer = OuterLoop(model, RECIPES[name], bucket_bytes=1024)
    try:
        for step in range(STEPS):
            if step == LAST and rank == 1:
                die_in(phase, outer)
            if step == LAST and rank == 2 and phase == "unevenly":
                go_deaf(outer._rounds.epoch.levels[0].group)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(2.0**rank)
            began = time.monotonic()
            outer.step()
    except RankFailure as error:
        seconds = time.monotonic() - began
        state = outer.state_dict()
        digests = [part._checksums() for part in outer._rounds.replica.fragments]
        ways = [way for part in outer._rounds.replica.fragments for way in moves(part, rank)]
        torch.save((str(error), seconds, digests, sorted(set(ways)), state, step), folder / str(rank))
        sys.exit(7)


def moves(part, rank):
    """How many steps each weight is away from what was agreed on."""
    lane = part.weights
    for k in range(len(lane.buckets)):
        for piece, point in zip(lane.buckets.pieces(k), lane.agreed(k), strict=True):
            yield from ((piece - point) / 2.0**rank).round(decimals=2).unique().tolist()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(phase, outer):
    group, lane = outer._rounds.epoch.levels[0].group, outer._rounds.replica.fragments[0].weights
    if phase == "local phase":
        die()
    elif phase == "encode":
        dying(lane, "prepare", 3)
    elif phase == "apply":
        dying(lane, "apply", 2)
    elif phase == "vote":
        dying(group, "begin_all_gather_small", 1)
        dying(group, "all_reduce", 1)
    elif phase in ("confirm", "lengthen", "confirm after that"):
        dying(group, "all_gather_small", 2 if phase == "confirm after that" else 1)
    else:
        for kind in ("all_reduce", "all_gather"):
            dying(group, kind, 12)


class Deaf:
    """A collective whose connection broke just before its result came."""

    def __init__(self, group):
        self._group = group

    def wait(self):
        time.sleep(0.1)  # the other survivor goes on meanwhile
        raise self._group.failure(RuntimeError("Connection closed by peer"))


def go_deaf(group):
    kept, calls = group.all_reduce, []

    def all_reduce(x, op="sum"):
        calls.append(0)
        work = kept(x, op)
        return Deaf(group) if len(calls) == 11 else work

    group.all_reduce = all_reduce


def dying(of, name, count):
    """Die in the call of this number, once it has begun."""
    kept, calls = getattr(of, name), []

    def call(*arguments):
        calls.append(0)
        if len(calls) == count and name in ("prepare", "apply"):
            die()
        result = kept(*arguments)
        if len(calls) == count:
            die()
        return result

    setattr(of, name, call)


@pytest.mark.law("survivors-agree")
@pytest.mark.parametrize("name", RECIPES)
def test_survivors_are_told_agree_and_keep_their_steps(name, tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "farflung.testing.preload"])
    stores, crews = [], {}
    for phase in PHASES[name]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        folder = tmp_path / phase
        folder.mkdir()
        stores.append(store)
        crews[phase] = [
            context.Process(target=survive, args=({**variables, "RANK": str(rank)}, name, phase, folder))
            for rank in range(3)
        ]
    processes = [process for crew in crews.values() for process in crew]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + patience(30)
        for process in processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        codes = {phase: [process.exitcode for process in crew] for phase, crew in crews.items()}
        assert codes == {phase: [7, -signal.SIGKILL, 7] for phase in PHASES[name]}
    finally:
        for process in processes:
            process.kill()
            process.join()
    for phase in PHASES[name]:
        check(name, phase, [torch.load(tmp_path / phase / str(rank), weights_only=True) for rank in (0, 2)])


def check(name, phase, told):
    (_, _, digests, _, _, step), (_, _, others, _, _, last) = told
    assert digests == others, (phase, "the survivors' anchors differ")
    recipe = RECIPES[name]
    for message, seconds, mine, ways, state, _ in told:
        assert "rank 1 gave no sign of life" in message, phase
        assert seconds < patience(12), phase
        # What has landed is where it was agreed on, but for the steps since; the rest has all its steps.
        assert all(way == int(way) and 0 <= way <= 2 * recipe.schedule.delay + 4 for way in ways), (phase, ways)
        if recipe.schedule.delay == 0:
            assert set(ways) <= {0.0, 1.0}, phase
            assert name not in ("whole", "lengthened") or len(ways) == 1, phase
        again = OuterLoop(model_of_many_buckets(), recipe, SoloGroup(), bucket_bytes=1024)
        again.load_state_dict(state)
        assert [part._checksums() for part in again._rounds.replica.fragments] == mine
        for _ in range(5):
            again.step()
    assert abs(step - last) <= recipe.schedule.delay
