# SPDX-License-Identifier: Apache-2.0
"""What do six ways to train one small GPT come to? Take over a run of `farflung demo`, and its picture if asked to.

farflung demo && python benchmarks/bench_demo.py farflung-demo --picture

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2` computes as an older processor does.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from _measure import report

from farflung.demo.settings import PICTURE_FILE, SETTINGS_FILE, DemoSettings, load_results

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the demo's output")
    parser.add_argument("--picture", action="store_true", help="take over its picture too")
    asked = parser.parse_args()
    folder = asked.folder
    settings = DemoSettings(**{**asdict(DemoSettings.load(str(folder / SETTINGS_FILE))), "output": str(folder)})
    facts = {name: value for name, value in asdict(settings).items() if name not in ("seed", "output")}
    report(
        "What do six ways to train one small GPT come to?",
        {result.way: asdict(result) for result in load_results(settings)},
        seed=settings.seed,
        write_to="demo.jsonl",
        instructions=torch.backends.cpu.get_cpu_capability(),  # sums are rounded in another order with others
        **facts,
    )
    if asked.picture:
        shutil.copyfile(folder / PICTURE_FILE, PICTURE)


if __name__ == "__main__":
    main()
