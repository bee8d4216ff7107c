# SPDX-License-Identifier: Apache-2.0
"""What do five ways to train one small GPT come to? Take over a run of `farflung demo` and its picture.

farflung demo && python benchmarks/bench_demo.py farflung-demo
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path

from _measure import report

from farflung.demo.settings import PICTURE_FILE, SETTINGS_FILE, DemoSettings, load_results

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the demo's output")
    folder = parser.parse_args().folder
    settings = DemoSettings(**{**asdict(DemoSettings.load(str(folder / SETTINGS_FILE))), "output": str(folder)})
    facts = {name: value for name, value in asdict(settings).items() if name not in ("seed", "output")}
    report(
        "What do five ways to train one small GPT come to?",
        {result.way: asdict(result) for result in load_results(settings)},
        seed=settings.seed,
        write_to="demo.jsonl",
        **facts,
    )
    shutil.copyfile(folder / PICTURE_FILE, PICTURE)


if __name__ == "__main__":
    main()
