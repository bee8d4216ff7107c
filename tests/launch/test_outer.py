# SPDX-License-Identifier: Apache-2.0
"""`farflung launch --outer`: a script that never heard of outer loops becomes a run of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from farflung.config import environ
from farflung.launch.codes import FAILED
from farflung.launch.network import get_free_port

# The loop that Accelerate's users have, with an evaluation after each epoch and the usual `break`.
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from farflung import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(96, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
train, evaluation = DataLoader(data, 2, shuffle=True), DataLoader(data, 8)
model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=60))
steps, most = 0, 30
for epoch in range(3):
    model.train()
    for inputs, targets in train:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if steps >= most:
            break
    model.eval()
    errors = []
    for inputs, targets in evaluation:
        with torch.no_grad():
            errors.append(accelerator.gather_for_metrics((model(inputs) - targets).pow(2)))
    accelerator.print(f"epoch {epoch}: {torch.cat(errors).mean().item():.4f}")
    if accelerator.is_main_process:
        accelerator.save(accelerator.get_state_dict(model), f"epoch{epoch}.pt")
accelerator.wait_for_everyone()
weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
open(f"rank{accelerator.process_index}.bin", "wb").write(weights.numpy().tobytes())
accelerator.end_training()
"""


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("warm")
def test_flags_or_a_file_with_variables_turn_a_plain_script_into_the_same_run(farflung, forked, home):
    (home / "train.py").write_text(SCRIPT)
    two = ("--cpu", "--num_processes", "2")
    flags = ("--outer", "diloco", "--outer-every", "4", "--outer_rounds", "200", "--outer-codec", "bf16")
    done = farflung("launch", *two, *flags, "--run-dir", "run", "train.py", code=0)
    assert "warning" not in done.stderr  # that the loop did nothing, say
    first, second = ((home / f"rank{rank}.bin").read_bytes() for rank in (0, 1))
    assert first == second
    errors = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(errors) == 3
    assert errors[-1] < errors[0]
    # 12 optimizer steps a pass, of which the last is a round; 6 steps of the third, with the flush after the break.
    assert [row["step"] for row in rows(home)] == [4, 8, 12, 16, 20, 24, 28, 30]
    (home / "outer.yaml").write_text("outer:\n  recipe: diloco\n  every: 4\n  codec: int8\n")
    with environ.patched({"FARFLUNG_OUTER_ROUNDS": "200", "FARFLUNG_OUTER_CODEC": "bf16"}):
        forked(*two, "--config_file", "outer.yaml", "train.py")
    assert all((home / f"rank{rank}.bin").read_bytes() == first for rank in (0, 1))


IDLE = """
import sys, torch
if sys.argv[1] != "nothing":
    from farflung import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sys.argv[1] == "model":
        accelerator.prepare(model)
    if sys.argv[1] == "short":
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("what", "words", "recipe"),
    [
        ("nothing", "no optimizer of torch's made a step (Keras' fit has others)", "diloco"),
        ("model", "the script did not prepare a model together with its optimizer (`accelerator.prepare`)", "diloco"),
        ("short", "the script ended before the first round; try a smaller --outer_every", "diloco"),
        ("short", "it chose plain data parallelism, or the script ended before it chose", "auto"),
    ],
)
@pytest.mark.usefixtures("warm")
def test_an_outer_loop_that_did_nothing_is_said_at_the_end(what, words, recipe, farflung, home):
    (home / "train.py").write_text(IDLE)
    every = () if recipe == "auto" else ("--outer-every", "4")
    done = farflung("launch", "--cpu", "--outer", recipe, *every, "train.py", what, code=0)
    assert f"farflung: warning: --outer {recipe} did nothing: {words}.\n" in done.stderr


PLAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
home = os.getcwd(); os.chdir(os.path.dirname(torch.__file__))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
torch.manual_seed(dist.get_rank())
for step in range(6):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
END
torch.save([one.tolist() for one in model.parameters()], f"{home}/rank{os.environ['RANK']}.pt")
"""
HUGGING = """
import os, torch
from accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(4, 2)
assert (accelerator.mixed_precision, accelerator.device.type) == ("bf16", "cpu")
torch.manual_seed(accelerator.process_index)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)  # steps of both processes
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for step in range(6):
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
accelerator.end_training()
torch.save([one.tolist() for one in model.parameters()], f"rank{os.environ['RANK']}.pt")
"""


