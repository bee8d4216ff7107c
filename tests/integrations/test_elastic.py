# SPDX-License-Identifier: Apache-2.0
"""A replica in the run of its launcher: its place among the data, and trainings that follow each other."""

import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from farflung import Accelerator, LocalSGD
from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import LauncherNotes
from farflung.address.schemes import transport_at
from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure, StateError
from farflung.config import environ
from farflung.data.slots import Slots
from farflung.elastic import launched_membership, place
from farflung.hosts.data_parallel import DDPTakeover
from farflung.launch.plan import RANK
from farflung.launch.shell import start_of
from farflung.methods.arguments import OuterConfig
from farflung.outer import OuterLoop, diloco, post_local_sgd
from farflung.process.place import Place
from farflung.testing.ranks import run_ranks
from farflung.utils import ProjectConfiguration
from tests.outer.elastic_run import served
from tests.python import run_python

CONFIG = OuterConfig("diloco", every=4, lr=1.0, momentum=0.0, report="off")


class Launched:
    """A run with places for `expected` replicas, in which this process is one rank of one member after another."""

    def __init__(self, monkeypatch, expected):
        self.environment, self.store = monkeypatch, served()
        self.notes = LauncherNotes(C10dTransport(self.store).board)
        self.notes.board.put("run", json.dumps({"expected": expected}).encode())
        self.wait_until_written()
        monkeypatch.setenv("FARFLUNG_STORE", f"127.0.0.1:{self.store.port}")

    def wait_until_written(self):
        """Return once other connections to the store find what this one has written: it is answered in order."""
        assert self.notes.board.get("run")

    def place(self, member, rank=0, size=1):
        for name, value in {"FARFLUNG_MEMBER": member, "RANK": rank, "WORLD_SIZE": size}.items():
            self.environment.setenv(name, str(value))
        return place()


