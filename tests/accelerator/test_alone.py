# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `load_state` on some processes: they work where replicas are alike, and say so where they can't."""

import json
import os
import shutil
import time
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator, LocalSGD
from farflung.base.errors import CheckpointError, CollectiveMismatch, StateError
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.comm import matching
from farflung.config import environ
from farflung.methods.arguments import OuterConfig
from farflung.process import watchdog
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from tests.accelerator.conftest import on_ranks


class Run:
    """Training by DDP on shuffled data, with dropout, so that a state that is not loaded shows."""

    def __init__(self, **settings):
        watchdog._TICK_S = 0.05
        self.accelerator = accelerator = Accelerator(cpu=True, **settings)
        self.is_main = accelerator.is_main_process
        set_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(torch.randn(32, 2), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.seen = []

    def steps(self, number):
        """Train; stop after so many steps."""
        for k, batch in enumerate(self.loader, 1):
            self.seen.append(batch[:, 0].tolist())
            self.accelerator.backward(self.model(batch).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if k == number:
                break

    @property
    def weights(self):
        return [p.tolist() for p in self.accelerator.unwrap_model(self.model).parameters()]


def saves_alone(folder):
    """One run that is saved by the main process, by all, and by the main process again; three ways to be elsewhere."""
    run = Run()
    accelerator, times = run.accelerator, []
    folder = Path(folder)
    for name in ("in_backward", "in_gather"):
        run.steps(3)
        began = time.monotonic()
        if run.is_main:
            accelerator.save_state(folder / name)
            accelerator.save_state(folder / name)  # over the one before
        times.append(time.monotonic() - began)
        if name == "in_gather":
            accelerator.gather(torch.ones(1))
    if run.is_main:
        accelerator.save_state(folder / "step")
        accelerator.save_state(folder / "epoch")
    else:
        accelerator.save_state(folder / "epoch")  # no collective lies between: this process is here already
    if run.is_main:
        accelerator.save_state(folder / "epoch_then_alone")
    accelerator.save_state(folder / "epoch_then_alone" / str(accelerator.process_index))  # one line, but two folders
    at_save = run.weights
    run.steps(2)
    after = run.weights
    if run.is_main:
        time.sleep(0.1)
        accelerator.save_state(folder / "at_the_end")  # the other one has ended
    return at_save, after, times


def goes_on(folder, alone=False):
    run = Run()
    run.steps(1)  # what is loaded differs from what there is
    with redirect_stderr(StringIO()) as words:
        if run.is_main or not alone:
            run.accelerator.load_state(folder)
    loaded = run.weights
    run.seen.clear()
    if not alone:
        run.steps(2)
    run.accelerator.wait_for_everyone()
    return loaded, run.weights, run.seen, words.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one run of two processes, started by plain environment variables."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(saves_alone, 2, folder, connect=False)


def own_states(folder):
    return sorted(path.name for path in (folder / "loop_state").iterdir())


def test_the_main_process_saves_alone_and_all_save_together(saved):
    folder, (main, other) = saved
    assert main[:2] == other[:2]  # the replicas are alike, so nothing was mixed up with their training
    for name in ("in_backward", "in_gather", "step", "epoch_then_alone", "at_the_end"):
        assert own_states(folder / name) == ["rank_0.bin"], name
    for name in ("epoch", "epoch_then_alone/0"):
        assert own_states(folder / name) == ["rank_0.bin", "rank_1.bin"], name
    assert not (folder / "epoch_then_alone" / "1").exists()
    assert max(main[2]) < patience(8)


def test_what_was_saved_alone_is_loaded_by_all_and_they_go_on_together(saved):
    folder, ((at_save, after, _), _) = saved
    (together, _), (alone, other) = (run_ranks(goes_on, 2, folder / name, connect=False) for name in ("epoch", "step"))
    words = alone[3] + other[3]
    assert words.count("not all processes called save_state: positions in the data are those of rank 0") == 1
    assert words.count("rank 1 is new: its random numbers begin a stream of their own") == 1
    assert "not all processes" not in together[3]
    assert alone[0] == other[0] == at_save
    assert alone[1:3] == together[1:3]  # the same samples in the same order
    assert alone[1] == other[1] == after
    assert not {str(b) for b in alone[2]} & {str(b) for b in other[2]}


def test_it_is_loaded_by_another_number_of_processes(saved):
    folder, ((at_save, _, _), _) = saved
    ranks = run_ranks(goes_on, 3, folder / "step")
    assert [loaded for loaded, *_ in ranks] == [at_save] * 3
    assert "ranks 1 and 2 are new" in ranks[0][3]
    run = Run()
    run.accelerator.load_state(folder / "step")
    assert run.weights == at_save
    run.accelerator.save_state(folder / "by_one") if run.is_main else None
    assert own_states(folder / "by_one") == ["rank_0.bin"]


def test_the_main_process_loads_alone(saved):
    folder, ((at_save, _, _), _) = saved
    (main, other) = run_ranks(goes_on, 2, folder / "epoch", True)
    assert main[0] == at_save
    assert other[0] != at_save
    assert "rank 0 loaded it alone: the weights of other processes stay as they are" in main[3]


@on_ranks(2, connect=False)
def test_a_state_is_saved_by_the_main_process_and_loaded_by_each_after_training_has_ended(tmp_path):
    run = Run()
    run.steps(1)
    trained = run.weights
    run.accelerator.end_training()
    assert run.accelerator.save_state(tmp_path / f"rank_{run.is_main}") == str(tmp_path / f"rank_{run.is_main}")
    assert (tmp_path / f"rank_{run.is_main}").exists() is run.is_main
    if run.is_main:
        run.model.load_state_dict({name: 0 * value for name, value in run.model.state_dict().items()})
        run.accelerator.load_state(tmp_path / "rank_True")
        assert run.weights == trained
        assert own_states(tmp_path / "rank_True") == ["rank_0.bin"]


@on_ranks(2, connect=False)
def test_shards_can_not_be_saved_after_training_has_ended(tmp_path):
    run = Run(fsdp_plugin=FullyShardedDataParallelPlugin())
    run.accelerator.end_training()
    with pytest.raises(StateError, match=r"save_state: it needs every process.*before end_training"):
        run.accelerator.save_state(tmp_path / "shards")


def test_a_part_that_all_have_written_and_that_is_gone_is_still_an_error(saved, tmp_path):
    folder, _ = saved
    shutil.copytree(folder / "epoch", tmp_path / "epoch")
    (tmp_path / "epoch" / "loop_state" / "rank_1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"rank_1\.bin can't be found"):
        Run().accelerator.load_state(tmp_path / "epoch")


@on_ranks(2)
def test_automatic_names_are_the_main_processs_and_nobody_saves_without_it(tmp_path):
    run = Run(project_config=ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True))
    accelerator = run.accelerator
    if run.is_main:
        accelerator.save_state(block=False)
        accelerator.save_state()
    run.steps(1)
    accelerator.save_state()  # whose number the main process knows
    words = r"^save_state: rank 1 calls it, but rank 0, which writes the weights, does not\."
    for caller in (1, 0):  # on one line; the call of rank 1 is forgotten
        with pytest.raises(StateError, match=words) if caller and not run.is_main else nullcontext():
            if accelerator.process_index == caller:
                accelerator.save_state()
        accelerator.wait_for_everyone()
    accelerator.save_state()
    assert accelerator.save_iteration == 5
    accelerator.wait_for_everyone()
    found = {path.name: own_states(path) for path in (tmp_path / "checkpoints").iterdir()}
    alone, both = ["rank_0.bin"], ["rank_0.bin", "rank_1.bin"]
    assert found == {f"checkpoint_{k}": own for k, own in enumerate((alone, alone, both, alone, both))}


@on_ranks(2, each=["rank_0.bin", "rank_1.bin"])
def test_in_a_second_run_no_process_is_taken_for_ended(tmp_path):
    Accelerator(cpu=True).end_training()  # the group is the script's, so the second run has the same one
    run = Run()
    time.sleep(0 if run.is_main else 1)
    run.accelerator.save_state(tmp_path / "it")
    return own_states(tmp_path / "it")


def on_two_machines(folder):
    rank = int(environ.text("RANK"))
    environ.export({"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    run = Run(project_config=ProjectConfiguration(save_on_each_node=True))
    if run.accelerator.is_local_main_process:
        run.accelerator.save_state(f"{folder}/machine{rank // 2}")
    run.steps(1)


def test_the_first_process_of_each_machine_saves_there(tmp_path):
    run_ranks(on_two_machines, 4, tmp_path, connect=False)
    for machine in (0, 1):
        assert own_states(tmp_path / f"machine{machine}") == [f"rank_{2 * machine}.bin"]
        assert json.loads((tmp_path / f"machine{machine}" / "farflung.json").read_text())["world_size"] == 4


def all_of_two_machines(folder):
    rank = int(environ.text("RANK"))
    environ.export({"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    here = folder / f"machine{rank // 2}"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    run = Run(project_config=ProjectConfiguration(save_on_each_node=True))
    run.steps(1)
    run.accelerator.save_state("it")
    run.accelerator.load_state("it")


def test_each_machine_has_a_whole_checkpoint_of_its_ranks(tmp_path):
    run_ranks(all_of_two_machines, 4, tmp_path, connect=False)
    for machine in (0, 1):
        folder = tmp_path / f"machine{machine}" / "it"
        Checkpoint.open(folder).verify()
        assert own_states(folder) == [f"rank_{rank}.bin" for rank in (2 * machine, 2 * machine + 1)]


RECIPES = {
    "diloco": OuterConfig("diloco", every=4, report="off"),
    "streaming": OuterConfig("streaming_diloco", every=4, fragments=2, delay=1, report="off"),
    "eager": OuterConfig("eager_diloco", every=4, report="off"),
    "local_sgd": OuterConfig("local_sgd", every=4, report="off"),
}


def replica_saves_alone(folder, recipe):
    run, found = Run(outer=RECIPES[recipe]), []
    for number in range(1, 7):
        run.steps(1)
        if run.is_main:
            run.accelerator.save_state(folder / str(number), block=number % 2 == 0)
            found.append(run.weights)
    run.accelerator.end_training()
    return found, run.weights


def replica_goes_on(folder, recipe):
    run = Run(outer=RECIPES[recipe])
    with redirect_stderr(StringIO()) as words:
        run.accelerator.load_state(folder)
    loaded = run.weights
    run.steps(8)
    run.accelerator.end_training()
    return loaded, run.weights, words.getvalue()


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_replicas_continue_from_what_the_main_process_saved_alone(recipe, tmp_path):
    """In the middle of rounds, and with some under way: its steps since the last round, and nothing of the others."""
    (found, ended), (_, other) = run_ranks(replica_saves_alone, 2, tmp_path, recipe)
    assert ended == other
    for number in (3, 4, 6):
        one, two = run_ranks(replica_goes_on, 2, tmp_path / str(number), recipe)
        assert one[0] == two[0] == found[number - 1]
        assert one[1] == two[1] != found[number - 1]
        assert one[2].count("not all processes called save_state: ") == 1
        assert "mean of their weights" not in one[2]


def must_all(folder, kind, call, caller):
    matching._ASK_RANK_0_S = 0.25
    sharded = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    run = Run(**(sharded if kind == "sharded" else {}))
    accelerator, is_apart = run.accelerator, kind == "LocalSGD"
    accelerator.save_state(folder)
    began = time.monotonic()
    try:
        with LocalSGD(accelerator=accelerator, model=run.model, local_sgd_steps=8, enabled=is_apart):
            run.steps(1)
            if accelerator.process_index == caller:
                getattr(accelerator, call)(folder)
            accelerator.gather(torch.ones(1))
    except CollectiveMismatch as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize(("kind", "call", "caller"), [("sharded", "save_state", 0), ("LocalSGD", "load_state", 1)])
def test_where_all_must_call_it_the_error_names_the_call_and_both_lines(kind, call, caller, tmp_path):
    why = "each process trains a replica of its own" if caller else "models are sharded over the processes"
    (said, seconds), (other, other_s) = run_ranks(must_all, 2, tmp_path / "c", kind, call, caller)
    assert said == other
    assert said.startswith(f"{call}: every process must call it, as {why}. Rank {caller} is in `{call}` ({__file__}:")
    assert "`getattr(accelerator, call)(folder)`" in said
    assert "the `if` that only some processes pass, such as `if accelerator.is_main_process:`" in said
    assert f", but rank {1 - caller} is in `gather` ({__file__}:" in said
    assert max(seconds, other_s) < patience(8)
