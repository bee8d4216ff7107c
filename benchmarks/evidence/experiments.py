# SPDX-License-Identifier: Apache-2.0
"""What does an outer loop keep of data parallelism's gain, for which share of its bytes?

From `benchmarks`: python -m evidence.experiments [--experiment tune 1 2 3 4 5 6 7 8] [--sizes 34k 100k] [--seeds 0 1 2]

Experiment 8 is from scratch, 1 and 2 are methods and codecs, 3 single changes, 4 Muon (after `tune`), 5 uneven
replicas, 6 outer rates, 7 defaults, 9 readouts, 10 fine-tuning, 11 shorter runs of DDP, 12 two replicas, 13 hops.

Each run is a line of results/evidence.jsonl; those that are there already are not done again, so a series can be broken
off and taken up. Settings are tuned at a quarter of the length first (`tune`), on the smallest size.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from inspect import signature
from itertools import product
from typing import Any

import torch
from _measure import RESULTS, report

import farflung.outer
from evidence.runner import LOW_RANK, train
from evidence.runs import SHAPES, Run, checksum
from farflung.methods.momentum import rate_of

QUESTION = "What does an outer loop keep of data parallelism's gain, for which share of its bytes?"
FILE = "evidence.jsonl"
STEPS = {"34k": 2000, "100k": 1000, "385k": 1000, "1M": 1000}
AT_ONCE = 36  # rows of a stack: more of them take as long each, fewer take longer
TUNED_AT = "34k"
SCRATCH = "8"  # all methods by themselves from the first step on
READOUTS = "9"  # by which weights a run is judged
TUNED = "10"  # what fine-tuning on another text makes of a run
TUNED_STEPS = 200
LENGTHS = "11"  # how far DDP gets in fewer steps, each run under a schedule of its own length
PARTS_OF_STEPS = tuple(eighths / 8 for eighths in range(1, 8))
PAIRS = "12"  # two replicas in place of four, from scratch
HOPS = "13"  # how often an exchange among several replicas rounds
EXCHANGES = ("gather", "reduce_scatter")
WITH_FEEDBACK = "reduce_scatter with feedback"  # for the second rounding: measured, and left out of the package
LARGEST = (0.7, 0.8, 0.9)  # outer momenta
LONG_ROUNDS = "diloco(32) e3m0"
INNER = {"adamw": (2.5e-3, 5e-3, 1e-2, 2e-2), "muon": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2)}
LARGER_INNER = {"adamw": (5e-3, 1e-2), "muon": (2e-2, 4e-2)}  # for larger models, and for runs of the whole length
FIRST_RATE = 0.7  # DiLoCo's outer learning rate while the inner ones are tuned
OUTER, MOMENTA, DECAYS = (0.4, 0.7, 1.0, 1.4), (0.3, 0.6, 0.9), (0.9, 0.95, 0.99)
RATES = (0.5, 0.7, 0.85, 1.0, 1.4)  # outer ones, by H
EXPERIMENTS = ("tune", "1", "2", "3", "4", "5", "6", "7", SCRATCH, READOUTS, TUNED, LENGTHS, PAIRS, HOPS)
GROWING = ("diloco", "streaming_diloco")  # whose momentum grows
LR_AND_MOMENTUM = ("lr", OUTER, "momentum", MOMENTA)
OTHERS = {  # the recipes that have something else in their place, or want other rates
    "sparse_loco": ("lr", (*OUTER, 2.0, 2.8, 4.0), "beta", DECAYS),
    "slowmo": ("alpha", OUTER, "beta", MOMENTA),
}
ANCHORED = ("diloco", "streaming_diloco", "eager_diloco", "noloco", "sparse_loco", "edit", "slowmo")


def spelled(**settings: Any) -> str:
    return json.dumps(settings, sort_keys=True)


def run_of(line: Mapping[str, Any], kind: type[Run] = Run) -> Run:
    """Return the run of a line."""
    return kind(**{field.name: line[field.name] for field in fields(kind) if field.name in line})


class Results:
    """The lines of a file that are there, by their runs."""

    def __init__(self, name: str = FILE, kind: type[Run] = Run) -> None:
        self.name, self._kind = name, kind
        self.read()

    def read(self) -> None:
        file = RESULTS / self.name
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.figures: dict[Run, dict[str, Any]] = {}
        self.figures.update((run_of(line, self._kind), line["figures"]) for line in map(json.loads, lines))

    def loss(self, run: Run) -> float:
        """Return the held-out loss; infinite if it isn't there or wasn't finite."""
        found = self.figures.get(run, {}).get("held_out_loss")
        return math.inf if found is None else float(found)


def inner_grid(results: Results, size: str, method: str, inner: str = "adamw", every: int = 32) -> list[Run]:
    """Return runs with the first seed: a quarter as long on the smallest size; as long as all on others.

    There a quarter chose rates that were too large for the whole: two rates are left, which fall as the width grows.
    """
    settings: dict[str, Any] = {} if method in ("alone", "DDP") else {"every": every, "lr": FIRST_RATE}
    if size == TUNED_AT:
        return [Run(size, method, lr, 0, STEPS[size] // 4, spelled(**settings), inner=inner) for lr in INNER[inner]]
    if settings:
        settings = best(results, outer_grid(results, method, inner, every=every)).options
    rates = [round(lr * SHAPES[TUNED_AT].width / SHAPES[size].width, 6) for lr in LARGER_INNER[inner]]
    return [Run(size, method, lr, 0, STEPS[size], spelled(**settings), inner=inner) for lr in rates]


def outer_grid(results: Results, method: str, inner: str = "adamw", **settings: Any) -> list[Run]:
    """Return the recipe with its defaults, with other learning rates, and with pairs of rate and momentum or decay."""
    lr, steps = inner_lr(results, TUNED_AT, method, inner, settings["every"]), STEPS[TUNED_AT] // 4
    rate, rates, second, others = OTHERS.get(method, LR_AND_MOMENTUM)
    usual = usual_settings(method, settings)
    alone = [{**settings, rate: value} for value in rates if method in GROWING and inner == "adamw"]
    pairs = [{**settings, rate: value, second: other} for value in rates for other in others]
    chosen = dict.fromkeys(spelled(**one) for one in (usual, *alone, *pairs))
    return [Run(TUNED_AT, method, lr, 0, steps, one, inner=inner) for one in chosen]


def usual_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which the recipe's default outer rate is spelled out, and its momentum unless that grows."""
    parameters = signature(getattr(farflung.outer, method)).parameters
    rate, _, second, _ = OTHERS.get(method, LR_AND_MOMENTUM)
    usual = {rate: parameters[rate].default or rate_of(settings["every"])}
    if parameters.get(second) and parameters[second].default is not None:
        usual[second] = parameters[second].default
    return {**settings, **usual}


