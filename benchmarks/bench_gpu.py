# SPDX-License-Identifier: Apache-2.0
"""What do steps, rounds, codecs, anchors in the host's memory and saves in the background cost on one GPU?

python benchmarks/bench_gpu.py step|codecs|rounds|anchors|saves [--values N] [--rounds N] [--compiled] [--write]

Each question prints a line of its own. Contestants take turns; figures are medians. `rounds` has two processes share
the GPU and exchange over gloo, through the host's memory; it says nothing about links between GPUs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _measure import interleave, ratios, report, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import farflung
from farflung.codec import blockwise
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.comm.group import SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.outer import OuterLoop, diloco, eager_diloco, streaming_diloco
from farflung.testing.ranks import run_ranks

SEED = 0
DEVICE = "cuda"
SHAPE = Shape(17, 768, 12, 1024)  # 121M parameters


def synchronized(call: Callable[[], Any]) -> Callable[[], Any]:
    def whole() -> None:
        call()
        torch.cuda.synchronize()

    return whole


def trained() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = GPT(SHAPE).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# ---- steps
def raw_loop(tokens: Tensor, compiled: bool) -> Iterator[None]:
    model, optimizer = trained()
    if compiled:
        model.compile()
    while True:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def prepared_loop(library: str, tokens: Tensor, compiled: bool, outer: bool = False) -> Iterator[None]:
    backend = "inductor" if compiled else "no"
    accelerator = importlib.import_module(library).Accelerator(mixed_precision="bf16", dynamo_backend=backend)
    model, optimizer = accelerator.prepare(*trained())
    with accelerator.outer(model, diloco(10**6)) if outer else nullcontext():
        while True:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, tokens))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            yield


def step(given: argparse.Namespace) -> None:
    for batch, length in ((4, 1024), (1, 128)):
        tokens = torch.randint(256, (batch, length + 1), device=DEVICE)
        loops = {
            "raw": raw_loop(tokens, given.compiled),
            "accelerate": prepared_loop("accelerate", tokens, given.compiled),
            "farflung": prepared_loop("farflung", tokens, given.compiled),
            "farflung_outer": prepared_loop("farflung", tokens, given.compiled, outer=True),
        }
        blocks = {name: synchronized(partial(repeated, loop, 4)) for name, loop in loops.items()}
        seconds = interleave(blocks, rounds=given.rounds, warmup=2, before=torch.cuda.synchronize)
        ms = {name: round(250 * statistics.median(values), 3) for name, values in seconds.items()}
        facts = {
            "batch": [batch, length],
            "compiled": given.compiled,
            "parameters": sum(one.numel() for one in trained()[0].parameters()),
        }
        spread = {
            name: [round(250 * x, 2) for x in statistics.quantiles(values, n=4)] for name, values in seconds.items()
        }
        figures = {"ms": ms, "times_raw": ratios(ms, to="raw"), "quartiles_ms": spread}
        line("what does a prepared loop add to a step?", figures, given, **facts)
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]


def repeated(loop: Iterator[None], times: int) -> None:
    for _ in range(times):
        next(loop)


# ---- codecs
def codecs(given: argparse.Namespace) -> None:
    triton = blockwise.kernels
    x = torch.randn(given.values, device=DEVICE) * 1e-3
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    moved = {"copy": 8.0}  # bytes a value that must be read and written
    for codec in (Int8(), Fp8(), Int4(), E3M0()):
        wire = codec.encode(x)
        parts: dict[str, Callable[[], Any]] = {
            "encode": partial(codec.encode, x),
            "decode": partial(codec.decode, wire, out),
            "add": partial(codec.add, wire, out, 0.5),
        }
        for name, part in parts.items():
            for way in ("triton", "eager", *(["compiled"] if isinstance(codec, (Int8, E3M0)) else [])):
                key = f"{type(codec).__name__} {name} {way}"
                call = torch.compile(part, dynamic=False) if way == "compiled" else part
                calls[key] = partial(by_way, call, triton if way == "triton" else lambda x, block: None)
                moved[key] = codec.wire_bytes(x.numel()) / x.numel() + (8 if name == "add" else 4)
    seconds = {name: on_device(call, given.rounds) for name, call in calls.items()}
    speed = {name: moved[name] * given.values / seconds[name] for name in seconds}
    figures = {
        "us": {name: round(1e6 * value, 1) for name, value in seconds.items()},
        "share_of_the_copys_bytes_per_s": {name: round(value / speed["copy"], 3) for name, value in speed.items()},
    }
    line("how fast are the codecs next to a copy?", figures, given, values=given.values)


def on_device(call: Callable[[], Any], times: int) -> float:
    """Return the median seconds of a call on the GPU's own clock."""
    found = []
    for _ in range(3 + times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found[3:])


def by_way(call: Callable[[], Any], kernels: Any) -> None:
    kept, blockwise.kernels = blockwise.kernels, kernels
    try:
        call()
    finally:
        blockwise.kernels = kept


