# SPDX-License-Identifier: Apache-2.0
"""What does an outer loop keep of data parallelism's gain when a trained model is fine-tuned, whole or by LoRA?

From `benchmarks`: python -m evidence.fine_tuning [--experiment "four replicas" uneven] [--seeds 0 1 2]

The demo's GPT is trained once per seed on one text, by one process, and then on another. Runs are done and kept as
those of `experiments.py`, in results/fine_tuning.jsonl; what was trained first is in ~/.cache/farflung-benchmarks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _measure import RESULTS, report
from torch import Tensor, nn
from torch.func import functional_call

from evidence.experiments import Results, best, do, spelled
from evidence.lora import EXACT, SCALE, Adapters
from evidence.runner import Stack, flat, loss_of, spread
from evidence.runs import Run, checksum, texts
from evidence.tables import SEEDS, as_times, kept, with_error
from evidence.tuning import topics
from farflung.codec.blockwise import E3M0
from farflung.demo.gpt import GPT

QUESTION = "What does an outer loop keep of data parallelism's gain when a trained model is fine-tuned?"
FILE = "fine_tuning.jsonl"
SIZE, FIRST_STEPS, FIRST_RATE, FIRST_BATCH = "385k", 1500, 1.5e-3, 8
STEPS = 512  # which 8, 32 and 128 divide
SEQUENCES = 256  # of each held-out text
RANKS = (0, 16)  # 0: all weights train
RATES = {0: (1e-4, 3e-4, 1e-3), 4: (1e-3, 3e-3, 1e-2), 16: (1e-3, 3e-3, 1e-2)}  # by rank
CACHE = Path.home() / ".cache" / "farflung-benchmarks"
MOMENTA = (0.3, 0.5, 0.7)
PLAIN = {"lr": 1.0, "momentum": 0.0}  # with it `diloco` is `local_sgd` that sends what has changed


@dataclass(frozen=True)
class Tuning(Run):
    """One fine-tuning.

    Args:
        parts: each replica has a kind of text of its own.
        rank: of LoRA's factors; 0 trains all weights.
    """

    rank: int = 0

    @property
    def stacked_by(self) -> tuple[Any, ...]:
        return *super().stacked_by, self.rank

    @property
    def text(self) -> tuple[Tensor, Tensor]:
        return kinds(self.replicas) if self.parts else topics()


@cache
def kinds(number: int) -> tuple[Tensor, Tensor]:
    """Return that many texts of one length, one after the other: to train on, and held out.

    They are Python's documentation of the language, headers in C, tables of encodings, and tests.
    """
    library = Path(sysconfig.get_path("stdlib"))
    train, held_out = topics()
    parts = [(train, held_out)]
    for folder, pattern in (
        (Path(sysconfig.get_path("include")), "**/*.h"),
        (library / "encodings", "*.py"),
        (library / "test", "test_*.py"),
    ):
        content = b"".join(file.read_bytes() for file in sorted(folder.glob(pattern)))
        length = len(train) + len(held_out)
        if len(content) < length:
            raise SystemExit(f"{folder / pattern} has {len(content)} bytes, and {length} are needed.")
        text = torch.frombuffer(bytearray(content[:length]), dtype=torch.uint8)
        parts.append((text[: len(train)], text[len(train) :]))
    first, last = zip(*parts[:number], strict=True)
    return torch.cat(first), torch.cat(last)


@cache
def checksum_of_kinds() -> str:
    """Return the first digits of the SHA-256 of all texts."""
    content = checksum().encode() + b"\0".join(bytes(text.tolist()) for text in kinds(4))
    return hashlib.sha256(content).hexdigest()[:16]


def trained(size: str, seed: int) -> Tensor:
    """Return `[parameters]` of a model that one process has trained on the first text; it is kept in `CACHE`."""
    file = CACHE / f"{size}-{seed}-{checksum()}.pt"
    if not file.is_file():
        run = Run(size, "alone", FIRST_RATE, seed, FIRST_STEPS, replicas=1, batch=FIRST_BATCH, common=0.0)
        [lane] = Stack([run]).train()
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(lane.weights[0].clone(), file)
    weights: Tensor = torch.load(file)
    return weights


class Tunings(Stack):
    """Fine-tunings done together: of all weights, or of adapters next to weights that are frozen."""

    def __init__(self, runs: Sequence[Tuning]) -> None:
        self._frozen: list[Tensor] = []
        super().__init__(runs)
        if self._rank:
            self._beside = (torch.cat(self._frozen),)
            for lane, frozen in zip(self.lanes, self._beside[0].split([run.replicas for run in runs]), strict=True):
                lane.frozen = frozen

    def _first(self, run: Run) -> Tensor:
        assert isinstance(run, Tuning)
        weights, self._rank, self._gpt = trained(run.size, run.seed), run.rank, GPT(self.shape)
        if not run.rank:
            self._model = self._gpt
            return weights.repeat(run.replicas, 1)
        self._frozen.append(weights.repeat(run.replicas, 1))
        torch.manual_seed(run.seed)
        self._model: nn.Module = Adapters(self._gpt, run.rank)
        return flat(self._model).repeat(run.replicas, 1)

    def _new_model(self) -> nn.Module:
        return Adapters(self._gpt, self._rank) if self._rank else GPT(self.shape)

    def _loss(self, row: Tensor, batch: Tensor, *beside: Tensor) -> Tensor:
        if not beside:
            return super()._loss(row, batch)
        named = dict(self._gpt.named_parameters())
        parts = beside[0].split([parameter.numel() for parameter in named.values()])
        values = {name: part.view(named[name].shape) for name, part in zip(named, parts, strict=True)}
        assert isinstance(self._model, Adapters)
        for pair in self._model.pairs:
            a, b = pair.factors(row)
            values[pair.name] = values[pair.name] + SCALE * b @ a
        return loss_of(functional_call(self._gpt, values, (batch[:, :-1],)), batch)

    @torch.no_grad()
    def judge(self) -> list[dict[str, float]]:
        """Return the losses on held-out parts of the new and the old text; of replicas alone, their mean."""
        found = []
        for lane in self.lanes:
            new, old = (spread(text, self.shape.context, SEQUENCES) for text in (lane.run.text[1], texts()[1]))
            frozen = () if lane.frozen is None else (lane.frozen[0],)

            def loss(rows: Tensor, batches: Sequence[Tensor], frozen: tuple[Tensor, ...] = frozen) -> float:
                return statistics.mean(self._loss(row, batch, *frozen).item() for row in rows for batch in batches)

            rows = lane.weights if lane.run.method == "alone" else lane.weights[:1]
            figures = {"held_out_loss": loss(rows, new), "old_loss": loss(rows, old)}
            mean = lane.readouts.weights.get("slow, mean of 5")
            found.append(figures if mean is None else figures | {"average_loss": loss(mean, new)})
        return found


def train(runs: Sequence[Tuning]) -> list[dict[str, Any]]:
    """Do runs together; return the figures of each."""
    began = time.process_time()
    stack = Tunings(runs)
    stack.train()
    losses = stack.judge()
    seconds = round((time.process_time() - began) / len(runs), 1)
    return [
        {
            **{name: round(loss, 5) if math.isfinite(loss) else None for name, loss in by_name.items()},
            "bytes_sent": round(lane.bytes_sent),
            "rounds": lane.rounds,
            "cpu_s": seconds,
        }
        for lane, by_name in zip(stack.lanes, losses, strict=True)
    ]


def rates(rank: int) -> list[Tuning]:
    """Return DDP's runs of the first seed, by inner learning rate."""
    return [Tuning(SIZE, "DDP", lr, 0, STEPS, common=0.0, readouts=True, rank=rank) for lr in RATES[rank]]


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("alone", {}),
    "DDP": ("DDP", {}),
    **{f"local_sgd({every})": ("local_sgd", {"every": every}) for every in (8, 16, 32, 128)},
    **{f"diloco({every})": ("diloco", {"every": every}) for every in (8, 16, 32, 128)},
    **{f"diloco(32) {codec}": ("diloco", {"every": 32, "codec": codec}) for codec in ("int8", "e3m0")},
    "diloco(32) e3m0, no momentum": ("diloco", {"every": 32, "codec": "e3m0", **PLAIN}),
    **{
        f"diloco({every}) to {most}": ("diloco", {"every": every, "max_momentum": most})
        for every, most in product((8, 32), MOMENTA)
    },
    **{f"{name}(32)": (name, {"every": 32}) for name in EXACT},
}
FEW = ("alone", "DDP", "local_sgd(32)", "diloco(32)")
FIRST = (*FEW, "local_sgd(8)", "local_sgd(128)", "diloco(8)", "diloco(128)", "diloco(32) e3m0")
PAIRS = ("local_sgd(8)", "diloco(8)", "local_sgd(32)", "diloco(32)")
OFTEN, SELDOM = (tuple(f"diloco({every}) to {most}" for most in MOMENTA) for every in (8, 32))
EXCHANGED = tuple(f"{name}(32)" for name in EXACT)
VISIBLE_QUESTION = "Which share of the weights do a few steps change as the forward pass sees them, in bf16?"
VISIBLE_FILE = "visible.jsonl"
VISIBLE_RATES = {0: (1e-6, 1e-5, 1e-4, 1e-3), 16: (1e-4, 1e-3, 3e-3)}  # by rank
VISIBLE_IN, VISIBLE_AFTER = (8, 32), 64  # steps
FOUR = "four replicas"
CASES = {  # experiments by the title of a row, which says what is changed
    "": (FOUR,),
    ", 256 steps": ("256 steps",),
    ", 1,024 steps": ("1,024 steps",),
    ", a tenth of the rate": ("a tenth of the rate", "a tenth of the rate, whole"),
    ", a text each": ("uneven", "uneven, whole", "uneven, alone"),
    ", two replicas": ("two replicas",),
}
TENTH, SMALL = "a tenth of the rate", "momentum, a tenth of the rate"
MOMENTUM_ROWS = {  # what trains, how often it is exchanged, and the experiments that have its rows
    "LoRA, H=8": (16, 8, (FOUR, "momentum")),
    "LoRA, H=8, a tenth of the rate": (16, 8, (TENTH, SMALL)),
    "LoRA, H=8, two replicas": (16, 8, ("momentum, two replicas",)),
    "LoRA, H=8, a text each": (16, 8, ("momentum, a text each",)),
    "LoRA, H=32": (16, 32, (FOUR, "momentum")),
    "LoRA, H=32, a tenth of the rate": (16, 32, (SMALL,)),
    "whole, H=8": (0, 8, (FOUR, "momentum, whole")),
    "whole, H=8, a tenth of the rate": (0, 8, (f"{TENTH}, whole", "momentum, whole, a tenth of the rate")),
}
EXPERIMENTS: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, Any]]] = {  # methods, ranks, what is changed
    FOUR: (FIRST, RANKS, {}),
    "exchanges": (EXCHANGED, (16,), {}),
    "a third of the rate": (PAIRS[:2], (16,), {"lr": 3e-3}),
    "a tenth of the rate": (PAIRS[:2], (16,), {"lr": 1e-3}),
    "uneven": ((*FEW[1:], "residual(32)", "alternating(32)"), (16,), {"parts": True}),
    "two replicas": (FEW, RANKS, {"replicas": 2}),
    "uneven, whole": (FEW[1:], (0,), {"parts": True}),
    "uneven, alone": (FEW[:1], RANKS, {"parts": True}),
    "256 steps": (PAIRS, RANKS, {"steps": 256}),
    "a tenth of the rate, whole": (PAIRS, (0,), {"lr": 1e-4}),
    "H=16": (("local_sgd(16)", "diloco(16)"), (16,), {}),
    "more codecs": (("diloco(32) int8", "diloco(32) e3m0, no momentum"), RANKS, {}),
    "momentum": (OFTEN + SELDOM, (16,), {}),
    "momentum, a tenth of the rate": ((*OFTEN, *SELDOM, *PAIRS[2:]), (16,), {"lr": 1e-3}),
    "momentum, whole": (OFTEN, (0,), {}),
    "momentum, whole, a tenth of the rate": (OFTEN, (0,), {"lr": 1e-4}),
    "momentum, two replicas": (("local_sgd(8)", "diloco(8)", OFTEN[1]), (16,), {"replicas": 2}),
    "momentum, a text each": (("local_sgd(8)", "diloco(8)", OFTEN[1]), (16,), {"parts": True}),
    "rank 4": (FEW, (4,), {}),
    "1,024 steps": (FEW, RANKS, {"steps": 1024}),
}


