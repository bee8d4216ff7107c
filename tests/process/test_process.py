# SPDX-License-Identifier: Apache-2.0
"""How a process finds its place, and what it does as one among others."""

import logging
import os
import random
import signal
import time
import warnings
from collections import UserDict
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from farflung import Accelerator
from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.config import environ
from farflung.config.handlers import InitProcessGroupKwargs
from farflung.launch.network import get_free_port
from farflung.launchers import debug_launcher
from farflung.process.bootstrap import RankInfo, choose_device, join_world, leave_world, read_rank_info
from farflung.process.log import get_logger
from farflung.process.seed import set_seed, synchronize_rng_states
from farflung.process.world import current_world, joined_world
from farflung.state import AcceleratorState, PartialState
from farflung.testing.ranks import run_ranks

OPEN_MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
# What each launcher sets, and the place of this process.
LAUNCHERS = {
    "torchrun": ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
    "Open MPI": ({f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}, (3, 4, 1, 2)),
    "PMI": ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (3, 4, 1, 2)),
    "srun": (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
        (3, 4, 1, 2),
    ),
    "a batch script of Slurm's": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),
}


@pytest.fixture(autouse=True)
def no_world():
    yield
    leave_world()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_understood(launcher):
    variables, place = LAUNCHERS[launcher]
    with environ.patched(variables):
        assert read_rank_info() == RankInfo(*place)


