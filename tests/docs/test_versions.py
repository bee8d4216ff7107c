# SPDX-License-Identifier: Apache-2.0
"""docs/versions.md has what the matrix of versions found; the workflows and scripts of CI fit the project."""

import re
import runpy
import shutil
import stat

import pytest
import yaml

from farflung.base.oldest_torch import OLDEST_TORCH
from tests.docs.test_pages import ROOT, TEXTS, results
from tests.python import run_python

ROWS = runpy.run_path(str(ROOT / ".ci" / "matrix"))["ROWS"]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WORKFLOWS = {file.name: file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml")}


def newest():
    """The last result of each row, in the order of the matrix."""
    found = {}
    for row in results("versions"):
        found[".".join(row["python"].split(".")[:2]), row["asked"]] = row
    return [found[row] for row in ROWS if row in found]


def line_of(row):
    counts = f"{row['passed']} passed, {row.get('skipped', 0)} skipped" if "passed" in row else ""
    if "failures" in row:
        counts += f"; {len(row['failures'])} failed, and {row['again']} when run again alone"
    cells = (row["python"], f"`{row['asked']}`", row.get("torch", ""), row["date"], counts or row["result"])
    return f"| {' | '.join(cells)} |"


def test_the_page_has_a_row_for_each_of_the_matrix():
    assert len(newest()) == len(ROWS)
    for row in newest():
        assert line_of(row) in TEXTS["docs/versions.md"], line_of(row)


def test_the_matrix_has_the_ends_of_what_is_declared():
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}"' in PROJECT
    assert {torch for _, torch in ROWS} >= {f"torch=={oldest}", "torch"}
    least = re.search(r'requires-python = ">=3\.(\d+)"', PROJECT)[1]
    assert min(int(python.split(".")[1]) for python, _ in ROWS) == int(least)


def test_workflows_run_what_exists_on_the_rows_of_the_matrix():
    for name, text in WORKFLOWS.items():
        jobs = yaml.safe_load(text)["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        scripts = re.findall(r"\.ci/\w+", " ".join(commands))
        assert scripts, name
        for script in scripts:
            assert (ROOT / script).stat().st_mode & stat.S_IXUSR, script
    chosen = yaml.safe_load(WORKFLOWS["matrix.yml"])["jobs"]["torch"]["strategy"]["matrix"]
    rows = {(python, torch) for python in chosen["python"] for torch in chosen["torch"]}
    assert rows | {(row["python"], row["torch"]) for row in chosen["include"]} == set(ROWS)


@pytest.mark.parametrize("name", ["ci/run", "ci/matrix", "ci/release", "ci/accelerate", "github/workflows/ci.yml"])
def test_no_script_names_an_index_of_packages(name):
    assert "://" not in (ROOT / f".{name}").read_text(encoding="utf-8")


def test_the_version_stands_in_one_place_and_a_citation_says_whose_it_is():
    assert 'dynamic = ["version"]' in PROJECT
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)
    assert cited["authors"] == [{"name": re.search(r'authors = \[\{ name = "(.+?)" \}\]', PROJECT)[1]}]
    assert f'license = "{cited["license"]}"' in PROJECT
    assert f'description = "{cited["abstract"]}"' in PROJECT
    assert "version" not in cited


# ---- what is written for the changelog has a name and a form that the tool which gathers it can read
TEMPLATE = "template.md.jinja"
KINDS = re.findall(r'^directory = "(\w+)"\n', PROJECT, re.MULTILINE)
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
