# SPDX-License-Identifier: Apache-2.0
"""`docs/glossary.md` explains few words, each once, and none that the pages don't use."""

import re

from tests.docs.test_pages import ROOT, TEXTS

ROWS = [line.split(" | ") for line in TEXTS["docs/glossary.md"].splitlines() if line.startswith("| **")]
TERMS = [term for row in ROWS for term in re.findall(r"\*\*(.+?)\*\*", row[0])]


def test_a_glossary_of_nouns_of_single_files_would_be_longer():
    assert 40 < len(ROWS) <= 60


def test_each_term_is_explained_once():
    assert sorted(set(TERMS)) == sorted(TERMS)


def test_each_term_is_used_on_a_page():
    pages = " ".join(" ".join(text.split()) for page, text in TEXTS.items() if page != "docs/glossary.md").lower()
    assert [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}", pages)] == []


def test_each_class_that_the_glossary_names_is_there():
    named = set(re.findall(r"`((?:[A-Z][a-z0-9]+)+)`", TEXTS["docs/glossary.md"]))
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src" / "farflung").rglob("*.py")]
    assert named <= set(re.findall(r"^ *class (\w+)", "\n".join(sources), re.MULTILINE)), (
        "docs/glossary.md names classes that are no more"
    )
