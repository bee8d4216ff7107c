# SPDX-License-Identifier: Apache-2.0
"""Redo runs of results/evidence.jsonl and compare: python -m evidence.redo LINE [LINE ...], from `benchmarks`.

Lines are counted from 1. A run is done by itself here, where it was one of a stack: sums may be rounded
otherwise, so the loss may differ in its last digits, and what was sent may not. Nothing is written.
"""

from __future__ import annotations

import argparse
import json

import torch
from _measure import RESULTS

from evidence.experiments import FILE, run_of
from evidence.runner import train
from evidence.runs import checksum


def redo(number: int, line: dict[str, object]) -> str:
    """Do the run of a line again; return what was there and what came now."""
    [now] = train([run_of(line)])
    then = line["figures"]
    said = f"line {number}: {then} then, {now} now"
    if "text" not in line:
        return f"{said}; the line has no checksum of its text"
    return said if line["text"] == checksum() else f"{said}; the text is another one: {line['text']}, now {checksum()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", nargs="+", type=int)
    torch.set_num_threads(1)
    lines = (RESULTS / FILE).read_text(encoding="utf-8").splitlines()
    for number in parser.parse_args().line:
        if not 1 <= number <= len(lines):
            parser.error(f"line {number}: {FILE} has {len(lines)} lines.")
        print(redo(number, json.loads(lines[number - 1])), flush=True)


if __name__ == "__main__":
    main()
