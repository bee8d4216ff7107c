# SPDX-License-Identifier: Apache-2.0
"""The core in a day, a list of docs/concepts/outer.md, has each file of the outer loop once, after those it imports."""

import re

from tests.docs.test_pages import TEXTS
from tests.test_house import NAMES, own_imports, tree

ROOMS = ("votes", "methods", "exchanged", "outer")
LINE = re.compile(r"^\d+\. \[([\w/]+)\]\(\.\./\.\./src/farflung/([\w/]+)\.py\): ", re.MULTILINE)
LISTED = LINE.findall(TEXTS["docs/concepts/outer.md"])


def needed(file):
    """The files of these rooms that `file` imports."""
    found = {module for module in own_imports(tree(f"{file}.py")) if f"{module}.py" in NAMES}
    return {module for module in found if module.split("/")[0] in ROOMS}


def behind(file):
    """`file`, and all that it imports in these rooms, directly or not."""
    files, left = set(), [file]
    while left:
        if (one := left.pop()) not in files:
            files.add(one)
            left += needed(one)
    return files


def test_the_core_in_a_day_has_each_file_behind_the_engine_once_and_after_those_that_it_imports():
    files = [file for file, _ in LISTED]
    assert [path for _, path in LISTED] == files, "a link leads to another file"
    assert sorted(files) == sorted(behind("outer/engine"))
    late = {file: needed(file) - set(files[:place]) for place, file in enumerate(files)}
    assert {file: later for file, later in late.items() if later} == {}, "these are imported before they are listed"