def rows(results: Results, experiment: str, seed: int) -> dict[tuple[str, int], Tuning]:
    """Return an experiment's runs with a seed, by method and rank."""
    names, ranks, changes = EXPERIMENTS[experiment]
    found = {}
    for rank, name in product(ranks, names):
        method, settings = METHODS[name]
        settled = replace(best(results, rates(rank)), seed=seed, **changes)
        found[name, rank] = replace(settled, method=method, settings=spelled(**settings))
    return found


def beginning(seed: int, replicas: int = 1) -> Tuning:
    """Return a run of no steps, on the text of so many replicas."""
    kind = {"replicas": replicas, "parts": replicas > 1}
    return Tuning(SIZE, "alone", 0.0, seed, 0, common=0.0, readouts=True, **kind)


def visible(rank: int, rate: float, seed: int) -> dict[str, float]:
    """Return the share of the weights that steps at a constant rate change in bf16, as the forward pass sees them.

    A codec that sent these alone would need at least the entropy of where they are, and two bytes each: with `fewer`,
    how many times fewer bytes that is than E3M0 needs.
    """
    steps = VISIBLE_AFTER + max(VISIBLE_IN)
    run = Tuning(SIZE, "alone", rate, seed, steps, replicas=1, common=0.0, falls=False, rank=rank)
    stack, figures, before = Tunings([run]), {}, torch.empty(0)
    [lane] = stack.lanes
    for step in range(steps + 1):
        now = lane.weights.bfloat16()
        if step == VISIBLE_AFTER:
            before = now
        if (every := step - VISIBLE_AFTER) in VISIBLE_IN:
            share = (now != before).float().mean().item()
            bits = 16 * share - sum(p * math.log2(p) for p in (share, 1 - share) if p)
            e3m0 = E3M0().wire_bytes(now.numel()) / now.numel()
            figures |= {
                f"share, H={every}": round(share, 5),
                f"fewer, H={every}": round(8 * e3m0 / (bits or math.nan), 3),
            }
        if step < steps:
            stack._step()
    return figures


