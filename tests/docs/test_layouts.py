# SPDX-License-Identifier: Apache-2.0
"""`docs/islands.md`: its numbers are the estimate's, and its picture shows the layouts of its tables."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from farflung.base.words import in_bytes
from farflung.cost.memory import ModelSize, RankLayout, estimate
from farflung.cost.recipes import method_of
from farflung.outer import diloco

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "islands.md").read_text(encoding="utf-8")
SIZE = ModelSize((132_000_000, *[44_000_000] * 22))
HALF = {"param_bytes": 2, "reduce_bytes": 4}


def rows(heading):
    """The rows of the table below a heading, as lists of their cells."""
    table = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.+\|$", table, re.M)]
    return cells[2:]


@pytest.mark.parametrize("row", rows("What a rank needs"), ids=lambda row: row[0])
def test_what_a_rank_needs_is_what_the_estimate_says(row):
    name, grid, *shown = row
    rank_rows, columns = map(int, grid.split(" x "))
    sharded = name.startswith(("FSDP", "HSDP"))
    held = SIZE.parameters // (columns if sharded else 1)
    outer = method_of(diloco(every=32), parameters=held, name="diloco") if "outer loop" in name else None
    options = {"sharded": True, **HALF} if sharded else {}
    cost = estimate(SIZE, RankLayout(rank_rows, columns, outer=outer, **options))
    assert shown == [in_bytes(number) for number in (cost.peak, cost.row_bytes, cost.column_bytes)]


def test_bytes_for_each_parameter_are_those_of_the_estimate():
    alone, replicated = (estimate(SIZE, RankLayout(ranks)).peak / SIZE.parameters for ranks in (1, 8))
    assert f"needs {alone:g} bytes for each parameter, {replicated:g} under DDP" in PAGE


def test_what_fsdp_needs_without_wrapping_and_with_accumulation_is_what_the_estimate_says():
    sharded = RankLayout(1, 8, sharded=True, **HALF)
    at_once = estimate(ModelSize((SIZE.parameters,)), sharded)
    accumulated = estimate(SIZE, replace(sharded, micro_batches=4))
    assert f"the whole model at once, for {in_bytes(at_once.peak)} here" in PAGE
    assert f"until the last batch of a step, for {in_bytes(accumulated.peak)};" in " ".join(PAGE.split())


def test_the_picture_of_a_round_can_be_drawn(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "images" / "round.py"))["draw"](tmp_path / "round.png")
    assert (tmp_path / "round.png").read_bytes()[:4] == b"\x89PNG"


def test_the_picture_shows_each_layout_and_can_be_drawn(tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "images" / "layouts.py"))
    titles = [drawing.title.replace("\n", " ") for drawing in script["LAYOUTS"]]
    assert titles == [row[0] for row in rows("The flags")] == [row[0] for row in rows("What a rank needs")]
    script["draw"](tmp_path / "layouts.png")
    assert (tmp_path / "layouts.png").read_bytes()[:4] == b"\x89PNG"
