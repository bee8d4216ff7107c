# SPDX-License-Identifier: Apache-2.0
"""How long until something happens: `--help`, a slip in each command, `import`, and the first line of a script in two
launched CPU processes.

    python benchmarks/bench_startup.py --rounds 9

Accelerate's launcher starts one process, not two, when it is asked for two on the CPU: its figure is for one. Python's
bytecode caches are in use, as they are for an installed package: the first round, which is not counted, fills them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from _measure import ratios, report

from farflung.launch.codes import DONE, USAGE
from farflung.launch.main import COMMANDS as FARFLUNG_COMMANDS

SCRIPT = """
import time
now = time.time()
import os
with open(f"first{os.environ.get('RANK', '0')}", "w") as file:
    file.write(repr(now))
"""
PYTHON = sys.executable
# Without this variable Python keeps the bytecode of a checkout's files, as pip keeps that of a package's.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

COMMANDS = {
    "help": {
        "python -c pass": [PYTHON, "-c", "pass"],
        "farflung": [PYTHON, "-m", "farflung", "--help"],
        "torchrun": [PYTHON, "-m", "torch.distributed.run", "--help"],
        "accelerate": [PYTHON, "-m", "accelerate.commands.accelerate_cli", "--help"],
    },
    "slip": {
        "python -c pass": [PYTHON, "-c", "pass"],
        **{name: [PYTHON, "-m", "farflung", name, "--not-a-flag"] for name in FARFLUNG_COMMANDS},
    },
    "import": {
        "import torch": [PYTHON, "-c", "import torch"],
        "import farflung": [PYTHON, "-c", "import farflung"],
        "from farflung import Accelerator": [PYTHON, "-c", "from farflung import Accelerator"],
        "from farflung.outer import OuterLoop": [PYTHON, "-c", "from farflung.outer import OuterLoop"],
        "from accelerate import Accelerator": [PYTHON, "-c", "from accelerate import Accelerator"],
    },
    "launch": {
        "torchrun": [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "first.py"],
        "farflung": [PYTHON, "-m", "farflung", "launch", "--cpu", "--num_processes", "2", "first.py"],
        "accelerate": [PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "first.py"],
    },
}
BASE = {"help": "python -c pass", "slip": "python -c pass", "import": "import torch", "launch": "torchrun"}


def whole(command: list[str]) -> float:
    """Seconds until the command has ended, well or with the code of a wrong use."""
    start = time.perf_counter()
    code = subprocess.run(command, capture_output=True, env=ENVIRONMENT).returncode
    assert code in (DONE, USAGE), command
    return time.perf_counter() - start


def first_line(command: list[str]) -> float:
    """Seconds until the last of the processes that the command starts has reached its script's first line."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first.py").write_text(SCRIPT, encoding="utf-8")
        start = time.time()
        subprocess.run(command, check=True, capture_output=True, cwd=folder, env=ENVIRONMENT)
        return max(float(path.read_text()) for path in Path(folder).glob("first[0-9]")) - start


def interleaved(
    commands: Mapping[str, list[str]], measure: Callable[[list[str]], float], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each command's median and least seconds; an uncounted round fills the caches of disk and bytecode.

    What else runs on the machine only adds, by more than an import costs: on a busy one the least are to be compared.
    """
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            took = measure(command)
            if turn > 0:
                seconds[name].append(took)
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    return medians, {name: round(min(values), 4) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=list(COMMANDS), help="One of the questions.")
    parser.add_argument("--write", action="store_true", help="Add the line to benchmarks/results/startup.jsonl.")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    for question, commands in COMMANDS.items():
        if asked.only in (None, question):
            medians, least = interleaved(commands, first_line if question == "launch" else whole, asked.rounds)
            figures |= {f"{question}: {name}, s": value for name, value in medians.items()}
            for found, which in ((medians, ""), (least, " at least")):
                relative = ratios(found, BASE[question])
                figures |= {f"{question}: {name}, times {BASE[question]}{which}": r for name, r in relative.items()}
    report(
        "startup",
        figures,
        seed=0,
        write_to="startup.jsonl" if asked.write else None,
        rounds=asked.rounds,
        load=round(os.getloadavg()[0], 1),
    )


if __name__ == "__main__":
    main()