# ---- the tables of docs/evidence.md


def spread_of(values: Sequence[float], form: str = ".4f") -> str:
    """Return the mean and its standard error as one word."""
    return with_error(list(values), form).replace(" ± ", "±")


def losses(results: Results, experiment: str, name: str, rank: int, key: str = "held_out_loss") -> list[float]:
    """Return a figure of a row by seed; nothing if one is missing."""
    runs = [rows(results, experiment, seed).get((name, rank)) for seed in SEEDS]
    found = [results.figures.get(run, {}).get(key) for run in runs if run is not None]
    return [] if None in found else found


def shares(results: Results, experiment: str, name: str, rank: int, of: str = "alone") -> list[float]:
    """Return by seed the share that a row keeps of DDP's gain over one replica alone, or of its fall from the start."""
    figures = [losses(results, experiment, one, rank) for one in ("alone", "DDP", name)]
    if of == "start":
        replicas = 4 if experiment.startswith("uneven") else 1
        figures[0] = [results.loss(beginning(seed, replicas)) for seed in SEEDS]
    return [kept(list(one)) for one in zip(*figures, strict=True)] if all(figures) else []


def methods_table(results: Results) -> list[str]:
    """Return losses on both texts, and the share of DDP's gain, of all weights and of LoRA."""
    head = [f"{what}: {figure}" for what in ("whole", "LoRA") for figure in ("new text", "gain kept", "old text")]
    lines = [f"| method | {' | '.join(head)} | fewer bytes |", "|---" * 8 + "|"]
    for name in ("before", *(one for one in FIRST if "(128)" not in one)):
        cells, fewer = [], "-"
        for rank in RANKS:
            if name == "before":
                start = [results.figures.get(beginning(seed), {}) for seed in SEEDS]
                new, old = ([one[key] for one in start if one] for key in ("held_out_loss", "old_loss"))
                share: list[float] = []
            else:
                new, old = (losses(results, FOUR, name, rank, key) for key in ("held_out_loss", "old_loss"))
                share = shares(results, FOUR, name, rank)
                sent = [losses(results, FOUR, one, rank, "bytes_sent") for one in ("DDP", name)]
                fewer = as_times(sent[0][0] / sent[1][0]) if all(sent) and sent[1][0] else "-"
            cells += [spread_of(new), spread_of(share, ".2f") if share else "-", spread_of(old)] if new else ["-"] * 3
        lines.append(f"| {'before' if name == 'before' else f'`{name}`'} | {' | '.join(cells)} | {fewer} |")
    return lines