def best(results: Results, grid: Iterable[Run]) -> Run:
    return min(grid, key=results.loss)


def inner_lr(results: Results, size: str, method: str, inner: str = "adamw", every: int = 32) -> float:
    """Return the tuned inner learning rate: that of one replica alone, DDP or DiLoCo with this H, or 32 for others."""
    if method not in ("alone", "DDP", "diloco"):
        method, every = "diloco", 32
    return best(results, inner_grid(results, size, method, inner, every)).lr


def tuned(results: Results, size: str, seed: int, method: str, inner: str = "adamw", **settings: Any) -> Run:
    """Return a method's run with what was best; outer settings are those of the smallest size."""
    if method == LOW_RANK:  # as DiLoCo
        settings = {**tuned(results, size, seed, "diloco", inner, every=settings["every"]).options, **settings}
    if method in ANCHORED:
        where = {name: value for name, value in settings.items() if name in ("every", "fragments", "delay", "pull")}
        settings = {**best(results, outer_grid(results, method, inner, **where)).options, **settings}
    lr = inner_lr(results, size, method, inner, settings.get("every", 32))
    return Run(size, method, lr, seed, STEPS[size], spelled(**settings), inner=inner)


def default(results: Results, size: str, seed: int, method: str, **settings: Any) -> Run:
    """Return a recipe's run with its own outer defaults."""
    usual = usual_settings(method, settings)
    return replace(tuned(results, size, seed, method, **settings), settings=spelled(**usual))