def test_where_replicas_are_fixed_a_place_is_the_rank_and_there_is_no_membership(monkeypatch):
    for name in ("FARFLUNG_STORE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert place() == (0, 1)
    assert launched_membership() is None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert place() == (2, 3)


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ([(5,), (8,), (5,), (8,)], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ([(0,), (1,), (2,), (3,)], [(0, 2), (1, 2), (2, 3), (3, 4)]),
        ([(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)], [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
    ids=["the first free one, which it keeps", "of its own beyond those the run began with", "shared by its ranks"],
)
def test_each_replica_gets_a_place(monkeypatch, asked, places):
    run = Launched(monkeypatch, expected=2)
    assert [run.place(*one) for one in asked] == places


@pytest.mark.parametrize("end", ["gone", "left"])
def test_the_place_of_a_replica_that_is_no_more_is_free_again(monkeypatch, end):
    run = Launched(monkeypatch, expected=3)
    assert [run.place(member) for member in range(3)] == [(0, 3), (1, 3), (2, 3)]
    run.notes.put(end, 1)
    run.wait_until_written()
    assert run.place(2) == (2, 3)  # which it had
    assert run.place(3) == (1, 3)


def test_a_schedule_may_be_planned_by_the_length_of_a_loader_before_there_is_a_model(monkeypatch):
    run = Launched(monkeypatch, expected=2)
    run.place(0)
    data = range(12)
    loaders = [DataLoader(data, sampler=DistributedSampler(data, 1, 0, shuffle=shuffle)) for shuffle in (True, False)]
    planned = DDPTakeover(CONFIG, Slots, Place.launched())._data
    assert [planned._length(DataLoader.__len__, loader) for loader in loaders] == [6, 12]


def in_a_run(tmp_path, act, *args, ranks=1):
    """What a replica returns from `act(address, *args)`: the only one of a run that may have two."""
    transport_at(tmp_path.as_uri()).board.put("run", json.dumps({"expected": 1, "most": 2}).encode())
    return run_ranks(act, ranks, tmp_path.as_uri(), *args)[0]


def by_two(tmp_path, act):
    """What both replicas of a run return from `act(address, number)`."""
    transport_at(tmp_path.as_uri()).board.put("run", json.dumps({"expected": 2, "most": 2}).encode())
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: run_ranks(act, 1, tmp_path.as_uri(), number)[0], range(2)))


def enroll(address):
    """Have this process be a replica of the run; return its id."""
    environ.export({"FARFLUNG_STORE": address, "FARFLUNG_RUN_DIR": "none"})
    member = LauncherNotes(transport_at(address).board).enroll("replica")
    os.environ["FARFLUNG_MEMBER"] = str(member)
    return member


def save_after_others(address, folder):
    enroll(address)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    return [Path(accelerator.save_state()).name for _ in range(2)]


def test_a_replica_numbers_its_checkpoints_after_those_of_replicas_before_it(tmp_path):
    (tmp_path / "project" / "checkpoints" / "checkpoint_7").mkdir(parents=True)
    assert in_a_run(tmp_path, save_after_others, tmp_path / "project") == ["checkpoint_8", "checkpoint_9"]


class Fits:
    """Trainings of one model that follow each other in a process, each with an outer loop of its own."""

    def __init__(self):
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def batches(self, sampler=None):
        data = TensorDataset(torch.ones(5, 2))
        return DataLoader(data, 1, sampler=None if sampler is None else sampler(data))

    def train(self, model, optimizer, loader):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    def optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


class Loops(Fits):
    def fit(self):
        optimizer = self.optimizer()
        with OuterLoop(self.model, diloco(4, lr=1.0, momentum=0.0), membership=launched_membership()) as loop:
            loop.attach(optimizer)
            self.train(self.model, optimizer, self.batches())

    def end(self):
        return None


class Prepared(Fits):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.accelerator = Accelerator(cpu=True, outer=config)

    def fit(self):
        self.train(*self.accelerator.prepare(self.model, self.optimizer(), self.batches()))
        self.accelerator.free_memory()

    def end(self):
        self.accelerator.end_training()


class Wrapped(Fits):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.takeover = DDPTakeover(config, Slots, Place.launched())
        self.takeover.install()

    def fit(self):
        loader = self.batches(lambda data: DistributedSampler(data, 1, 0))
        self.train(DistributedDataParallel(self.model), self.optimizer(), loader)

    def end(self):
        self.takeover.close()


def fitted(address, host):
    """The weight after each of three fits, and what a replica is told that starts meanwhile."""
    first, fits, weights = enroll(address), host(), []
    for _ in range(3):
        fits.fit()
        weights.append(fits.model.weight.tolist())
    errors = []
    for is_gone in (False, True):
        if is_gone:
            LauncherNotes(transport_at(address).board).note_end(first, "was killed by SIGKILL")
        enroll(address)
        with pytest.raises(RankFailure) as caught:
            OuterLoop(nn.Linear(2, 1, bias=False), diloco(4, lr=1.0, momentum=0.0), membership=launched_membership())
        errors.append(caught.value)
    fits.end()
    return weights, [str(error) for error in errors], [error.cause for error in errors]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("host", "cause"), [(Loops, Cause.RUN_ENDED), (Prepared, Cause.RUN_ENDED), (Wrapped, Cause.FAULT)]
)
def test_a_process_may_train_several_times_in_one_run(tmp_path, host, cause):
    """A newcomer is told so while others train, and once they have ended; an error if their last loop has not."""
    weights, told, causes = in_a_run(tmp_path, fitted, host)
    assert weights == [[[-5.0, -5.0]], [[-10.0, -10.0]], [[-15.0, -15.0]]]
    assert "second fit" in told[0]
    assert ("All replicas have ended in a later outer loop" in told[1]) == (cause is Cause.FAULT)
    assert causes == [Cause.RUN_ENDED, cause]


