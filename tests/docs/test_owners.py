# SPDX-License-Identifier: Apache-2.0
"""A fact has one page that owns it; the others link there.

An option of `farflung launch` is explained if a sentence or a row of a table has it as its subject: "`--x` sets ...",
"With `--x` ...", or a row that begins with it. docs/commands.md, written from the settings, has a line on each; one
page more may say the rest. Naming an option in a command, or in passing, explains nothing.
"""

import re

import pytest

from farflung.config.launch import FIELDS
from tests.docs.test_glossary import TERMS
from tests.docs.test_pages import TEXTS, prose

PAGES = {
    page: prose(text)
    for page, text in TEXTS.items()
    if page.startswith("docs/") and not page.startswith(("docs/reference/", "docs/commands.md", "docs/glossary.md"))
}
FLAGS = {flag.lstrip("-").replace("_", "-") for entry in FIELDS for flag in entry.flags if flag.startswith("--")}
SUBJECT = re.compile(
    r"(?:^|(?<=[.:;] )|(?<=\| )|(?<=- ))(With )?\**`--([a-z][\w-]*)[^`]*`\**(?: \([^)]*\))?,? (\w+)", re.MULTILINE
)
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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`--grace_s 3` says how long.", ["grace-s"]),
        ("It waits. With `--meet` (or\n`--join`), it meets.", ["meet"]),
        ("| `--elastic min:max` | counts |", ["elastic"]),
        ("| `--elastic` counts |", ["elastic"]),
        ("- `--tee 3` keeps both.", ["tee"]),
        ("Start it with `--meet` on each machine, or `--join` it.", []),
    ],
)
def test_an_explanation_is_seen(text, names):
    assert list(dict.fromkeys(explained(text))) == names


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