# ---- rounds in the background
RECIPES = {"none": None, "diloco": diloco(32), "streaming": streaming_diloco(32, 2, delay=8), "eager": eager_diloco(32)}


def training(name: str, steps: int) -> dict[str, float]:
    recipe, tokens = RECIPES[name], torch.randint(256, (8, 1025), device=DEVICE)
    model, optimizer = trained()
    outer = None if recipe is None else OuterLoop(model, replace(recipe, same_data=True), TorchGroup())
    waits: list[list[float]] = []
    for number in range(steps + 16):
        if number == 16:
            dist.barrier()
            torch.cuda.synchronize()
            began, before = time.perf_counter(), None if outer is None else outer.stats()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()  # or a round waits for what is left of a step
        if outer is not None:
            called = time.perf_counter()
            outer.step()
            if time.perf_counter() - called > 2e-3:
                waits.append([number, round(time.perf_counter() - called, 4)])
    torch.cuda.synchronize()
    found: dict[str, Any] = {"ms_per_step": round(1000 * (time.perf_counter() - began) / steps, 2)}
    if outer is not None and before is not None:
        after = outer.stats()
        found["waits"] = waits
        for key in ("rounds", *(f"seconds_{one}" for one in ("exposed", "hidden", "voting", "encoding", "landing"))):
            found[key] = round(getattr(after, key) - getattr(before, key), 3)
        found["share_hidden"] = round(found["seconds_hidden"] / (found["seconds_hidden"] + found["seconds_exposed"]), 3)
        outer.close()
    return found


def rounds(given: argparse.Namespace) -> None:
    figures = {name: run_ranks(training, 2, name, 96, timeout_s=100)[0] for name in RECIPES}
    line("how much of a round is hidden?", figures, given, replicas=2, over="gloo, on one GPU", parameters="121M")


# ---- anchors in the host's memory
def anchors(given: argparse.Namespace) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(10_000_000, device=DEVICE)) for _ in range(given.values // 10**7))
    figures: dict[str, Any] = {}
    for name, away in (("on_gpu", False), ("on_host", True)):
        gc.collect()
        torch.cuda.synchronize()
        before, seconds = torch.cuda.memory_allocated(), []
        torch.cuda.reset_peak_memory_stats()
        outer = OuterLoop(model, replace(diloco(1), anchor_on_cpu=away), SoloGroup())
        for _ in range(4):
            with torch.no_grad():
                torch._foreach_add_(list(model), 1e-3)
            torch.cuda.synchronize()
            began = time.perf_counter()
            outer.step()
            torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - began, 4))
        added = torch.cuda.max_memory_allocated() - before
        figures[name] = {
            "seconds_per_round": seconds,
            "gpu_bytes_added": added,
            "per_value": round(added / given.values, 3),
        }
        outer.close()
        del outer
    line("what do anchors in the host's memory cost?", figures, given, values=given.values)


# ---- saves in the background
def saves(given: argparse.Namespace) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerator = farflung.Accelerator()
    model, optimizer = accelerator.prepare(*trained())
    tokens = torch.randint(256, (2, 129), device=DEVICE)
    loss_of(model, tokens).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [t for part in (state["model"], *state["optimizer"]["state"].values()) for t in part.values()]
    tensors = [t for t in tensors if t.is_cuda]
    staging = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    folder, pending, number = Path(tempfile.mkdtemp()), [], iter(range(10**6))

    def ours() -> None:
        accelerator.save_state(folder / f"ours{next(number)}", block=False)

    def theirs() -> None:
        pending.append(dcp.async_save(state, checkpoint_id=folder / f"dcp{next(number)}"))

    contestants = {
        "farflung": (ours, accelerator._checkpointer.saver.settle),
        "dcp": (theirs, lambda: getattr(pending[-1], "upload_completion", pending.pop()).result()),
        "copy_to_pinned": (lambda: torch._foreach_copy_(staging, tensors, non_blocking=True), lambda: None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(given.rounds):
        for name, (act, settle) in contestants.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            torch.cuda.synchronize()
            seconds[name].append(round(time.perf_counter() - began, 4))
            settle()
            for path in folder.iterdir():
                shutil.rmtree(path, ignore_errors=True)
    medians = {f"{name}_s": statistics.median(values[1:]) for name, values in seconds.items()}
    state_bytes = sum(t.nbytes for t in tensors)
    line("how long does a save stall training?", {**medians, "each": seconds}, given, state_bytes=state_bytes)
    with suppress(OSError):
        shutil.rmtree(folder)


def line(question: str, figures: dict[str, Any], given: argparse.Namespace, **facts: Any) -> None:
    report(question, figures, seed=SEED, write_to="gpu.jsonl" if given.write else None, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    questions = {one.__name__: one for one in (step, codecs, rounds, anchors, saves)}
    parser.add_argument("question", choices=questions)
    parser.add_argument("--values", type=int, default=124_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="steps of compiled models")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/gpu.jsonl")
    given = parser.parse_args()
    seeded(SEED)
    questions[given.question](given)


if __name__ == "__main__":
    main()
