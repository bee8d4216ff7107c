# SPDX-License-Identifier: Apache-2.0
"""The ways of three readers, `docs/start`: short, first in docs/README.md, and what they show runs."""

import re
import shlex

import pytest

from tests.docs.test_pages import _FENCE, ROOT, TEXTS
from tests.python import run_farflung

WAYS = ("ddp", "accelerate", "machines")
LONGEST = 600  # words to the first success and what to read next
ALL_PAGES = 62_300


@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_short_and_says_what_success_is(way):
    text = TEXTS[f"docs/start/{way}.md"]
    assert len(text.split()) <= LONGEST
    assert "**You have succeeded**" in text
    assert "pip install" in text


def test_the_ways_are_the_first_links_of_the_start():
    links = re.findall(r"\]\((.+?)\)", TEXTS["docs/README.md"])
    assert links[:3] == [f"start/{way}.md" for way in WAYS]
    assert sorted(path.stem for path in (ROOT / "docs" / "start").iterdir()) == sorted(WAYS)


def test_the_pages_have_few_words():
    """As `find docs -name '*.md' | xargs cat | wc -w` counts them: what grows here must be said shorter elsewhere."""
    assert sum(len(text.split()) for page, text in TEXTS.items() if page.startswith("docs/")) <= ALL_PAGES


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS[:2])
def test_the_script_of_a_way_runs_with_its_commands(way, tmp_path):
    fences = _FENCE.findall(TEXTS[f"docs/start/{way}.md"])
    (script,) = (code for title, code in fences if title == "python train.py")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    commands = [
        shlex.split(line) for _, code in fences for line in code.splitlines() if line.startswith("farflung launch")
    ]
    assert len(commands) == 2
    alone, outer = (run_farflung(*command[1:], cwd=tmp_path) for command in commands)
    assert "round" not in alone.stderr
    assert re.search(r"farflung: round 2\d, step (192|200)", outer.stderr)
