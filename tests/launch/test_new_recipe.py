# SPDX-License-Identifier: Apache-2.0
"""A recipe is one function in one file: CONTRIBUTING's page, followed to the letter in a copy of the package."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.python import run_farflung

pytestmark = pytest.mark.long

SOURCE = Path(__file__).parents[2] / "src" / "farflung"

TOY = '''

def toy(every: int = 4, *, strength: float = 0.5) -> Recipe:
    """Move every rank's weights part of the way to their mean.

    Args:
        every: optimizer steps between two visits to the mean.
        strength: part of the way, from 0 to 1.

    Raises:
        ConfigError: a number is out of its range.
    """
    check_number("strength", strength, least=0, most=1)
    return _anchored(Every(every), None, _sgd(1.0, 0.0, nesterov=False), merge=Blend(1 - strength))
'''

SCRIPT = """
import torch
from farflung import Accelerator, OuterConfig
from farflung.outer import toy

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
(loop,) = accelerator.outer_loops
for _ in range(5):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
accelerator.end_training()
assert toy(2, strength=0.25).merge == toy(strength=0.25).merge != toy().merge
print("rounds", loop.stats().rounds, loop.state_dict()["description"])
"""


@pytest.fixture
def farflung(home):
    """Run `farflung` from a copy of the package in which a contributor has added one function to one file."""
    package = home / "lib" / "farflung"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / "methods" / "recipes.py"
    text = file.read_text(encoding="utf-8")
    assert text.count('    "streaming_diloco",\n]') == 1
    text = text.replace('    "streaming_diloco",\n]', '    "streaming_diloco",\n    "toy",\n]')
    file.write_text(text + TOY, encoding="utf-8")
    (home / "train.py").write_text(SCRIPT)

    return partial(run_farflung, timeout_s=90, env=os.environ | {"PYTHONPATH": str(package.parent)})


def test_one_function_in_one_file_is_a_recipe_with_its_flags_keys_variables_and_checks(farflung, home):
    launch = ("launch", "--cpu", "--outer", "toy")
    done = farflung(*launch, "--outer-every", "2", "--outer-strength", "0.25", "train.py")
    assert done.stdout.startswith("rounds 3 ")  # after steps 2 and 4, and at the end
    assert "Blend(alpha=0.75)" in done.stdout

    (home / "farflung.yaml").write_text("outer:\n  recipe: toy\n  strength: 2\n")
    done = farflung("launch", "--cpu", "train.py", code=2)
    assert done.stdout == ""
    assert "farflung.yaml:3: strength is 2.0; it must be a finite number from 0 to 1." in " ".join(done.stderr.split())

    said = " ".join(farflung("launch", "--help", "outer").stdout.split())
    assert "toy only: part of the way, from 0 to 1." in said
    assert "toy: optimizer steps between two visits to the mean." in said
