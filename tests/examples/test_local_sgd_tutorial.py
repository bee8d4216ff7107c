# SPDX-License-Identifier: Apache-2.0
"""The tutorial's three files differ by the lines that it shows, and each of them learns its task."""

import difflib
import runpy

import pytest

from farflung.testing.ranks import run_ranks
from tests.examples.scripts import FOLDER

# What each step of the tutorial takes away and puts in, apart from indentation.
PREPARED = "model, optimizer, training_dataloader, scheduler"
TO_ACCELERATED = f"""
+ from farflung import Accelerator
- device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
+ accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
+ device = accelerator.device
+ {PREPARED} = accelerator.prepare({PREPARED})
- for index, batch in enumerate(training_dataloader):
+ for batch in training_dataloader:
+ with accelerator.accumulate(model):
- inputs = inputs.to(device)
- targets = targets.to(device)
- loss = loss / gradient_accumulation_steps
- loss.backward()
- if (index + 1) % gradient_accumulation_steps == 0:
+ accelerator.backward(loss)
- print(f"{{accuracy:.1%}} of the points are classified correctly")
+ accelerator.print(f"{{accuracy:.1%}} of the points are classified correctly")
"""
TO_LOCAL_SGD = """
- from farflung import Accelerator
+ from farflung import Accelerator, LocalSGD
+ with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True) as local_sgd:
+ local_sgd.step()
"""


def lines_of(name):
    source = (FOLDER / "local_sgd" / f"{name}.py").read_text()
    code = source.split('"""', 2)[2]  # each file has a docstring of its own
    return [line.strip() for line in code.splitlines() if line.strip()]


def changes(before, after):
    marked = difflib.ndiff(lines_of(before), lines_of(after))
    return sorted(line for line in marked if line[0] in "+-")


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [("plain", "accelerated", TO_ACCELERATED), ("accelerated", "local_sgd", TO_LOCAL_SGD)],
)
def test_only_the_lines_that_the_tutorial_shows_differ(before, after, shown):
    assert changes(before, after) == sorted(shown.strip().splitlines())


def accuracy_of(name):
    return runpy.run_path(str(FOLDER / "local_sgd" / f"{name}.py"), run_name="__main__")["accuracy"]


@pytest.mark.parametrize(("name", "size"), [("plain", 1), ("accelerated", 1), ("accelerated", 2), ("local_sgd", 2)])
def test_the_task_is_learnt(name, size):
    found = run_ranks(accuracy_of, size, name, connect=False)
    assert min(found) > 0.9
    assert len(set(found)) == 1  # the replicas end up as one model