@pytest.mark.parametrize(
    ("script", "ranks"),
    [(DESTROYS := PLAIN.replace("END", "dist.destroy_process_group()"), 2), (HUGGING, 2), (DESTROYS, 4)],
    ids=["plain", "accelerate", "islands"],
)
def test_scripts_that_know_nothing_of_farflung_train_with_an_outer_loop(script, ranks, forked, home):
    (home / "train.py").write_text(script)
    flags = ["--outer", "diloco", "--outer-every", "4", "--run-dir", "run", "--mixed_precision", "bf16"]
    flags += ["--island_size", "2"] if ranks > 2 else []
    printed = forked("--cpu", "--num_processes", str(ranks), *flags, "train.py")
    each = ", each on 2 ranks," if ranks > 2 else ""
    assert f"farflung: diloco over 2 replicas{each} of a DDP model with 10 parameters: Every(every=4)" in printed
    assert [one["step"] for one in rows(home)] == [4, 6]
    lines = [line for line in printed.splitlines() if line.startswith("farflung: round")]
    assert [line.split(":")[1] for line in lines] == [" round 1, step 4", " round 2, step 6"]  # there is no terminal
    assert printed.count("farflung: as the learning rate schedule has it, 6 steps make 1 round of 4.") == 1
    first, *others = (torch.load(home / f"rank{rank}.pt") for rank in range(ranks))
    assert all(other == first for other in others)


def test_the_end_of_a_script_flushes(forked, home):
    (home / "train.py").write_text(PLAIN.partition("END")[0])
    forked("--cpu", "--num_processes", "2", "--outer", "diloco", "--outer-every", "4", "--run-dir", "run", "train.py")
    assert [one["step"] for one in rows(home)] == [4, 6]


# Rank 1 fails, and its process stays until the other one knows.
FAILS = """
import sys, threading, time
def stay():
    while not os.path.exists(f"{home}/told"):
        time.sleep(0.02)
if dist.get_rank() == 1:
    threading.Thread(target=stay).start()
    raise KeyError("bad sample")
sys.excepthook = lambda *_: open(f"{home}/told", "w")
"""


@pytest.mark.usefixtures("warm")
def test_an_error_in_a_script_is_told_to_the_other_ranks(farflung, home):
    (home / "train.py").write_text(PLAIN.replace("END", FAILS))
    flags = ["--outer", "diloco", "--outer-every", "3"]
    done = farflung("launch", "--cpu", "--num_processes", "2", *flags, "train.py", code=FAILED)
    assert "rank 1 failed" in done.stderr
    assert "bad sample" in done.stderr


FAILS_AT_THE_END = """
from farflung.outer import OuterLoop
def close(self):
    raise ValueError("the last flush failed")
OuterLoop.close = close
sys.exit(0)
"""


@pytest.mark.usefixtures("warm")
def test_an_error_of_the_last_flush_is_shown_where_a_script_ends_by_an_exit_too(farflung, home):
    (home / "train.py").write_text(PLAIN.partition("END")[0] + "import sys" + FAILS_AT_THE_END)
    done = farflung("launch", "--cpu", "--num_processes", "2", "--outer", "diloco", "train.py", code=FAILED)
    assert "ValueError: the last flush failed" in done.stderr
    assert "left no traceback" not in done.stderr


# As torch's tutorials and hifi-gan start their ranks; `destroy` flushes before the weights are written.
SPAWNS = """
import multiprocessing, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

def worker(rank, url, name):
    if url == "env://":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[2]
    init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    destroy_process_group()
    open(f"{name}{rank}.txt", "w").write(repr(model.module.weight.tolist()))

if __name__ == "__main__":
    mp.spawn(worker, args=(f"tcp://127.0.0.1:{sys.argv[1]}", "spawned"), nprocs=2)
    started = [multiprocessing.get_context("fork").Process(target=worker, args=(r, "env://", "forked")) for r in (0, 1)]
    for one in started:
        one.start()
    for one in started:
        one.join()
"""


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_processes_that_a_script_starts_by_itself_are_followed(farflung, home):
    (home / "train.py").write_text(SPAWNS)
    flags = ("--outer", "diloco", "--outer-every", "3", "--run-dir", "run")
    ports = map(str, (get_free_port(), get_free_port()))
    farflung("launch", "--cpu", "--num_processes", "1", *flags, "train.py", *ports, code=0)
    for name in ("spawned", "forked"):
        assert (home / f"{name}0.txt").read_text() == (home / f"{name}1.txt").read_text()
    assert [len(one["weights"]) for one in rows(home)] == [2] * 6


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_script_that_starts_its_processes_is_launched_once(farflung, home):
    (home / "train.py").write_text(SPAWNS)
    ports = map(str, (get_free_port(), get_free_port()))
    done = farflung("launch", "--cpu", "--num_processes", "2", "--outer", "diloco", "train.py", *ports, code=FAILED)
    assert "is launched with --num_processes 1 (for each machine)" in done.stderr
