# SPDX-License-Identifier: Apache-2.0
"""The core in a day, a list of docs/concepts/outer.md, has each file of the outer loop once, after those it imports."""

import re

from tests.docs.test_pages import TEXTS
from tests.test_house import behind, own_imports, tree

ROOMS = ("votes", "methods", "exchanged", "outer")
LINE = re.compile(r"^\d+\. \[([\w/]+)\]\(\.\./\.\./src/farflung/([\w/]+)\.py\): ", re.MULTILINE)
LISTED = LINE.findall(TEXTS["docs/concepts/outer.md"])


CORE = {file for file in behind("outer/engine") if file.split("/")[0] in ROOMS}


def test_the_core_in_a_day_has_each_file_behind_the_engine_once_and_after_those_that_it_imports():
    files = [file for file, _ in LISTED]
    assert [path for _, path in LISTED] == files, "a link leads to another file"
    assert sorted(files) == sorted(CORE)
    needed = {file: CORE.intersection(own_imports(tree(f"{file}.py"), for_types=False)) for file in files}
    late = {file: needed[file] - set(files[:place]) for place, file in enumerate(files)}
    assert {file: later for file, later in late.items() if later} == {}, "these are imported before they are listed"
