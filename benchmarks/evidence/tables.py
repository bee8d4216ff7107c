# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/evidence.md, from results/evidence.jsonl alone.

From `benchmarks`, `python -m evidence.tables` prints them in full, with standard errors.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType

from evidence.efficiency import curve, efficiencies
from evidence.experiments import (
    CHANGED,
    COMPARED,
    EXCHANGES,
    HOPS,
    LARGEST,
    LONG_ROUNDS,
    MEASURED,
    METHODS,
    PAIRS,
    PARTS_OF_STEPS,
    RATES,
    READOUTS,
    SCRATCH,
    TUNED_AT,
    WITH_FEEDBACK,
    Results,
    best,
    inner_grids,
    outer_grids,
    rows,
    scratch_grid,
    spelled,
    tuned,
)
from evidence.readouts import WINDOWS
from evidence.runs import SHAPES, Run
from farflung.methods.momentum import rate_of

SEEDS = (0, 1, 2)
NOT_ON_THE_PAGE = re.compile(  # rows of little news
    r"\| (`.+(, defaults|\) rank \d|32, 2.+ 4|128, 2.+ \d+|, no pull)`|the last tenth|outer momentum|2 %"
    r"|34k \| ([28] |4 \| (falls \| (64|128)|stays \| 16) )|100k \| 4 \| falls \| 128|`one average|`DDP, 32"
    r"|`diloco\(\d+\) int8|`(diloco|local_sgd)\(128\)`|`(slowmo|edit|eager_diloco)\(32\)|an outer learning"
    r"|a constant momentum|DDP's inner|30 % of|`alone, a part)"
)


@dataclass
class Row:
    """What a row comes to over its seeds.

    Attributes:
        runs: by seed: one replica alone, DDP, and the method.
        shares: of DDP's gain over one replica alone that the method keeps, by seed.
        differences: by seed, how much larger the share is than that of `diloco(32)`, of "as it is", or from scratch of
            `diloco(8) e3m0`.
        fewer_bytes: how many times fewer than DDP a replica sends, after the common start if there is one.
    """

    name: str
    runs: dict[int, list[Run]] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    fewer_bytes: float = math.nan

    @property
    def mark(self) -> str:
        """`(=)` if the difference is not twice its standard error, or has none; nothing for what is compared with."""
        if not any(self.differences):
            return "" if self.differences else " (=)"
        mean, error = mean_and_error(self.differences)
        return "" if abs(mean) >= 2 * error else " (=)"

    @property
    def share(self) -> str:
        return f"{with_range(self.shares)}{self.mark}"

    def loss(self, index: int) -> str:
        return with_error([losses[index] for losses in self.losses], ".4f")


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error; without a second value that is not a number."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def with_error(values: list[float], form: str, scale: float = 1.0) -> str:
    mean, error = mean_and_error([scale * value for value in values])
    return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form}}")


def with_range(values: list[float], form: str = ".0f") -> str:
    """Return the mean of shares in percent and, of several, the least and the largest."""
    least, largest = (f"{100 * value:{form}}" for value in (min(values), max(values)))
    return f"{100 * statistics.mean(values):{form}} %" + (f" ({least} to {largest})" if len(values) > 1 else "")


def collect(results: Results, experiment: str, size: str) -> dict[str, Row]:
    """Return an experiment's rows that have results, of seeds that have alone and DDP too."""
    found: dict[str, Row] = {}
    for seed in SEEDS:
        usual = [tuned(results, size, seed, METHODS[name][0], **METHODS[name][1]) for name in CHANGED]
        by_name = rows(results, experiment, size, seed)
        usual = by_name.get("as it is", usual)
        if experiment == SCRATCH:
            usual = [by_name[name][0] for name in ("alone", "DDP", MEASURED)]
        for name, runs in by_name.items():
            three = runs if len(runs) == 3 else [*usual[:2], *runs]
            losses = [results.loss(run) for run in three]
            if all(map(math.isfinite, losses)):
                row = found.setdefault(name, Row(name))
                row.runs[seed] = three
                row.losses.append(losses)
                row.shares.append(kept(losses))
                difference = row.shares[-1] - kept([results.loss(run) for run in usual])
                row.differences += [difference] if math.isfinite(difference) else []
                row.fewer_bytes = each_step(results, three[1]) / (each_step(results, three[2]) or math.nan)
    return found