def cases_table(results: Results) -> list[str]:
    """Return the loss on the new text as one thing is changed, and of `diloco` by how much it is below `local_sgd`."""
    head = ["`alone`", "`DDP`", *(f"`{one}({every})`" for every in (8, 32) for one in ("local_sgd", "diloco"))]
    lines = [f"| what trains | {' | '.join(head)} |", "|---" * 7 + "|"]
    cases = [(rank, "LoRA" if rank else "whole", *case) for rank, case in product(RANKS, CASES.items())]
    for rank, what, title, experiments in [*cases, (4, "LoRA", ", rank 4", ("rank 4",))]:

        def found(name: str, rank: int = rank, experiments: Sequence[str] = experiments) -> list[float]:
            return next(filter(None, (losses(results, one, name, rank) for one in experiments)), [])

        cells = [found("alone"), found("DDP")]
        for every in (8, 32):
            plain, moved = (found(f"{recipe}({every})") for recipe in ("local_sgd", "diloco"))
            cells += [plain, [one - other for one, other in zip(plain, moved, strict=True)] if moved else []]
        if any(cells):
            said = [spread_of(one) if one else "-" for one in cells]
            lines.append(f"| {what}{title} | {' | '.join(said)} |")
    return lines


def by_momentum(results: Results) -> dict[str, list[list[float]]]:
    """Return losses on the new text by what the outer momentum grows to, from none to the default."""
    found = {}
    for title, (rank, every, experiments) in MOMENTUM_ROWS.items():
        names = [f"local_sgd({every})", *(f"diloco({every}) to {most}" for most in MOMENTA), f"diloco({every})"]
        found[title] = [
            next(filter(None, (losses(results, one, name, rank) for one in experiments)), []) for name in names
        ]
    return found


