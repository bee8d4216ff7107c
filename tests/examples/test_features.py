# SPDX-License-Identifier: Apache-2.0
"""Each script of `examples/features` runs on one process and on two, and shows what it promises.

All scripts run one after the other in the same processes: starting them takes longer than the scripts.
"""

import json
import re
import traceback
import warnings

import pytest

from farflung.testing.ranks import run_ranks
from tests.examples.scripts import FOLDER, PAGE, run_script

RUNS = {
    "gradient_accumulation": ["--epochs 6 --lr 0.03"],
    "automatic_accumulation": ["--lr 0.03 --samples_per_update 64"],
    "token_accumulation": [
        "--epochs 2 --batch_size {eight} --steps 1",
        "--epochs 2 --batch_size {four} --steps 2",
    ],
    "checkpointing": [
        "--folder {folder}/whole --epochs 3 --lr 0.03 --save_every 100",
        "--folder {folder}/two --epochs 3 --lr 0.03 --stop_after 21",
        "--folder {folder}/two --epochs 3 --lr 0.03",
    ],
    "cross_validation": ["--folds 3 --epochs 3 --lr 0.03"],
    "early_stopping": ["--enough 0.15"],
    "communication_hook": [f"--epochs 3 --lr 0.03 --hook {hook}" for hook in ("no", "fp16", "bf16", "power_sgd")],
    "layouts": ["--epochs 6"],
    "memory": ["--lr 0.03"],
    "metrics": ["--epochs 3 --lr 0.03"],
    "profiler": ["--folder {folder}/traces"],
    "tracking": ["--folder {folder}/runs --epochs 3 --lr 0.03"],
    "schedule_free": ["--epochs 3"],
}


def run_all(folder, size):
    """Run all scripts in this process; what each of their runs returns, or its error."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # says torch 2.11 of every profile
    given, found = {"folder": folder, "eight": 8 // size, "four": 4 // size}, {}
    for name, runs in RUNS.items():
        try:
            found[name] = [run_script(f"features/{name}", "--cpu " + flags.format(**given)) for flags in runs]
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def runs(request, tmp_path_factory):
    """What `runs(name)` answers: the values of a script's runs, by rank; the folder that they wrote to, and ranks."""
    folder = tmp_path_factory.mktemp("runs")
    by_rank = run_ranks(run_all, request.param, folder, request.param, timeout_s=120, connect=False)

    def results(name):
        for found in by_rank:
            if isinstance(found[name], str):
                pytest.fail(found[name])
        return [found[name] for found in by_rank]

    results.folder, results.size = folder, request.param
    return results


def test_scripts_learn_their_tasks_and_all_processes_agree(runs):
    for name in RUNS.keys() - {"token_accumulation", "profiler"}:
        first, *others = runs(name)
        assert all(other == first for other in others), name
        assert first[-1]["accuracy"] > 0.9, name


def test_accumulated_batches_make_one_update(runs):
    batches = -(-1000 // (16 * runs.size))
    assert runs("gradient_accumulation")[0][0]["updates"] == 6 * -(-batches // 4)


def test_the_largest_batch_that_fits_is_found_and_an_update_keeps_its_samples(runs):
    (found,) = runs("automatic_accumulation")[0]
    assert found["tried"][0] == 64
    assert found["tried"][-1] <= 40 < found["tried"][-2]
    assert found["steps"] == 64 // found["tried"][-1]
    assert runs("memory")[0][0]["tried"] == [256, 128, 64]


def test_each_token_counts_once_and_the_same(runs):
    large, small = runs("token_accumulation")[0]
    assert small["tokens"] == large["tokens"] > 1000
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-5)
    assert small["weights"] == pytest.approx(large["weights"], rel=1e-5)


def test_a_stopped_run_continues_as_if_it_had_not_stopped(runs):
    whole, stopped, continued = runs("checkpointing")[0]
    assert stopped["updates"] == 21
    assert continued == whole


def test_training_ends_early_and_in_the_same_step_everywhere(runs):
    (found,) = runs("early_stopping")[0]
    assert found["stopped"]
    assert found["updates"] < 50 * -(-1000 // (32 * runs.size))


def test_each_sample_is_in_the_metrics_once(runs):
    (found,) = runs("metrics")[0]
    assert found["samples"] == 501
    assert found["f1"] > 0.9


def test_the_profiler_calls_back_after_its_cycle_and_writes_a_trace_for_each_process(runs):
    for (found,) in runs("profiler"):
        assert found["tables"] == 1
        assert "aten::addmm" in found["names"]
    written = sorted(path.name for path in (runs.folder / "traces").iterdir())
    assert written == [f"profile_{rank}.json" for rank in range(runs.size)]
    assert json.loads((runs.folder / "traces" / written[-1]).read_text())["traceEvents"]


def test_the_main_process_logs_an_epoch_at_a_time(runs):
    (found,) = runs("tracking")[0]
    lines = [json.loads(line) for line in (runs.folder / "runs" / "circle.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[0]["config"]["lr"] == 0.03
    assert (lines[-1]["step"], lines[-1]["values"]["loss"]) == (found["updates"], found["loss"])


def test_every_script_is_tested_and_listed():
    scripts = {path.stem for path in (FOLDER / "features").glob("*.py")} - {"tiny"}
    assert scripts == set(RUNS)
    assert scripts == set(re.findall(r"\.\./examples/features/(\w+)\.py", PAGE.read_text(encoding="utf-8")))
