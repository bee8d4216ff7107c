# SPDX-License-Identifier: Apache-2.0
"""How long, and how many bytes, to the same validation loss over a slow line? Two ranks in namespaces; needs root.

The loss is the one that DDP ends with. The others make more steps than DDP (`--longer`), as theirs are shorter.
torchft takes part where it can be imported.

python benchmarks/bench_slow_network.py [--megabits 20 100] [--size small] [--steps 240] [--longer 2] [--batch 8]
    [--points 20] [--seeds 3] [--only ...] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import _lab
import torch
import torch.distributed as dist
from _measure import report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import SIZES
from farflung.demo.text import load_text
from farflung.outer import Int8, OuterLoop, Recipe, diloco, eager_diloco, local_sgd, streaming_diloco

ENDS = ("alone", "ddp")


@dataclass
class Run:
    """One training: when what was reached."""

    method: str
    seed: int
    seconds: list[float]
    bytes_sent: list[int]
    losses: list[float]
    tokens_per_s: float


def main() -> None:
    possible = [name for name in METHODS if not name.startswith("torchft") or find_spec("torchft")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabits", type=float, nargs="+", default=[20.0, 100.0])
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=240, help="of DDP")
    parser.add_argument("--longer", type=int, default=2, help="how many times as many steps the others make")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step: how much there is to compute")
    parser.add_argument("--points", type=int, default=20, help="how often weights are kept, to be judged at the end")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=possible)
    parser.add_argument("--write", action="store_true", help="append the lines to results/slow_network.jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(**json.loads(chosen.worker))
        return
    if not _lab.is_possible():
        sys.exit("This benchmark makes network namespaces: run it as root, with iproute2 installed.")
    for megabits in chosen.megabits:
        runs: list[Run] = []
        with _lab.line(megabits):
            for seed in range(chosen.seeds):
                for method in chosen.only:
                    steps = chosen.steps * (1 if method.startswith("ddp") else chosen.longer)
                    runs.append(one_run(method, seed, steps, chosen.batch, chosen.size, chosen.points))
        report(
            "How long to the same validation loss over a slow line?",
            figures(runs),
            seed=0,
            write_to="slow_network.jsonl" if chosen.write else None,
            megabits=megabits,
            steps=chosen.steps,
            longer=chosen.longer,
            seeds=chosen.seeds,
            batch=chosen.batch,
            model=f"byte-level GPT of the demo ({chosen.size}), AdamW, two ranks",
        )


def one_run(method: str, seed: int, steps: int, batch: int, size: str, points: int) -> Run:
    """Train by one method in both namespaces."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        task = {"method": method, "seed": seed, "steps": steps, "batch": batch, "size": size, "points": points}
        task["output"] = file.name
        worker = [sys.executable, __file__, "--worker", json.dumps(task)]
        _lab.run_pair(worker, {"OMP_NUM_THREADS": "1"}, timeout_s=3000)
        run = Run(**json.loads(Path(file.name).read_text(encoding="utf-8")))
    print(f"{method:28} seed {seed}: loss {run.losses[-1]:.3f} after {run.seconds[-1]:.1f} s", file=sys.stderr)
    return run


def figures(runs: list[Run]) -> dict[str, Any]:
    """Compare medians over seeds; ratios are DDP's figure over the method's, at the loss that DDP ended with.

    `losses` are those after `seconds`.
    """
    seeds = sorted({run.seed for run in runs})
    target = {run.seed: run.losses[-1] for run in runs if run.method == "ddp"}
    lines: dict[str, Any] = {}
    for method in dict.fromkeys(run.method for run in runs):
        mine = {run.seed: run for run in runs if run.method == method}
        reached = [_reached(mine[seed], target.get(seed, float("nan"))) for seed in seeds]
        lines[method] = {
            "final_loss": round(statistics.median(run.losses[-1] for run in mine.values()), 3),
            "tokens_per_s": round(statistics.median(run.tokens_per_s for run in mine.values())),
            "mb_sent": round(statistics.median(run.bytes_sent[-1] for run in mine.values()) / 1e6, 3),
            "seconds_to_loss": _middle([point[0] for point in reached if point]),
            "mb_to_loss": _middle([point[1] / 1e6 for point in reached if point]),
            "seeds_that_reached_it": sum(point is not None for point in reached),
            "seconds": [_middle(list(at)) for at in zip(*(run.seconds for run in mine.values()), strict=True)],
            "losses": [_middle(list(at)) for at in zip(*(run.losses for run in mine.values()), strict=True)],
        }
    base = lines.get("ddp")
    for name, each in lines.items():
        if base and each["seconds_to_loss"]:
            each["faster_than_ddp"] = round(base["seconds_to_loss"] / each["seconds_to_loss"], 2)
            each["fewer_bytes_than_ddp"] = round(base["mb_to_loss"] / max(each["mb_to_loss"], 1e-9), 1)
        if "alone" in lines and name != "alone":
            each["of_throughput_alone"] = round(each["tokens_per_s"] / lines["alone"]["tokens_per_s"], 3)
    return lines


def _reached(run: Run, loss: float) -> tuple[float, float] | None:
    """Return seconds and bytes when `loss` was first reached, between two points on a straight line."""
    points = list(zip(run.losses, run.seconds, run.bytes_sent, strict=True))
    for before, after in pairwise(points):
        if after[0] <= loss:
            part = 1.0 if before[0] <= loss else (before[0] - loss) / (before[0] - after[0])
            return before[1] + part * (after[1] - before[1]), before[2] + part * (after[2] - before[2])
    return None