FIRST = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "kind", "message"),
    [
        ({"WORLD_SIZE": "2"}, ConfigError, "RANK is None"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, ConfigError, "RANK is 2"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ConfigError, "LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, ConfigError, "'two'"),
        (FIRST, ConfigError, "MASTER_PORT None"),
        (FIRST | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": None}, ConfigError, "MASTER_ADDR is None"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, Unsupported, "ACCELERATE_USE_DEEPSPEED"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, Unsupported, "ACCELERATE_USE_MEGATRON_LM"),
    ],
)
def test_what_can_not_become_a_group_is_refused_before_one_starts(variables, kind, message):
    with environ.patched(variables), pytest.raises(kind, match=message):
        join_world()
    assert current_world() is None


def test_nccl_on_cpus_is_refused():
    with environ.patched(FIRST | {"MASTER_PORT": "1"}), pytest.raises(ConfigError, match="nccl"):
        join_world(cpu=True, init=InitProcessGroupKwargs(backend="nccl"))
    assert current_world() is None


@pytest.mark.gpu
def test_a_process_without_a_device_of_its_own_is_told():
    with pytest.raises(ConfigError, match="at most"):
        choose_device(RankInfo(99, 100, 99, 100), cpu=False)


def test_nothing_is_known_before_the_world_is_joined():
    with pytest.raises(StateError, match="Accelerator"):
        joined_world()


def joins_by_itself():
    world = join_world(cpu=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    first = (world.size, world.backend, world.owns_group, total.item())
    again = join_world() is world
    leave_world()
    return first, again, dist.is_initialized()


def test_with_nothing_but_torchruns_variables_every_rank_joins_the_group():
    for first, again, left_over in run_ranks(joins_by_itself, 2, connect=False):
        assert first == (2, "gloo", True, 2.0)
        assert again
        assert not left_over


def makes_a_group_of_its_own():
    join_world(cpu=True)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    own = dist.group.WORLD
    world = join_world(cpu=True)
    return dist.group.WORLD is own, world.owns_group, world.exchange.size


def test_a_group_that_a_script_makes_in_place_of_ours_is_used_as_it_is():
    assert run_ranks(makes_a_group_of_its_own, 2, connect=False) == [(True, False, 2)] * 2


WAYS_TO_END = [
    lambda accelerator: AcceleratorState._reset_state(True),
    lambda accelerator: PartialState._reset_state(),
    lambda accelerator: dist.is_initialized() and dist.destroy_process_group(),
    lambda accelerator: (dist.is_initialized() and dist.destroy_process_group(), AcceleratorState._reset_state(True)),
    lambda accelerator: (accelerator.end_training(), accelerator.state.destroy_process_group()),
]


def trains():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    return accelerator, accelerator.reduce(torch.ones(1)).item()


def trains_again_and_again(port):
    """Train several times, each rank being the slow one once; `port`: of a store that rank 0 serves."""
    if port is not None:
        environ.remove("TORCHELASTIC_USE_AGENT_STORE")
        environ.export({"MASTER_PORT": str(port)})
    totals = []
    for number, end in enumerate([*WAYS_TO_END, WAYS_TO_END[0]]):
        accelerator, total = trains()
        totals.append(total)
        time.sleep(0.3 * (accelerator.process_index == number % 2))
        end(accelerator)
    debug_launcher(expects_two)
    return totals


def expects_two():
    assert trains()[1] == 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_process_can_train_again_however_the_last_run_ended(size, is_plain):
    totals = run_ranks(trains_again_and_again, size, get_free_port() if is_plain else None, connect=False)
    assert totals == [[float(size)] * (len(WAYS_TO_END) + 1)] * size


def ends_at_once():
    """Join and be done, on rank 0 with sudden stops: the others are then long through where it still connects."""
    slow = os.getpid()
    if environ.integer("RANK") == 0 and not os.fork():
        with suppress(ProcessLookupError):
            while os.getppid() == slow:
                os.kill(slow, signal.SIGSTOP)
                time.sleep(random.choice((0.002, 0.15)))
                os.kill(slow, signal.SIGCONT)
                time.sleep(random.uniform(0, 0.004))
        os._exit(0)
    return join_world(cpu=True).size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="stops a process by POSIX signals")
def test_ranks_that_end_at_once_do_not_leave_a_slow_one_behind():
    for _ in range(4):
        assert run_ranks(ends_at_once, 4, connect=False) == [4] * 4


HOUR, HALF = timedelta(hours=1), timedelta(minutes=30)
UNUSED = ["InitProcessGroupKwargs: {'timeout': '1:00:00'} has no effect on collectives"]


def asks_again(first, later):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        init = InitProcessGroupKwargs()
        for asked in (first, {}, later):
            init.__init__(**asked)  # as of a script that sets its fields
            join_world(cpu=True, init=init)
    return [str(one.message).partition(",")[0] for one in found]


@pytest.mark.parametrize(
    ("is_scripts", "first", "later", "said"),
    [
        (False, {"timeout": HOUR}, {"timeout": HOUR, "backend": "gloo"}, []),
        (False, {}, {"timeout": HALF}, []),  # as torch allows by default
        (False, {}, {"timeout": HOUR}, UNUSED),
        (True, {}, {"timeout": HOUR, "backend": "gloo"}, UNUSED),
        (True, {"timeout": HOUR}, {}, UNUSED),
    ],
)
def test_arguments_for_a_group_that_was_made_without_them_are_named(is_scripts, first, later, said):
    assert run_ranks(asks_again, 2, first, later, connect=is_scripts) == [said] * 2


def uses_the_scripts_group():
    world = join_world(cpu=True)
    leave_world()
    return world.owns_group, dist.is_initialized()


def test_a_group_that_the_script_made_is_used_and_left_standing():
    assert run_ranks(uses_the_scripts_group, 2) == [(False, True)] * 2


def one_after_the_other(folder):
    state = PartialState(cpu=True)
    with state.main_process_first():
        seen = sorted(path.name for path in folder.iterdir())
        (folder / str(state.process_index)).touch()
    state.wait_for_everyone()

    @state.on_main_process
    def main_only():
        return "main"

    @state.on_process(process_index=1)
    def second_only():
        return "second"

    nobody = state.on_process(lambda: "somebody", process_index=5)
    assert nobody() is state.on_local_process(nobody, local_process_index=5)() is None
    return seen, main_only(), second_only(), state.on_last_process(lambda: "last")()


def test_only_one_of_us_and_one_after_the_other(tmp_path):
    first, second = run_ranks(one_after_the_other, 2, tmp_path)
    assert first == ([], "main", None, None)
    assert "0" in second[0]
    assert second[1:] == (None, "second", "last")


def test_a_process_alone_runs_what_is_for_another_one():
    state = PartialState(cpu=True)
    assert state.on_process(lambda: "alone", process_index=3)() == "alone"
    assert state.on_local_process(lambda: "alone", local_process_index=3)() == "alone"


def shares():
    state = PartialState(cpu=True)
    whole = {"list": [*range(5)], "tensor": torch.arange(5), "array": np.arange(5), "range": range(5), "few": [1, 2]}
    parts = {}
    for padded in (False, True):
        for name, value in whole.items():
            with state.split_between_processes(value, padded) as part:
                parts[name, padded] = part.tolist() if hasattr(value, "tolist") else part
        for text in ("abcde", b"abcde"):
            with state.split_between_processes(text, padded) as parts[text, padded]:
                pass
    rows = TensorDataset(torch.arange(5), -torch.arange(5))  # whose slices are columns
    with state.split_between_processes(rows) as part:
        assert all(sum(row) == 0 for row in part)
        assert len(part) in (1, 2)
    with state.split_between_processes({"a": "xyz", "b": [1, 2, 3]}) as part:
        pass
    with state.split_between_processes(UserDict(a="xyz", b=[1, 2, 3])) as of_mapping:  # as tokenizers return
        assert type(of_mapping) is UserDict
        assert of_mapping == part
    for odd, words in ((None, "None"), (iter([1]), "iterator"), ({1: [], 2: [3]}, "differ in length: {1: 0, 2: 1}")):
        with pytest.raises((TypeError, ConfigError), match=f"split_between_processes.*{words}"):
            state.split_between_processes(odd).__enter__()
    return parts, part


def test_a_process_alone_gets_whatever_it_would_split():
    state, rows = PartialState(cpu=True), iter([1])
    for whole in (rows, {"prompt": ["a", "b"], "seed": 3}, {1: [], 2: [3]}):
        with state.split_between_processes(whole) as part:
            assert part is whole


def test_inputs_are_split_and_padded():
    shared, of_dictionary = zip(*run_ranks(shares, 4), strict=True)
    for kind in ("list", "tensor", "array", "range"):
        assert [[*parts[kind, False]] for parts in shared] == [[0, 1], [2], [3], [4]]
        assert [[*parts[kind, True]] for parts in shared] == [[0, 1], [2, 4], [3, 4], [4, 4]]
    assert of_dictionary[1] == {"a": "xyz", "b": [2]}
    assert all(parts[text, padded] == text for parts in shared for text in ("abcde", b"abcde") for padded in (0, 1))
    assert [parts["few", False] for parts in shared] == [[1], [2], [], []]
    assert [parts["few", True] for parts in shared] == [[1], [2], [2], [2]]


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_seeding_repeats_every_kind_of_random_number():
    set_seed(3)
    first = draws()
    set_seed(3)
    assert draws() == first


def seeded_ranks():
    state = PartialState(cpu=True)
    set_seed(10, device_specific=True)
    apart = draws()
    generator = torch.Generator().manual_seed(state.process_index)
    synchronize_rng_states(["torch", "generator"], generator)
    return apart, torch.rand(1).item(), torch.rand(1, generator=generator).item()


def test_seeds_can_differ_by_rank_and_states_can_be_made_equal():
    first, second = run_ranks(seeded_ranks, 2)
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:]


def logs():
    lines = []
    logging.getLogger("t").addFilter(lambda record: lines.append(record.getMessage()))
    with pytest.raises(StateError):
        get_logger("t").info("too early")
    state = PartialState(cpu=True)
    logger = get_logger("t", log_level="info")
    logger.info("once")
    logger.info("each %d", 7, main_process_only=False)
    logger.info("in turn", in_order=True)
    logger.debug("unheard", main_process_only=False)
    for _ in range(3):
        logger.warning_once("careful")
    state.destroy_process_group()
    logger.info("saved")
    logger.info("left", in_order=True)
    return lines


def test_a_logger_knows_its_rank():
    first, second = run_ranks(logs, 2)
    after = ["[RANK 0] saved", "[RANK 0] left"]
    assert first == ["[RANK 0] once", "[RANK 0] each 7", "[RANK 0] in turn", "[RANK 0] careful", *after]
    assert second == ["[RANK 1] each 7", "[RANK 1] in turn", "[RANK 1] left"]