def kept(losses: list[float]) -> float:
    """Return the share of DDP's gain that is kept, from the losses of one replica alone, DDP and the method."""
    return (losses[0] - losses[2]) / (losses[0] - losses[1])


def each_step(results: Results, run: Run) -> float:
    """Return the bytes that a replica sends in a step after the common start."""
    return float(results.figures[run]["bytes_sent"]) / (run.steps - run.split)


def methods(results: Results, size: str) -> dict[str, Row]:
    """Experiments 1 and 2."""
    return collect(results, "1", size) | collect(results, "2", size)


def methods_table(found: dict[str, Row], efficiency: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    names = ["method", "held-out loss", "DDP's gain kept", *["efficiency"] * bool(efficiency), "fewer bytes than DDP"]
    lines = [f"| {' | '.join(names)} | seeds |", "|---" * (len(names) + 1) + "|"]
    for row in sorted(found.values(), key=lambda row: -statistics.mean(row.shares)):
        fewer = "sends nothing" if math.isnan(row.fewer_bytes) else as_times(row.fewer_bytes)
        cells = [row.loss(2), row.share, *([efficiency[row.name]] if efficiency else []), fewer, str(len(row.shares))]
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    return lines


def scratch_table(results: Results, size: str) -> list[str]:
    found = collect(results, SCRATCH, size)
    return methods_table(found, {name: as_efficiency(results, size, row.runs) for name, row in found.items()})


def as_efficiency(results: Results, size: str, runs: Mapping[int, Sequence[Run]]) -> str:
    found = efficiencies(results, size, runs) if runs else []
    return with_error(found, ".2f").replace(" ± ", "±") if found else "-"


def lengths_table(results: Results) -> list[str]:
    """Experiment 11: DDP's mean loss at the end of runs of several lengths, in parts of the usual one."""
    lines = [f"| size | {' | '.join(f'{8 * part:g}/8' for part in (*PARTS_OF_STEPS, 1))} |"]
    lines += ["|---|" + "---|" * (len(PARTS_OF_STEPS) + 1)]
    for size in SHAPES:
        curves = [list(curve(results, size, seed).values()) for seed in SEEDS]
        if all(len(losses) == 1 + len(PARTS_OF_STEPS) for losses in curves):
            cells = [statistics.mean(losses) for losses in zip(*curves, strict=True)]
            lines.append(f"| {size} | {' | '.join(f'{cell:.4f}' for cell in cells)} |")
    return lines


def pairs_table(results: Results) -> list[str]:
    """Experiments 12 and 8: the efficiency with two replicas, with four, and with two of a larger model."""
    lines = ["| method | two replicas | four | two of 385k |", "|---|---|---|---|"]
    for name in (name for name in COMPARED if name != "DDP"):
        cells = []
        for experiment, size in ((PAIRS, "100k"), (SCRATCH, "100k"), (PAIRS, "385k")):
            runs = {seed: rows(results, experiment, size, seed)[name] for seed in SEEDS}
            if all(math.isfinite(results.loss(run)) for [run] in runs.values()):
                cells.append(as_efficiency(results, size, runs))
        if len(cells) == 3:
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def hops_table(results: Results) -> list[str]:
    """Experiment 13: losses of `diloco(8)` whose replicas exchange encoded values in one hop and in two."""
    heads = {EXCHANGES[0]: "one hop", EXCHANGES[1]: "two", WITH_FEEDBACK: "two, with feedback"}
    lines = [f"| `diloco(8)` | {' | '.join(heads.values())} | fewer bytes |", "|---" * (len(heads) + 2) + "|"]
    for size, (replicas, codec) in product(SHAPES, ((4, "e3m0"), (4, "int8"), (8, "e3m0"))):
        cells, num_bytes = [], []
        for exchange in heads:
            name = f"{replicas} replicas, {codec}, {exchange}"
            runs = [rows(results, HOPS, size, seed).get(name, [None])[0] for seed in SEEDS]
            found = [results.figures[run] for run in runs if run in results.figures]
            whole = len(found) == len(SEEDS)
            cells.append(with_error([one["held_out_loss"] for one in found], ".4f") if whole else "-")
            num_bytes += [found[0]["bytes_sent"]] if whole else []
        if cells[:2].count("-") == 0:
            ratio = f"{num_bytes[0] / num_bytes[1]:.2g}"
            lines.append(f"| {replicas} replicas of {size}, {codec} | {' | '.join(cells)} | {ratio} |")
    return lines


def as_times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def changes_table(results: Results) -> list[str]:
    """Experiment 3; a dash where the change doesn't touch one replica alone or DDP."""
    head = "| one change | alone | DDP | `diloco(32)` | DDP's gain kept | fewer bytes than DDP | seeds |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    found = collect(results, "3", TUNED_AT)
    for row in found.values():
        usual = found["as it is"].runs
        both = set(row.runs) & set(usual)
        changed = [any(row.runs[seed][index] != usual[seed][index] for seed in both) for index in (0, 1)]
        cells = [row.loss(index) if row.name == "as it is" or changed[index] else "-" for index in (0, 1)]
        cells += [row.loss(2), row.share, as_times(row.fewer_bytes), str(len(row.shares))]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def saved_by(row: Row, other: Row) -> list[float]:
    """Return by how much the method's loss is below another row's, by seed."""
    there = dict(zip(other.runs, other.losses, strict=True))
    return [there[seed][2] - losses[2] for seed, losses in zip(row.runs, row.losses, strict=True) if seed in there]


def inner_table(results: Results) -> list[str]:
    """Experiment 4; the share is of the gain of DDP with the same inner optimizer, then of DDP with AdamW."""
    names = (
        "inner optimizer",
        "size",
        "alone",
        "DDP",
        "`diloco(32)`",
        "below AdamW's",
        "DDP's gain kept",
        "AdamW DDP's",
    )
    lines = [f"| {' | '.join(names)} | seeds |", "|---|---|---|---|---|---|---|---|---|"]
    for size in SHAPES:
        found = collect(results, "4", size)
        for row in found.values():
            seeds = dict(zip(row.runs, row.losses, strict=True))
            usual = dict(zip(found["AdamW"].runs, found["AdamW"].losses, strict=True))
            of_usual = [kept([*usual[seed][:2], losses[2]]) for seed, losses in seeds.items() if seed in usual]
            below = "-" if row.name == "AdamW" else with_error(saved_by(row, found["AdamW"]), ".4f")
            shares = [row.share, with_range(of_usual)]
            cells = [row.name, size, *map(row.loss, range(3)), below, *shares]
            lines.append(f"| {' | '.join(cells)} | {len(seeds)} |")
    return lines


def tuning_table(results: Results) -> list[str]:
    """What was best at a quarter of the length; for outer settings, next to the recipe's own defaults."""
    lines = ["| method | size | best | loss | loss with defaults |", "|---|---|---|---|---|"]
    grids = [(name, size, grid) for size in SHAPES for name, grid in inner_grids(results, size).items()]
    grids += [(name, TUNED_AT, grid) for name, grid in outer_grids(results).items()]
    for name, size, grid in grids:
        there = [run for run in grid if math.isfinite(results.loss(run))]
        if len(there) < len(grid):
            continue
        chosen = min(there, key=results.loss)
        outer = ", ".join(
            f"{key} {value}" for key, value in chosen.options.items() if key in ("lr", "alpha", "momentum", "beta")
        )
        is_inner = len({run.lr for run in grid}) > 1
        said = f"inner rate {chosen.lr:.2g}" if is_inner else outer or "defaults"
        usual = "-" if is_inner else f"{results.loss(grid[0]):.4f}"
        lines.append(f"| `{name}` | {size} | {said} | {results.loss(chosen):.4f} | {usual} |")
    return lines


def rates_table(results: Results) -> list[str]:
    """Experiment 6: the loss by outer learning rate; in bold where it is the recipe's default."""
    lines = [f"| size | replicas | inner rate | H | {' | '.join(map(str, RATES))} |", "|" + "---|" * (4 + len(RATES))]
    by_row: dict[tuple[str, int, str, int], dict[float, list[float]]] = {}
    for size, seed in product(("34k", "100k"), SEEDS):
        for [run] in rows(results, "6", size, seed).values():
            place = (size, run.replicas, "falls" if run.falls else "stays", run.options["every"])
            if math.isfinite(loss := results.loss(run)):
                by_row.setdefault(place, {}).setdefault(run.options["lr"], []).append(loss)
    for place, losses in by_row.items():
        cells = [with_error(losses[rate], ".4f") if rate in losses else "-" for rate in RATES]
        bold = [f"**{cell}**" if rate == rate_of(place[-1]) else cell for rate, cell in zip(RATES, cells, strict=True)]
        lines.append(f"| {' | '.join(map(str, place))} | {' | '.join(bold)} |")
    return lines


def defaults_table(results: Results) -> list[str]:
    """Experiment 7: how far above the tuned loss the defaults end, by length; below it with a minus.

    A dash where the tuned settings are the defaults.
    """
    lines = ["| method | steps | tuned | defaults | defaults above tuned | seeds |", "|---|---|---|---|---|---|"]
    for name in rows(results, "7", TUNED_AT, 0):
        pairs = [[results.loss(run) for run in rows(results, "7", TUNED_AT, seed)[name]] for seed in SEEDS]
        if pairs := [pair for pair in pairs if all(map(math.isfinite, pair))]:
            tuned_losses, losses = map(list, zip(*pairs, strict=True))
            above = with_range([usual / best - 1 for best, usual in pairs], ".1f") if tuned_losses != losses else "-"
            cells = [with_error(tuned_losses, ".4f"), with_error(losses, ".4f"), above, str(len(pairs))]
            method, _, steps = name.removesuffix(" steps").rpartition(", ")
            lines.append(f"| `{method}` | {steps} | {' | '.join(cells)} |")
    return lines


def readouts_table(results: Results, of: str = "") -> list[str]:
    """Experiment 9: the loss by each readout; or by how much it is below that `of` one, in the same runs.

    What has no rounds has `last` in place of the weights of a round.
    """
    means = [f"slow, mean of {window}" for window in WINDOWS]
    columns = ("replicas", "look_ahead", "slow", *means, f"look_ahead, mean of {WINDOWS[1]}")
    lines = [f"| size | run | {' | '.join(columns)} | seeds |", "|" + "---|" * (3 + len(columns))]
    for size in SHAPES:
        found: dict[str, list[dict[str, float]]] = {}
        for seed in SEEDS:
            for name, [run] in rows(results, READOUTS, size, seed).items():
                figures = results.figures.get(run, {})
                if figures and None not in figures.values():
                    found.setdefault(name, []).append(figures)
        for name, by_seed in found.items():
            cells = []
            for column in columns:
                keys = [column, column.replace("slow", "last")]
                key = next((one for one in keys if all(one in figures for figures in by_seed)), None)
                if key is None:
                    cells.append("-")
                elif of:
                    below = [figures.get(of, figures.get("last", 0.0)) - figures[key] for figures in by_seed]
                    cells.append(with_error(below, ".4f"))
                else:
                    cells.append(with_error([figures[key] for figures in by_seed], ".4f"))
            lines.append(f"| {size} | {name} | {' | '.join(cells)} | {len(by_seed)} |")
    return lines


def readout(results: Results, size: str, row: str, key: str) -> list[float]:
    """Experiment 9: the losses of a row by one readout, of each seed; none if a seed is missing."""
    found = []
    for seed in SEEDS:
        [run] = rows(results, READOUTS, size, seed)[row]
        figures = results.figures.get(run, {})
        found += [figures[one] for one in (key, key.replace("slow", "last")) if figures.get(one) is not None][:1]
    return found if len(found) == len(SEEDS) else []


def readout_phrases(results: Results) -> list[str]:
    """Return what the page says of readouts."""
    mean = f"slow, mean of {WINDOWS[0]}"
    usual, less = (f"{MEASURED}, momentum to {largest}" for largest in (LARGEST[-1], LARGEST[-2]))
    long, at = f"{LONG_ROUNDS}, falling", lambda *one: statistics.mean(readout(results, *one))
    sizes = [size for size in SHAPES if readout(results, size, f"{usual}, constant", mean)]

    def below(before: tuple[str, str], after: tuple[str, str]) -> str:
        """Return by how many percent a row's readout ends below another one, over sizes."""
        found = [100 * (1 - at(size, *after) / at(size, *before)) for size in sizes]
        return f"{min(found):.1f} to {max(found):.1f} %"

    def share(key: str) -> str:
        alone, all_data, ours = (at("100k", row, key) for row in ("alone, constant", ddp, f"{less}, constant"))
        return f"{100 * (alone - ours) / (alone - all_data):.0f} %"

    constant, ddp = (f"{usual}, constant", mean), "DDP, constant"
    return [
        f"the mean over five rounds ends {below((constant[0], 'look_ahead'), constant)} below the look-ahead",
        f"DDP's own mean {below((ddp, 'slow'), (ddp, mean))} below its last weights",
        f"With `max_momentum={LARGEST[-2]}` it ends {below(constant, (f'{less}, constant', mean))} lower",
        f"at 385k `{MEASURED}` ends at {at('385k', f'{less}, constant', mean):.4f} so, and DDP under a cosine at "
        f"{at('385k', 'DDP, falling', 'slow'):.4f}",
        f"At 100k it keeps {share(mean)} of DDP's gain with the same mean for all, {share('slow')} with none",
        f"{100 * (at('385k', long, mean) / at('385k', long, 'slow') - 1):.1f} % higher with H=32 (385k), and 0.8 "
        f"{100 * (at('385k', f'{less}, falling', 'slow') / at('385k', f'{usual}, falling', 'slow') - 1):.1f} %",
    ]


def readouts_by_size(results: Results) -> list[str]:
    """Experiment 9 with the momenta that are used: the loss by three readouts at each size with all seeds."""
    found: dict[str, dict[str, str]] = {}
    left_out = ["alone", f"momentum to {LARGEST[0]},", f"momentum to {LARGEST[1]}, falling"]
    for line in readouts_table(results)[2:]:
        size, run, _, ahead, slow, mean, *_, seeds = line.strip("| ").split(" | ")
        if seeds == str(len(SEEDS)) and not any(one in run for one in left_out):
            run = run.replace(f", momentum to {LARGEST[-1]}", "").replace("momentum to ", "max_momentum=")
            found.setdefault(run, {})[size] = f"{ahead}, {slow}, {mean}"
    sizes = [size for size in SHAPES if any(size in cells for cells in found.values())]
    lines = [f"| run, inner rate | {' | '.join(sizes)} |", "|---|" + "---|" * len(sizes)]
    return lines + [f"| {run} | {' | '.join(cells.get(size, '-') for size in sizes)} |" for run, cells in found.items()]


def scratch_rates_table(results: Results) -> list[str]:
    """Experiment 8: the loss of the first seed at each of two inner rates; the better one, in bold, is used."""
    lines = [f"| size | `alone` | `DDP` | `{MEASURED}` |", "|---|---|---|---|"]
    for size in SHAPES:
        cells = []
        for name in ("alone", "DDP", MEASURED):
            grid = scratch_grid(results, size, name)
            chosen = best(results, grid)
            there = [run for run in grid if math.isfinite(results.loss(run))]
            pairs = [(f"{run.lr:.2g}: {results.loss(run):.4f}", run is chosen) for run in there]
            cells.append(", ".join(f"**{pair}**" if is_chosen else pair for pair, is_chosen in pairs))
        if all(cells):
            lines.append(f"| {size} | {' | '.join(cells)} |")
    return lines


def headline(results: Results, size: str, name: str) -> str:
    """Return `x % (least to largest) of DDP's gain for 1/y of all its bytes`, of runs from scratch."""
    row = collect(results, SCRATCH, size)[name]
    return f"{with_range(row.shares)} of DDP's gain for 1/{row.fewer_bytes:.0f} of all its bytes"


def in_two_hops(results: Results) -> str:
    """Return the same of `diloco(8) e3m0` at 100k, whose replicas exchange their values in two hops."""
    row = collect(results, SCRATCH, "100k")[MEASURED]
    runs = [rows(results, HOPS, "100k", seed) for seed in SEEDS]
    one, two = ([results.figures[by_name[f"4 replicas, e3m0, {way}"][0]] for by_name in runs] for way in EXCHANGES)
    pairs = zip(row.losses, two, strict=True)
    shares = [(alone - run["held_out_loss"]) / (alone - ddp) for (alone, ddp, _), run in pairs]
    fewer = row.fewer_bytes * one[0]["bytes_sent"] / two[0]["bytes_sent"]
    return f"{with_range(shares)} of DDP's gain for 1/{fewer:.0f} of all its bytes"


def with_common_start(results: Results, size: str, name: str) -> str:
    """Return `x % (least to largest) of DDP's gain for 1/y of its bytes`, of runs whose first tenth is DDP."""
    row = methods(results, size)[name]
    return f"{with_range(row.shares)} of DDP's gain for 1/{row.fewer_bytes:.0f} of its bytes"


def above(results: Results, pairs: list[tuple[Run, Run]]) -> float:
    """Return by how many percent the mean loss of the first runs is above that of the second ones."""
    first, second = (statistics.mean(map(results.loss, runs)) for runs in zip(*pairs, strict=True))
    return 100 * (first / second - 1)


def outer_rate(results: Results, size: str, replicas: int, every: int, inner: str = "falling") -> float:
    """Experiment 6: by how many percent an outer rate of 1.0 ends above 0.7."""
    pairs = []
    for seed in SEEDS:
        by_name = rows(results, "6", size, seed)
        one, less = (by_name[f"{replicas} replicas, {inner}, H={every}, lr {lr}"][0] for lr in (1.0, 0.7))
        pairs.append((one, less))
    return above(results, pairs)


def sparse_loco(results: Results, steps: int, **settings: float) -> float:
    """Return by how many percent other settings of `sparse_loco` end above its defaults, at 34k."""
    usual = [rows(results, "7", TUNED_AT, seed)[f"sparse_loco(32), {steps} steps"][1] for seed in SEEDS]
    other = [replace(run, settings=spelled(**{**run.options, **settings})) for run in usual]
    return above(results, list(zip(other, usual, strict=True)))


def phrases(results: Results) -> list[str]:
    """Return what the page says in its text of differences in loss."""
    places = (("34k", 4), ("34k", 2), ("34k", 8), ("100k", 4))
    often, seldom = ([outer_rate(results, *place, every) for place in places] for every in (8, 32))
    slower = sparse_loco(results, 2000, lr=1.0, beta=0.95)
    fewer = methods(results, "100k")[MEASURED].fewer_bytes
    return [
        f"1.0 ends {min(often):.1f} to {max(often):.1f} % higher than 0.7 with H=8, "
        f"and {-max(seldom):.1f} to {-min(seldom):.1f} % lower with H=32",
        f"with H=32 1.0 ends {outer_rate(results, '34k', 4, 32, 'constant'):.1f} % higher than 0.7",
        f"With 1.0 and the paper's decay of 0.95 it ends {slower:.1f} % higher in 2,000 steps",
        f"With the bytes of that tenth it is 1/{1 / (0.1 + 0.9 / fewer):.1f}",
        *readout_phrases(results),
    ]


def all_tables(results: Results) -> dict[str, list[str]]:
    """Return every table that has rows, by its title."""
    tables = {"tuning": tuning_table(results), "changes": changes_table(results), "inner": inner_table(results)}
    tables |= {f"{size} from scratch": scratch_table(results, size) for size in SHAPES}
    tables |= {"lengths of DDP": lengths_table(results), "two replicas": pairs_table(results)}
    tables["rates from scratch"] = scratch_rates_table(results)
    tables |= {size: methods_table(methods(results, size)) for size in SHAPES}
    tables |= {"rates": rates_table(results), "defaults": defaults_table(results)}
    tables |= {"readouts": readouts_table(results), "below the look-ahead": readouts_table(results, "look_ahead")}
    tables["hops"] = hops_table(results)
    tables["uneven"] = methods_table(collect(results, "5", TUNED_AT))
    return {title: lines for title, lines in tables.items() if len(lines) > 2}


def by_size_table(results: Results) -> list[str]:
    """Experiments 1 and 2: the share that is kept at each size, and the bytes at the smallest that has the method."""
    found = {size: methods(results, size) for size in SHAPES}
    found = {size: by_name for size, by_name in found.items() if by_name}
    lines = [f"| method | {' | '.join(found)} | fewer bytes than DDP |", "|---|" + "---|" * (len(found) + 1)]
    named: dict[str, list[Row]] = {}
    for by_name in found.values():
        for row in sorted(by_name.values(), key=lambda row: -statistics.mean(row.shares)):
            named.setdefault(row.name, []).append(row)
    for name, [row, *_] in named.items():
        shares = [by_name[name].share if name in by_name else "-" for by_name in found.values()]
        fewer = "sends nothing" if math.isnan(row.fewer_bytes) else as_times(row.fewer_bytes)
        lines.append(f"| `{name}` | {' | '.join(shares)} | {fewer} |")
    return lines


def page_tables(results: Results) -> dict[str, list[str]]:
    """Return the tables of docs/evidence.md: without standard errors, sizes side by side, without the tuning."""
    tables = all_tables(results)
    for title in (
        "tuning",
        "defaults",
        "readouts",
        "below the look-ahead",
        "lengths of DDP",
        "rates from scratch",
        *SHAPES,
    ):
        tables.pop(title, None)
    tables = {title: [re.sub(r" ± [\d.]+", "", line) for line in lines] for title, lines in tables.items()}
    tables["inner"] = [line for line in tables["inner"] if line.endswith(f"| {len(SEEDS)} |")]
    tables["hops"] = hops_table(results)  # whose differences are next to nothing
    tables["by readout"] = [re.sub(r" ± [\d.]+", "", line) for line in readouts_by_size(results)]
    tables["by size"] = by_size_table(results)
    tables["two replicas"] = [line for line in tables["two replicas"] if not re.search("sparse|streaming", line)]
    return {
        title: without_seeds([line for line in lines if not NOT_ON_THE_PAGE.match(line)])
        for title, lines in tables.items()
    }


def without_seeds(lines: list[str]) -> list[str]:
    """Return a table without the column that says how many seeds there are, if each row has all."""
    head, rule, *rows = lines
    if head.endswith("| seeds |") and all(row.endswith(f"| {len(SEEDS)} |") for row in rows):
        return [head.removesuffix(" seeds |"), rule.removesuffix("---|"), *(row[:-4] for row in rows)]
    return lines


if __name__ == "__main__":
    for title, lines in all_tables(Results()).items():
        print(f"\n{title}\n\n" + "\n".join(lines))