def adversaries(address):
    """The weights of two nets in an epoch of a replica, as one and then both are evaluated, and after loading."""
    enroll(address)
    takeover = DDPTakeover(CONFIG, Slots, Place.launched())
    takeover.install()
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.weight)
    nets = [DistributedDataParallel(model) for model in models]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    other = {"weight": torch.tensor([[5.0]])}
    models[0].load_state_dict(other)
    data = TensorDataset(torch.ones(6, 1))
    weights = []

    def look():
        weights.append([model.weight.item() for model in models])

    for number, (batch,) in enumerate(DataLoader(data, 1, sampler=DistributedSampler(data, 1, 0))):
        made = nets[0](batch)  # whose graph the step of the other net doesn't break
        for which, source in ((1, made.detach()), (0, made)):
            optimizers[which].zero_grad()
            (nets[1](batch) + source).sum().backward()
            optimizers[which].step()
        if number == 1:
            for which, mode in ((0, False), (1, False), (0, True), (1, True)):
                nets[which].train(mode)
                look()
            with pytest.raises(StateError, match=r"together with 1 other one, .*without --elastic"):
                models[1].load_state_dict(other)
    models[1].load_state_dict(other)
    look()
    loops = len({id(one.driver.loop) for one in takeover._followed})
    takeover.close()
    return loops, weights


@pytest.mark.timeout(30)
def test_all_ddp_models_of_a_replica_share_a_loop_and_each_is_evaluated_for_itself(tmp_path):
    loops, weights = in_a_run(tmp_path, adversaries)
    assert loops == 1
    assert weights == [[5.0, -2.0], [5.0, 0.0], [3.0, 0.0], [3.0, -2.0], [-1.0, 5.0]]


def scheduled(address, num_epochs):
    """What a replica that trains alone says of a schedule for so many epochs of five batches, and its last rate."""
    enroll(address)
    host = Prepared()
    optimizer = host.optimizer()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=round(5 * num_epochs))
    loader = DataLoader(TensorDataset(torch.ones(5, 2)), 1, shuffle=True)
    model, optimizer, loader, schedule = host.accelerator.prepare(host.model, optimizer, loader, schedule)
    with redirect_stderr(StringIO()) as said:
        for handler in logging.getLogger().handlers:
            handler.stream = said
        for _ in range(int(num_epochs)):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                schedule.step()
    host.end()
    return said.getvalue(), schedule.get_last_lr()[0]


@pytest.mark.timeout(30)
def test_a_line_says_where_a_schedule_ends(tmp_path):
    said, rate = in_a_run(tmp_path, scheduled, 2)
    assert "training ends after 10 updates of each of 1 replica: 2 epochs." in said
    assert rate < 1e-6


