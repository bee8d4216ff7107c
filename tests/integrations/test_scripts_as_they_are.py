# SPDX-License-Identifier: Apache-2.0
"""Scripts of the kinds that tutorials and examples have, as they are: under a fixed set, elastic, and at an address."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.python import run_farflung, run_python

SCRIPTS = Path(__file__).parent / "scripts"
WAYS = {
    "fixed": ("--num_processes", 2),
    "elastic": ("--elastic", "1:3", "--replicas", 2),
    "meet": ("--elastic", "1:3", "--replicas", 2, "--meet"),
}
OTHERS = ("fixed", "elastic", "meet")
OUTER = ("--outer", "diloco", "--outer-every", 4, "--outer-report", "off")
PLAIN = ("--outer-lr", 1, "--outer-momentum", 0)  # averaging, as these runs have a dozen rounds
BY_TORCHRUN = {}  # what a script's processes left without Farflung

pytestmark = pytest.mark.usefixtures("warm")


def ended(script, way, folder, *flags, code=0, arguments=()):
    """What the replicas of a script have left at their ends, and what was printed."""
    shutil.copy(SCRIPTS / script, folder)
    place = ((folder / "run").as_uri(),) if way == "meet" else ()
    words = ("launch", "--cpu", *WAYS[way], *place, *OUTER, *PLAIN, *flags, script, *arguments)
    done = run_farflung(*words, cwd=folder, code=code, timeout_s=90)
    said = done.stdout + done.stderr
    assert ("2 replicas have ended with equal weights" in said) == (code == 0 and "--elastic" in words)
    return left(folder), said


def left(folder):
    return [torch.load(file) for file in sorted(folder.glob("end-*.pt"))]


def check(ends, samples=None):
    """Two replicas have ended with equal weights, and each sample came once in each epoch."""
    one, other = (end["weights"] for end in ends)
    assert all(torch.equal(one[name], other[name]) for name in one)
    if samples is not None:
        assert Counter(sample for end in ends for sample in end["seen"]) == samples


def check_loss(ends, script, folder):
    """The error after training is as low as under torchrun, but for a third of what that has gained."""
    if script not in BY_TORCHRUN:
        (folder / "torchrun").mkdir()
        shutil.copy(SCRIPTS / script, folder / "torchrun")
        words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        run_python(*words, cwd=folder / "torchrun", env=env, timeout_s=90)
        BY_TORCHRUN[script] = left(folder / "torchrun")
    before, best = BY_TORCHRUN[script][0]["losses"]
    assert best < 0.8 * before
    for end in ends:
        assert end["losses"][0] == pytest.approx(before)
        assert end["losses"][1] < best + (before - best) / 3


def once(epochs, number=96):
    return {(epoch, sample): 1 for epoch in range(epochs) for sample in range(number)}


@pytest.mark.parametrize("way", ["fixed", "elastic", pytest.param("meet", marks=pytest.mark.long)])
def test_a_tutorial_that_looks_at_a_batch_of_each_epoch(way, tmp_path):
    ends, _ = ended("tutorial.py", way, tmp_path)
    check(ends, once(4))
    check_loss(ends, "tutorial.py", tmp_path)


@pytest.mark.parametrize("way", ["fixed", "elastic", pytest.param("meet", marks=pytest.mark.long)])
def test_a_denoiser_whose_main_process_saves_and_whose_schedule_was_made_before_prepare(way, tmp_path):
    ends, said = ended("denoiser.py", way, tmp_path, *(("--as-accelerate",) if way == "fixed" else ()))
    check(ends, once(3))
    check_loss(ends, "denoiser.py", tmp_path)
    assert max(end["rate"] for end in ends) < 0.05 * 1e-2
    assert (tmp_path / "saved" / "checkpoint-10" / "farflung.json").exists()
    assert said.count("saved to saved/checkpoint-10 alone: it lacks") == (way == "fixed")
    assert ("`import accelerate` is answered by Farflung" in said) == (way != "fixed")


@pytest.mark.parametrize("host", [(), ("accelerator",)], ids=["DDP", "Accelerator"])
@pytest.mark.parametrize("way", ["fixed", "elastic", pytest.param("meet", marks=pytest.mark.long)])
def test_a_gan_of_two_models_whose_replicas_make_other_numbers_of_steps(way, host, tmp_path):
    """Of 25 batches an epoch, with a round after each: where one replica is at its end, the other has a round left."""
    ends, _ = ended("gan.py", way, tmp_path, "--outer-every", 1, arguments=host)
    check(ends, None if host and way == "fixed" else once(2, 100))  # ranks have even batches there, as in Accelerate
    check_loss(ends, "gan.py", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("way", OTHERS)
def test_a_trainer_on_accelerate_shares_its_data_out(way, tmp_path):
    ends, said = ended("trainer.py", way, tmp_path, *(("--as-accelerate",) if way == "fixed" else ()))
    check(ends)
    check_loss(ends, "trainer.py", tmp_path)
    counts = Counter(sample for end in ends for sample in end["seen"])
    assert max(counts.values()) == 2
    # Of 128: where replicas come and go, one leaves each epoch after len(loader) batches, maybe within a slot of two.
    assert counts.total() >= (128 if way == "fixed" else 120)
    assert way == "fixed" or "`import accelerate` is answered by Farflung" in said


@pytest.mark.long
@pytest.mark.parametrize("way", OTHERS)
def test_a_script_that_draws_its_own_batches_needs_a_seed_by_its_place_where_replicas_come_and_go(way, tmp_path):
    ends, said = ended("sampler.py", way, tmp_path, code=0 if way == "fixed" else None)
    if way == "fixed":
        check(ends)
    else:
        assert "or a seed that depends on its place (farflung.elastic.place())" in said
    (tmp_path / "placed").mkdir()
    ends, _ = ended("sampler.py", way, tmp_path / "placed", arguments=("--place",))
    check(ends)
    check_loss(ends, "sampler.py", tmp_path)
