# SPDX-License-Identifier: Apache-2.0
"""A fact has one page that owns it; the others link there. docs/glossary.md has few words, all of which pages use.

An option of `farflung launch` is explained if a sentence or a row of a table has it as its subject: "`--x` sets ...",
"With `--x` ...", or a row that begins with it. docs/commands.md, written from the settings, has a line on each; one
page more may say the rest. Naming an option in a command, or in passing, explains nothing.
"""

import re

import pytest

from farflung.config.launch import FIELDS
from tests.docs.commands import PAGE, page as page_of_commands
from tests.docs.test_pages import ROOT, TEXTS, prose

PAGES = {
    page: prose(text)
    for page, text in TEXTS.items()
    if page.startswith("docs/") and not page.startswith(("docs/reference/", "docs/commands.md", "docs/glossary.md"))
}
ROWS = [line.split(" | ") for line in TEXTS["docs/glossary.md"].splitlines() if line.startswith("| **")]
TERMS = [term for row in ROWS for term in re.findall(r"\*\*(.+?)\*\*", row[0])]
FLAGS = {flag.lstrip("-").replace("_", "-") for entry in FIELDS for flag in entry.flags if flag.startswith("--")}
SUBJECT = re.compile(r"(?m:^|(?<=[.:;] )|(?<=\| )|(?<=- ))(With )?\**`--([a-z][\w-]*)[^`]*`\**(?: \([^)]*\))?,? (\w+)")
ROW = re.compile(r"^\| \**`--([a-z][\w-]*)[^|]*\|", re.MULTILINE)
# What other commands, or an engine, take under the same name: their pages say what it does there.
ELSEWHERE = {"dry-run": r"docs/engines/\w+\.md", "json": r"docs/cost\.md", "meet": r"docs/(cost|doctor)\.md"}


def explained(text):
    """The options that a text explains."""
    for paragraph in text.split("\n\n"):
        one_line = paragraph if paragraph.startswith("|") else " ".join(paragraph.split())
        for begins, name, verb in SUBJECT.findall(one_line):
            if begins or verb in ("are", "have") or re.fullmatch("[a-z]+s", verb):
                yield name.replace("_", "-")
        yield from (name.replace("_", "-") for name in ROW.findall(one_line))


SEEN = {
    "`--grace_s 3` says how long.": {"grace-s"},
    "It waits. With `--meet` (or\n`--join`), it meets.": {"meet"},
    "| `--elastic min:max` | counts |": {"elastic"},
    "| `--elastic` counts |": {"elastic"},
    "- `--tee 3` keeps both.": {"tee"},
    "Start it with `--meet` on each machine, or `--join` it.": set(),
}


def test_an_explanation_is_seen():
    assert {text: set(explained(text)) for text in SEEN} == SEEN


def test_an_option_is_explained_on_one_page():
    owners = {}
    for page, text in PAGES.items():
        for name in set(explained(text)) & FLAGS:
            if not re.fullmatch(ELSEWHERE.get(name, ""), page):
                owners.setdefault(name, []).append(page)
    assert len(owners) > 15
    several = {name: pages for name, pages in owners.items() if len(pages) > 1}
    assert not several, f"explained on several pages, which should link to one: {several}"


def test_exit_codes_have_one_table_and_pages_that_name_one_link_to_it():
    assert "\n| 75 | " in TEXTS["docs/commands.md"]
    for page, text in PAGES.items():
        assert not re.search(r"^\| (?:0|2|3|4|5|75|130) \| \w", text, re.MULTILINE), f"{page} has a table of exit codes"
        named = re.search(r"\bcode\]?(?:\([^)]*\))? \d+\b", re.sub("`[^`\n]*`", "", text))
        assert not named or "commands.md#exit-codes" in text, f"{page}: link `{named[0]}` to commands.md#exit-codes"


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_defined_on_one_page(term):
    """In bold, as a definition is, outside the glossary."""
    bold = re.compile(rf"\*\*(?:an? |the )?{re.escape(term)}s?\*\*", re.IGNORECASE)
    pages = [page for page, text in PAGES.items() if bold.search(text)]
    assert len(pages) <= 1, f"{term} is defined on {pages}"


def test_the_page_of_commands_is_what_the_sources_make_it():
    assert PAGE.read_text(encoding="utf-8") == page_of_commands(), "run `python -m tests.docs.commands`"
    assert all(f"`{flag}`" in page_of_commands() for entry in FIELDS for flag in entry.flags)


def test_a_glossary_of_nouns_of_single_files_would_be_longer_and_each_term_is_explained_once():
    assert 40 < len(ROWS) <= 60
    assert sorted(set(TERMS)) == sorted(TERMS)


def test_each_term_is_used_on_a_page():
    pages = " ".join(" ".join(text.split()) for page, text in TEXTS.items() if page != "docs/glossary.md").lower()
    assert [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}", pages)] == []


def test_each_class_that_the_glossary_names_is_there():
    named = set(re.findall(r"`((?:[A-Z][a-z0-9]+)+)`", TEXTS["docs/glossary.md"]))
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src" / "farflung").rglob("*.py"))
    assert named - set(re.findall(r"^ *class (\w+)", sources, re.MULTILINE)) == set(), "classes that are no more"