STREAMED = "streaming_diloco(32, 2) 4 bits"
STREAMING = {"every": 32, "fragments": 2, "delay": 1}
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "alone": ("alone", {}),
    "DDP": ("DDP", {}),
    "diloco(32)": ("diloco", {"every": 32}),
    "local_sgd(32)": ("local_sgd", {"every": 32}),
    STREAMED: ("streaming_diloco", STREAMING),
    "diloco(8)": ("diloco", {"every": 8}),
    "diloco(128)": ("diloco", {"every": 128}),
    "local_sgd(8)": ("local_sgd", {"every": 8}),
    "DDP, 32 steps accumulated": ("DDP", {"accumulate": 32}),
    "sparse_loco(32)": ("sparse_loco", {"every": 32}),
    "eager_diloco(32) int8": ("eager_diloco", {"every": 32}),
    "noloco(32)": ("noloco", {"every": 32, "pull": 1}),
    "noloco(32), no pull": ("noloco", {"every": 32, "pull": 0}),
    "DDP, bf16": ("DDP", {"dtype": "bfloat16"}),
    "DDP, PowerSGD rank 2": ("DDP", {"hook": "powersgd", "rank": 2}),
    "gossip(32)": ("gossip", {"every": 32}),
    "edit(32)": ("edit", {"every": 32}),
    "slowmo(32)": ("slowmo", {"every": 32}),
    "one average, at the end": ("local_sgd", {"every": 10**6}),
}
CODECS: Mapping[str, tuple[str, dict[str, Any]]] = {
    f"diloco({every}) {codec}": ("diloco", {"every": every, "codec": codec})
    for every in (32, 8)
    for codec in ("int8", "e3m0")
} | {
    f"diloco({every}) rank {rank}": (LOW_RANK, {"every": every, "rank": rank})
    for every, rank in ((32, 4), (32, 2), (8, 2))
}
MEASURED = "diloco(8) e3m0"  # what the first sentences of the pages are about
FROM_SCRATCH: Mapping[str, tuple[str, dict[str, Any]]] = {  # with the recipes' defaults
    "alone": ("alone", {}),
    **{f"diloco({every}) e3m0": ("diloco", {"every": every, "codec": "e3m0"}) for every in (8, 32, 128, 16, 4, 64)},
    **{f"diloco({every})": ("diloco", {"every": every}) for every in (8, 32, 128)},
    **{f"local_sgd({every})": ("local_sgd", {"every": every}) for every in (8, 32, 128)},
    **{
        f"streaming_diloco({every}, 2) e3m0, delay {delay}": (
            "streaming_diloco",
            {"every": every, "fragments": 2, "delay": delay},
        )
        for every, delay in ((8, 1), (8, 2), (32, 1), (32, 4), (32, 8), (128, 1), (128, 8), (128, 32))
    },
    **{f"sparse_loco({every})": ("sparse_loco", {"every": every}) for every in (32, 8)},
    **{f"eager_diloco({every}) int8": ("eager_diloco", {"every": every}) for every in (32, 8)},
    **{f"{method}(32)": (method, {"every": 32}) for method in ("slowmo", "edit", "gossip")},
    "noloco(32)": ("noloco", {"every": 32, "pull": 1}),
    "DDP, bf16": ("DDP", {"dtype": "bfloat16"}),
    "DDP, PowerSGD rank 2": ("DDP", {"hook": "powersgd", "rank": 2}),
}
COMPARED = (  # with other numbers of replicas
    *("alone", "DDP"),
    *(f"diloco({every}) e3m0" for every in (8, 16, 32, 64, 128)),
    *(f"{recipe}({every})" for recipe in ("local_sgd", "sparse_loco") for every in (8, 32)),
    *(f"streaming_diloco({every}, 2) e3m0, delay {delay}" for every, delay in ((8, 1), (8, 2), (32, 1), (32, 8))),
)
LARGER = ("alone", "DDP", "diloco(32)", "diloco(8)", STREAMED, "diloco(128)", "local_sgd(32)")
CHANGED = ("alone", "DDP", "diloco(32)")
MUON = "Muon"  # behind the names of what takes it


def inner_grids(results: Results, size: str) -> dict[str, list[Run]]:
    """Return the grids of AdamW's learning rate, then those of Muon's."""
    methods = ("alone", "DDP", "diloco")  # with H=32
    grids = {method: inner_grid(results, size, method) for method in methods}
    grids |= {f"diloco, H={every}": inner_grid(results, size, "diloco", every=every) for every in (8, 128)}
    return grids | {f"{method}, {MUON}": inner_grid(results, size, method, "muon") for method in methods}


