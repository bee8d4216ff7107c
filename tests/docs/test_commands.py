# SPDX-License-Identifier: Apache-2.0
"""The page of commands is made from the tables of the sources, and is up to date."""

from farflung.config.launch import FIELDS
from tests.docs.commands import PAGE, page


def test_the_page_of_commands_is_what_the_sources_make_it():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.docs.commands`"
    assert all(f"`{flag}`" in page() for entry in FIELDS for flag in entry.flags)