def _middle(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


# ---- in the namespaces


def work(
    method: str,
    seed: int,
    steps: int,
    batch: int,
    size: str,
    points: int,
    output: str,
) -> None:
    """Train one replica; rank 0 writes down how it went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = load_text(None)
    shape = SIZES[size]
    torch.manual_seed(seed)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    train = torch.frombuffer(bytearray(text.train), dtype=torch.uint8)
    kept: list[tuple[float, int, dict[str, Tensor]]] = []
    keep_after = {round(steps * (point + 1) / points) for point in range(points)}
    make = METHODS[method]
    with make(model, optimizer, steps) as (trained, after_step, weights):
        dist.barrier()
        start, sent = time.perf_counter(), _lab.bytes_out()
        kept.append((0.0, 0, _copy(model)))
        for step in range(1, steps + 1):
            places = torch.randint(len(train) - shape.context - 1, (batch,), generator=draw)
            drawn = torch.stack([train[place : place + shape.context + 1] for place in places.tolist()])
            loss = loss_per_sequence(trained(drawn[:, :-1]), drawn[:, 1:]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            after_step()
            if step in keep_after and step < steps:
                kept.append((time.perf_counter() - start, _lab.bytes_out() - sent, weights()))
    kept.append((time.perf_counter() - start, _lab.bytes_out() - sent, _copy(model)))
    if rank == 0:
        losses = judge(model, [weights for _, _, weights in kept], text.validation, shape.context)
        tokens = batch * shape.context * steps / kept[-1][0]
        run = Run(method, seed, [k[0] for k in kept], [k[1] for k in kept], losses, tokens)
        Path(output).write_text(json.dumps(asdict(run)), encoding="utf-8")
    _lab.go_home()


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def judge(model: GPT, kept: list[dict[str, Tensor]], text: bytes, context: int) -> list[float]:
    """Return the validation loss of each set of weights."""
    held_out = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    places = torch.linspace(0, len(held_out) - context - 1, 128).long()
    batch = torch.stack([held_out[place : place + context + 1] for place in places.tolist()])
    losses = []
    for weights in kept:
        model.load_state_dict(weights)
        losses.append(loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean().item())
    return losses


# A context of (what is called with a batch, what is done after a step, what returns the weights to be judged).
Method = Callable[[GPT, torch.optim.Optimizer, int], Any]


def bf16_hook(_, bucket):  # DDP reads annotations, and knows none that are strings
    """Send gradients in bf16; torch's own hook is for GPUs alone."""
    narrow = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp(hook: Callable[..., Any] | None) -> Method:
    @contextmanager
    def method(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
        wrapped = DistributedDataParallel(model)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        yield wrapped, lambda: None, lambda: _copy(model)

    return method


def outer(recipe: Recipe) -> Method:
    @contextmanager
    def method(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
        with OuterLoop(model, recipe, inner=optimizer) as loop:

            def weights() -> dict[str, Tensor]:
                if recipe.optimizer is None or not recipe.agrees:
                    return _copy(model)
                with loop.synced():
                    return _copy(model)

            yield model, loop.step, weights

    return method


@contextmanager
def alone(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
    yield model, lambda: None, lambda: _copy(model)


@contextmanager
def accelerate_local_sgd(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    theirs = Accelerator(cpu=True)
    assert theirs.num_processes == 2, "Accelerate did not join the group"
    wrapped = theirs.prepare_model(model)
    with ExitStack() as stack:
        local = stack.enter_context(LocalSGD(accelerator=theirs, model=wrapped, local_sgd_steps=8, enabled=True))
        yield wrapped, local.step, lambda: _copy(model)


@contextmanager
def torchft_diloco(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[Any]:
    """torchft's DiLoCo(32) with the outer optimizer of ours: a lighthouse on rank 0, each rank a group of its own."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    make_optimizer = diloco(32).optimizer
    assert make_optimizer is not None
    rank = dist.get_rank()
    home = _lab.ADDRESSES[rank]
    lighthouse = LighthouseServer(bind="0.0.0.0:29600", min_replicas=2) if rank == 0 else None
    store = dist.TCPStore(home, 29601, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=home,
        store_port=store.port,
        lighthouse_addr=f"http://{_lab.ADDRESSES[0]}:29600",
        replica_id=f"replica_{rank}",
        hostname=home,
        init_sync=False,  # all begin alike, and its way to send weights asks for a host name
    )
    with DiLoCo(manager, [model], optimizer, make_optimizer(list(model.parameters())), sync_every=32):
        yield model, lambda: None, lambda: _copy(model)
    del lighthouse


METHODS: dict[str, Method] = {
    "ddp": ddp(None),
    "ddp bf16": ddp(bf16_hook),
    "accelerate local_sgd(8)": accelerate_local_sgd,
    "torchft diloco(32)": torchft_diloco,
    "local_sgd(8)": outer(local_sgd(8)),
    "diloco(32)": outer(diloco(32)),
    "diloco(16) int8": outer(diloco(16, codec=Int8())),
    "eager_diloco(16)": outer(eager_diloco(16)),
    "streaming_diloco(24, 3)": outer(streaming_diloco(24, 3, delay=1)),
    "alone": alone,
}

if __name__ == "__main__":
    main()
