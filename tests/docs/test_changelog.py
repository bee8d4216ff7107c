# SPDX-License-Identifier: Apache-2.0
"""What is written for the changelog has a name and a form that the tool which gathers it can read."""

import re
import shutil
from pathlib import Path

import pytest

from tests.python import run_python

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = "template.md.jinja"
KINDS = re.findall(r'^directory = "(\w+)"\n', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
FRAGMENTS = [file for file in sorted((ROOT / "changelog.d").iterdir()) if file.name not in ("README.md", TEMPLATE)]


def test_each_fragment_is_one_sentence_or_two_of_a_known_kind():
    assert KINDS == ["added", "changed", "fixed"]
    for file in FRAGMENTS:
        assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", file.name), file.name
        text = file.read_text(encoding="utf-8")
        assert re.fullmatch(r"\S.*\.\n", text), f"{file.name}: one line that ends with a full stop"


@pytest.mark.package
def test_the_tool_gathers_all_of_them(tmp_path):
    pytest.importorskip("towncrier")
    for name in ("pyproject.toml", "CHANGELOG.md", "changelog.d"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "changelog.d" / "probe.fixed.md").write_text("A sentence of this test.\n")
    run_python("-m", "towncrier", "build", "--version", "9.9.9", "--date", "2100-01-01", "--yes", cwd=tmp_path)
    gathered = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## 9.9.9 (2100-01-01)\n\n### " in gathered
    assert gathered.count("\n- ") == len(FRAGMENTS) + 1
    assert "\n- A sentence of this test.\n" in gathered
    assert sorted(file.name for file in (tmp_path / "changelog.d").iterdir()) == ["README.md", TEMPLATE]
