# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in each phase of a round; the others get one clear error, agree, and have lost no step."""

import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farflung.base.errors import RankFailure
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.config import environ
from farflung.outer import Identity, OuterLoop, diloco, edit, streaming_diloco
from farflung.outer.membership import FixedMembership
from farflung.testing.patience import patience
from farflung.testing.ranks import fork_context
from tests.faults import fail_at
from tests.outer.replicas import same, shift, values

PLAIN = {"lr": 1.0, "momentum": 0.0}
RECIPES = {
    "summed": diloco(1, **PLAIN),
    "whole": edit(1, **PLAIN, threshold=1e6, temperature=float("inf"), max_norm=1e6),
    "lengthened": diloco(1, **PLAIN, radial=True),
    "two in the air": streaming_diloco(4, 2, delay=3, alpha=0.0, codec=Identity(), **PLAIN),
}
OFTEN = {
    "local phase": ("local step", 1),
    "encode": ("encoding", 3),
    "vote": ("vote", 1),
    "confirm": ("confirmed", 1),
    "apply": ("landing", 2),
}
MIDDLE = ("exchange", 12)
# In "unevenly" one survivor has received two buckets less than the other when it hears of the loss.
CASES = {
    "summed": OFTEN | {"unevenly": MIDDLE},
    "whole": {"collectives": MIDDLE, "confirm": ("confirmed", 1)},
    "lengthened": {"collectives": MIDDLE, "lengthen": ("confirmed", 1), "confirm after that": ("confirmed", 2)},
    "two in the air": OFTEN | {"collectives": MIDDLE},
}
STEPS = 16
LAST = 9  # the step in which rank 1 dies, or the first one after it in which it comes to that phase


def model_of_many_buckets():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def survive(variables, name, case, folder):
    """Train until rank 1 is lost; the others write down where they ended, and end by themselves."""
    environ.export(variables)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = model_of_many_buckets()
    is_deaf = rank == 2 and case == "unevenly"
    fault = fail_at("arrival", 11, go_deaf, False) if is_deaf else fail_at(*CASES[name][case], is_armed=False)
    membership = fault.membership(FixedMembership(TorchGroup(), SoloGroup()))
    outer = OuterLoop(model, fault.recipe(RECIPES[name]), membership=membership, bucket_bytes=1024)
    try:
        for step in range(STEPS):
            if step == LAST and (rank == 1 or is_deaf):
                fault.arm()
            fault.reach("local step")
            shift(model.parameters(), 2.0**rank)
            began = time.monotonic()
            outer.step()
    except RankFailure as error:
        seconds = time.monotonic() - began
        agreed, state = agreed_in(outer, model), outer.state_dict()
        ways = [(value - agreed[key]) / 2.0**rank for key, value in values(model).items()]
        ways = torch.cat([way.flatten() for way in ways]).round(decimals=2).unique().tolist()
        torch.save((str(error), seconds, agreed, ways, state, step), folder / str(rank))
        sys.exit(7)


def agreed_in(outer, model):
    """The weights that all replicas have agreed on."""
    with outer.synced():
        return values(model)


def go_deaf(group):
    """Let the connection break just before the result comes."""
    time.sleep(0.1)  # the other survivor goes on meanwhile
    raise group.failure(RuntimeError("Connection closed by peer"))


@pytest.mark.long
@pytest.mark.law("survivors-agree")
@pytest.mark.parametrize("name", RECIPES)
def test_survivors_are_told_agree_and_keep_their_steps(name, tmp_path):
    context = fork_context()
    stores, crews = [], {}
    for case in CASES[name]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        folder = tmp_path / case
        folder.mkdir()
        stores.append(store)
        crews[case] = [
            context.Process(target=survive, args=({**variables, "RANK": str(rank)}, name, case, folder))
            for rank in range(3)
        ]
    processes = [process for crew in crews.values() for process in crew]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + patience(30)
        for process in processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        codes = {case: [process.exitcode for process in crew] for case, crew in crews.items()}
        assert codes == {case: [7, -signal.SIGKILL, 7] for case in CASES[name]}
    finally:
        for process in processes:
            process.kill()
            process.join()
    for case in CASES[name]:
        check(name, case, [torch.load(tmp_path / case / str(rank), weights_only=True) for rank in (0, 2)])


def check(name, case, told):
    (_, _, agreed, _, _, step), (_, _, others, _, _, last) = told
    assert same(agreed, others), (case, "the survivors' anchors differ")
    recipe = RECIPES[name]
    for message, seconds, mine, ways, state, _ in told:
        assert "rank 1 sent no heartbeat" in message, case
        assert seconds < patience(12), case
        # What has landed is where it was agreed on, but for the steps since; the rest has all its steps.
        assert all(way == int(way) and 0 <= way <= 2 * recipe.schedule.delay + 4 for way in ways), (case, ways)
        if recipe.schedule.delay == 0:
            assert set(ways) <= {0.0, 1.0}, case
            assert name not in ("whole", "lengthened") or len(ways) == 1, case
        model = model_of_many_buckets()
        again = OuterLoop(model, recipe, SoloGroup(), bucket_bytes=1024)
        again.load_state_dict(state)
        assert same(agreed_in(again, model), mine)
        for _ in range(5):
            again.step()
    assert abs(step - last) <= recipe.schedule.delay
