# SPDX-License-Identifier: Apache-2.0
"""Docstrings and pages are free of ten habits that make a reader translate. What is in code spans is quoted."""

import ast
import re

from tests.docs.test_pages import ROOT, TEXTS, prose

SOURCE = ROOT / "src" / "farflung"
# Each with what to write instead.
HABITS = {
    r"(?<!each )(?<!one )(?<!some )(?<!all )(?<!both )(?<!most )(?<!none )of which": "whose, or two sentences",
    r"that there (?:is|are|was|were)": "leave it out",
    r"what (?:\S+ ){1,3}makes? of": "decides, derives",
    r"(?:lets?|letting) (?!in\b|go\b|alone\b|us\b)\w+": "allow, make, restore, have",
    r"(?:go|goes|going|went|gone) on": "continue",
    r"anew": "again, restart",
    r"in common": "shared",
    r"beside": "next to, in addition to, outside",
    r"(?:is|are|was|were|be|been) (?:said|told)": "a message says, is notified",
    r"(?:ranks?|replicas?|process|processes|members?|machines?|launchers?|ones?|those|others?|of|to|for) who": "that",
    r"as of|all the same": "see, nevertheless",
}


def texts():
    """Pages without blocks and spans of code, and docstrings, by file and line."""
    for page, text in TEXTS.items():
        yield page, re.sub(r"`[^`\n]*`", "`x`", prose(text))
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                yield f"{path.relative_to(ROOT).as_posix()}:{node.body[0].lineno}", ast.get_docstring(node)


def test_ten_habits_are_left_behind():
    found = [
        f"{where}: `{match[0]}`; better: {better}"
        for where, text in texts()
        for habit, better in HABITS.items()
        for match in re.finditer(rf"\b(?:{habit})\b", " ".join(text.split()), re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
