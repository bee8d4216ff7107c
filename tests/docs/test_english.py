# SPDX-License-Identifier: Apache-2.0
"""Texts are free of habits that make a reader translate: pages, docstrings, comments, messages and help.

Code spans are quoted, and left out.
"""

import ast
import io
import re
import tokenize

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
    r"say whether": "return whether",
    r"signs? of life": "heartbeat",
    r"where (?:there (?:is|are|was|were)|nobody|none|nothing)": "if",
}


def texts():
    """Pages, and the sources' texts: each with its file and line."""
    yield from ((page, prose(text)) for page, text in TEXTS.items())
    for path in sorted(SOURCE.rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for line, text in [*strings(ast.parse(source)), *comments(source)]:
            yield f"{name}:{line}", text


def strings(node):
    """Docstrings, messages and help: every string of three words or more; what is formatted into one is `x`."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)
        return
    if len(text.split()) >= 3:
        yield node.lineno, text


def comments(source):
    """Comments; lines of their own that follow one another are one text."""
    block, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            continues = token.start[0] == last + 1 and token.line.lstrip().startswith("#")
            if block and not continues:
                yield last, " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    if block:
        yield last, " ".join(block)


def test_habits_are_left_behind():
    bare = [(where, " ".join(re.sub(r"`[^`\n]*`", "`x`", text).split())) for where, text in texts()]
    any_habit = re.compile("|".join(rf"\b(?:{habit})\b" for habit in HABITS), re.IGNORECASE)
    found = [
        f"{where}: `{match[0]}`; better: {better}"
        for where, text in bare
        if any_habit.search(text)
        for habit, better in HABITS.items()
        for match in re.finditer(rf"\b(?:{habit})\b", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