def outer_grids(results: Results) -> dict[str, list[Run]]:
    named = {name: pair for name, pair in METHODS.items() if pair[0] in ANCHORED}
    grids = {name: outer_grid(results, method, **settings) for name, (method, settings) in named.items()}
    return grids | {f"diloco(32), {MUON}": outer_grid(results, "diloco", "muon", every=32)}


def tune(results: Results, size: str) -> None:
    """Find the inner learning rates of a size, and on the smallest one the outer settings."""
    do((run for grid in inner_grids(results, size).values() for run in grid), results)
    if size == TUNED_AT:
        do((run for grid in outer_grids(results).values() for run in grid), results)


def changes(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs with one thing changed each: one replica alone, DDP and DiLoCo, where all three see the change.

    They are half as long as those of the other experiments.
    """
    longer = [tuned(results, size, seed, METHODS[name][0], **METHODS[name][1]) for name in CHANGED]
    usual = [replace(run, steps=run.steps // 2) for run in longer]
    diloco = usual[2]

    def with_settings(**settings: Any) -> list[Run]:
        return [replace(diloco, settings=spelled(**{**diloco.options, **settings}))]

    def with_common(share: float) -> list[Run]:  # which DDP doesn't see
        return [replace(usual[0], common=share), usual[1], replace(diloco, common=share)]

    return {
        "as it is": usual,
        "an outer learning rate of 0.7": with_settings(lr=0.7),
        "a constant momentum of 0.6": with_settings(momentum=0.6),
        "DDP's inner learning rate": [replace(diloco, lr=usual[1].lr)],
        "no common training first": with_common(0.0),
        "2 % of common training": with_common(0.02),
        "30 % of common training": with_common(0.3),
        "a constant learning rate": [replace(run, falls=False) for run in usual],
        "AdamW's moments averaged": with_settings(average_state=True),
        "the last tenth with H 4": with_settings(last=4),
        "outer momentum is reset in the last tenth": with_settings(last=32),
        "half the steps": [replace(run, steps=run.steps // 2) for run in usual],
        "twice the steps": longer,
        "four times the steps": [replace(run, steps=2 * run.steps) for run in longer],
        "half the batch": [replace(run, batch=run.batch // 2) for run in usual],
        "8 replicas": [replace(run, replicas=8) for run in usual],
        "published outer rate and momentum": with_settings(lr=0.7, momentum=0.9),
    }


def with_muon(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return one replica alone, DDP and DiLoCo with AdamW and with Muon; on the smallest size at other settings too."""

    def all_three(inner: str) -> list[Run]:
        return [tuned(results, size, seed, METHODS[name][0], inner, **METHODS[name][1]) for name in CHANGED]

    def slower(runs: list[Run], factor: int) -> list[Run]:
        return [replace(run, lr=run.lr / factor) for run in runs]

    usual, muon = all_three("adamw"), all_three("muon")
    found = {"AdamW": usual, MUON: muon}
    if size != TUNED_AT:
        return found
    found[f"{MUON} at half its rates"] = slower(muon, 2)
    if seed == 0:
        found["AdamW at half its rates"] = slower(usual, 2)
        found[f"{MUON} at a quarter of its rates"] = slower(muon, 4)
        settings = spelled(every=32, lr=0.9, momentum=0.8)  # arXiv:2505.23725, for two replicas
        found[f"{MUON}, outer rate 0.9 and momentum 0.8"] = [*muon[:2], replace(muon[2], settings=settings)]
        settings = spelled(**usual_settings("diloco", {"every": 32}))
        found[f"{MUON}, defaults"] = [*muon[:2], replace(muon[2], settings=settings)]
    return found


def uneven(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs of replicas that draw from parts of the text, and of replicas as fast as 4, 2, 1 and 1."""
    usual = {name: tuned(results, size, seed, METHODS[name][0], **METHODS[name][1]) for name in CHANGED}
    found = {f"{name}, a part of the text each": [replace(run, parts=True)] for name, run in usual.items()}
    for name in CHANGED[1:]:
        found[f"{name}, all wait for the slowest"] = [replace(usual[name], strides="[4, 4, 4, 4]")]
    found["diloco(32), each at its own speed"] = [replace(usual["diloco(32)"], strides="[1, 2, 4, 4]")]
    return found


def rows(results: Results, experiment: str, size: str, seed: int) -> dict[str, list[Run]]:
    """Return the runs of an experiment, by the names of its rows."""
    if experiment == "3":
        return changes(results, size, seed)
    if experiment == "4":
        return with_muon(results, size, seed)
    if experiment == "5":
        return uneven(results, size, seed)
    if experiment == "6":
        return outer_rates(results, size, seed)
    if experiment == "7":
        return defaults(results, size, seed)
    if experiment == SCRATCH:
        return from_scratch(results, size, seed)
    if experiment == LENGTHS:
        return lengths(results, size, seed)
    if experiment == PAIRS:
        return pairs(results, size, seed)
    if experiment == READOUTS:
        return readouts(results, size, seed)
    if experiment == TUNED:
        found = from_scratch(results, size, seed)
        then = {"readouts": True, "tuned_steps": TUNED_STEPS}
        return {name: [replace(found[name][0], **then)] for name in ("DDP", MEASURED, LONG_ROUNDS)}
    if experiment == HOPS:
        return hops(results, size, seed)
    table = METHODS if experiment == "1" else CODECS
    names = LARGER if experiment == "1" and size != TUNED_AT else table
    found = {name: [tuned(results, size, seed, table[name][0], **table[name][1])] for name in names}
    if experiment == "1" and size == TUNED_AT:
        for name in ("diloco(32)", STREAMED, *(name for name in METHODS if METHODS[name][0] == "noloco")):
            found[f"{name}, defaults"] = [default(results, size, seed, METHODS[name][0], **METHODS[name][1])]
    return found


def hops(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs of four and of eight replicas that exchange encoded values in one hop and in two.

    What is there alone is returned of runs with feedback.
    """
    found, scratch = {}, from_scratch(results, size, seed)
    for replicas, codec in ((4, "e3m0"), (8, "e3m0"), (4, "int8")):
        usual = replace(scratch[MEASURED][0], replicas=replicas)
        for exchange in (*EXCHANGES, WITH_FEEDBACK):
            settings = spelled(**{**usual.options, "codec": codec, "exchange": exchange})
            run = replace(usual, settings=settings)
            if exchange in EXCHANGES or run in results.figures:
                found[f"{replicas} replicas, {codec}, {exchange}"] = [run]
    return found


def outer_rates(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs of DiLoCo with the momentum that grows, by H, outer learning rate, replicas and inner schedule."""
    usual = replace(tuned(results, size, seed, "diloco", every=32), steps=1000)
    found = {}

    def add(every: int, rates: Sequence[float], replicas: int = usual.replicas, falls: bool = True) -> None:
        for lr in sorted({*rates, rate_of(every)}):
            run = replace(usual, settings=spelled(every=every, lr=lr), replicas=replicas, falls=falls)
            found[f"{replicas} replicas, {'falling' if falls else 'constant'}, H={every}, lr {lr}"] = [run]

    if size != TUNED_AT:
        for every in (8, 32, 128):
            add(every, (0.7, 1.0))
        return found
    for every in (8, 16, 32, 64, 128):
        add(every, RATES if every == 16 else (0.5, 0.7, 1.0, 1.4))
    for replicas, every in product((2, 8), (8, 32)):
        add(every, (0.7, 1.0, 1.4), replicas)
    add(16, (0.7, 0.85), falls=False)
    add(32, (0.7, 0.85, 1.0), falls=False)
    return found


def defaults(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return each recipe's run with tuned settings and with its defaults, over three lengths."""
    found = {}
    for name, (method, settings) in METHODS.items():
        if method in ANCHORED and settings.get("pull", 1):
            for steps in (500, 2000, 4000):
                pair = [one(results, size, seed, method, **settings) for one in (tuned, default)]
                found[f"{name}, {steps} steps"] = [replace(run, steps=steps) for run in pair]
    return found


def scratch_grid(results: Results, size: str, method: str) -> list[Run]:
    """Return runs of the whole length with the first seed, at two inner rates: one replica alone, DDP, and DiLoCo."""
    first = "alone" if method == "alone" else MEASURED
    rates = [round(lr * SHAPES[TUNED_AT].width / SHAPES[size].width, 6) for lr in LARGER_INNER["adamw"]]
    if method == "DDP":  # which a common start doesn't change
        return [Run(size, "DDP", lr, 0, STEPS[size]) for lr in rates]
    settings = spelled(**scratch_settings(*FROM_SCRATCH[first]))
    return [Run(size, FROM_SCRATCH[first][0], lr, 0, STEPS[size], settings, common=0.0) for lr in rates]


def length_grids(results: Results, size: str) -> list[list[Run]]:
    """Return DDP's grid of inner rates for each of the shorter lengths."""
    usual = scratch_grid(results, size, "DDP")
    return [[replace(run, steps=round(part * run.steps)) for run in usual] for part in PARTS_OF_STEPS]


def lengths(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return DDP's shorter runs, each with the better one of two inner rates."""
    chosen = [best(results, grid) for grid in length_grids(results, size)]
    return {f"DDP, {run.steps} steps": [replace(run, seed=seed)] for run in chosen}


def pairs(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs of two replicas with the rates of four; the first names are DDP's shorter runs."""
    found, whole = lengths(results, size, seed), from_scratch(results, size, seed)
    return {
        name: [replace(run, replicas=2)] for name, [run] in (found | {name: whole[name] for name in COMPARED}).items()
    }


def scratch_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    return usual_settings(method, settings) if method in ANCHORED else settings


def from_scratch(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs that train by themselves from the first step on, each with the better one of two inner rates."""
    found = {"DDP": [replace(best(results, scratch_grid(results, size, "DDP")), seed=seed)]}
    for name, (method, settings) in FROM_SCRATCH.items():
        run = replace(best(results, scratch_grid(results, size, method)), method=method, seed=seed)
        found[name] = [replace(run, settings=spelled(**scratch_settings(method, settings)), common=0.0)]
    return found


def readouts(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs from scratch with a rate that falls and one that stays, and by what the outer momentum grows to."""
    found = from_scratch(results, size, seed)
    usual = {name: replace(found[name][0], readouts=True) for name in ("alone", "DDP", MEASURED, LONG_ROUNDS)}
    runs = {}
    for falls in (False, True):
        inner = "falling" if falls else "constant"
        runs |= {f"{name}, {inner}": [replace(usual[name], falls=falls)] for name in ("alone", "DDP", LONG_ROUNDS)}
        for largest in LARGEST:
            run = replace(usual[MEASURED], falls=falls)
            settings = spelled(**{**run.options, "largest": largest})
            runs[f"{MEASURED}, momentum to {largest}, {inner}"] = [replace(run, settings=settings)]
    return runs


def do(
    runs: Iterable[Run],
    results: Results,
    train: Callable[[Sequence[Any]], list[dict[str, Any]]] = train,
    question: str = QUESTION,
    **facts: Any,
) -> None:
    """Do what isn't there yet, in stacks of what can be done together; write it with these facts."""
    facts = facts or {"tuned_at": TUNED_AT, "text": checksum()}
    by_kind: dict[tuple[Any, ...], list[Run]] = {}
    results.read()
    for run in dict.fromkeys(runs):
        if run not in results.figures:
            by_kind.setdefault(run.stacked_by, []).append(run)
    for kind in by_kind.values():
        while kind:
            now = [kind.pop(0)]
            while kind and sum(run.replicas for run in [*now, kind[0]]) <= AT_ONCE:
                now.append(kind.pop(0))
            for run, figures in zip(now, train(now), strict=True):
                report(question, figures, write_to=results.name, **facts, **asdict(run))
                results.figures[run] = figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", nargs="*", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    parser.add_argument("--rows", nargs="*", metavar="ROW", help="of the experiments; all by default")
    parser.add_argument("--sizes", nargs="*", default=["34k"], choices=list(SHAPES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results()
    for experiment in chosen.experiment:
        for size in chosen.sizes:
            if experiment == "tune":
                tune(results, size)
                continue
            if experiment == LENGTHS:
                do((run for grid in length_grids(results, size) for run in grid), results)
            if experiment in (SCRATCH, READOUTS, TUNED, HOPS):
                do((run for method in CHANGED for run in scratch_grid(results, size, method)), results)
            named = [rows(results, experiment, size, seed) for seed in chosen.seeds]
            chosen_rows = [runs for one in named for name, runs in one.items() if name in (chosen.rows or one)]
            do((run for runs in chosen_rows for run in runs), results)


if __name__ == "__main__":
    main()
