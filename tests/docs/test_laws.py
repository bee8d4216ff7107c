# SPDX-License-Identifier: Apache-2.0
"""docs/laws.md and the tests know the same laws: each has a test that cites it, and each name that is cited exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")
LAWS = re.findall(r"^(\d+)\. `([\w-]+)`: ", PAGE, re.MULTILINE)


def cited():
    """The names of all laws that tests cite; a mark on anything but a test is an error, as pytest would ignore it."""
    names = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.law" not in (text := file.read_text(encoding="utf-8")):
            continue
        tree = ast.parse(text)
        marks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_mark(node)]
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert set(marks) <= {mark for test in tests for mark in test.decorator_list}, file
        names |= {ast.literal_eval(mark.args[0]) for mark in marks}
    return names


def _is_mark(call):
    return ast.unparse(call.func) == "pytest.mark.law"


def test_each_law_has_a_number_and_a_name_of_its_own():
    numbers, names = zip(*LAWS, strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert len(set(names)) == len(names)


def test_each_law_has_a_test_that_cites_it_and_each_name_that_is_cited_is_a_law():
    assert cited() == {name for _, name in LAWS}