OWN = """
import os, sys, torch, torch.distributed as dist
if "group" in sys.argv:
    dist.init_process_group("gloo")
if "elastic" in sys.argv:
    import farflung.elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
ASIDE = "Each replica of --elastic is a process group of its own, so what a script exchanges itself"


@pytest.mark.parametrize(
    ("words", "recipe", "said"),
    [
        (
            [],
            "",
            "This SGD makes its first step in a replica of --elastic, .*: .* a model of its own. Start with --outer",
        ),
        (["elastic"], "", ""),
        ([], "diloco", f"made no process group in this replica: call .*init_process_group in the script. {ASIDE}"),
        (["group"], "diloco", f"trains 2 parameters which no DDP model has, .*DistributedDataParallel. {ASIDE}"),
    ],
)
def test_a_replica_whose_model_no_loop_has_is_told_at_its_first_step(words, recipe, said, monkeypatch, home, request):
    """And one whose script will open a loop is not."""
    if recipe:  # without one the rank waits for torch to be loaded
        request.getfixturevalue("warm")
    (home / "train.py").write_text(OWN)
    monkeypatch.setenv("FARFLUNG_OUTER_RECIPE", recipe)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    Launched(monkeypatch, 1).place(1)
    done = run_python(*start_of(RANK)[1:], "train.py", *words, code=None)
    assert re.search(said, done.stderr) if said else not done.stderr
    assert done.returncode == bool(said)


def prepared_adversaries(address):
    """How many loops two prepared nets have, what is saved of one after an epoch, and the weights at the end."""
    enroll(address)
    accelerator = Accelerator(cpu=True, outer=CONFIG)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    *nets, optimizers[0], optimizers[1], data = accelerator.prepare(
        *models, *optimizers, DataLoader(TensorDataset(torch.ones(6, 1)), 1)
    )
    for (batch,) in data:
        made = nets[0](batch)
        for which, source in ((1, made.detach()), (0, made)):
            optimizers[which].zero_grad()
            accelerator.backward((nets[1](batch) + source).sum())
            optimizers[which].step()
    loops = len(accelerator.outer_loops)
    saved = accelerator.get_state_dict(nets[1])["weight"].item()
    third = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"one together: .*to one call of `accelerator.prepare`"):
        accelerator.prepare(third, torch.optim.SGD(third.parameters(), lr=1.0))
    accelerator.end_training()
    return loops, saved, [model.weight.item() for model in models]


@pytest.mark.timeout(30)
def test_all_models_of_an_accelerator_share_a_loop_where_replicas_come_and_go(tmp_path):
    loops, saved, weights = in_a_run(tmp_path, prepared_adversaries)
    assert (loops, saved, weights) == (1, -6.0, [-6.0, -6.0])


def in_islands(address):
    """Be a rank of a replica of two, in a script that asks for islands."""
    environ.export({"FARFLUNG_STORE": address, "FARFLUNG_MEMBER": "0", "FARFLUNG_RUN_DIR": "none"})
    with pytest.raises(ConfigError, match=r"2 processes of this one form 2, .* give --ranks_per_replica 1"):
        Accelerator(cpu=True, outer=CONFIG, island_size=1)
    return Accelerator(cpu=True, outer=CONFIG, island_size=2).num_processes


def test_a_replica_is_one_island_whatever_a_script_asks_for(tmp_path):
    assert in_a_run(tmp_path, in_islands, ranks=2) == 2


WARM = OuterConfig("post_local_sgd", warmup=4, every=2)


def warmed_up(address, host):
    """Train in a replica whose gradients DDP averages in the first steps."""
    enroll(address)
    fits = host(WARM)
    with pytest.raises(ConfigError, match="within each replica alone"):
        fits.fit()


@pytest.mark.parametrize("host", [Prepared, Wrapped])
def test_a_warm_up_in_which_each_replica_would_train_alone_is_refused(host, tmp_path):
    in_a_run(tmp_path, warmed_up, host)


def warmed_up_in_a_plain_loop(address, number):
    """The weights of a model of DDP after a warm-up, whose gradients differ between replicas."""
    enroll(address)
    fits = Fits()
    ddp, optimizer = DistributedDataParallel(fits.model), fits.optimizer()
    with OuterLoop(ddp, post_local_sgd(3, every=100), membership=launched_membership()) as loop:
        loop.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.full((1, 2), float(number))).sum().backward()
            optimizer.step()
        weights = fits.model.weight.tolist()
    return weights


@pytest.mark.timeout(60)
def test_an_attached_loop_averages_gradients_of_ddp_over_replicas_in_a_warm_up(tmp_path):
    assert by_two(tmp_path, warmed_up_in_a_plain_loop) == [[[-1.5, -1.5]]] * 2


def averaged(address, number):
    """The weights of a replica of one process after each step of LocalSGD."""
    enroll(address)
    fits, accelerator = Fits(), Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(fits.model, fits.optimizer())
    weights = []
    with LocalSGD(accelerator, model, 2) as averaging:
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((1, 2), float(number))).sum())
            optimizer.step()
            averaging.step()
            weights.append(fits.model.weight[0, 0].item())
    return weights


@pytest.mark.timeout(60)
def test_local_sgd_averages_replicas_of_one_process(tmp_path):
    assert by_two(tmp_path, averaged) == [[0.0, -1.0], [-1.0, -1.0]]