def momentum_table(results: Results) -> list[str]:
    lines = [f"| `diloco`, momentum to | 0 | {' | '.join(map(str, MOMENTA))} | 0.9 |", "|---" * 6 + "|"]
    for title, found in by_momentum(results).items():
        if any(found):
            lines.append(f"| {title} | {' | '.join(spread_of(one) if one else '-' for one in found)} |")
    return lines


def exchanges_table(results: Results) -> list[str]:
    """Return the loss by exchange of LoRA's factors, and how much lower than by today's it is."""
    ways = {"averaged apart": "local_sgd(32)", "with the residual": "residual(32)"}
    ways |= {"best of their rank": "best_rank(32)", "in turns": "alternating(32)"}
    lines = ["| A and B | one text | lower by | a text each | lower by |", "|---" * 5 + "|"]
    usual = {one: losses(results, one, "local_sgd(32)", 16) for one in (FOUR, "uneven")}
    for title, name in ways.items():
        cells = []
        for experiment in usual:
            where = "exchanges" if experiment == FOUR and name in EXCHANGED else experiment
            found = losses(results, where, name, 16)
            saved = [before - after for before, after in zip(usual[experiment], found, strict=False)]
            cells += [spread_of(one) if any(one) else "-" for one in (found, saved)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def visible_figures() -> dict[tuple[int, float], dict[str, float]]:
    """Return the mean figures of `visible`, by rank and rate."""
    found: dict[tuple[int, float], list[dict[str, float]]] = {}
    for line in map(json.loads, (RESULTS / VISIBLE_FILE).read_text(encoding="utf-8").splitlines()):
        found.setdefault((line["rank"], line["lr"]), []).append(line["figures"])
    return {
        kind: {name: statistics.mean(one[name] for one in lines) for name in lines[0]} for kind, lines in found.items()
    }


def visible_table() -> list[str]:
    """Return the share of weights that change in bf16, and how many times fewer bytes than E3M0 they need."""
    lines = ["| rate | H=8: changed | fewer bytes | H=32: changed | fewer bytes |", "|---" * 5 + "|"]
    for (rank, rate), figures in visible_figures().items():
        cells = [f"{figures[f'{what}, H={every}']:.2f}" for every in VISIBLE_IN for what in ("share", "fewer")]
        lines.append(f"| {'LoRA' if rank else 'whole'}, {rate:g} | {' | '.join(cells)} |")
    return lines


def phrases() -> list[str]:
    """Return what the page says in its text."""
    results = Results(FILE, Tuning)
    of = [
        [statistics.mean(shares(results, FOUR, name, rank, start)) for start in ("alone", "start")]
        for name, rank in (("diloco(32)", 0), ("diloco(32)", 16), ("local_sgd(8)", 16))
    ]
    longer = [statistics.mean(shares(results, "1,024 steps", "diloco(32)", 16, start)) for start in ("alone", "start")]
    above = {
        title: [statistics.mean(one) - statistics.mean(plain) for one in (half, usual)]
        for title, (plain, _, half, _, usual) in by_momentum(results).items()
        if title.startswith("LoRA")
    }
    two = [statistics.mean(shares(results, "two replicas", "diloco(32)", rank, "start")) for rank in RANKS]
    often, seldom = (
        [visible_figures()[0, 1e-6][f"{what}, H={every}"] for what in ("share", "fewer")] for every in VISIBLE_IN
    )
    return [
        f"`diloco(32)` keeps {of[0][0]:.2f} of DDP's gain over one replica alone and {of[0][1]:.2f} of its fall from "
        f"the first weights; by LoRA {of[1][0]:.2f} and {of[1][1]:.2f}, as 16 rounds are few: {longer[0]:.2f} and "
        f"{longer[1]:.2f} in 1,024 steps. "
        f"`local_sgd(8)` keeps {of[2][0]:.2f} and {of[2][1]:.2f} by LoRA, and two replicas with `diloco(32)` "
        f"{two[0]:.2f} and {two[1]:.2f} of the fall, whole and by LoRA",
        f"among two replicas it ends {above['LoRA, H=8, two replicas'][1]:.3f} above plain averages. With a momentum "
        f"to 0.5 it ends at most {max(half for half, _ in above.values()):.3f} above them, and else below",
        f"At a rate of 1e-6, 8 steps change {often[0]:.2f} of all weights in bf16, which takes at most "
        f"{often[1]:.1f} times fewer bytes than E3M0, and 32 steps {seldom[0]:.2f}, {seldom[1]:.1f} times",
    ]


def tables() -> dict[str, list[str]]:
    """Return the tables of the page, by title."""
    results = Results(FILE, Tuning)
    return {
        "methods": methods_table(results),
        "cases": cases_table(results),
        "momentum": momentum_table(results),
        "exchanges": exchanges_table(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", nargs="*", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and train nothing")
    parser.add_argument("--visible", action="store_true", help=f"write {VISIBLE_FILE}, and train nothing else")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.tables:
        for title, lines in (tables() | {"visible": visible_table()}).items():
            print(f"\n{title}\n\n" + "\n".join(lines))
        return
    if chosen.visible:
        for seed, (rank, rates_of_it) in product(chosen.seeds, VISIBLE_RATES.items()):
            for rate in rates_of_it:
                facts = {"size": SIZE, "rank": rank, "lr": rate, "text": checksum_of_kinds()}
                report(VISIBLE_QUESTION, visible(rank, rate, seed), seed=seed, write_to=VISIBLE_FILE, **facts)
        return
    results = Results(FILE, Tuning)

    def done(runs: Iterable[Run]) -> None:
        do(runs, results, train, QUESTION, text=checksum_of_kinds())

    done(run for rank in RATES for run in rates(rank))
    done(beginning(seed, replicas) for seed in chosen.seeds for replicas in (1, 4))
    for experiment in chosen.experiment:
        for seed in chosen.seeds:
            done(rows(results, experiment, seed).values())


if __name__ == "__main__":
    main()
